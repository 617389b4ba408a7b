"""Attention on TPUs: block sizes, padding to whole blocks, and the kernels of a band and of gathered rows."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import autotune
from kernels_pallas.flash import tpu_backward, tpu_forward
from kernels_pallas.flash import tpu_configs as configs
from kernels_pallas.flash.rules import NOTHING
from kernels_pallas.flash.tpu_blocks import LANES, Band, Gathered, SinkKeys
from kernels_pallas.flash.tpu_configs import BackwardConfig, Case, ForwardConfig, band_plan, round_up

LOG2E = 1.4426950408889634
NO_SEGMENT = 2**30  # id of keys that no row sees

_DTYPES = (jnp.bfloat16, jnp.float32)
_LARGEST_DIM = 256

Shaped: TypeAlias = Array | jax.ShapeDtypeStruct
"""What has shape and dtype."""


def unsupported(query: Shaped, key: Shaped) -> str | None:
    """Returns why no kernel takes these, None if one does."""
    if query.dtype not in _DTYPES:
        return f"dtype {jnp.dtype(query.dtype).name} (bfloat16 or float32)"
    if query.shape[-1] > _LARGEST_DIM:
        return f"head size {query.shape[-1]} (at most {_LARGEST_DIM})"
    return None


def unsupported_device() -> str | None:
    """Returns why this machine's device cannot run the kernels: every TPU can."""
    return None


def _forward_config(operation: str, config: ForwardConfig | None, case: Case) -> ForwardConfig:
    if config is None:
        found = autotune.lookup(operation, "pallas_tpu.forward", case._asdict())
        config = configs.forward_heuristic(case) if found is None else ForwardConfig(**found)
    return configs.checked(config)


def _backward_config(operation: str, config: BackwardConfig | None, case: Case) -> BackwardConfig:
    if config is None:
        found = autotune.lookup(operation, "pallas_tpu.backward", case._asdict())
        config = configs.backward_heuristic(case) if found is None else BackwardConfig(**found)
    return configs.checked(config)


def _heads_first(x: Float[Array, "batch rows heads dim"], rows: int) -> Float[Array, "batch heads padded dim2"]:
    """(batch, heads, rows, dim) with zeros up to `rows` rows and whole registers."""
    x = jnp.swapaxes(x, 1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows - x.shape[2]), (0, -x.shape[3] % LANES)))


def _heads_last(x: Float[Array, "batch heads padded dim2"], like: Array) -> Float[Array, "batch rows heads dim"]:
    return jnp.swapaxes(x[:, :, : like.shape[1], : like.shape[3]], 1, 2)


def _scaled(query: Array, scale: float) -> Array:
    return (query.astype(jnp.float32) * (scale * LOG2E)).astype(query.dtype)


def _row(x: Int[Array, "batch n"], size: int, fill: int) -> Int[Array, "batch 1 1 padded"]:
    return jnp.pad(x.astype(jnp.int32), ((0, 0), (0, size - x.shape[1])), constant_values=fill)[:, None, None]


def _of_rows(out: Array, lse: Array, grad_out: Array, size: int) -> Float[Array, "batch heads 2 padded"]:
    """log-sum-exp in base 2, and delta, of rows up to `size`."""
    lse = jnp.where(lse < NOTHING, lse * LOG2E, NOTHING)
    delta = jnp.einsum("bthd,bthd->bht", out, grad_out, preferred_element_type=jnp.float32)
    padding = ((0, 0), (0, 0), (0, size - lse.shape[2]))
    return jnp.stack([jnp.pad(lse, padding, constant_values=NOTHING), jnp.pad(delta, padding)], axis=2)


def _band_ids(segment_ids: Array | None, size: int, padding_sees: bool) -> tuple[Array | None, Array | None]:
    """Segment ids of rows and of keys."""
    if segment_ids is None:
        return None, None
    keys = segment_ids if padding_sees else jnp.where(segment_ids == 0, NO_SEGMENT, segment_ids)
    return _row(segment_ids, size, 0), _row(keys, size, NO_SEGMENT)


def band_forward(
    operation: str,
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch rows kv_heads dim"],
    value: Float[Array, "batch rows kv_heads dim"],
    segment_ids: Int[Array, "batch rows"] | None,
    *,
    scale: float,
    window: int,
    sinks: int = 0,
    padding_sees: bool,
    config: ForwardConfig | None,
    interpret: Any,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """Rows that see the last `window` keys up to their own, and the first `sinks`.

    Args:
      operation: Name of the operation, and of its kernels.
      query: See `api`.
      key: See `api`.
      value: See `api`.
      segment_ids: See `api`.
      scale: Factor on the scores.
      window: At least 1.
      sinks: See `api`.
      padding_sees: Whether id 0 is an id like any other.
      config: Block sizes; None takes those that `autotune` has for this case, else the heuristic's.
      interpret: As in `pallas_call`.

    Returns:
      Output and log-sum-exp.
    """
    rows = query.shape[1]
    config = _forward_config(operation, config, Case.of(query, key, segment_ids, window, sinks, False))
    plan = band_plan(window, rows, config.block_q, config.block_kv, config.blocks, keys_outer=False)
    q, k, v = (_heads_first(x, plan.length) for x in (_scaled(query, scale), key, value))
    row_ids, key_ids = _band_ids(segment_ids, plan.length, padding_sees)
    out, lse = tpu_forward.forward(
        plan,
        q,
        k,
        v,
        row_ids=row_ids,
        key_ids=key_ids,
        sinks=sinks if window < rows else 0,
        strip=min(config.strip, plan.outer),
        name=f"{operation}_forward",
        interpret=interpret,
    )
    return _heads_last(out, query), lse[:, :, :rows]


def band_backward(
    operation: str,
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch rows kv_heads dim"],
    value: Float[Array, "batch rows kv_heads dim"],
    segment_ids: Int[Array, "batch rows"] | None,
    out: Float[Array, "batch rows heads dim"],
    lse: Float[Array, "batch heads rows"],
    grad_out: Float[Array, "batch rows heads dim"],
    *,
    scale: float,
    window: int,
    sinks: int = 0,
    padding_sees: bool,
    config: BackwardConfig | None,
    interpret: Any,
) -> tuple[
    Float[Array, "batch rows heads dim"],
    Float[Array, "batch rows kv_heads dim"],
    Float[Array, "batch rows kv_heads dim"],
]:
    """Gradients of `band_forward`, whose arguments these are."""
    rows = query.shape[1]
    config = _backward_config(operation, config, Case.of(query, key, segment_ids, window, sinks, False))
    sinks = sinks if window < rows else 0
    plan = band_plan(window, rows, config.block_q, config.block_kv, config.blocks, keys_outer=False)
    plan_kv = band_plan(window, rows, config.outer_kv, config.inner_q, config.blocks_q, keys_outer=True)

    def arguments(plan: Band) -> dict[str, Any]:
        q, k, v, do = (_heads_first(x, plan.length) for x in (_scaled(query, scale), key, value, grad_out))
        row_ids, key_ids = _band_ids(segment_ids, plan.length, padding_sees)
        of_rows = _of_rows(out, lse, grad_out, plan.length)
        arrays = {"query": q, "key": k, "value": v, "grad_out": do, "of_rows": of_rows}
        return arrays | {"row_ids": row_ids, "key_ids": key_ids, "interpret": interpret}

    dquery = tpu_backward.backward_query(
        plan,
        **arguments(plan),
        scale=scale,
        sinks=sinks,
        strip=min(config.strip, plan.outer),
        name=f"{operation}_dquery",
    )
    given = arguments(plan_kv)
    grads = tpu_backward.backward_key_value(
        plan_kv, **given, strip=min(config.strip_kv, plan_kv.outer), name=f"{operation}_dkey_dvalue"
    )
    dkey, dvalue = (_heads_last(x, key) for x in grads)
    if sinks:
        outer = round_up(sinks, LANES)
        plan_sinks = SinkKeys(window, sinks, plan_kv.length, outer, plan_kv.inner)
        added = tpu_backward.backward_key_value(
            plan_sinks, **given, strip=min(config.strip_kv, outer), name=f"{operation}_dsinks"
        )
        dkey, dvalue = (
            x.at[:, :sinks].add(jnp.swapaxes(y[:, :, :sinks, : key.shape[3]], 1, 2))
            for x, y in zip((dkey, dvalue), added, strict=True)
        )
    return _heads_last(dquery, query), dkey, dvalue


class _Places(NamedTuple):
    """Rows at their positions, padded: -1 sees nothing."""

    positions: Int[Array, "batch rows"]
    row_ids: Int[Array, "batch 1 1 rows"] | None
    key_ids: Int[Array, "batch 1 1 keys"] | None


def _places(positions: Array, segment_ids: Array | None, seq: int, rows: int, keys: int) -> _Places:
    positions = jnp.where(positions < seq, positions, -1).astype(jnp.int32)
    row_ids = key_ids = None
    if segment_ids is not None:
        row_ids = _row(jnp.take_along_axis(segment_ids, jnp.maximum(positions, 0), axis=1), rows, 0)
        key_ids = _row(jnp.where(segment_ids == 0, NO_SEGMENT, segment_ids), keys, NO_SEGMENT)
    positions = jnp.pad(positions, ((0, 0), (0, rows - positions.shape[1])), constant_values=-1)
    return _Places(positions, row_ids, key_ids)


def gathered_plan(
    positions: Int[Array, "batch rows"], keys: int, block_q: int, block_kv: int, *, keys_outer: bool
) -> tuple[Gathered, Int[Array, " limits"]]:
    """The plan of rows at padded ascending positions, and its limits."""
    batch, rows = positions.shape
    blocks_q, blocks_kv = rows // block_q, keys // block_kv
    largest = positions.reshape(batch, blocks_q, block_q).max(axis=2)
    if not keys_outer:
        limits = blocks_kv - (largest // block_kv + 1)  # of -1: all
        return Gathered(batch, blocks_q, blocks_kv, block_q, block_kv, keys_outer), limits.reshape(-1)
    empty = (largest < 0).sum(axis=1)  # the last ones
    # The first block of rows that reaches a block of keys: those before it are the ones that do not.
    starts = jnp.arange(blocks_kv) * block_kv
    reaches = jnp.where(largest < 0, jnp.iinfo(jnp.int32).max, largest)
    skipped = (reaches[:, None, :] < starts[:, None]).sum(axis=2)
    limits = jnp.concatenate([skipped.reshape(-1), empty]).astype(jnp.int32)
    return Gathered(batch, blocks_kv, blocks_q, block_kv, block_q, keys_outer), limits


def _gathered_sizes(rows: int, keys: int, block_q: int, block_kv: int) -> tuple[int, int]:
    return min(block_q, round_up(rows, LANES)), min(block_kv, round_up(keys, LANES))


def gathered_forward(
    operation: str,
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    positions: Int[Array, "batch rows"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
    config: ForwardConfig | None,
    interpret: Any,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """Rows that see all keys up to their positions, which ascend.

    Args:
      operation: Name of the operation, and of its kernels.
      query: See `api`.
      key: See `api`.
      value: See `api`.
      positions: See `api`.
      segment_ids: See `api`.
      scale: Factor on the scores.
      config: Block sizes; None takes those that `autotune` has for this case, else the heuristic's.
      interpret: As in `pallas_call`.

    Returns:
      Output and log-sum-exp.
    """
    rows, seq = query.shape[1], key.shape[1]
    config = _forward_config(operation, config, Case.of(query, key, segment_ids, None, 0, True))
    block_q, block_kv = _gathered_sizes(rows, seq, config.block_q, config.block_kv)
    size, keys = round_up(rows, block_q), round_up(seq, block_kv)
    places = _places(positions, segment_ids, seq, size, keys)
    plan, limits = gathered_plan(places.positions, keys, block_q, block_kv, keys_outer=False)
    out, lse = tpu_forward.forward(
        plan,
        _heads_first(_scaled(query, scale), size),
        _heads_first(key, keys),
        _heads_first(value, keys),
        limits,
        places.positions[:, None, None],
        places.row_ids,
        places.key_ids,
        strip=min(config.strip, block_q),
        name=f"{operation}_forward",
        interpret=interpret,
    )
    return _heads_last(out, query), lse[:, :, :rows]


def gathered_backward(
    operation: str,
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    positions: Int[Array, "batch rows"],
    segment_ids: Int[Array, "batch seq"] | None,
    out: Float[Array, "batch rows heads dim"],
    lse: Float[Array, "batch heads rows"],
    grad_out: Float[Array, "batch rows heads dim"],
    *,
    scale: float,
    config: BackwardConfig | None,
    interpret: Any,
) -> tuple[
    Float[Array, "batch rows heads dim"],
    Float[Array, "batch seq kv_heads dim"],
    Float[Array, "batch seq kv_heads dim"],
]:
    """Gradients of `gathered_forward`, whose arguments these are."""
    rows, seq = query.shape[1], key.shape[1]
    config = _backward_config(operation, config, Case.of(query, key, segment_ids, None, 0, True))

    def arguments(block_q: int, block_kv: int, keys_outer: bool) -> tuple[Gathered, dict[str, Any]]:
        block_q, block_kv = _gathered_sizes(rows, seq, block_q, block_kv)
        size, keys = round_up(rows, block_q), round_up(seq, block_kv)
        places = _places(positions, segment_ids, seq, size, keys)
        plan, limits = gathered_plan(places.positions, keys, block_q, block_kv, keys_outer=keys_outer)
        return plan, {
            "query": _heads_first(_scaled(query, scale), size),
            "key": _heads_first(key, keys),
            "value": _heads_first(value, keys),
            "grad_out": _heads_first(grad_out, size),
            "of_rows": _of_rows(out, lse, grad_out, size),
            "limits": limits,
            "positions": places.positions[:, None, None],
            "row_ids": places.row_ids,
            "key_ids": places.key_ids,
            "interpret": interpret,
        }

    plan, given = arguments(config.block_q, config.block_kv, False)
    strip = min(config.strip, plan.outer)
    dquery = tpu_backward.backward_query(plan, **given, scale=scale, strip=strip, name=f"{operation}_dquery")
    plan, given = arguments(config.inner_q, config.outer_kv, True)
    strip = min(config.strip_kv, plan.outer)
    dkey, dvalue = tpu_backward.backward_key_value(plan, **given, strip=strip, name=f"{operation}_dkey_dvalue")
    return _heads_last(dquery, query), _heads_last(dkey, key), _heads_last(dvalue, key)
