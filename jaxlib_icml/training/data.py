"""Documents to batches: token ids are concatenated, cut into equal rows, shuffled and sharded with Grain.

A document of tokens t1 .. tn is the stream ``[eos, t1, .., tn]`` with targets ``[t1, .., tn, eos]``: every
token, the first one and the closing eos included, is predicted exactly once per epoch. Rows cut the
concatenated streams every ``seq_len`` tokens; ``segment_ids`` number the documents inside a row, so that
attention can be kept inside them, and ``positions`` restart with each.
"""

import functools
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

try:
    import grain
except ImportError as error:
    raise ImportError("the data pipeline needs the package grain: pip install 'jaxlib-icml[lm]'") from error

__all__ = ["Batch", "BatchIterator", "PackedDataset", "bits_per_byte", "evaluation_batches", "make_loader"]

Batch = dict[str, np.ndarray]
"""``tokens``, ``targets``, ``segment_ids``, ``positions``: int32; ``weights``: float32; all ``(rows,
seq_len)``.

``segment_ids`` count documents from 1 inside each row, 0 is padding; ``weights`` is 1 where a target counts.
"""

_INT32_MAX = np.iinfo(np.int32).max


class PackedDataset:
    """Tokenised documents as one array, and the gather that turns stream offsets into batches.

    Args:
      token_docs: one integer array of ids per document, without eos; empty documents are dropped.
      eos_id: the id that separates documents.
      seq_len: tokens per row.
      start_id: the input in front of a document's first token; None: ``eos_id``.

    Raises:
      ValueError: no tokens, ids out of range, or a bad ``seq_len``.

    Example:
      >>> import numpy as np
      >>> data = PackedDataset([np.array([5, 6]), np.array([7])], eos_id=9, seq_len=5)
      >>> batch = data.rows(np.array([0]))
      >>> batch["tokens"].tolist(), batch["targets"].tolist(), batch["segment_ids"].tolist()
      ([[9, 5, 6, 9, 7]], [[5, 6, 9, 7, 9]], [[1, 1, 1, 2, 2]])
    """

    def __init__(
        self, token_docs: Sequence[np.ndarray], *, eos_id: int, seq_len: int, start_id: int | None = None
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        if not 0 <= eos_id <= _INT32_MAX:
            raise ValueError(f"eos_id must be a non-negative int32, got {eos_id}")
        documents = [np.asarray(tokens) for tokens in token_docs]
        documents = [tokens for tokens in documents if tokens.size]
        if not documents:
            raise ValueError("token_docs is empty: there is no token to learn from")
        for index, tokens in enumerate(documents):
            if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
                raise ValueError(
                    f"token_docs[{index}] must be a one-dimensional integer array, "
                    f"got {tokens.dtype}{list(tokens.shape)}"
                )
            if tokens.min() < 0 or tokens.max() > _INT32_MAX:
                raise ValueError(f"token_docs[{index}] holds ids outside the non-negative int32")
        self.eos_id = eos_id
        self.start_id = eos_id if start_id is None else start_id
        self.seq_len = seq_len
        lengths = np.array([tokens.size + 1 for tokens in documents], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        # One eos more than the streams: the target of stream offset i is then always element i + 1.
        self._stream = np.full(self._starts[-1] + 1, eos_id, np.int32)
        for start, tokens in zip(self._starts[:-1], documents, strict=True):
            self._stream[start + 1 : start + 1 + tokens.size] = tokens

    @property
    def num_documents(self) -> int:
        """Documents that hold tokens."""
        return len(self._starts) - 1

    @property
    def num_targets(self) -> int:
        """Targets per epoch: all tokens plus one eos per document."""
        return int(self._starts[-1])

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the token stream."""
        return hashlib.sha256(self._stream.tobytes()).hexdigest()

    def rows(
        self,
        row_starts: Int[np.ndarray, " rows"],
        document_order: Int[np.ndarray, " documents"] | None = None,
    ) -> Batch:
        """Rows that begin at the given offsets of the concatenated document streams.

        Args:
          row_starts: offsets; whatever lies beyond the end of the streams is padding.
          document_order: permutation in which the documents are concatenated; None is the order given.

        Returns:
          A `Batch`; a document that a row cuts has its positions restart at 0 in the next row.
        """
        if document_order is None:
            document_order, bounds = np.arange(self.num_documents), self._starts
        else:
            bounds = self._bounds(document_order)
        return self._gather(row_starts, document_order, bounds)

    def _bounds(self, document_order: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.diff(self._starts)[document_order])])

    def _gather(self, row_starts: np.ndarray, document_order: np.ndarray, bounds: np.ndarray) -> Batch:
        offsets = row_starts[:, None] + np.arange(self.seq_len)
        real = offsets < self.num_targets
        offsets = np.minimum(offsets, self.num_targets - 1)
        slots = np.searchsorted(bounds, offsets, side="right") - 1
        within = offsets - bounds[slots]
        source = self._starts[document_order[slots]] + within
        segments = slots - slots[:, :1] + 1
        positions = np.where(segments == 1, within - within[:, :1], within)
        return {
            "tokens": np.where(real, np.where(within == 0, self.start_id, self._stream[source]), self.eos_id).astype(
                np.int32
            ),
            "targets": np.where(real, self._stream[source + 1], self.eos_id).astype(np.int32),
            "segment_ids": np.where(real, segments, 0).astype(np.int32),
            "positions": np.where(real, positions, 0).astype(np.int32),
            "weights": real.astype(np.float32),
        }


class _EpochRows:
    """Batch number -> batch: per epoch, documents in a fresh order are cut into rows in a fresh order."""

    def __init__(
        self,
        data: PackedDataset,
        *,
        batch_size: int,
        local_rows: slice,
        seed: int,
        shuffle: bool,
        num_epochs: int | None,
    ) -> None:
        self._data = data
        self._batch_size = batch_size
        self._local_rows = local_rows
        self._seed = seed
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        self.rows_per_epoch = math.ceil(data.num_targets / data.seq_len)
        self._orders = functools.lru_cache(maxsize=2)(self._make_orders)  # a batch can span two epochs

    def _make_orders(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not self._shuffle:
            documents, rows = np.arange(self._data.num_documents), np.arange(self.rows_per_epoch)
        else:
            generator = np.random.default_rng([self._seed, epoch])
            documents = generator.permutation(self._data.num_documents)
            rows = generator.permutation(self.rows_per_epoch)
        return rows * self._data.seq_len, documents, self._data._bounds(documents)

    def __call__(self, index: int) -> Batch:
        first = index * self._batch_size
        wanted = np.arange(first, first + self._batch_size)[self._local_rows]
        epochs = wanted // self.rows_per_epoch
        parts = []
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            places = wanted[epochs == epoch] - epoch * self.rows_per_epoch
            if self._num_epochs is not None and epoch >= self._num_epochs:
                # Rows beyond the last epoch keep the shape of the final batch: an offset past the end is
                # padding.
                row_starts, documents, bounds = self._orders(self._num_epochs - 1)
                parts.append(self._data._gather(np.full(len(places), self._data.num_targets), documents, bounds))
                continue
            row_starts, documents, bounds = self._orders(epoch)
            parts.append(self._data._gather(row_starts[places], documents, bounds))
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class BatchIterator(Iterator[Batch]):
    """Iterates over batches and can say, and return to, where it stands. Made by `make_loader`.

    The state is a small JSON-able dictionary: the number of the next batch, and what the order of batches
    depends on (tokens, lengths, seed), so that a checkpoint of another run is refused. The number of
    processes is not part of it: a run may resume on more or fewer hosts.
    """

    def __init__(self, iterator: Any, identity: dict[str, Any], batches_per_epoch: float) -> None:
        self._iterator = iterator
        self._identity = identity
        self.batches_per_epoch = batches_per_epoch

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands, before the next batch."""
        return {**self._iterator.get_state(), **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state, bit for bit.

        Raises:
          ValueError: if the state was taken from other data, lengths or seed, or is damaged.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise ValueError(
                    f"data position was saved with {name}={state.get(name)!r}, this run has {value!r}: "
                    "resume with the same data and settings"
                )
        position = state.get("next_index")
        if type(position) is not int or position < 0:
            raise ValueError(f"data position must be a non-negative integer, got {position!r}")
        try:
            self._iterator.set_state({"next_index": position})
        except IndexError as error:
            raise ValueError(f"data position {position} lies beyond the end of the data") from error


def make_loader(
    token_docs: Sequence[np.ndarray],
    *,
    eos_id: int,
    seq_len: int,
    batch_size: int,
    seed: int,
    shuffle: bool = True,
    num_epochs: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    prefetch: int = 2,
    start_id: int | None = None,
) -> BatchIterator:
    """Training batches in an order that depends on the data, the lengths and the seed alone.

    In each epoch the documents are concatenated in a new order, cut into rows (no token is lost; the last row
    of the epoch is padded), and the rows are dealt in a new order. Batches run on across epochs, so only the
    very last batch can hold empty rows. Batch ``i`` of all processes together is batch ``i`` of a single
    process.

    Args:
      token_docs: ids per document, without eos.
      eos_id: the document boundary.
      seq_len: tokens per row.
      batch_size: rows per batch of all processes together; a multiple of ``process_count``.
      seed: non-negative; seeds both orders, together with the number of the epoch.
      shuffle: False keeps documents and rows in the order given.
      num_epochs: passes over the data; None never ends.
      process_index: which process this is; each gets its own rows of every batch.
      process_count: how many there are.
      prefetch: batches that a background thread prepares ahead; 0 prepares each when asked.
      start_id: the input in front of a document's first token; None: ``eos_id``.

    Returns:
      An iterator of `Batch` with ``batch_size / process_count`` rows, ``get_state`` and ``set_state``.

    Raises:
      ValueError: ``seq_len`` longer than the corpus, no tokens, or an argument out of range.

    Example:
      >>> import numpy as np
      >>> loader = make_loader([np.arange(100)], eos_id=100, seq_len=8, batch_size=4, seed=0)
      >>> next(loader)["tokens"].shape, loader.get_state()["next_index"]
      ((4, 8), 1)
    """
    data = PackedDataset(token_docs, eos_id=eos_id, seq_len=seq_len, start_id=start_id)
    if seq_len > data.num_targets:
        raise ValueError(f"seq_len {seq_len} is longer than the corpus ({data.num_targets} tokens)")
    if batch_size < 1 or process_count < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size must be a positive multiple of process_count, got {batch_size} and {process_count}"
        )
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must lie in [0, {process_count}), got {process_index}")
    if seed < 0:
        raise ValueError(f"seed must be non-negative, got {seed}")
    if num_epochs is not None and num_epochs < 1:
        raise ValueError(f"num_epochs must be at least 1 or None, got {num_epochs}")
    if prefetch < 0:
        raise ValueError(f"prefetch must be non-negative, got {prefetch}")

    local = batch_size // process_count
    make_batch = _EpochRows(
        data,
        batch_size=batch_size,
        local_rows=slice(process_index * local, (process_index + 1) * local),
        seed=seed,
        shuffle=shuffle,
        num_epochs=num_epochs,
    )
    rows = make_batch.rows_per_epoch
    num_batches = sys.maxsize if num_epochs is None else math.ceil(rows * num_epochs / batch_size)
    identity = {
        "tokens": data.fingerprint,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
    }
    dataset = grain.MapDataset.range(num_batches).map(make_batch)
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    return BatchIterator(iter(dataset.to_iter_dataset(options)), identity, rows / batch_size)


def evaluation_batches(
    token_docs: Sequence[np.ndarray],
    *,
    eos_id: int,
    seq_len: int,
    batch_size: int,
    overlap: int = 0,
    start_id: int | None = None,
) -> Iterator[Batch]:
    """One pass, in order, in which every token and every closing eos is a weighted target exactly once.

    Args:
      token_docs: ids per document, without eos; may be shorter than one row.
      eos_id: the document boundary.
      seq_len: tokens per row.
      batch_size: rows per batch; missing rows of the last batch are padding.
      overlap: rows begin every ``seq_len - overlap`` tokens and the repeated targets weigh 0, so that each
        counted target sees at least ``overlap`` tokens before it (or all of its document's).
      start_id: the input in front of a document's first token; None: ``eos_id``.

    Returns:
      An iterator of `Batch`.

    Raises:
      ValueError: no tokens, or an argument out of range.

    Example:
      >>> import numpy as np
      >>> batches = list(evaluation_batches([np.arange(9)], eos_id=9, seq_len=4, batch_size=2, overlap=2))
      >>> float(sum(batch["weights"].sum() for batch in batches))
      10.0
    """
    data = PackedDataset(token_docs, eos_id=eos_id, seq_len=seq_len, start_id=start_id)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not 0 <= overlap < seq_len:
        raise ValueError(f"overlap must lie in [0, seq_len) = [0, {seq_len}), got {overlap}")
    stride = seq_len - overlap
    num_rows = 1 + math.ceil(max(0, data.num_targets - seq_len) / stride)

    def make_batch(index: int) -> Batch:
        rows = np.arange(index * batch_size, (index + 1) * batch_size)
        batch = data.rows(np.where(rows < num_rows, rows * stride, data.num_targets))
        batch["weights"][rows > 0, :overlap] = 0.0
        return batch

    return map(make_batch, range(math.ceil(num_rows / batch_size)))


def bits_per_byte(total_nats: float, num_bytes: int) -> float:
    """Negative log-likelihood of all targets in bits, per byte of the text: the rate of compression.

    Args:
      total_nats: sum over all targets, closing eos included, of -ln p(target).
      num_bytes: UTF-8 bytes of the documents.

    Returns:
      ``total_nats / (ln 2 * num_bytes)``.

    Raises:
      ValueError: if there are no bytes or the loss is not finite.

    Example:
      >>> round(bits_per_byte(math.log(256) * 10, 10), 6)
      8.0
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes must be at least 1, got {num_bytes}")
    if not math.isfinite(total_nats):
        raise ValueError(f"total_nats must be finite, got {total_nats}")
    return total_nats / (math.log(2.0) * num_bytes)
