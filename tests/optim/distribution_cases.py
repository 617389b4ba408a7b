"""`map_matrices` and OLion on eight virtual devices, in a process of its own; raises where something differs.

The function under test couples all entries of a matrix, and the inputs are small integers, so results are exact.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlib_icml.optim import MatrixSpec, muon_direction, scale_by_olion
from jaxlib_icml.optim.distribution import map_matrices, matrix_layout

P = PartitionSpec


def couple(x):
    """Treats matrices one by one, commutes with transposition, and needs all entries."""
    return {"product": x @ jnp.swapaxes(x, -1, -2) @ x, "largest": jnp.max(x, axis=(-2, -1), keepdims=True)}


def check_map_matrices(mesh, cases):
    """Cases are (shape, PartitionSpec); the last two axes are the matrix."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape, _ in cases]
    shardings = [NamedSharding(mesh, spec) for _, spec in cases]
    layouts = [matrix_layout(s, x.shape, MatrixSpec(-2, -1), x.shape) for s, x in zip(shardings, arrays, strict=True)]
    placed = [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]
    outs = jax.jit(lambda xs: map_matrices(couple, xs, layouts))(placed)
    for x, out in zip(arrays, outs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, out, couple(x))


def check_optimizer(mesh, make):
    """Sharded and unsharded updates agree, NaN stays inside its matrix."""
    names = mesh.axis_names
    shapes = {
        "query": ((32, 4, 8), P(names[0], names[1])),
        "fused": ((32, 96), P(names[0], names[1])),
        "out": ((4, 8, 32), P(names[1], None, names[0])),
        "up": ((32, 64), P(names[0], names[1])),
        "down": ((64, 32), P(names[1], names[0])),
        "odd": ((7, 13), P()),
        "layers": ((3, 32, 64), P(None, names[0], names[1])),
        "experts": ((4, 32, 64), P(names[0], None, names[1])),
        "bias": ((32,), P(names[0])),
    }
    specs = {name: MatrixSpec(-2, -1) for name in shapes} | {
        "query": MatrixSpec(0, (1, 2)),
        "out": MatrixSpec((0, 1), 2),
        "fused": MatrixSpec(0, 1, split=(32, 32, 32)),
        "bias": None,
    }
    shardings = {name: NamedSharding(mesh, spec) for name, (_, spec) in shapes.items()}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    grads = {name: jax.random.normal(k, s) for k, (name, (s, _)) in zip(keys, shapes.items(), strict=True)}
    grads["odd"] = grads["odd"].at[2, 3].set(jnp.nan)
    plain, shared = make(matrix_specs=specs), make(matrix_specs=specs, param_shardings=shardings)
    expected, _ = jax.jit(plain.update)(grads, plain.init(grads))
    placed = jax.device_put(grads, shardings)
    updates, state = jax.jit(shared.update)(placed, shared.init(placed))
    for name, want in expected.items():
        got = np.asarray(updates[name])
        if name == "odd":
            assert np.isnan(got).all()
        elif name == "bias":
            np.testing.assert_array_equal(got, want)
        else:
            assert np.mean(np.abs(got - want) < 1e-4) > 0.999, name
            assert np.isfinite(got).all()
    np.testing.assert_allclose(state.mu["up"], jax.jit(plain.update)(grads, plain.init(grads))[1].mu["up"], rtol=1e-6)


def main():
    cube = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    pieces = [P("fsdp", "tensor"), P("tensor", "fsdp"), P(("tensor", "fsdp"), None), P(None, "tensor"), P()]
    for first, second in itertools.product(pieces, repeat=2):
        check_map_matrices(cube, [((8, 16), first), ((16, 8), second), ((8, 16), P("fsdp", None))])
    check_map_matrices(cube, [((9, 8, 16), P(None, "fsdp", "tensor"))])  # more matrices than devices
    check_map_matrices(cube, [((4, 8, 16), P("data", "fsdp", "tensor")), ((2, 16, 8), P("data", None, "fsdp"))])
    check_map_matrices(cube, [((4, 2, 8, 16), P(None, "tensor", "fsdp")), ((6, 5), P("data"))])
    line = jax.make_mesh((8, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    check_map_matrices(line, [((8, 16), P("fsdp", "tensor")), ((16, 24), P(None, "fsdp")), ((7, 3), P())])
    square = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for make in (scale_by_olion, muon_direction):
        check_optimizer(square, make)


if __name__ == "__main__":
    main()
