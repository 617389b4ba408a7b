"""The engine behind OLion and Muon: momentum, then a function of every matrix, wherever the matrix lies."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from jaxlib_icml.nn import tree_leaves
from jaxlib_icml.optim.distribution import (
    Matrices,
    MatrixLayout,
    map_matrices,
    map_whole_matrices,
    matrix_layout,
    resolve_shardings,
    take_matrix,
)
from jaxlib_icml.optim.matrix_specs import from_matrices, resolve_matrix_specs, to_matrices

Scalar = ArrayLike | Callable[..., Any]
"""A number, a scalar array (possibly traced), or a schedule from the step count to one."""


def at(value: Any, count: Array, dtype: DTypeLike | None = None) -> Any:
    """A scalar at a step: schedules are called, arrays cast, Python numbers kept in double precision."""
    value = value(count) if callable(value) else value
    return value.astype(dtype) if dtype is not None and hasattr(value, "astype") else value


def wide_dtype(dtype: DTypeLike) -> Any:
    """float32, or `dtype` if wider."""
    return jnp.promote_types(dtype, jnp.float32)


class MatrixRule(NamedTuple):
    """An update that treats matrices one by one, in three parts; every part also gets the step count.

    Attributes:
        mix: entrywise, from gradient and momentum to the new momentum and the matrix to project.
        project: of whole matrices, to a tree of small arrays (see `map_matrices`): what has to travel.
        finish: entrywise, from these to the update.
    """

    mix: Callable[[Array, Array, Array], tuple[Array, Array]]
    project: Callable[[Array, Array], Any]
    finish: Callable[[Any, Array], Array]


def scale_by_matrix_rule(
    rule: MatrixRule, mu_dtype: DTypeLike | None, matrix_specs: Any, param_shardings: Any, make_state: type
) -> optax.GradientTransformation:
    """Momentum, then a function of each matrix.

    Args:
        rule: the update.
        mu_dtype: of the stored momentum; None: float32, or the parameter's dtype if wider.
        matrix_specs: as in `resolve_matrix_specs`; leaves without a spec pass unchanged.
        param_shardings: as in `resolve_shardings`.
        make_state: from (count, mu) to the state.

    Returns:
        The transformation.
    """

    def init(params: Any) -> Any:
        specs = resolve_matrix_specs(matrix_specs, params)
        resolve_shardings(param_shardings, params)
        mu = [
            optax.MaskedNode()
            if specs[leaf.parts] is None
            else jnp.zeros_like(leaf.value, dtype=wide_dtype(leaf.value.dtype) if mu_dtype is None else mu_dtype)
            for leaf in tree_leaves(params)
        ]
        return make_state(jnp.zeros([], jnp.int32), jax.tree.unflatten(jax.tree.structure(params), mu))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        treedef: Any = jax.tree.structure(updates)
        specs = resolve_matrix_specs(matrix_specs, updates if params is None else params)
        shardings = resolve_shardings(param_shardings, updates if params is None else params)
        leaves = list(tree_leaves(updates))
        targets = [leaf.value for leaf in leaves] if params is None else treedef.flatten_up_to(params)
        moments = treedef.flatten_up_to(state.mu)
        directions = [leaf.value for leaf in leaves]

        def mix(g: Array, mu: Array) -> tuple[Array, Array]:
            wide = wide_dtype(mu.dtype)
            return rule.mix(g.astype(wide), mu.astype(wide), state.count)

        def mixed(g: Array, mu: Array, index: Array | None) -> Array:
            return mix(take_matrix(g, index), take_matrix(mu, index))[1]

        whole: list[Matrices] = []
        cut: list[tuple[Array, MatrixLayout]] = []
        where: dict[int, list[tuple[list[Any], int]]] = {}  # leaf -> (list that will hold its results, position)
        done_whole: list[Any] = []
        done_cut: list[Any] = []
        for i, leaf in enumerate(leaves):
            if (spec := specs[leaf.parts]) is None:
                continue
            g, mu, places = leaf.value, moments[i], []
            for block_g, block_mu in zip(to_matrices(g, spec), to_matrices(mu, spec), strict=True):
                layout = matrix_layout(shardings[leaf.parts], g.shape, spec, block_g.shape)
                if layout is None:
                    places.append((done_whole, len(whole)))
                    flat = (x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in (block_g, block_mu))
                    whole.append(Matrices(block_g.shape, wide_dtype(mu.dtype), partial(mixed, *flat)))
                else:
                    places.append((done_cut, len(cut)))
                    cut.append((mix(block_g, block_mu)[1], layout))
            where[i] = places

        def project(matrix: Array) -> Any:
            return rule.project(matrix, state.count)

        done_whole += map_whole_matrices(project, whole)
        done_cut += map_matrices(project, [x for x, _ in cut], [layout for _, layout in cut])
        for i, places in where.items():
            spec = specs[leaves[i].parts]
            assert spec is not None
            finished = [rule.finish(done[position], state.count) for done, position in places]
            directions[i] = from_matrices(finished, directions[i].shape, spec).astype(targets[i].dtype)
            moments[i] = mix(leaves[i].value, moments[i])[0].astype(moments[i].dtype)
        count = optax.safe_increment(state.count)
        return treedef.unflatten(directions), make_state(count, treedef.unflatten(moments))

    return optax.GradientTransformation(init, update)
