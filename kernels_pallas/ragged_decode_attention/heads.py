"""Query heads by the kind of the key head they read: static slices, as `partitioned` takes no index arrays."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def split(
    query: Float[Array, "batch rows heads dim"], kinds: tuple[bool, ...], full: bool
) -> Float[Array, "batch kind_heads row_group dim"]:
    """The queries that read key heads of one kind: by key head, then (row, head of the group)."""
    batch, rows, heads, dim = query.shape
    grouped = query.reshape(batch, rows, len(kinds), heads // len(kinds), dim)
    if len(set(kinds)) > 1:
        grouped = jnp.stack([grouped[:, :, g] for g, kind in enumerate(kinds) if kind == full], axis=2)
    return jnp.swapaxes(grouped, 1, 2).reshape(batch, grouped.shape[2], -1, dim)


def join(
    full: Float[Array, "batch full_heads row_group dim"] | None,
    compressed: Float[Array, "batch compressed_heads row_group dim"] | None,
    kinds: tuple[bool, ...],
    rows: int,
) -> Float[Array, "batch rows heads dim"]:
    """What `split` took apart; None for a kind that no head has."""
    if full is None or compressed is None:
        both = jnp.concatenate([x for x in (full, compressed) if x is not None])
    else:
        order = [kinds[:g].count(kind) for g, kind in enumerate(kinds)]
        both = jnp.stack([(full if kind else compressed)[:, i] for i, kind in zip(order, kinds, strict=True)], axis=1)
    batch, heads, _, dim = both.shape
    return jnp.swapaxes(both.reshape(batch, heads, rows, -1, dim), 1, 2).reshape(batch, rows, -1, dim)
