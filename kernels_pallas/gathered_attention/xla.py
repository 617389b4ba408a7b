"""Causal attention of gathered rows on CPU: blocks of rows against the chunks of keys that reach up to their positions.

Written like `causal_attention.xla`, whose measurements explain the loops over heads and the transposed scores of the
backward pass. How many chunks a block visits is known only at run time: positions ascend, so its last one decides.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas._compat import same_varying
from kernels_pallas.flash.heads import add_rows, head_of, rows_of, set_head
from kernels_pallas.flash.rules import MASKED, NOTHING

_NO_SEGMENT = 2**30


class _Shape(NamedTuple):
    """Static sizes: `blocks` blocks of `size` gathered rows, chunks of `chunk` keys."""

    rows: int
    seq: int
    group: int

    @property
    def size(self) -> int:
        return min(self.rows, max(16, (128 if self._long else 64) // self.group))

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.size)

    @property
    def chunk(self) -> int:
        return 2048 if self._long else min(self.seq, 512)

    @property
    def _long(self) -> bool:
        # Measured: products small enough for one thread, or large enough to be shared out; between them is a dip.
        return self.seq >= 4096

    @property
    def padding(self) -> int:
        """Rows of the last block that do not exist."""
        return self.blocks * self.size - self.rows

    @property
    def key_padding(self) -> int:
        return -self.seq % self.chunk


class _Places(NamedTuple):
    """Positions of the rows, and for packed sequences the ids of keys and (negated) of rows."""

    positions: Int[Array, "*batch rows"]
    chunks: Int[Array, "*batch blocks"]
    key_ids: Int[Array, "*batch keys"] | None
    row_ids: Int[Array, "*batch rows"] | None


def _places(shape: _Shape, positions: Int[Array, "batch rows"], segment_ids: Int[Array, "batch seq"] | None) -> _Places:
    positions = jnp.pad(positions.astype(jnp.int32), ((0, 0), (0, shape.padding)), constant_values=shape.seq)
    positions = jnp.where(positions < shape.seq, positions, -1)  # sees no key
    last = positions.reshape(-1, shape.blocks, shape.size).max(axis=2)
    chunks = last // shape.chunk + 1  # of -1 none
    repeated = jnp.repeat(positions, shape.group, axis=1)
    if segment_ids is None:
        return _Places(repeated, chunks, None, None)
    row_ids = jnp.take_along_axis(segment_ids, jnp.maximum(positions, 0), axis=1)
    key_ids = jnp.where(segment_ids == 0, _NO_SEGMENT, segment_ids)
    key_ids = jnp.pad(key_ids, ((0, 0), (0, shape.key_padding)), constant_values=_NO_SEGMENT)
    return _Places(repeated, chunks, key_ids, -jnp.repeat(row_ids, shape.group, axis=1))


class _Block(NamedTuple):
    """What a block of rows knows about their places."""

    positions: Int[Array, " rows"]
    row_ids: Int[Array, " rows"] | None
    key_ids: Int[Array, " keys"] | None

    def visible(self, start: Any, chunk: int) -> Bool[Array, "rows chunk"]:
        keys = start + jnp.arange(chunk)
        visible = self.positions[:, None] >= keys
        if self.row_ids is None or self.key_ids is None:
            return visible
        return visible & (self.row_ids[:, None] + rows_of(self.key_ids, start, chunk) == 0)


def _block(shape: _Shape, places: _Places, first: Any) -> _Block:
    positions, row_ids = places.positions, places.row_ids
    if row_ids is not None:
        row_ids = rows_of(row_ids, first, shape.size, shape.group)
    return _Block(rows_of(positions, first, shape.size, shape.group), row_ids, places.key_ids)


def forward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    positions: Int[Array, "batch rows"],
    segment_ids: Int[Array, "batch seq"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """See `flash.rules`."""
    batch, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    shape = _Shape(rows, key.shape[1], heads // kv_heads)
    places = _places(shape, positions, segment_ids)

    def one_head(i, buffers):
        b, g = i // kv_heads, i % kv_heads
        q = scale * head_of(query, b, g, shape.group).reshape(-1, dim)
        k, v = (jnp.pad(head_of(x, b, g)[:, 0], ((0, shape.key_padding), (0, 0))) for x in (key, value))
        out, lse = _forward_head(shape, q, k, v, jax.tree.map(lambda x: x[b], places))
        return (
            set_head(buffers[0], b, g, out.reshape(rows, shape.group, dim)),
            jax.lax.dynamic_update_slice(buffers[1], lse.reshape(rows, -1).T[None], (b, g * shape.group, 0)),
        )

    buffers = same_varying((jnp.zeros_like(query), jnp.zeros((batch, heads, rows), jnp.float32)), like=query)
    return jax.lax.fori_loop(0, batch * kv_heads, one_head, buffers)


def _forward_head(
    shape: _Shape,
    q: Float[Array, "rows dim"],
    k: Float[Array, "keys dim"],
    v: Float[Array, "keys dim"],
    places: _Places,
) -> tuple[Float[Array, "rows dim"], Float[Array, " rows"]]:
    q = jnp.pad(q, ((0, shape.padding * shape.group), (0, 0)))

    def block(i):
        first = i * shape.size
        queries = rows_of(q, first, shape.size, shape.group)
        of_block = _block(shape, places, first)

        def visit(c, carry):
            largest, total, out = carry
            start = c * shape.chunk
            keys, values = rows_of(k, start, shape.chunk), rows_of(v, start, shape.chunk)
            scores = jnp.where(of_block.visible(start, shape.chunk), queries @ keys.T, MASKED)
            new_largest = jnp.maximum(largest, scores.max(axis=1))
            weights = jnp.exp(scores - new_largest[:, None])
            shrink = jnp.exp(largest - new_largest)
            total = total * shrink + weights.sum(axis=1)
            return new_largest, total, out * shrink[:, None] + weights @ values

        rows = queries.shape[0]
        carry = same_varying(
            (jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros_like(queries)), like=q
        )
        largest, total, out = jax.lax.fori_loop(0, places.chunks[i], visit, carry)
        some = largest > 0.5 * MASKED  # else the sums are those of masked scores
        total = jnp.where(some, total, 1.0)
        return jnp.where(some[:, None], out / total[:, None], 0.0), jnp.where(some, largest + jnp.log(total), NOTHING)

    out, lse = jax.lax.map(block, jnp.arange(shape.blocks))
    rows = shape.rows * shape.group
    return out.reshape(-1, q.shape[1])[:rows], lse.reshape(-1)[:rows]


def backward(
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
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`."""
    batch, rows, heads, dim = query.shape
    kv_heads, seq = key.shape[2], key.shape[1]
    shape = _Shape(rows, seq, heads // kv_heads)
    places = _places(shape, positions, segment_ids)

    def one_head(i, buffers):
        b, g = i // kv_heads, i % kv_heads
        q, o, do = (head_of(x, b, g, shape.group).reshape(-1, dim) for x in (query, out, grad_out))
        k, v = (jnp.pad(head_of(x, b, g)[:, 0], ((0, shape.key_padding), (0, 0))) for x in (key, value))
        lse_rows = jax.lax.dynamic_slice(lse, (b, g * shape.group, 0), (1, shape.group, rows))[0].T.reshape(-1)
        delta = (o * do).sum(axis=1)
        dq, dk, dv = _backward_head(shape, scale * q, k, v, jax.tree.map(lambda x: x[b], places), lse_rows, delta, do)
        grads = (scale * dq.reshape(rows, shape.group, dim), dk[:seq, None], dv[:seq, None])
        return tuple(set_head(x, b, g, grad) for x, grad in zip(buffers, grads, strict=True))

    buffers = same_varying(tuple(jnp.zeros_like(x) for x in (query, key, value)), like=query)
    return jax.lax.fori_loop(0, batch * kv_heads, one_head, buffers)


def _backward_head(
    shape: _Shape,
    q: Float[Array, "rows dim"],
    k: Float[Array, "keys dim"],
    v: Float[Array, "keys dim"],
    places: _Places,
    lse: Float[Array, " rows"],
    delta: Float[Array, " rows"],
    do: Float[Array, "rows dim"],
) -> tuple[Float[Array, "rows dim"], Float[Array, "keys dim"], Float[Array, "keys dim"]]:
    """dq, dk and dv of one key head; scores are keys × rows."""
    padding = shape.padding * shape.group
    q, do = (jnp.pad(x, ((0, padding), (0, 0))) for x in (q, do))
    lse, delta = jnp.pad(lse, (0, padding), constant_values=NOTHING), jnp.pad(delta, (0, padding))
    k_t = k.T

    def block(carry, i):
        first = i * shape.size
        queries, grads, lses, deltas = (rows_of(x, first, shape.size, shape.group) for x in (q, do, lse, delta))
        of_block = _block(shape, places, first)

        def visit(c, carry):
            dq_t, dk, dv = carry
            start = c * shape.chunk
            keys, values = rows_of(k, start, shape.chunk), rows_of(v, start, shape.chunk)
            scores = jnp.where(of_block.visible(start, shape.chunk).T, keys @ queries.T - lses, MASKED)
            weights = jnp.exp(scores)
            dscores = weights * (values @ grads.T - deltas)
            dq_t += jax.lax.dynamic_slice_in_dim(k_t, start, shape.chunk, axis=1) @ dscores
            return dq_t, add_rows(dk, start, dscores @ queries), add_rows(dv, start, weights @ grads)

        dq_t = same_varying(jnp.zeros_like(queries.T), like=q)
        dq_t, *carry = jax.lax.fori_loop(0, places.chunks[i], visit, (dq_t, *carry))
        return tuple(carry), dq_t.T

    carry = same_varying((jnp.zeros_like(k), jnp.zeros_like(v)), like=q)
    (dk, dv), dq = jax.lax.scan(block, carry, jnp.arange(shape.blocks))
    return dq.reshape(-1, q.shape[1])[: shape.rows * shape.group], dk, dv
