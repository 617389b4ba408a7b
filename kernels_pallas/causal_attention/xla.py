"""Causal attention on CPU: one head at a time, blocks that stay in cache, keys after a block never touched.

What shapes this file, measured on CPU against `jax.nn.dot_product_attention`:

- A loop over (batch, key head) of two-dimensional products is 1.6 to 2 times as fast as one batched product: the
  scores of a block stay in the second-level cache instead of being fresh memory. XLA:CPU hands `a @ b` and
  `a @ bᵀ` to its threaded matrix library but not `aᵀ @ b`; hence the transposed scores of the backward pass,
  where dk and dv are plain products and dq only needs kᵀ.
- Heads are sliced out of the (batch, seq, heads, dim) arrays inside the loop: no transposed copies of them.
- The query heads that share a key head are rows (position, head) of one product.
- A fused loop that broadcasts one array along both axes (segment ids of queries against those of keys) is not
  vectorised and ten times slower; hence the two separate arrays of segment ids.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.causal_attention import reference
from kernels_pallas.causal_attention.sharding import partitioned, same_varying

_STRIPS = 8  # unrolled groups of blocks: bounds the size of the program when the sequence is long
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def causal_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    scale: float,
) -> Float[Array, "batch seq heads dim"]:
    """Blockwise attention with its own backward pass; see `api.causal_attention`."""
    query, key, value, segment_ids = same_varying((query, key, value, segment_ids))
    return _attention(scale, query, key, value, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(scale, query, key, value, segment_ids):
    return _forward(scale, query, key, value, segment_ids)[0]


def _attention_fwd(scale, query, key, value, segment_ids):
    out, lse = _forward(scale, query, key, value, segment_ids)
    return out, (query, key, value, segment_ids, out, lse)


def _attention_bwd(scale, residuals, grad_out):
    return *_backward(scale, *residuals, grad_out), None


_attention.defvjp(_attention_fwd, _attention_bwd)


# The two passes are loops that fill buffers. Differentiating them once more takes the plain formulas instead.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(scale, query, key, value, segment_ids):
    call = _local(functools.partial(_forward_pass, scale), results=("b.h.", "bg."))
    return call(query, key, value, segment_ids)


@_forward.defjvp
def _forward_jvp(scale, primals, tangents):
    segment_ids = primals[3]

    def plain(query, key, value):
        return reference.attention_and_lse(query, key, value, segment_ids, scale)

    return jax.jvp(plain, primals[:3], tangents[:3])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(scale, query, key, value, segment_ids, out, lse, grad_out):
    call = _local(functools.partial(_backward_pass, scale), results=("b.h.", "b.g.", "b.g."))
    return call(query, key, value, segment_ids, out, lse, grad_out)


@_backward.defjvp
def _backward_jvp(scale, primals, tangents):
    query, key, value, segment_ids, _, _, grad_out = primals

    def plain(query, key, value, grad_out):  # recomputes out and lse, so their tangents are not needed
        def attend(query, key, value):
            return reference.causal_attention(query, key, value, segment_ids, scale)

        return jax.vjp(attend, query, key, value)[1](grad_out)

    return jax.jvp(plain, (query, key, value, grad_out), (*tangents[:3], tangents[6]))


def _local(operation: Callable, results: tuple[str, ...]) -> Callable:
    """`operation` with its vmap and sharding rules; dimensions are named as in `partitioned`."""

    def call(query, key, value, segment_ids, *rest):
        has_segments = segment_ids is not None
        segments = (segment_ids,) if has_segments else ()
        operands = ("b.h.", "b.g.", "b.g.", *["b."] * has_segments, *("b.h.", "bg.", "b.h.")[: len(rest)])

        def flat(query, key, value, *others):
            segment_ids, others = (others[0], others[1:]) if has_segments else (None, others)
            return operation(query, key, value, segment_ids, *others)

        return _fold_vmap(partitioned(flat, operands, results))(query, key, value, *segments, *rest)

    return call


def _fold_vmap(operation: Callable) -> Callable:
    """Makes `vmap` of `operation` one call with a larger leading axis."""
    folded = jax.custom_batching.custom_vmap(operation)

    @folded.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        def fold(x, batched):
            x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = _fold_vmap(operation)(*jax.tree.map(fold, args, tuple(in_batched)))
        unfolded = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return unfolded, jax.tree.map(lambda _: True, out)

    return folded


class _Strip(NamedTuple):
    """`blocks` blocks of `size` positions from `start` on, which the program treats alike."""

    start: int
    size: int
    blocks: int

    @property
    def stop(self) -> int:
        return self.start + self.size * self.blocks

    @property
    def block_starts(self) -> Int[Array, " blocks"]:
        return self.start + self.size * jnp.arange(self.blocks)


def _strips(seq: int, group: int) -> Iterator[_Strip]:
    size = 128 if group <= 2 else 64  # a block has size * group rows: equally fast, a third of the memory
    full = seq // size
    per_strip = max(1, -(-full // _STRIPS))
    for first in range(0, full, per_strip):
        yield _Strip(first * size, size, min(per_strip, full - first))
    if seq % size:
        yield _Strip(full * size, seq % size, 1)


class _Segments(NamedTuple):
    """Segment ids of the keys, and the negated ids of the rows (position, query head) of a key head."""

    keys: Int[Array, "*batch seq"]
    rows: Int[Array, "*batch rows"]


def _segments(segment_ids: Int[Array, "batch seq"] | None, group: int) -> _Segments | None:
    if segment_ids is None:
        return None
    return _Segments(segment_ids, -jnp.repeat(segment_ids, group, axis=1))


def _visible(
    queries: tuple[Any, int], keys: tuple[Any, int], group: int, segments: _Segments | None
) -> Bool[Array, "rows keys"]:
    """Which keys a row may see; both ranges are (first position, how many positions)."""
    shape = (queries[1], group)
    rows = queries[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0).reshape(-1)
    visible = rows[:, None] >= keys[0] + jnp.arange(keys[1])
    if segments is not None:
        row_ids, key_ids = _rows(segments.rows, *queries, group), _rows(segments.keys, *keys)
        visible = visible & (row_ids[:, None] + key_ids == 0)
    return visible


def _forward_pass(scale, query, key, value, segment_ids):
    batch, seq, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    segments = _segments(segment_ids, group)

    def one_head(i, buffers):
        b, g = i // kv_heads, i % kv_heads
        q = scale * _head(query, b, g, group).reshape(seq * group, dim)
        k, v = (_head(x, b, g)[:, 0] for x in (key, value))
        out, lse = _forward_head(q, k, v, jax.tree.map(lambda ids: ids[b], segments))
        return (
            _set_head(buffers[0], b, g, out.reshape(seq, group, dim)),
            jax.lax.dynamic_update_slice(buffers[1], lse[None, None], (b, g, 0)),
        )

    buffers = same_varying((jnp.zeros_like(query), jnp.zeros((batch, kv_heads, seq * group))), like=query)
    return jax.lax.fori_loop(0, batch * kv_heads, one_head, buffers)


def _forward_head(
    q: Float[Array, "rows dim"],
    k: Float[Array, "seq dim"],
    v: Float[Array, "seq dim"],
    segments: _Segments | None,
) -> tuple[Float[Array, "rows dim"], Float[Array, " rows"]]:
    """Output and log-sum-exp of the query heads of one key head; q is already scaled."""
    group = q.shape[0] // k.shape[0]
    outs, lses = [], []
    for strip in _strips(k.shape[0], group):
        keys, values = k[: strip.stop], v[: strip.stop]

        def block(start, strip=strip, keys=keys, values=values):
            queries = _rows(q, start, strip.size, group)
            visible = _visible((start, strip.size), (0, strip.stop), group, segments)
            scores = jnp.where(visible, queries @ keys.T, _MASKED)
            largest = scores.max(axis=1, keepdims=True)
            weights = jnp.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            return weights @ values / total, (largest + jnp.log(total))[:, 0]

        if strip.blocks == 1:
            out, lse = block(strip.start)
        else:
            out, lse = jax.lax.map(block, strip.block_starts)
        outs.append(out.reshape(-1, out.shape[-1]))
        lses.append(lse.reshape(-1))
    return jnp.concatenate(outs), jnp.concatenate(lses)


def _backward_pass(scale, query, key, value, segment_ids, out, lse, grad_out):
    batch, seq, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    segments = _segments(segment_ids, group)

    def one_head(i, buffers):
        b, g = i // kv_heads, i % kv_heads
        q, o, do = (_head(x, b, g, group).reshape(seq * group, dim) for x in (query, out, grad_out))
        k, v = (_head(x, b, g)[:, 0] for x in (key, value))
        delta = (o * do).sum(axis=1)
        dq_t, dk, dv = _backward_head(scale * q, k, v, jax.tree.map(lambda ids: ids[b], segments), lse[b, g], delta, do)
        dq = (scale * dq_t.T).reshape(seq, group, dim)
        grads = (dq, dk[:, None], dv[:, None])
        return tuple(_set_head(x, b, g, grad) for x, grad in zip(buffers, grads, strict=True))

    buffers = same_varying(tuple(jnp.zeros_like(x) for x in (query, key, value)), like=query)
    return jax.lax.fori_loop(0, batch * kv_heads, one_head, buffers)


def _backward_head(
    q: Float[Array, "rows dim"],
    k: Float[Array, "seq dim"],
    v: Float[Array, "seq dim"],
    segments: _Segments | None,
    lse: Float[Array, " rows"],
    delta: Float[Array, " rows"],
    do: Float[Array, "rows dim"],
) -> tuple[Float[Array, "dim rows"], Float[Array, "seq dim"], Float[Array, "seq dim"]]:
    """(dq)ᵀ, dk and dv of one key head; delta is the row sum of out * do. Scores here are keys × rows."""
    seq = k.shape[0]
    group = q.shape[0] // seq
    k_t = k.T
    dq_t, dks, dvs = same_varying(jnp.zeros_like(q.T), like=q), [], []
    for strip in _strips(seq, group):
        first = strip.start * group  # earlier rows see none of this strip's keys

        def block(dq_t, start, strip=strip, first=first):
            queries, grads = q[first:], do[first:]
            keys, values = (_rows(x, start, strip.size) for x in (k, v))
            visible = _visible((strip.start, seq - strip.start), (start, strip.size), group, segments).T
            scores = jnp.where(visible, keys @ queries.T - lse[first:], _MASKED)
            weights = jnp.exp(scores)
            dscores = weights * (values @ grads.T - delta[first:])
            keys_t = jax.lax.dynamic_slice_in_dim(k_t, start, strip.size, axis=1)
            return dq_t + keys_t @ dscores, (dscores @ queries, weights @ grads)

        if strip.blocks == 1:
            dq_strip, (dk, dv) = block(dq_t[:, first:], strip.start)
        else:
            dq_strip, (dk, dv) = jax.lax.scan(block, dq_t[:, first:], strip.block_starts)
        dq_t = jax.lax.dynamic_update_slice(dq_t, dq_strip, (0, first))
        dks.append(dk.reshape(-1, dk.shape[-1]))
        dvs.append(dv.reshape(-1, dv.shape[-1]))
    return dq_t, jnp.concatenate(dks), jnp.concatenate(dvs)


def _rows(x: Array, start: Any, size: int, group: int = 1) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start * group, size * group)


def _head(x: Array, batch: Array, head: Array, width: int = 1) -> Float[Array, "seq width dim"]:
    """Heads width * head ... of one batch element, in float32."""
    _, seq, _, dim = x.shape
    piece = jax.lax.dynamic_slice(x, (batch, 0, head * width, 0), (1, seq, width, dim))
    return piece[0].astype(jnp.float32)


def _set_head(x: Array, batch: Array, head: Array, piece: Float[Array, "seq width dim"]) -> Array:
    return jax.lax.dynamic_update_slice(x, piece[None].astype(x.dtype), (batch, 0, head * piece.shape[1], 0))
