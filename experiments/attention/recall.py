"""Byte-level text with key-value records planted in it, which only far reading can answer.

A record is a mark, a key of four random bytes and a value of four random bytes. It is written over the text once, and
once more further on, where the value can be known from the first time only. The bytes of keys and values do not occur
in the text.
"""

from typing import NamedTuple

import numpy as np

from jaxlib_icml.training.corpus import load_corpus

KEY = 4  # bytes
RECORD = 1 + 2 * KEY
_MARK = 2
_RANDOM = range(128, 256)


class Batch(NamedTuple):
    """Byte sequences and what to score.

    Attributes:
      tokens: (batch, seq) int32 inputs.
      targets: (batch, seq) int32, the next byte.
      answers: (batch, seq) whether the target is a byte of a value that has been seen before.
      random: (batch, seq) whether the target is random: nothing can predict it.
    """

    tokens: np.ndarray
    targets: np.ndarray
    answers: np.ndarray
    random: np.ndarray


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
        parts.append(np.frombuffer(data.translate(None, bytes([_MARK, *_RANDOM])), np.uint8))
    return Text(*parts), corpus.description


def make_batch(
    rng: np.random.Generator,
    text: np.ndarray,
    batch: int,
    seq: int,
    *,
    pairs: int,
    planted: int,
    longest: int = KEY,
) -> Batch:
    """Random windows of text, the first `planted` of them with `pairs` records written twice.

    Values have `KEY` to `longest` bytes, the same number in all records of a window.
    """
    data, kind = _windows(rng, text, batch, seq)
    for row in range(planted):
        length = 1 + KEY + int(rng.integers(KEY, longest + 1))
        # Uniform over all placements without overlap.
        places = np.sort(rng.choice(seq + 1 - 2 * pairs * (length - 1), 2 * pairs, replace=False))
        places = rng.permutation(places + (length - 1) * np.arange(2 * pairs)).reshape(pairs, 2)
        for first, again in np.sort(places, axis=1):
            _write(rng, data[row], kind[row], length, first, again)
    return _batch(data, kind)


def make_questions(rng: np.random.Generator, text: np.ndarray, batch: int, seq: int) -> tuple[Batch, np.ndarray]:
    """Windows of text with one record at a uniform depth, asked for at the end; and how far back it lies."""
    data, kind = _windows(rng, text, batch, seq)
    again = seq + 1 - RECORD
    places = rng.integers(0, again - RECORD + 1, batch)
    for row, first in enumerate(places):
        _write(rng, data[row], kind[row], RECORD, first, again)
    return _batch(data, kind), again - places


_RECALLED, _UNKNOWN = 1, 2  # kinds of bytes; 0 is text


def _windows(rng: np.random.Generator, text: np.ndarray, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """(batch, seq + 1) bytes and their kinds."""
    starts = rng.integers(0, len(text) - seq - 1, batch)
    data = text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return data, np.zeros_like(data)


def _write(rng: np.random.Generator, row: np.ndarray, kind: np.ndarray, length: int, first: int, again: int) -> None:
    record = np.concatenate([[_MARK], rng.integers(_RANDOM.start, _RANDOM.stop, length - 1)])
    for place in (first, again):
        row[place : place + length] = record
        kind[place + 1 : place + length] = _UNKNOWN
    kind[again + 1 + KEY : again + length] = _RECALLED


def _batch(data: np.ndarray, kind: np.ndarray) -> Batch:
    return Batch(data[:, :-1], data[:, 1:], kind[:, 1:] == _RECALLED, kind[:, 1:] == _UNKNOWN)
