"""Orthogonal growth: a trained mixture of experts made deeper and wider, to go on training.

Depth grows by copying every layer in place ("interposition"), width by copying every expert with a little noise while
twice as many are active. After "Beyond Sunk Costs: Boosting LLM Pre-training Efficiency via Orthogonal Growth of
Mixture-of-Experts" (arXiv:2510.08008).

Parameters are nested mappings (`nnx.State` or `dict`) with a node "layers": either one child per layer under the keys
0, 1, ..., or parameters whose first axis is the layer.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

__all__ = [
    "EXPERT_AXES",
    "Growth",
    "apply_growth",
    "clone_divergence",
    "grow_depth",
    "grow_opt_state",
    "grow_width",
    "layer_sources",
    "perturb_clones",
]

_Tree = TypeVar("_Tree")
_Path = tuple[Any, ...]
_METHODS = ("interpose", "stack", "interpose_zero")
_POLICIES = ("reset", "copy", "scale")
_OUTPUTS = (("attention", "out"), ("experts", "down"), ("shared", "down"), ("mlp", "down"))
"""Projections into the residual stream."""

EXPERT_AXES: Mapping[tuple[str, ...], int] = {
    ("router", "kernel"): -1,
    ("experts", "gate", "kernel"): -3,
    ("experts", "up", "kernel"): -3,
    ("experts", "down", "kernel"): -3,
    ("expert_bias",): -1,
}
"""Where the axis of experts is, by the end of a parameter's path."""


class Growth(NamedTuple):
    """What a growth did.

    Attributes:
      sources: The old layer that every new layer is a copy of; empty: layers stay as they are.
      expert_factor: How many experts stand where one was.
    """

    sources: tuple[int, ...]
    expert_factor: int = 1


def layer_sources(num_layers: int, factor: int | Sequence[int] = 2, method: str = "interpose") -> tuple[int, ...]:
    """The old layer that every layer of a deeper model is a copy of.

    Args:
      num_layers: L, layers of the old model.
      factor: Copies of a layer, itself included; one number, or one for every layer.
      method: "interpose" and "interpose_zero": copies follow their layer. "stack": the whole sequence again.

    Returns:
      Indices of old layers.

    Raises:
      ValueError: A factor that is not a positive integer, or several for "stack"; an unknown method.

    >>> layer_sources(3), layer_sources(3, method="stack"), layer_sources(3, (1, 1, 2))
    ((0, 0, 1, 1, 2, 2), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2))
    """
    if method not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
    several = not isinstance(factor, int)
    factors = tuple(factor) if isinstance(factor, Sequence) else (factor,) * num_layers
    if len(factors) != num_layers:
        raise ValueError(f"factor must be one number or one for each of {num_layers} layers, got {len(factors)}")
    for one in factors:
        _check_factor("factor", one)
    if method == "stack":
        if several:
            raise ValueError("factor must be one number for method 'stack'")
        return tuple(range(num_layers)) * factors[0]
    return tuple(layer for layer, copies in enumerate(factors) for _ in range(copies))


def grow_depth(params: _Tree, factor: int | Sequence[int] = 2, method: str = "interpose") -> _Tree:
    """Copies of layers, exact: attention, norms, router, experts and selection biases. Everything else stays.

    Args:
      params: Parameters with a node "layers" (see the module).
      factor: Copies of a layer, itself included; one number, or one for every layer.
      method: "interpose" (l1, l1, l2, l2, ...), "stack" (l1, l2, ..., l1, l2, ...), or "interpose_zero": interposition
        with output projections of 0 in the copies, which leaves the function as it is.

    Returns:
      New parameters, of the same types; no two share an array.

    Raises:
      ValueError: No node "layers", or what `layer_sources` refuses.

    >>> grow_depth({"layers": {"norm": {"scale": jnp.array([1.0, 2.0])}}})["layers"]["norm"]["scale"]
    Array([1., 1., 2., 2.], dtype=float32)
    """
    growth = Growth(layer_sources(num_layers(params), factor, method))
    return apply_growth(params, growth, silent=method == "interpose_zero")


def grow_width(
    params: _Tree,
    key: Array,
    factor: int = 2,
    *,
    noise: float = 0.01,
    gate: str = "softmax_renorm",
    spec: Mapping[tuple[str, ...], int] = EXPERT_AXES,
) -> _Tree:
    """`factor` times as many experts: the old ones untouched, and noisy copies behind them.

    With `factor` times as many active experts and no noise the function stays the same for softmax gates and for
    sigmoid gates averaged over the active experts: copies are chosen together and share the weight.

    Args:
      params: Parameters with experts, of any number of layers.
      key: A random key.
      factor: How many experts stand where one was.
      noise: α; a copy gets normal noise with α times the standard deviation of what is copied, a matrix of one expert
        or a router's column. Without any, copies have equal gradients for ever.
      gate: The gate of the layers. Softmax gates choose by probability plus selection bias: the biases are divided by
        `factor`, as the probabilities are.
      spec: Where the axis of experts is, by the end of a parameter's path.

    Returns:
      New parameters, of the same types.

    Raises:
      ValueError: A factor that is not a positive integer, negative or infinite noise, no experts, or the cosine gate,
        whose experts have weight 1 each.
    """
    _check_factor("factor", factor)
    if not any(_expert_axis(path, spec) is not None for path, _ in _leaves(params)):
        raise ValueError("params: no experts")
    return apply_growth(params, Growth((), factor), key, noise=noise, gate=gate, spec=spec)


def apply_growth(
    params: _Tree,
    growth: Growth,
    key: Array | None = None,
    *,
    noise: float = 0.01,
    gate: str = "softmax_renorm",
    silent: bool = False,
    spec: Mapping[tuple[str, ...], int] = EXPERT_AXES,
) -> _Tree:
    """Depth and width at once, one parameter after the other: besides old and new ones hardly any memory is needed.

    Args:
      params: Parameters.
      growth: What becomes of layers and experts.
      key: A random key; needed for noise only.
      noise: As for `grow_width`.
      gate: As for `grow_width`.
      silent: Whether copies that follow their layer get output projections of 0.
      spec: Where the axis of experts is.

    Returns:
      New parameters, of the same types; no two share an array.

    Raises:
      ValueError: As for `grow_width`; noise without a key.
    """
    sources, factor = growth
    _check_factor("expert_factor", factor)
    _check_noise(noise)
    if factor > 1 and gate == "cosine":
        raise ValueError("gate: twice as many experts of the cosine gate, with weight 1 each, double the output")
    if factor > 1 and noise > 0 and key is None:
        raise ValueError("key must be given for noise above 0")
    copies = tuple(i for i in range(1, len(sources)) if sources[i] == sources[i - 1]) if silent else ()

    def grown(path: _Path, x: Array) -> Array:
        axis = _expert_axis(path, spec)
        if axis is None or factor == 1:
            new = jnp.copy(x)
        elif path[-1] == "expert_bias":
            # Duplication halves probabilities, but not what is added to them.
            new = jnp.concatenate([x if gate == "sigmoid" else x / factor] * factor, axis=axis)
        elif key is None or noise == 0:
            new = jnp.concatenate([x] * factor, axis=axis)
        else:
            new = _perturbed(path, x, key, factor, noise, spec, copied=False)
        if not copies or not any(_contains(path, names) for names in _OUTPUTS):
            return new
        layer = _layer_of(path)
        if layer is None:
            return new.at[jnp.array(copies, jnp.int32)].set(0)
        return jnp.zeros_like(new) if layer in copies else new

    return _rebuilt(params, sources or None, grown)


def perturb_clones(
    params: _Tree,
    key: Array,
    factor: int,
    noise: float = 0.01,
    spec: Mapping[tuple[str, ...], int] = EXPERT_AXES,
) -> _Tree:
    """Noise for all experts but the first 1 / `factor` of them, as `grow_width` describes it; biases stay.

    The noise of a matrix depends on `key`, its layer, its expert and its name only: a model with stacked layers gets
    the same up to rounding. So copies of one layer get different noise.

    Args:
      params: Parameters whose experts have been copied.
      key: A random key.
      factor: Copies of an expert, itself included.
      noise: α.
      spec: Where the axis of experts is.

    Returns:
      New parameters, of the same types.

    Raises:
      ValueError: A factor that is not a positive integer or does not divide the experts, negative or infinite noise.
    """
    _check_factor("factor", factor)
    _check_noise(noise)
    return _map_leaves(lambda path, x: _perturbed(path, x, key, factor, noise, spec), params)


def _perturbed(
    path: _Path,
    x: Array,
    key: Array,
    factor: int,
    noise: float,
    spec: Mapping[tuple[str, ...], int],
    *,
    copied: bool = True,
) -> Array:
    """`x` with noisy copies of its experts: in the place of those that it has, or behind it."""
    axis = _expert_axis(path, spec)
    if axis is None or path[-1] == "expert_bias" or noise == 0 or factor == 1:
        return x
    if copied and x.shape[axis] % factor:
        raise ValueError(f"factor: {factor} does not divide the {x.shape[axis]} experts of {_spelled(path)}")
    name = jax.random.fold_in(key, zlib.crc32(_spelled(_without_layer(path)).encode()))
    stacked = _is_stacked(path)
    first = 0 if stacked else _layer_of(path) or 0
    options = {"axis": axis, "factor": factor, "stacked": stacked, "copied": copied}
    return _with_noise(x, name, jnp.array(first), jnp.float32(noise), **options)


@functools.partial(jax.jit, static_argnames=("axis", "factor", "stacked", "copied"))
def _with_noise(
    x: Array, key: Array, first_layer: Array, noise: Array, *, axis: int, factor: int, stacked: bool, copied: bool
) -> Array:
    """`x` is (*matrix) with experts at `axis`, or (layers, *matrix)."""

    def one_layer(x: Array, layer: Array) -> Array:
        experts = jnp.moveaxis(x, axis, 0)
        originals = experts.shape[0] // factor if copied else experts.shape[0]
        std = jnp.std(experts[:originals].astype(jnp.float32), axis=tuple(range(1, x.ndim)))

        def clone(expert: Array, scale: Array, matrix: Array) -> Array:
            drawn = _hashed_normal(jax.random.fold_in(jax.random.fold_in(key, layer), expert), matrix.shape)
            return (matrix + noise * scale * drawn).astype(matrix.dtype)

        parts = [experts[:originals]]
        for i in range(1, factor):
            numbers = jnp.arange(i * originals, (i + 1) * originals)
            source = experts[i * originals : (i + 1) * originals] if copied else experts
            parts.append(jax.vmap(clone)(numbers, std, source))
        return jnp.moveaxis(jnp.concatenate(parts), 0, axis)

    if not stacked:
        return one_layer(x, first_layer)
    return jax.vmap(one_layer)(x, jnp.arange(x.shape[0]))


def _hashed_normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Standard normal numbers from hashed counters: four times as fast on CPUs as a cipher, whose strength nobody needs
    to tell copies apart."""

    def mix(x: Array) -> Array:
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        return x ^ (x >> 16)

    first, second = jax.random.bits(key, (2,), jnp.uint32)
    bits = mix(mix(jnp.arange(math.prod(shape), dtype=jnp.uint32) + first) ^ second)
    # The middles of 2^24 equal parts of (-1, 1): never its ends.
    uniform = (bits >> 8).astype(jnp.float32) * 2.0**-23 + (2.0**-24 - 1.0)
    return (math.sqrt(2) * jax.lax.erf_inv(uniform)).reshape(shape)


def grow_opt_state(
    opt_state: Any,
    params: Any,
    growth: Growth,
    policy: str = "reset",
    spec: Mapping[tuple[str, ...], int] = EXPERT_AXES,
) -> Any:
    """An optimizer's state for grown parameters.

    Args:
      opt_state: Any state of Optax whose mappings mirror `params` (partitioned states too); other leaves are scalars.
      params: The parameters before the growth.
      growth: What was done to them.
      policy: "reset": zeros, as Adam and OLion begin. "copy": moments go with the weights. "scale": moments are those
        of the gradients that the grown model has, 1 / expert_factor of the old ones (squared for `nu`) where experts
        were copied.
      spec: Where the axis of experts is.

    Returns:
      The new state, of the same types.

    Raises:
      ValueError: An unknown policy, or a leaf that is no scalar and mirrors no parameter, with its path.
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy must be one of {', '.join(_POLICIES)}, got {policy!r}")
    shapes = {path: x.shape for path, x in _leaves(params)}
    roots = {path[0] for path in shapes}
    factor = growth.expert_factor

    def grown(where: str, second: bool, tree: Any) -> Any:
        for path, x in _leaves(tree):
            if x.ndim and shapes.get(path) != x.shape:
                raise ValueError(f"opt_state: {where}.{_spelled(path)} with shape {x.shape} mirrors no parameter")

        def widen(path: _Path, x: Array) -> Array:
            axis = _expert_axis(path, spec)
            if not x.ndim or axis is None:
                return jnp.copy(x)
            scale = 1.0 / factor ** (2 if second else 1) if policy == "scale" else 1.0
            return jnp.concatenate([scale * x] * factor, axis=axis).astype(x.dtype)

        return _rebuilt(tree, growth.sources or None, widen)

    def mirrors(node: Any) -> bool:
        return isinstance(node, Mapping) and roots.issuperset(node)

    def visit(path: _Path, node: Any) -> Any:
        where = jax.tree_util.keystr(path)
        if mirrors(node):
            new = grown(where, any(getattr(part, "name", None) == "nu" for part in path), node)
        elif jnp.ndim(node):
            raise ValueError(f"opt_state: {where} with shape {jnp.shape(node)} mirrors no parameter")
        else:
            new = node
        return jax.tree.map(jnp.zeros_like, new) if policy == "reset" else new

    return jax.tree_util.tree_map_with_path(visit, opt_state, is_leaf=mirrors)


def clone_divergence(
    params: Any, factor: int = 2, spec: Mapping[tuple[str, ...], int] = EXPERT_AXES
) -> dict[str, Array]:
    """How far copies of experts have moved from their originals.

    Args:
      params: Parameters after `grow_width`, and more training.
      factor: Copies of an expert, itself included.
      spec: Where the axis of experts is.

    Returns:
      By parameter ("layers.0.moe.router.kernel"): cosine distance 1 - cos(u, v) = |u/|u| - v/|v||² / 2, exactly 0 for
      equal copies, of shape (*layers, factor - 1, originals).

    Raises:
      ValueError: A factor that is not an integer of at least 2, or that does not divide the experts.
    """
    _check_factor("factor", factor)
    if factor < 2:
        raise ValueError("factor must be at least 2: there are no copies")
    found = {}
    for path, x in _leaves(params):
        axis = _expert_axis(path, spec)
        if axis is None or path[-1] == "expert_bias":
            continue
        if x.shape[axis] % factor:
            raise ValueError(f"factor: {factor} does not divide the {x.shape[axis]} experts of {_spelled(path)}")
        stacked = _is_stacked(path)
        flat = jnp.moveaxis(x.astype(jnp.float32), axis, 1 if stacked else 0)
        if not stacked:
            flat = flat[None]
        flat = flat.reshape(flat.shape[0], factor, -1, math.prod(flat.shape[2:]))
        unit = flat / jnp.maximum(jnp.linalg.norm(flat, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        distance = 0.5 * jnp.sum((unit[:, 1:] - unit[:, :1]) ** 2, axis=-1)
        found[_spelled(path)] = distance if stacked else distance[0]
    return found


def num_layers(params: Any) -> int:
    """How many layers parameters have.

    Raises:
      ValueError: No node "layers", or parameters in it that disagree.
    """
    node = _layers_node(params)
    if node is None:
        raise ValueError('params: no node "layers"')
    if _numbered(node):
        return len(node)
    sizes = {x.shape[0] if x.ndim else 0 for _, x in _leaves(node)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError('params: parameters in "layers" have no common first axis, of layers')
    return sizes.pop()


def _layers_node(tree: Any) -> Mapping[Any, Any] | None:
    node = tree.get("layers") if isinstance(tree, Mapping) else None
    return node if isinstance(node, Mapping) and len(node) else None


def _numbered(node: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, int) or str(name).isdecimal() for name in node)


def _rebuilt(tree: Any, sources: Sequence[int] | None, leaf: Callable[[_Path, Array], Array]) -> Any:
    """`tree` with copies of the layers `sources` (None: the layers it has), and `leaf` of every (new path, array).

    Leaf by leaf, so that no second tree is alive on the way. `leaf` copies: arrays that are shared cannot be donated.
    """
    node = _layers_node(tree)
    if node is None or sources is None:
        return _map_leaves(leaf, tree)
    if _numbered(node):
        by_index = {int(name): child for name, child in node.items()}
        named = str if any(isinstance(name, str) for name in node) else int
        new = {named(i): _map_leaves(leaf, by_index[source], ("layers", named(i))) for i, source in enumerate(sources)}
    else:
        index = jnp.asarray(sources, jnp.int32)

        def stacked(path: _Path, x: Array) -> Array:
            return leaf(path, jnp.take(x, index, axis=0) if x.ndim else x)

        new = {name: _map_leaves(stacked, child, ("layers", name)) for name, child in node.items()}
    rest = {name: _map_leaves(leaf, child, (name,)) for name, child in tree.items() if name != "layers"}
    return _like(tree, {**rest, "layers": _like(node, new)})


def _leaves(tree: Any, path: _Path = ()) -> Iterator[tuple[_Path, Array]]:
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from _leaves(child, (*path, name))
    else:
        for leaf in jax.tree.leaves(tree):
            yield path, leaf


def _map_leaves(function: Callable[[_Path, Array], Array], tree: _Tree, path: _Path = ()) -> _Tree:
    """`function` of every path and array; variables keep their type and metadata."""
    if isinstance(tree, Mapping):
        return _like(tree, {name: _map_leaves(function, child, (*path, name)) for name, child in tree.items()})
    return jax.tree.map(lambda x: function(path, x), tree)


def _like(tree: Any, children: dict[Any, Any]) -> Any:
    """A mapping of the type of `tree`; inner nodes of an `nnx.State` are dictionaries."""
    if not isinstance(tree, nnx.State):
        return type(tree)(children)
    return nnx.State({k: v.raw_mapping if isinstance(v, nnx.State) else v for k, v in children.items()})


def _contains(path: _Path, names: tuple[str, ...]) -> bool:
    return any(path[i : i + len(names)] == names for i in range(len(path)))


def _expert_axis(path: _Path, spec: Mapping[tuple[str, ...], int]) -> int | None:
    return next((axis for names, axis in spec.items() if path[-len(names) :] == names), None)


def _without_layer(path: _Path) -> _Path:
    """The path of the same parameter in a model with stacked layers."""
    if _layer_of(path) is None:
        return path
    at = path.index("layers") + 1
    return (*path[:at], *path[at + 1 :])


def _layer_of(path: _Path) -> int | None:
    """The layer that a path names; None for stacked layers and outside of layers."""
    if "layers" not in path:
        return None
    name = str(path[path.index("layers") + 1])
    return int(name) if name.isdecimal() else None


def _is_stacked(path: _Path) -> bool:
    return "layers" in path and _layer_of(path) is None


def _spelled(path: _Path) -> str:
    return ".".join(map(str, path))


def _check_factor(name: str, factor: Any) -> None:
    if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
        raise ValueError(f"{name} must be a positive integer, got {factor!r}")


def _check_noise(noise: float) -> None:
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise must be at least 0 and finite, got {noise}")
