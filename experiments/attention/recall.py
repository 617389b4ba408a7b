"""Byte-level text with key-value pairs planted in it, which only far reading can answer.

A record is a mark, a key of four random letters, a second mark and a value of four random letters. It is written over
the text once, and once more further on, where the value can be known from the first time only.
"""

from typing import NamedTuple

import numpy as np

from jaxlib_icml.training.corpus import load_corpus

LETTERS = 4
RECORD = 2 + 2 * LETTERS  # bytes
_MARKS = (2, 3)  # bytes that text does not hold


class Batch(NamedTuple):
    """Byte sequences and what to score.

    Attributes:
      tokens: (batch, seq) int32 inputs.
      targets: (batch, seq) int32, the next byte.
      answers: (batch, seq) whether the target is a letter of a value that has been seen before.
    """

    tokens: np.ndarray
    targets: np.ndarray
    answers: np.ndarray


class Text(NamedTuple):
    """Training and held-out text as one array of bytes each."""

    train: np.ndarray
    held_out: np.ndarray


def load_text(path: str | None, limit: int | None = None) -> tuple[Text, str]:
    """The corpus (None: the Python standard library), and a description; `limit` bytes at most."""
    corpus = load_corpus(path, held_out_fraction=0.05)
    parts = []
    for documents in (corpus.train, corpus.held_out):
        data = b"\n".join(document.utf8 for document in documents)[:limit]
        parts.append(np.frombuffer(data.translate(None, bytes(_MARKS)), np.uint8))
    return Text(*parts), corpus.description


def make_batch(rng: np.random.Generator, text: np.ndarray, batch: int, seq: int, *, pairs: int, planted: int) -> Batch:
    """Random windows of text, the first `planted` of them with `pairs` records written twice."""
    starts = rng.integers(0, len(text) - seq - 1, batch)
    data = text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    answers = np.zeros((batch, seq + 1), bool)
    for row, marked in zip(data[:planted], answers[:planted], strict=True):
        slots = rng.choice((seq + 1) // RECORD, 2 * pairs, replace=False) * RECORD
        for first, again in np.sort(slots.reshape(pairs, 2), axis=1):
            _write(rng, row, marked, first, again)
    return Batch(data[:, :-1], data[:, 1:], answers[:, 1:])


def make_questions(rng: np.random.Generator, text: np.ndarray, batch: int, seq: int) -> tuple[Batch, np.ndarray]:
    """Windows of text with one record at a uniform depth, asked for at the end; and how far back it lies."""
    starts = rng.integers(0, len(text) - seq - 1, batch)
    data = text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    answers = np.zeros((batch, seq + 1), bool)
    again = seq + 1 - RECORD
    first = rng.integers(0, again - RECORD + 1, batch)
    for row, marked, place in zip(data, answers, first, strict=True):
        _write(rng, row, marked, place, again)
    return Batch(data[:, :-1], data[:, 1:], answers[:, 1:]), again - first


def _write(rng: np.random.Generator, row: np.ndarray, answers: np.ndarray, first: int, again: int) -> None:
    letters = rng.integers(ord("a"), ord("z") + 1, 2 * LETTERS)
    record = np.concatenate([[_MARKS[0]], letters[:LETTERS], [_MARKS[1]], letters[LETTERS:]])
    for place in (first, again):
        row[place : place + RECORD] = record
    answers[again + RECORD - LETTERS : again + RECORD] = True
