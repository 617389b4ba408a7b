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

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas._compat import same_varying
from kernels_pallas.flash.heads import head_of, rows_of, set_head
from kernels_pallas.flash.rules import MASKED

_STRIPS = 8  # unrolled groups of blocks: bounds the size of the program when the sequence is long


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
        row_ids, key_ids = rows_of(segments.rows, *queries, group), rows_of(segments.keys, *keys)
        visible = visible & (row_ids[:, None] + key_ids == 0)
    return visible


def forward(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch heads seq"]]:
    """Blockwise attention; see `flash.rules`."""
    batch, seq, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    segments = _segments(segment_ids, group)

    def one_head(i, buffers):
        b, g = i // kv_heads, i % kv_heads
        q = scale * head_of(query, b, g, group).reshape(seq * group, dim)
        k, v = (head_of(x, b, g)[:, 0] for x in (key, value))
        out, lse = _forward_head(q, k, v, jax.tree.map(lambda ids: ids[b], segments))
        return (
            set_head(buffers[0], b, g, out.reshape(seq, group, dim)),
            jax.lax.dynamic_update_slice(buffers[1], lse.reshape(seq, group).T[None], (b, g * group, 0)),
        )

    buffers = same_varying((jnp.zeros_like(query), jnp.zeros((batch, heads, seq), jnp.float32)), like=query)
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
            queries = rows_of(q, start, strip.size, group)
            visible = _visible((start, strip.size), (0, strip.stop), group, segments)
            scores = jnp.where(visible, queries @ keys.T, MASKED)
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


def backward(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    out: Float[Array, "batch seq heads dim"],
    lse: Float[Array, "batch heads seq"],
    grad_out: Float[Array, "batch seq heads dim"],
    *,
    scale: float,
) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """Gradients of query, key and value; see `flash.rules`."""
    batch, seq, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    segments = _segments(segment_ids, group)

    def one_head(i, buffers):
        b, g = i // kv_heads, i % kv_heads
        q, o, do = (head_of(x, b, g, group).reshape(seq * group, dim) for x in (query, out, grad_out))
        k, v = (head_of(x, b, g)[:, 0] for x in (key, value))
        delta = (o * do).sum(axis=1)
        lse_rows = jax.lax.dynamic_slice(lse, (b, g * group, 0), (1, group, seq))[0].T.reshape(-1)
        dq_t, dk, dv = _backward_head(scale * q, k, v, jax.tree.map(lambda ids: ids[b], segments), lse_rows, delta, do)
        dq = (scale * dq_t.T).reshape(seq, group, dim)
        grads = (dq, dk[:, None], dv[:, None])
        return tuple(set_head(x, b, g, grad) for x, grad in zip(buffers, grads, strict=True))

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
            keys, values = (rows_of(x, start, strip.size) for x in (k, v))
            visible = _visible((strip.start, seq - strip.start), (start, strip.size), group, segments).T
            scores = jnp.where(visible, keys @ queries.T - lse[first:], MASKED)
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
