"""Block sizes of the TPU kernels of attention: what fits, what is worth trying, and the choice without a table.

The choice minimizes a rough model of the cycles that the compiler estimates on v5e, over the configs that fit the VMEM
of every chip.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.flash.tpu_blocks import LANES, Band, Gathered

MOST_SINKS = 1024
"""They are at hand in every step."""

VMEM_BYTES = 14 * 2**20
"""Of the 16 MiB that a kernel gets on v4, v5e and v5p without asking for more."""

_MOST_BLOCKS = 12  # operands of a kernel: each is a copy of its own in every step

_MULTIPLICATIONS = 4 * 128 * 128  # in a cycle: four systolic arrays
_BYTES = 546  # from or to HBM in a cycle
_STRIPS = {
    "forward": {128: 1.6, 256: 1.1},
    "query": {128: 1.4, 256: 1.1},
    "key_value": {128: 1.1, 256: 1.1},
}
"""What strips of so many rows take, by kernel, of the time that multiplications alone would."""
_ALONE = 1.35  # the same for a block of one strip, which has nothing to overlap with
_STEP = 250  # cycles of a grid step
_VISIT = 600  # and of one that has something to visit, besides its products


class ForwardConfig(NamedTuple):
    """Block sizes of the forward kernel, multiples of 128.

    Attributes:
      block_q: Rows of a grid step; for a band a multiple of `block_kv`.
      block_kv: Keys of a block.
      strip: Rows whose scores are computed at a time.
      blocks: Key blocks that a grid step has at hand at most; where a whole band is not more, it takes one step.
    """

    block_q: int
    block_kv: int
    strip: int
    blocks: int


class BackwardConfig(NamedTuple):
    """Block sizes of the backward kernels, multiples of 128: of the gradient of queries, and of keys and values.

    Attributes:
      block_q: As in `ForwardConfig`, of the first kernel, and so the next three.
      block_kv: See there.
      strip: See there.
      blocks: See there.
      outer_kv: Keys of a grid step of the second kernel; for a band a multiple of `inner_q`.
      inner_q: Rows of a block there.
      strip_kv: Keys whose scores are computed at a time.
      blocks_q: Row blocks that a grid step has at hand at most.
    """

    block_q: int
    block_kv: int
    strip: int
    blocks: int
    outer_kv: int
    inner_q: int
    strip_kv: int
    blocks_q: int


class Case(NamedTuple):
    """What the choice of block sizes depends on.

    Attributes:
      rows: Query rows, rounded up to a power of two.
      seq: Keys, rounded up to a power of two.
      group: Query heads of a key head.
      dim: Head size.
      window: Keys that a row sees; None is all up to its own.
      sinks: Keys at the beginning that it sees too.
      segmented: Whether there are segment ids.
      gathered: Whether rows stand at positions of their own.
      dtype: Of query, key and value.
    """

    rows: int
    seq: int
    group: int
    dim: int
    window: int | None
    sinks: int
    segmented: bool
    gathered: bool
    dtype: str

    @staticmethod
    def of(
        query: Array, key: Array, segment_ids: Array | None, window: int | None, sinks: int, gathered: bool
    ) -> "Case":
        rows, heads, dim = query.shape[1:]
        if window is not None and window >= key.shape[1]:
            window = None
        return Case(
            rows=max(LANES, 1 << (rows - 1).bit_length()),
            seq=max(LANES, 1 << (key.shape[1] - 1).bit_length()),
            group=heads // key.shape[2],
            dim=dim,
            window=window,
            sinks=sinks,
            segmented=segment_ids is not None,
            gathered=gathered,
            dtype=jnp.dtype(query.dtype).name,
        )

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def plan(self, outer: int, inner: int, blocks: int, *, keys_outer: bool) -> Band | Gathered:
        """The blocks that a kernel would visit."""
        if not self.gathered:
            return band_plan(self.window or self.rows, self.rows, outer, inner, blocks, keys_outer=keys_outer)
        outer_length, inner_length = (self.seq, self.rows) if keys_outer else (self.rows, self.seq)
        outer, inner = min(outer, outer_length), min(inner, inner_length)
        return Gathered(1, -(-outer_length // outer), -(-inner_length // inner), outer, inner, keys_outer)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def band_plan(window: int, rows: int, outer: int, inner: int, blocks: int, *, keys_outer: bool) -> Band:
    """The plan of a band; blocks are not much longer than the sequence."""
    at_hand = blocks * inner
    outer = min(outer, round_up(rows, LANES))
    inner = max(size for size in range(LANES, min(inner, outer) + 1, LANES) if outer % size == 0)
    fuse = 1 if blocks == 1 else min(at_hand // inner, _MOST_BLOCKS)
    return Band(min(window, rows), round_up(rows, outer), outer, inner, keys_outer, fuse)


def vmem_bytes(kind: str, plan: Band | Gathered, case: Case, strip: int) -> int:
    """Roughly the VMEM of a kernel: `kind` is "forward", "query" or "key_value"."""
    dim, itemsize, sinks = round_up(case.dim, LANES), case.itemsize, round_up(case.sinks, LANES)
    strip, keys = min(strip, plan.outer), plan.slots * plan.inner
    outer, inner = {"forward": (2, 2), "query": (3, 2), "key_value": (4, 2)}[kind]
    buffers = 2 * dim * itemsize * (outer * plan.outer + inner * (keys + sinks))
    buffers += 2 * 4 * 8 * 3 * (plan.outer + keys)  # log-sum-exp, ids, positions: a row takes eight
    columns = {"forward": 2 * (plan.accumulates), "query": 2, "key_value": 0}[kind] + case.gathered + case.segmented
    sums = 2 if kind == "key_value" else plan.accumulates
    scratch = int(4 * plan.outer * (columns * LANES + sums * dim))
    span = plan.inner if plan.slots == 1 else min(keys, round_up((case.window or keys) + strip, LANES) + LANES)
    scores = 4 * strip * (span + sinks) * (2 if kind == "forward" else 3)
    split = 6 * dim * 2 * (strip + span) if itemsize == 4 else 0  # float32 is multiplied in three parts
    return int(buffers + scratch + scores + split)


def cycles(kind: str, plan: Band | Gathered, case: Case, strip: int) -> float:
    """Roughly the compiler's estimate for one head on v5e; gathered rows are taken to be spread evenly."""
    dim, strip = round_up(case.dim, LANES), min(strip, plan.outer)
    products, arrays = {"forward": (2, 2), "query": (3, 3), "key_value": (4, 4)}[kind]
    rate = products * dim / _MULTIPLICATIONS * (6 if case.itemsize == 4 else 1)
    rate *= _STRIPS[kind][strip] * (_ALONE if strip == plan.outer else 1)
    moved = 2 * plan.inner * dim * case.itemsize / _BYTES
    total = 0.0
    if isinstance(plan, Band):
        for step in range(plan.span):
            delta = (step - plan.halo) * plan.inner
            area = plan.outer * plan.inner if plan.is_whole(delta) else _area(plan, delta, strip)
            missing = max(0, step - plan.ratio + 1) if plan.keys_outer else max(0, plan.halo - step)
            visits = max(0, plan.outer_blocks - -(-missing // plan.ratio))
            total += visits * (max(area * rate, moved) + (0 if plan.fused else _VISIT))
        total += plan.outer_blocks * _VISIT if plan.fused else 0
    else:
        # A block of rows sees its last row's keys; a block of keys is seen by rows from its first key on.
        visited = plan.outer_blocks * plan.inner_blocks / 2 + (plan.outer_blocks + plan.inner_blocks) / 2
        total += visited * (max(plan.outer * plan.inner * rate, moved) + _VISIT)
    ends = plan.outer_blocks * plan.outer * (0.5 + arrays * dim * case.itemsize / _BYTES)
    return total + plan.outer_blocks * plan.steps * _STEP + ends


def _area(plan: Band, delta: int, strip: int) -> int:
    """Scores that are computed of an inner block."""
    strips = [(start, min(strip, plan.outer - start)) for start in range(0, plan.outer, strip)]
    return sum(
        rows * part.size for start, rows in strips for part in plan.slices(start, rows, [(0, delta)], None, 0, 0, 0)
    )


def _pass_candidates(kind: str, case: Case) -> Iterator[tuple[tuple[int, int, int, int], Band | Gathered]]:
    """(outer, inner, strip, blocks) that fit."""
    keys_outer = kind == "key_value"
    length = round_up(case.seq if keys_outer else case.rows, LANES)
    sizes = (128, 256, 512, 1024) if case.itemsize == 2 else (128, 256, 512)  # float32 takes long to compile
    seen = set()
    for outer, inner, strip in itertools.product(sizes, sizes, (128, 256)):
        if outer > max(length, LANES) or strip > outer:
            continue
        if not case.gathered and inner > outer:
            continue
        for blocks in (1, 9) if not case.gathered else (1,):
            plan = case.plan(outer, inner, blocks, keys_outer=keys_outer)
            config = (plan.outer, plan.inner, strip, plan.slots)
            if config not in seen and vmem_bytes(kind, plan, case, strip) <= VMEM_BYTES:
                seen.add(config)
                yield config, plan


def _best(kind: str, case: Case) -> tuple[int, int, int, int]:
    found = [(cycles(kind, plan, case, config[2]), config) for config, plan in _pass_candidates(kind, case)]
    return min(found)[1]


@functools.lru_cache(maxsize=512)
def forward_heuristic(case: Case) -> ForwardConfig:
    """Returns the config of the fewest `cycles` that fits."""
    return ForwardConfig(*_best("forward", case))


@functools.lru_cache(maxsize=512)
def backward_heuristic(case: Case) -> BackwardConfig:
    """Returns the config of the fewest `cycles` that fits."""
    return BackwardConfig(*_best("query", case), *_best("key_value", case))


def forward_candidates(key: Mapping[str, Any]) -> list[ForwardConfig]:
    """The configs worth trying for a case, given as a mapping."""
    case = Case(**key)
    return [ForwardConfig(*config) for config in _cheapest("forward", case, 8)]


def backward_candidates(key: Mapping[str, Any]) -> list[BackwardConfig]:
    """The same for the backward pass: the kernels' best ones, each with the other's first."""
    case = Case(**key)
    of_query, of_keys = (_cheapest(kind, case, 4) for kind in ("query", "key_value"))
    pairs = [(q, of_keys[0]) for q in of_query] + [(of_query[0], k) for k in of_keys[1:]]
    return [BackwardConfig(*q, *k) for q, k in pairs]


def _cheapest(kind: str, case: Case, number: int) -> list[tuple[int, int, int, int]]:
    found = [(cycles(kind, plan, case, config[2]), config) for config, plan in _pass_candidates(kind, case)]
    return [config for _, config in sorted(found)[:number]]


def checked(config: Any) -> Any:
    """Raises a ValueError unless block sizes are multiples of 128."""
    for name, size in config._asdict().items():
        if size < 1 or (not name.startswith("blocks") and size % LANES):
            raise ValueError(f"config must have positive multiples of {LANES}, got {config}")
    return config
