"""Which blocks a TPU kernel of attention visits, and what is seen in them: the operations differ in nothing else.

A kernel walks over outer blocks, and for each over some inner blocks, all in one grid step or one a step. Outer blocks
are rows and inner ones keys; for the gradients of keys and values it is the other way round.

The compiler's cycle estimates take every value in scalar memory for 0 (`static_report`). Counts are kept so that 0
means "visit every block".
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

LANES = 128
_MOST_BODIES = 3  # of a fused kernel: whole bands, and outer blocks whose band leaves the sequence


class Slice(NamedTuple):
    """Indices `start` to `stop` of inner block `slot`; outer minus inner index is at least `lowest`, at most `highest`.

    Indices count from the first of the strip and of the slice. None: no bound is needed on that side.
    """

    slot: int
    start: int
    stop: int
    lowest: Any = None
    highest: Any = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    def mask(self, rows: int) -> Bool[Array, "rows columns"] | None:
        """What is seen, None for everything."""
        if self.lowest is None and self.highest is None:
            return None
        offset = iota((rows, self.size), 0) - iota((rows, self.size), 1)
        bounds = [offset >= self.lowest] if self.lowest is not None else []
        return both(*bounds, None if self.highest is None else offset <= self.highest)


def iota(shape: tuple[int, int], axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def both(*masks: Any) -> Any:
    """The conjunction of masks; None is all true."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    mask = given[0]
    for other in given[1:]:
        mask = mask & other
    return mask


class Band(NamedTuple):
    """Rows that see the last `window` keys up to their own: all of it is known when compiling.

    Attributes:
      window: Number of keys.
      length: Rows, and as many keys; a multiple of `outer`.
      outer: Size of an outer block.
      inner: Size of an inner block; divides `outer`.
      keys_outer: Whether outer blocks are keys.
      fuse: The largest number of inner blocks to visit in one step.
    """

    window: int
    length: int
    outer: int
    inner: int
    keys_outer: bool
    fuse: int

    @property
    def ratio(self) -> int:
        return self.outer // self.inner

    @property
    def outer_blocks(self) -> int:
        return self.length // self.outer

    @property
    def inner_blocks(self) -> int:
        return self.length // self.inner

    @property
    def span(self) -> int:
        """Inner blocks of an outer one."""
        return min(self.ratio + -(-(self.window - 1) // self.inner), self.inner_blocks)

    @property
    def halo(self) -> int:
        """Inner blocks that come before the outer one."""
        return 0 if self.keys_outer else self.span - self.ratio

    @property
    def cut(self) -> int:
        """Outer blocks whose band leaves the sequence."""
        return min(-(-(self.span - self.ratio) // self.ratio), self.outer_blocks)

    @property
    def fused(self) -> bool:
        return self.span <= self.fuse and self.cut < _MOST_BODIES

    @property
    def slots(self) -> int:
        """Inner blocks at hand in a step."""
        return self.span if self.fused else 1

    @property
    def steps(self) -> int:
        return 1 if self.fused else self.span

    @property
    def accumulates(self) -> bool:
        """Whether the sums of an outer block outlive a step."""
        return self.steps > 1

    def inner_block(self, limits: Any, batch: Any, i: Any, j: Any, slot: int) -> Any:
        """The inner block of a slot; where there is none, the nearest one, which is then at hand already."""
        return jnp.clip(i * self.ratio - self.halo + (slot if self.fused else j), 0, self.inner_blocks - 1)

    def cases(self, limits: Any, batch: Any, i: Any, j: Any) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
        """Conditions, at most one of them true in a step (None: always), and the inner blocks to visit then.

        Blocks are given by their slot and how far after the outer block they start.
        """
        deltas = [(step - self.halo) * self.inner for step in range(self.span)]
        if self.fused:
            for k in range(self.cut):
                block = self.outer_blocks - 1 - k if self.keys_outer else k
                first = block * self.ratio - self.halo
                visible = [slot for slot in range(self.span) if 0 <= first + slot < self.inner_blocks]
                yield i == block, [(slot, deltas[slot]) for slot in visible]
            if self.cut < self.outer_blocks:
                rest = i < self.outer_blocks - self.cut if self.keys_outer else i >= self.cut
                yield (rest if self.cut else None), list(enumerate(deltas))
            return
        block = i * self.ratio - self.halo + j
        inside = block < self.inner_blocks if self.keys_outer else block >= 0
        whole = [step for step, delta in enumerate(deltas) if self.is_whole(delta)]
        for step, delta in enumerate(deltas):
            if step not in whole:
                yield inside & (j == step), [(0, delta)]
        if whole:  # they follow one another
            yield inside & (j >= whole[0]) & (j <= whole[-1]), [(0, deltas[whole[0]])]

    def is_last(self, blocks: list[tuple[int, int]]) -> bool:
        """Whether a case is the last one of an outer block."""
        return blocks[-1][1] == (self.span - 1 - self.halo) * self.inner

    def is_whole(self, delta: int) -> bool:
        """Whether every row sees every key of an inner block that starts `delta` after its outer block."""
        first, last = -(self.inner - 1) - delta, self.outer - 1 - delta  # row minus key, or key minus row
        if self.keys_outer:
            first, last = -last, -first
        return first >= 0 and last < self.window

    def slices(
        self, start: int, rows: int, blocks: list[tuple[int, int]], limits: Any, batch: Any, i: Any, j: Any
    ) -> list[Slice]:
        """What outer indices `start` ... `start + rows - 1` see of the blocks of a case."""
        found = []
        before, after = (0, self.window - 1) if self.keys_outer else (self.window - 1, 0)
        for slot, delta in blocks:
            # Outer index x, counted from `start`, sees inner y with -after <= ahead + x - y <= before.
            ahead = start - delta
            first, last = max(ahead - before, 0), min(ahead + rows - 1 + after, self.inner - 1)
            if first > last:
                continue
            first, stop = first // LANES * LANES, -(-(last + 1) // LANES) * LANES
            lowest, highest = first - ahead - after, first - ahead + before
            least, most = first + 1 - stop, rows - 1
            found.append(
                Slice(slot, first, stop, lowest if lowest > least else None, highest if highest < most else None)
            )
        return found


class Gathered(NamedTuple):
    """Rows at ascending positions: which blocks to visit is known only when running, from `limits`.

    `limits` are for every (batch, outer block) the keys' blocks at the end that no row of it sees, or, where keys are
    outer, the rows' blocks at the beginning that do not see it; then for every batch element the blocks at the end
    without rows that see anything.

    Attributes:
      batch: Batch elements.
      outer_blocks: How many.
      inner_blocks: How many.
      outer: Size of an outer block.
      inner: Size of an inner block.
      keys_outer: Whether outer blocks are keys.
    """

    batch: int
    outer_blocks: int
    inner_blocks: int
    outer: int
    inner: int
    keys_outer: bool

    @property
    def fused(self) -> bool:
        return False

    @property
    def slots(self) -> int:
        return 1

    @property
    def steps(self) -> int:
        return self.inner_blocks

    @property
    def accumulates(self) -> bool:
        """Always: an outer block may have nothing to visit, and is zero then."""
        return True

    def _range(self, limits: Any, batch: Any, i: Any) -> tuple[Any, Any]:
        """The inner blocks to visit: the first one, and the one after the last."""
        limit = limits[batch * self.outer_blocks + i]
        if not self.keys_outer:
            return 0, self.inner_blocks - limit
        return limit, self.inner_blocks - limits[self.batch * self.outer_blocks + batch]

    def inner_block(self, limits: Any, batch: Any, i: Any, j: Any, slot: int) -> Any:
        first, stop = self._range(limits, batch, i)
        return jnp.clip(first + j, 0, jnp.maximum(stop - 1, 0))

    def cases(self, limits: Any, batch: Any, i: Any, j: Any) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
        first, stop = self._range(limits, batch, i)
        yield first + j < stop, [(0, 0)]

    def is_last(self, blocks: list[tuple[int, int]]) -> bool:
        return False

    def slices(
        self, start: int, rows: int, blocks: list[tuple[int, int]], limits: Any, batch: Any, i: Any, j: Any
    ) -> list[Slice]:
        return [Slice(0, 0, self.inner)]

    def key_start(self, limits: Any, batch: Any, i: Any, j: Any) -> Any:
        """The first key of the block of keys at hand."""
        return i * self.outer if self.keys_outer else j * self.inner


class SinkKeys(NamedTuple):
    """The first keys as the one outer block, seen by all rows whose window has left them behind.

    Attributes:
      window: Number of keys that a row sees as its window.
      sinks: Number of keys at the beginning that it sees too.
      length: Rows, a multiple of `inner`.
      outer: Size of the block of keys.
      inner: Size of a block of rows.
    """

    window: int
    sinks: int
    length: int
    outer: int
    inner: int

    @property
    def keys_outer(self) -> bool:
        return True

    @property
    def outer_blocks(self) -> int:
        return 1

    @property
    def fused(self) -> bool:
        return False

    @property
    def slots(self) -> int:
        return 1

    @property
    def first(self) -> int:
        """The first block of rows that see a sink behind their window."""
        return self.window // self.inner

    @property
    def steps(self) -> int:
        return self.length // self.inner - self.first

    @property
    def accumulates(self) -> bool:
        return self.steps > 1

    def inner_block(self, limits: Any, batch: Any, i: Any, j: Any, slot: int) -> Any:
        return self.first + j

    def cases(self, limits: Any, batch: Any, i: Any, j: Any) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
        yield None, [(0, 0)]

    def is_last(self, blocks: list[tuple[int, int]]) -> bool:
        return False

    def slices(
        self, start: int, rows: int, blocks: list[tuple[int, int]], limits: Any, batch: Any, i: Any, j: Any
    ) -> list[Slice]:
        # Key start + x, row (first + j) inner + y: seen where key <= row - window.
        return [Slice(0, 0, self.inner, highest=(self.first + j) * self.inner - self.window - start)]


Plan: TypeAlias = Band | Gathered | SinkKeys
