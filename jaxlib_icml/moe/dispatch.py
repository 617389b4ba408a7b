"""Three exchangeable ways to run the selected experts on their tokens.

All of them compute y_t = sum_k w[t, k] * E_{i[t, k]}(x_t) for given expert indices i and weights w:

- `dense_experts`: every expert on every token, unselected outputs masked. The reference.
- `blocked_experts`: dropless; assignments are grouped by expert and each group is cut into blocks, one matmul
  per block. The number of blocks is decided at run time, so experts without tokens and padding tokens cost
  nothing.
- `ragged_experts`: `jax.lax.ragged_dot` over the grouped assignments, for GPUs and TPUs.

An index equal to `num_experts` marks a choice that is not computed (padding tokens).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlib_icml.nn import activate

__all__ = ["ExpertKernels", "blocked_experts", "dense_experts", "ragged_experts"]


class ExpertKernels(NamedTuple):
    """Weights of all experts.

    Attributes:
      inputs: `(up,)` for GELU experts, `(gate, up)` for SwiGLU experts, each (experts, width, hidden).
      down: (experts, hidden, width).
    """

    inputs: tuple[Float[Array, "experts width hidden"], ...]
    down: Float[Array, "experts hidden width"]


class _Groups(NamedTuple):
    """Assignments grouped by expert, tokens in increasing order inside a group."""

    counts: Int[Array, " experts"]  # assignments per expert
    starts: Int[Array, " experts"]  # first place of each expert's group
    place: Int[Array, "tokens active"]  # where assignment (t, k) went
    source: Int[Array, " assignments"]  # the inverse: flat t * active + k at each place


def _group(indices: Int[Array, "tokens active"], num_experts: int) -> _Groups:
    # A counting sort: at these sizes the running count per expert is several times cheaper than a sort.
    bins = jnp.arange(num_experts + 1, dtype=indices.dtype)  # the last bin collects the choices not computed
    chosen = jnp.any(indices[:, :, None] == bins, axis=1).astype(jnp.int32)
    running = jnp.cumsum(chosen, axis=0)
    # A padding token puts all its choices, not one, into the last bin; that bin is never read.
    counts = running[-1]
    starts = jnp.cumsum(counts) - counts
    place = jnp.take_along_axis(running - chosen + starts, indices, axis=1)
    place = jnp.where(indices == num_experts, indices.size, place)
    flat = jnp.arange(indices.size, dtype=jnp.int32)
    source = jnp.zeros(indices.size, jnp.int32).at[place.reshape(-1)].set(flat, mode="drop")
    return _Groups(counts[:-1], starts[:-1], place, source)


def _accumulator(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _dot(a: Array, b: Array, dtype: Any) -> Array:
    """a @ b summed in (at least) float32, then rounded once: in bfloat16 also the fast way on CPUs."""
    return jnp.dot(a, b, preferred_element_type=_accumulator(a.dtype)).astype(dtype)


def _take(stacked: Array, index: Array, dtype: Any) -> Array:
    return lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False).astype(dtype)


def dense_experts(
    x: Float[Array, "tokens width"],
    kernels: ExpertKernels,
    weights: Float[Array, "tokens active"],
    indices: Int[Array, "tokens active"],
) -> Float[Array, "tokens width"]:
    """Run every expert on every token and mask: slow, simple, differentiable any number of times.

    Args:
      x: tokens, in the compute dtype.
      kernels: weights of all experts, cast to the dtype of `x` for use.
      weights: combination weight of each choice.
      indices: chosen experts, distinct for a token; `num_experts` marks a choice that is not computed.

    Returns:
      The weighted sum of the chosen experts' outputs, accumulated in (at least) float32.
    """
    accumulator = _accumulator(x.dtype)

    def add_expert(y: Array, expert: tuple[Array, ExpertKernels]) -> tuple[Array, None]:
        index, kernel = expert
        hidden = activate(tuple(_dot(x, matrix.astype(x.dtype), x.dtype) for matrix in kernel.inputs))
        output = _dot(hidden, kernel.down.astype(x.dtype), accumulator)
        weight = jnp.sum(jnp.where(indices == index, weights, 0), axis=1)
        return y + weight[:, None] * output, None

    experts = jnp.arange(kernels.down.shape[0], dtype=indices.dtype)
    return lax.scan(add_expert, jnp.zeros(x.shape, accumulator), (experts, kernels))[0]


def ragged_experts(
    x: Float[Array, "tokens width"],
    kernels: ExpertKernels,
    weights: Float[Array, "tokens active"],
    indices: Int[Array, "tokens active"],
) -> Float[Array, "tokens width"]:
    """Run the chosen experts with `jax.lax.ragged_dot`; arguments and result as in `dense_experts`."""
    accumulator = _accumulator(x.dtype)
    groups = _group(indices, kernels.down.shape[0])
    computed = (jnp.arange(indices.size) < jnp.sum(groups.counts))[:, None]

    def grouped_dot(rows: Array, matrix: Array) -> Array:
        product = lax.ragged_dot(rows, matrix.astype(x.dtype), groups.counts)
        return jnp.where(computed, product, 0)  # rows past the last group are unspecified

    rows = x[groups.source // indices.shape[1]]
    hidden = activate(tuple(grouped_dot(rows, matrix) for matrix in kernels.inputs))
    outputs = grouped_dot(hidden, kernels.down)
    chosen = outputs.at[groups.place].get(mode="fill", fill_value=0)
    return jnp.einsum("tk,tkd->td", weights, chosen.astype(accumulator))


def blocked_experts(
    x: Float[Array, "tokens width"],
    kernels: ExpertKernels,
    weights: Float[Array, "tokens active"],
    indices: Int[Array, "tokens active"],
    *,
    block_size: int = 128,
) -> Float[Array, "tokens width"]:
    """Run the chosen experts block by block; arguments and result as in `dense_experts`.

    At most ceil(tokens * active / block_size) + experts blocks run. A block holds min(block_size, tokens)
    rows: an expert is chosen at most once by a token, so decoding a few tokens is not padded to full blocks.
    Reverse-mode differentiable once; use `dense_experts` for forward-mode or second derivatives.
    """
    return _blocked(min(block_size, x.shape[0]), x, kernels, weights, indices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(block: int, x: Array, kernels: ExpertKernels, weights: Array, indices: Array) -> Array:
    return _blocked_forward(block, x, kernels, weights, indices, keep=False)[0]


def _over_blocks(block: int, groups: _Groups, start_expert: Any, run_block: Any, end_expert: Any, carry: Any) -> Any:
    """Visit the experts that have tokens in index order, and for each its blocks.

    `start_expert(e)` gives (context, partial); `run_block(context, at, count, carry, partial)` handles the
    places at..at + count of the grouped assignments and returns (carry, partial); `end_expert(e, carry,
    partial)` stores what was summed for this expert. Slicing an expert's weights once per expert instead of
    once per block, and summing its gradient in a loop carry of one expert's size, is what keeps this fast and
    small.
    """
    busy = jnp.argsort(groups.counts == 0, stable=True)

    def visit(i: Array, carry: Any) -> Any:
        expert = busy[i]
        context, partial = start_expert(expert)
        count, start = groups.counts[expert], groups.starts[expert]

        def step(j: Array, state: Any) -> Any:
            return run_block(context, start + j * block, count - j * block, *state)

        carry, partial = lax.fori_loop(0, (count + block - 1) // block, step, (carry, partial))
        return end_expert(expert, carry, partial)

    return lax.fori_loop(0, jnp.sum(groups.counts > 0), visit, carry)


def _block_rows(block: int, at: Array, count: Array, source: Array, tokens: int, active: int) -> tuple[Array, Array]:
    """Tokens and flat assignments of one block; rows past `count` get indices out of range."""
    valid = jnp.arange(block) < count
    flat = lax.dynamic_slice(source, (at,), (block,))
    return jnp.where(valid, flat // active, tokens), jnp.where(valid, flat, tokens * active)


def _blocked_forward(
    block: int, x: Array, kernels: ExpertKernels, weights: Array, indices: Array, *, keep: bool
) -> tuple[Array, tuple[Array, ...], _Groups]:
    tokens, active = indices.shape
    experts, _, hidden_size = kernels.inputs[0].shape
    accumulator = _accumulator(x.dtype)
    groups = _group(indices, experts)
    source = jnp.pad(groups.source, (0, block))  # a block may reach past the last place
    flat_weights = weights.reshape(-1)

    def start_expert(expert: Array) -> Any:
        inputs = tuple(_take(matrix, expert, x.dtype) for matrix in kernels.inputs)
        return (inputs, _take(kernels.down, expert, x.dtype)), ()

    def run_block(context: Any, at: Array, count: Array, carry: Any, partial: Any) -> Any:
        (inputs, down), (y, kept) = context, carry
        token, flat = _block_rows(block, at, count, source, tokens, active)
        rows = x.at[token].get(mode="fill", fill_value=0)
        pre = tuple(_dot(rows, matrix, x.dtype) for matrix in inputs)
        output = _dot(activate(pre), down, accumulator)
        weight = flat_weights.at[flat].get(mode="fill", fill_value=0)
        y = y.at[token].add(weight[:, None] * output, mode="drop")
        if keep:  # rows past the group's end are rewritten by the next expert, which starts there
            kept = tuple(lax.dynamic_update_slice(buffer, p, (at, 0)) for buffer, p in zip(kept, pre, strict=True))
        return (y, kept), partial

    rows_kept = tokens * active + block if keep else 0
    kept = tuple(jnp.zeros((rows_kept, hidden_size), x.dtype) for _ in kernels.inputs)
    carry = (jnp.zeros(x.shape, accumulator), kept)
    y, kept = _over_blocks(block, groups, start_expert, run_block, lambda _, carry, __: carry, carry)
    return y, kept, groups


def _blocked_save(block: int, x: Array, kernels: ExpertKernels, weights: Array, indices: Array) -> tuple[Array, Any]:
    y, kept, groups = _blocked_forward(block, x, kernels, weights, indices, keep=True)
    return y, (x, kernels, weights, kept, groups)


def _blocked_backward(block: int, saved: Any, dy: Array) -> tuple[Array, ExpertKernels, Array, None]:
    x, kernels, weights, kept, groups = saved
    tokens, active = weights.shape
    accumulator = _accumulator(x.dtype)
    source = jnp.pad(groups.source, (0, block))
    flat_weights = weights.reshape(-1)

    def start_expert(expert: Array) -> Any:
        kernel = jax.tree.map(lambda matrix: _take(matrix, expert, x.dtype), kernels)
        return kernel, jax.tree.map(lambda matrix: jnp.zeros(matrix.shape, accumulator), kernel)

    def run_block(kernel: ExpertKernels, at: Array, count: Array, carry: Any, partial: ExpertKernels) -> Any:
        dx, dkernels, dweights = carry
        token, flat = _block_rows(block, at, count, source, tokens, active)
        rows = x.at[token].get(mode="fill", fill_value=0)
        dout = dy.at[token].get(mode="fill", fill_value=0).astype(x.dtype)
        weight = flat_weights.at[flat].get(mode="fill", fill_value=0).astype(x.dtype)[:, None]
        pre = tuple(lax.dynamic_slice(buffer, (at, 0), (block, buffer.shape[1])) for buffer in kept)
        hidden, activate_vjp = jax.vjp(activate, pre)

        dhidden = _dot(dout, kernel.down.T, x.dtype)
        # d w = <dy, E(x)> = <W_down dy, hidden>: the expert's output need not be kept.
        dweight = jnp.sum((hidden * dhidden).astype(accumulator), axis=1)
        (dpre,) = activate_vjp(weight * dhidden)
        drows = sum(_dot(dp, matrix.T, accumulator) for dp, matrix in zip(dpre, kernel.inputs, strict=True))
        partial = ExpertKernels(
            tuple(t + _dot(rows.T, dp, accumulator) for t, dp in zip(partial.inputs, dpre, strict=True)),
            partial.down + _dot(hidden.T, weight * dout, accumulator),
        )
        dx = dx.at[token].add(drows, mode="drop")
        dweights = dweights.at[flat].set(dweight.astype(dweights.dtype), mode="drop")
        return (dx, dkernels, dweights), partial

    def end_expert(expert: Array, carry: Any, partial: ExpertKernels) -> Any:
        dx, dkernels, dweights = carry

        def store(total: Array, one: Array) -> Array:
            return lax.dynamic_update_index_in_dim(total, one.astype(total.dtype), expert, 0)

        return dx, jax.tree.map(store, dkernels, partial), dweights

    carry = (
        jnp.zeros(x.shape, accumulator),
        jax.tree.map(jnp.zeros_like, kernels),
        jnp.zeros_like(flat_weights),
    )
    dx, dkernels, dweights = _over_blocks(block, groups, start_expert, run_block, end_expert, carry)
    return dx.astype(x.dtype), dkernels, dweights.reshape(weights.shape), None


_blocked.defvjp(_blocked_save, _blocked_backward)
