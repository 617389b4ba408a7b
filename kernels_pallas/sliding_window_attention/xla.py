"""Sliding-window attention on CPU: one head at a time, each block of rows against the one slice of keys it can see.

Written like `causal_attention.xla`, whose measurements explain the loops and the transposed scores of the gradients.
Keys are padded in front by window - 1 positions, so that the slice of a block always has the same size and its
mask is the same band; what lies before the first position is masked by column.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas._compat import same_varying
from kernels_pallas.flash.heads import add_rows, head_of, rows_of, set_head
from kernels_pallas.flash.reference import segment_starts
from kernels_pallas.flash.rules import MASKED, NOTHING

_NO_SEGMENT = 2**30  # never the id of a row: keys before the first position, and padding


class _Shape(NamedTuple):
    """Static sizes: `blocks` blocks of `size` positions, each against `span` keys."""

    rows: int
    group: int
    window: int
    sinks: int

    @property
    def size(self) -> int:
        # 64 rows (position, query head): a third faster than 128 or 256, which visit more keys out of sight.
        return min(self.rows, max(16, 64 // self.group))

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.size)

    @property
    def span(self) -> int:
        return self.size + self.window - 1

    @property
    def padding(self) -> int:
        """Rows of the last block that do not exist."""
        return self.blocks * self.size - self.rows


class _Places(NamedTuple):
    """Where the rows of a batch element stand; ids and beginnings only for packed sequences."""

    start: Int[Array, "*batch"]
    key_ids: Int[Array, "*batch keys"] | None
    row_ids: Int[Array, "*batch rows"] | None
    begins: Int[Array, "*batch padded"] | None


def _places(
    shape: _Shape, segment_ids: Int[Array, "batch seq"] | None, starts: Int[Array, " batch"] | None, batch: int
) -> _Places:
    start = jnp.zeros(batch, jnp.int32) if starts is None else starts.astype(jnp.int32)
    if segment_ids is None:
        return _Places(start, None, None, None)

    def of_rows(x: Array) -> Array:
        rows = x if starts is None else jax.vmap(lambda x, i: rows_of(x, i, shape.rows))(x, start)
        return jnp.pad(rows, ((0, 0), (0, shape.padding)))

    key_ids = jnp.pad(
        jnp.where(segment_ids == 0, _NO_SEGMENT, segment_ids),
        ((0, 0), (shape.window - 1, shape.padding)),
        constant_values=_NO_SEGMENT,
    )
    # Ids of rows are negated: a sum of zero means equal, and both are added up without a broadcast comparison.
    row_ids = -jnp.repeat(of_rows(segment_ids), shape.group, axis=1)
    begins = of_rows(segment_starts(segment_ids)) if shape.sinks else None
    return _Places(start, key_ids, row_ids, begins)


class _Head(NamedTuple):
    """Keys or values of one head: padded for the slices of the blocks, and as they are for the sinks."""

    padded: Float[Array, "keys dim"]
    plain: Float[Array, "seq dim"]


def _padded(x: Float[Array, "seq dim"], shape: _Shape) -> _Head:
    return _Head(jnp.pad(x, ((shape.window - 1, shape.padding), (0, 0))), x)


def _visible(shape: _Shape, places: _Places, first: Any) -> Bool[Array, "rows span"]:
    """Which keys of its slice a row of the block at row `first` sees, sinks apart."""
    row = jax.lax.broadcasted_iota(jnp.int32, (shape.size, shape.group), 0).reshape(-1)[:, None]
    column = jnp.arange(shape.span)
    visible = (column >= row) & (column < row + shape.window)
    if places.key_ids is None or places.row_ids is None:
        return visible & (column >= shape.window - 1 - first - places.start)
    key_ids = rows_of(places.key_ids, places.start + first, shape.span)
    return visible & (rows_of(places.row_ids, first, shape.size, shape.group)[:, None] + key_ids == 0)


class _Sinks(NamedTuple):
    """Sinks of the rows of a block: the same for all, (sinks, dim), or of each its own, (size, sinks, dim)."""

    visible: Bool[Array, "rows sinks"]
    own: Int[Array, "size sinks"] | None
    number: int
    group: int

    def take(self, x: Float[Array, "seq dim"]) -> Float[Array, "*size sinks dim"]:
        return x[: self.number] if self.own is None else jnp.take(x, self.own, axis=0, mode="clip")

    def products(self, rows: Float[Array, "rows dim"], sinks: Array) -> Float[Array, "rows sinks"]:
        """Of every row with its sinks."""
        if self.own is None:
            return rows @ sinks.T
        return jnp.einsum("tgd,tsd->tgs", self._grouped(rows), sinks).reshape(-1, self.number)

    def sums(self, weights: Float[Array, "rows sinks"], sinks: Array) -> Float[Array, "rows dim"]:
        """The weighted sum of its sinks for every row."""
        if self.own is None:
            return weights @ sinks
        return jnp.einsum("tgs,tsd->tgd", self._grouped(weights), sinks).reshape(-1, sinks.shape[-1])

    def add(
        self, total: Float[Array, "seq dim"], weights: Float[Array, "rows sinks"], rows: Float[Array, "rows dim"]
    ) -> Float[Array, "seq dim"]:
        """`total` plus, at every sink, the weighted sum of the rows that see it."""
        if self.own is None:
            return add_rows(total, 0, jnp.einsum("rs,rd->sd", weights, rows))
        added = jnp.einsum("tgs,tgd->tsd", self._grouped(weights), self._grouped(rows))
        return total.at[self.own].add(added, mode="drop")

    def _grouped(self, x: Array) -> Array:
        return x.reshape(-1, self.group, x.shape[-1])


def _sinks(shape: _Shape, places: _Places, first: Any) -> _Sinks:
    """A sink counts where the window does not reach it."""
    positions = places.start + first + jnp.arange(shape.size)
    begins = None if places.begins is None else rows_of(places.begins, first, shape.size)
    index = jnp.arange(shape.sinks) + (0 if begins is None else begins[:, None])
    visible = jnp.broadcast_to(index <= positions[:, None] - shape.window, (shape.size, shape.sinks))
    visible = jnp.repeat(visible, shape.group, axis=0)
    if places.row_ids is not None:
        visible &= rows_of(places.row_ids, first, shape.size, shape.group)[:, None] != 0
    return _Sinks(visible, None if begins is None else index, shape.sinks, shape.group)


def _sizes(query: Array, key: Array, window: int, sinks: int) -> _Shape:
    return _Shape(query.shape[1], query.shape[2] // key.shape[2], window, sinks)


def forward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    starts: Int[Array, " batch"] | None,
    *,
    scale: float,
    window: int,
    sinks: int,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch heads rows"]]:
    """See `flash.rules`."""
    batch, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    shape = _sizes(query, key, window, sinks)
    places = _places(shape, segment_ids, starts, batch)

    def one_head(i, buffers):
        b, g = i // kv_heads, i % kv_heads
        q = scale * head_of(query, b, g, shape.group).reshape(-1, dim)
        k, v = (_padded(head_of(x, b, g)[:, 0], shape) for x in (key, value))
        out, lse = _forward_head(shape, q, k, v, jax.tree.map(lambda x: x[b], places))
        return (
            set_head(buffers[0], b, g, out.reshape(rows, shape.group, dim)),
            jax.lax.dynamic_update_slice(buffers[1], lse.reshape(rows, -1).T[None], (b, g * shape.group, 0)),
        )

    buffers = same_varying((jnp.zeros_like(query), jnp.zeros((batch, heads, rows), jnp.float32)), like=query)
    return jax.lax.fori_loop(0, batch * kv_heads, one_head, buffers)


def _forward_head(
    shape: _Shape, q: Float[Array, "rows dim"], k: _Head, v: _Head, places: _Places
) -> tuple[Float[Array, "rows dim"], Float[Array, " rows"]]:
    q = jnp.pad(q, ((0, shape.padding * shape.group), (0, 0)))

    def block(first):
        queries = rows_of(q, first, shape.size, shape.group)
        keys, values = (rows_of(x.padded, places.start + first, shape.span) for x in (k, v))
        scores = jnp.where(_visible(shape, places, first), queries @ keys.T, MASKED)
        largest = scores.max(axis=1, keepdims=True)
        if shape.sinks:
            at = _sinks(shape, places, first)
            sink_scores = jnp.where(at.visible, at.products(queries, at.take(k.plain)), MASKED)
            largest = jnp.maximum(largest, sink_scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        out = weights @ values
        if shape.sinks:
            sink_weights = jnp.exp(sink_scores - largest)
            total += sink_weights.sum(axis=1, keepdims=True)
            out += at.sums(sink_weights, at.take(v.plain))
        out, lse = out / total, (largest + jnp.log(total))[:, 0]
        if places.key_ids is None:
            return out, lse
        some = largest > 0.5 * MASKED
        return jnp.where(some, out, 0.0), jnp.where(some[:, 0], lse, NOTHING)

    out, lse = jax.lax.map(block, shape.size * jnp.arange(shape.blocks))
    rows = shape.rows * shape.group
    return out.reshape(-1, q.shape[1])[:rows], lse.reshape(-1)[:rows]


def backward(
    query: Float[Array, "batch rows heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    value: Float[Array, "batch seq kv_heads dim"],
    segment_ids: Int[Array, "batch seq"] | None,
    starts: Int[Array, " batch"] | None,
    out: Float[Array, "batch rows heads dim"],
    lse: Float[Array, "batch heads rows"],
    grad_out: Float[Array, "batch rows heads dim"],
    *,
    scale: float,
    window: int,
    sinks: int,
) -> tuple[Float[Array, "batch rows heads dim"], Float[Array, "batch seq kv_heads dim"], Any]:
    """See `flash.rules`."""
    batch, rows, _, dim = query.shape
    kv_heads = key.shape[2]
    shape = _sizes(query, key, window, sinks)
    places = _places(shape, segment_ids, starts, batch)

    def one_head(i, buffers):
        b, g = i // kv_heads, i % kv_heads
        q, o, do = (head_of(x, b, g, shape.group).reshape(-1, dim) for x in (query, out, grad_out))
        k, v = (_padded(head_of(x, b, g)[:, 0], shape) for x in (key, value))
        lse_rows = jax.lax.dynamic_slice(lse, (b, g * shape.group, 0), (1, shape.group, rows))[0].T.reshape(-1)
        delta = (o * do).sum(axis=1)
        dq, dk, dv = _backward_head(shape, scale * q, k, v, jax.tree.map(lambda x: x[b], places), lse_rows, delta, do)
        grads = (scale * dq.reshape(rows, shape.group, dim), dk[:, None], dv[:, None])
        return tuple(set_head(x, b, g, grad) for x, grad in zip(buffers, grads, strict=True))

    buffers = same_varying(tuple(jnp.zeros_like(x) for x in (query, key, value)), like=query)
    return jax.lax.fori_loop(0, batch * kv_heads, one_head, buffers)


def _backward_head(
    shape: _Shape,
    q: Float[Array, "rows dim"],
    k: _Head,
    v: _Head,
    places: _Places,
    lse: Float[Array, " rows"],
    delta: Float[Array, " rows"],
    do: Float[Array, "rows dim"],
) -> tuple[Float[Array, "rows dim"], Float[Array, "seq dim"], Float[Array, "seq dim"]]:
    """dq, dk and dv of one key head; scores are keys × rows."""
    seq, dim = k.plain.shape
    padding = shape.padding * shape.group
    q, do = (jnp.pad(x, ((0, padding), (0, 0))) for x in (q, do))
    lse, delta = jnp.pad(lse, (0, padding), constant_values=NOTHING), jnp.pad(delta, (0, padding))
    k_t = k.padded.T

    def block(carry, first):
        dk, dv, sink_dk, sink_dv = carry
        start = places.start + first
        queries, grads, lses, deltas = (rows_of(x, first, shape.size, shape.group) for x in (q, do, lse, delta))
        keys, values = (rows_of(x.padded, start, shape.span) for x in (k, v))
        scores = jnp.where(_visible(shape, places, first).T, keys @ queries.T - lses, MASKED)
        weights = jnp.exp(scores)
        dscores = weights * (values @ grads.T - deltas)
        dq_t = jax.lax.dynamic_slice_in_dim(k_t, start, shape.span, axis=1) @ dscores
        dk, dv = add_rows(dk, start, dscores @ queries), add_rows(dv, start, weights @ grads)
        dq = dq_t.T
        if shape.sinks:
            at = _sinks(shape, places, first)
            sink_k, sink_v = at.take(k.plain), at.take(v.plain)
            sink_scores = jnp.where(at.visible, at.products(queries, sink_k) - lses[:, None], MASKED)
            sink_weights = jnp.exp(sink_scores)
            sink_dscores = sink_weights * (at.products(grads, sink_v) - deltas[:, None])
            dq += at.sums(sink_dscores, sink_k)
            sink_dk, sink_dv = at.add(sink_dk, sink_dscores, queries), at.add(sink_dv, sink_weights, grads)
        return (dk, dv, sink_dk, sink_dv), dq

    zeros = jnp.zeros_like(k.padded)
    sink_zeros = jnp.zeros_like(k.plain) if shape.sinks else None
    carry = same_varying((zeros, zeros, sink_zeros, sink_zeros), like=q)
    (dk, dv, sink_dk, sink_dv), dq = jax.lax.scan(block, carry, shape.size * jnp.arange(shape.blocks))
    dk, dv = (x[shape.window - 1 : shape.window - 1 + seq] for x in (dk, dv))
    if shape.sinks:
        dk, dv = dk + sink_dk, dv + sink_dv
    return dq.reshape(-1, dim)[: shape.rows * shape.group], dk, dv
