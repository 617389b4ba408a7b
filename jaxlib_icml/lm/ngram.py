"""Byte n-gram model with Witten-Bell interpolation: the baseline that a language model has to beat.

Counting is sorting: the k bytes that end at each position are packed into one 64-bit integer, and equal
integers are counted. Ten megabytes and order 6 take seconds.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

__all__ = ["WittenBellNGram"]

_MAX_ORDER = 8  # bytes in a uint64
_BLOCK = 1 << 20  # positions scored at a time, to bound memory


class _Table(NamedTuple):
    """Counts of one order k; both key arrays are sorted.

    Args:
      grams: packed k-grams that occur.
      counts: how often, c(context, byte).
      contexts: packed (k-1)-byte contexts that occur with a next byte.
      totals: how often, c(context) = sum over bytes of c(context, byte).
      distinct: number of different next bytes, T(context).
    """

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    distinct: np.ndarray


class WittenBellNGram:
    """Byte-level n-gram language model, smoothed by Witten-Bell interpolation down to the uniform
    distribution.

    With context h (the k-1 previous bytes) and h' (h without its oldest byte),

      p_k(b | h) = (c(h b) + T(h) p_{k-1}(b | h')) / (c(h) + T(h)),   p_0(b) = 1/256,

    where c counts occurrences in training and T(h) is the number of different bytes seen after h; an unseen
    context leaves p_{k-1} as it is. No n-gram crosses from one document to the next: the first bytes of a
    document are predicted from the lower orders that fit. Documents have no end symbol, so unlike a language
    model's, this score pays nothing for where a document ends.

    Reference: Witten and Bell, "The zero-frequency problem", IEEE Trans. Information Theory 37(4), 1991,
      method C.

    Example:
      >>> model = WittenBellNGram.fit([b"abracadabra"] * 3, order=3)
      >>> model.bits_per_byte([b"abra"]) < 2 < model.bits_per_byte([b"zzzz"])
      True
    """

    def __init__(self, tables: Sequence[_Table]) -> None:
        self._tables = tuple(tables)

    @property
    def order(self) -> int:
        """Longest n-gram: ``order - 1`` bytes of context."""
        return len(self._tables)

    @classmethod
    def fit(cls, documents: Sequence[bytes], order: int) -> "WittenBellNGram":
        """Counts all n-grams up to ``order`` bytes.

        Args:
          documents: training texts as bytes.
          order: 1 to 8; 4 means three bytes of context.

        Returns:
          The fitted model.

        Raises:
          ValueError: order out of range, or no bytes to count.
        """
        if not 1 <= order <= _MAX_ORDER:
            raise ValueError(f"order must lie in [1, {_MAX_ORDER}], got {order}")
        data, age = _concatenate(documents, order)
        if not data.size:
            raise ValueError("documents is empty: an n-gram model needs bytes to count")
        first = order - 1
        keys = np.zeros(max(data.size - first, 0), np.uint64)
        for shift in range(order if keys.size else 0):
            keys <<= np.uint64(8)
            keys |= data[shift : shift + keys.size]
        grams, counts = np.unique(keys[age[first:] >= first], return_counts=True)
        tables = [_table(grams, counts)]
        for length in range(order - 1, 0, -1):
            # A shorter gram is the end of a longer one, except at the start of a document.
            starts = [int.from_bytes(text[:length]) for text in documents if len(text) >= length]
            suffixes = grams & np.uint64((1 << 8 * length) - 1)
            grams, counts = _add_up(
                np.concatenate([suffixes, np.array(starts, np.uint64)]),
                np.concatenate([counts, np.ones(len(starts), counts.dtype)]),
            )
            tables.append(_table(grams, counts))
        return cls(tables[::-1])

    def log2_probabilities(self, document: bytes) -> Float64[np.ndarray, " bytes"]:
        """Base-2 logarithm of the probability of each byte of a document, given those before it.

        Args:
          document: any bytes.

        Returns:
          One number per byte, never above 0.
        """
        data, age = _concatenate([document], self.order)
        return np.concatenate([np.zeros(0), *(np.log2(p) for p in self._probabilities(data, age))])

    def bits_per_byte(self, documents: Sequence[bytes]) -> float:
        """Mean number of bits to encode a byte of the documents.

        Args:
          documents: held-out texts as bytes; each starts without context.

        Returns:
          Minus the mean of `log2_probabilities` over all bytes.

        Raises:
          ValueError: if there are no bytes.
        """
        data, age = _concatenate(documents, self.order)
        if not data.size:
            raise ValueError("documents is empty: there are no bytes to score")
        return -sum(float(np.log2(p).sum()) for p in self._probabilities(data, age)) / data.size

    def next_byte_probabilities(self, context: bytes) -> Float64[np.ndarray, " 256"]:
        """Distribution of the byte that follows a context.

        Args:
          context: the document so far; the last ``order - 1`` bytes matter.

        Returns:
          256 probabilities that sum to 1.
        """
        probabilities = np.full(256, 1 / 256)
        for length in range(1, min(self.order, len(context) + 1) + 1):
            history = int.from_bytes(context[len(context) + 1 - length :])
            grams = np.uint64(history << 8) | np.arange(256, dtype=np.uint64)
            probabilities = self._interpolate(length, grams, probabilities)
        return probabilities

    def _probabilities(self, data: np.ndarray, age: np.ndarray) -> Iterator[np.ndarray]:
        """Probabilities of consecutive blocks of bytes; `age` is the distance to the document's start."""
        for begin in range(0, data.size, _BLOCK):
            places = np.arange(begin, min(begin + _BLOCK, data.size))
            grams = np.zeros(places.size, np.uint64)
            probabilities = np.full(places.size, 1 / 256)
            for length in range(1, self.order + 1):
                back = length - 1
                grams |= data[np.maximum(places - back, 0)].astype(np.uint64) << np.uint64(8 * back)
                inside = age[places] >= back
                probabilities[inside] = self._interpolate(length, grams[inside], probabilities[inside])
            yield probabilities

    def _interpolate(self, length: int, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        table = self._tables[length - 1]
        if not table.grams.size:  # every training document is shorter than this
            return lower
        place, known = _find(table.contexts, grams >> np.uint64(8))
        total, distinct = table.totals[place], table.distinct[place]
        gram_place, gram_known = _find(table.grams, grams)
        count = np.where(gram_known, table.counts[gram_place], 0)
        return np.where(known, (count + distinct * lower) / (total + distinct), lower)


def _concatenate(documents: Sequence[bytes], order: int) -> tuple[np.ndarray, np.ndarray]:
    """All bytes in one array, and for each how many bytes of its document come before it, at most `order`."""
    data = np.frombuffer(b"".join(documents), np.uint8)
    age = np.full(data.size, order, np.uint8)
    start = 0
    for document in documents:
        head = min(order, len(document))
        age[start : start + head] = np.arange(head)
        start += len(document)
    return data, age


def _table(grams: np.ndarray, counts: np.ndarray) -> _Table:
    contexts, totals = _sum_runs(grams >> np.uint64(8), counts)
    _, distinct = _sum_runs(grams >> np.uint64(8), np.ones_like(counts))
    return _Table(grams, counts, contexts, totals, distinct)


def _add_up(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(keys, kind="stable")
    return _sum_runs(keys[order], counts[order])


def _sum_runs(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unique values of sorted keys, and the sums of the counts that go with each."""
    if not keys.size:
        return keys, counts
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.add.reduceat(counts, first)


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of each wanted value in sorted keys (arbitrary if it is not there), and whether it is there."""
    place = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return place, keys[place] == wanted
