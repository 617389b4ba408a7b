"""Tensors as matrices: round trips, inference on Flax models, masks, messages."""

import doctest
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlib_icml.nn import tree_leaves
from jaxlib_icml.optim import (
    MatrixSpec,
    default_matrix_specs,
    default_weight_decay_mask,
    from_matrices,
    matrix_spec_table,
    muon_direction,
    olion,
    resolve_matrix_specs,
    to_matrices,
)


def shapes(*args):
    return jax.ShapeDtypeStruct(args, jnp.float32)


def blocks_of(params, **kwargs):
    """From path to the shapes of the leaf's matrices, None for the fallback."""
    specs = resolve_matrix_specs(partial(default_matrix_specs, **kwargs), params)
    leaves = jax.tree.leaves(params)
    cut = {}
    for (parts, spec), leaf in zip(specs.items(), leaves, strict=True):
        cut["/".join(parts)] = spec and [block.shape for block in jax.eval_shape(partial(to_matrices, spec=spec), leaf)]
    return cut


def test_docstrings():
    result = doctest.testmod(sys.modules["jaxlib_icml.optim.matrix_specs"])
    assert result.attempted > 0
    assert result.failed == 0


@settings(deadline=None, max_examples=20)
@given(data=st.data())
@pytest.mark.slow
def test_round_trip(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5)))
    order = data.draw(st.permutations(range(len(shape))))
    first = data.draw(st.integers(1, len(shape) - 1))
    second = data.draw(st.integers(first + 1, len(shape)))
    negative = data.draw(st.booleans())
    rows, cols = ([axis - len(shape) * negative for axis in group] for group in (order[:first], order[first:second]))
    width = int(np.prod([shape[axis] for axis in cols]))
    split = None
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(1, width))
        split = (cut, width - cut) if cut < width else (width,)
    spec = MatrixSpec(tuple(rows), tuple(cols), split)
    x = jnp.arange(np.prod(shape)).reshape(shape)
    blocks = to_matrices(x, spec)
    batch = tuple(shape[axis] for axis in sorted(order[second:]))
    assert [b.shape[:-2] for b in blocks] == [batch] * len(blocks)
    assert [b.shape[-1] for b in blocks] == list(split or (width,))
    np.testing.assert_array_equal(from_matrices(blocks, shape, spec), x)


def test_entries_land_where_the_spec_says():
    x = np.random.default_rng(0).standard_normal((5, 4, 3, 2)).astype(np.float32)
    (matrix,) = to_matrices(jnp.asarray(x), MatrixSpec((2, 0), 3))
    for b, r2, r0, c in [(0, 0, 0, 0), (3, 2, 4, 1), (1, 1, 2, 0)]:
        assert matrix[b, r2 * 5 + r0, c] == x[r0, b, r2, c]
    heads = to_matrices(jnp.asarray(x), MatrixSpec(-3, (-2, -1), per_head=True))[0]
    np.testing.assert_array_equal(heads, x.transpose(0, 2, 1, 3))
    out = to_matrices(jnp.asarray(x), MatrixSpec((-3, -2), -1, per_head=True))[0]
    np.testing.assert_array_equal(out, x)


def test_fused_projection_with_unequal_blocks():
    q, k, v = (np.random.default_rng(i).standard_normal((6, n)).astype(np.float32) for i, n in enumerate((8, 2, 2)))
    fused = jnp.concatenate([q, k, v], axis=1)
    for block, wanted in zip(to_matrices(fused, MatrixSpec(0, 1, (8, 2, 2))), (q, k, v), strict=True):
        np.testing.assert_array_equal(block, wanted)


def language_model(lead=()):
    """The leaves of the library's language model; lead is the axis of scanned layers."""
    d, heads, head_dim, hidden, experts, vocabulary = 16, 4, 8, 24, 3, 50

    def tensor(*shape):
        return shapes(*lead, *shape)

    def mlp(*first):
        return {
            "gate": {"kernel": tensor(*first, d, hidden)},
            "up": {"kernel": tensor(*first, d, hidden)},
            "down": {"kernel": tensor(*first, hidden, d)},
        }

    projection = {"kernel": tensor(d, heads, head_dim), "bias": tensor(heads, head_dim)}
    layer = {
        "attention": {
            **dict.fromkeys(("query", "key", "value"), projection),
            "out": {"kernel": tensor(heads, head_dim, d), "bias": tensor(d)},
            "query_norm": {"scale": tensor(head_dim)},
            "key_norm": {"scale": tensor(head_dim)},
        },
        "attention_norm": {"scale": tensor(d)},
        "mlp_norm": {"scale": tensor(d)},
        "mlp": mlp(),
        "moe": {"router": {"kernel": tensor(d, experts)}, "experts": mlp(experts), "shared": mlp()},
    }
    return {
        "embed": {"embedding": shapes(vocabulary, d)},
        "layers": layer if lead else {0: layer, 1: layer},
        "final_norm": {"scale": shapes(d)},
        "head": {"kernel": shapes(d, vocabulary)},
    }


def expected_language_model_blocks(prefix, lead, per_head):
    query, out = ((4, 16, 8), (4, 8, 16)) if per_head else ((16, 32), (32, 16))
    blocks = {f"attention/{name}/kernel": query for name in ("query", "key", "value")}
    blocks["attention/out/kernel"] = out
    for module, batch in (("mlp", ()), ("moe/experts", (3,)), ("moe/shared", ())):
        blocks |= {f"{module}/{name}/kernel": (*batch, 16, 24) for name in ("gate", "up")}
        blocks[f"{module}/down/kernel"] = (*batch, 24, 16)
    blocks["moe/router/kernel"] = (16, 3)
    return {f"{prefix}/{path}": [(*lead, *shape)] for path, shape in blocks.items()}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_language_model(lead, per_head):
    blocks = blocks_of(language_model(lead), per_head=per_head)
    prefixes = ["layers"] if lead else ["layers/0", "layers/1"]
    expected = {}
    for prefix in prefixes:
        expected |= expected_language_model_blocks(prefix, lead, per_head)
    assert {path: b for path, b in blocks.items() if b} == expected


@pytest.mark.parametrize("lead", [(), (2,)])
def test_language_model_weight_decay(lead):
    params = language_model(lead)
    mask = default_weight_decay_mask(params)
    names = ["/".join(parts) for parts in resolve_matrix_specs(None, params)]
    decayed = {name for name, decays in zip(names, jax.tree.leaves(mask), strict=True) if decays}
    assert decayed == {name for name in names if name.split("/")[-1] in ("kernel", "embedding")}


def test_linen_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Embed(50, 16)(x)
            x = nn.MultiHeadDotProductAttention(num_heads=4, normalize_qk=True)(x, x)
            x = nn.LayerNorm()(x)
            x = nn.Conv(8, (3,), use_bias=False)(x)
            x = nn.Conv(8, (5,))(x)[..., None]
            x = nn.Conv(6, (3, 3), name="patches")(x)
            x = nn.Dense(32)(x)
            return nn.Dense(50, name="logits")(x)

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.zeros((2, 4), jnp.int32))
    matrices = {path: blocks for path, blocks in blocks_of(params).items() if blocks}
    attention = "params/MultiHeadDotProductAttention_0"
    assert matrices == {
        **{f"{attention}/{name}/kernel": [(16, 16)] for name in ("query", "key", "value", "out")},
        "params/Conv_0/kernel": [(3 * 16, 8)],
        "params/Conv_1/kernel": [(5 * 8, 8)],
        "params/patches/kernel": [(3 * 3 * 1, 6)],
        "params/Dense_0/kernel": [(6, 32)],
    }


def test_linen_partitioned_boxes():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
            return nn.Dense(8, kernel_init=init)(x)

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.zeros((2, 4)))
    assert blocks_of(params) == {"params/Dense_0/bias": None, "params/Dense_0/kernel": [(4, 8)]}


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(50, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=16, rngs=rngs, decode=False)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 32, rngs=rngs)])
        self.conv = nnx.Conv(3, 8, kernel_size=(3, 5), rngs=rngs)


NNX_MATRICES = {
    **{f"attention/{name}/kernel": [(16, 16)] for name in ("query", "key", "value", "out")},
    "blocks/0/kernel": [(16, 32)],
    "conv/kernel": [(3 * 5 * 3, 8)],
}


def test_nnx_model():
    state = nnx.state(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))), nnx.Param)
    for params in (state, nnx.to_pure_dict(state)):
        assert {path: blocks for path, blocks in blocks_of(params).items() if blocks} == NNX_MATRICES
    # A tree of specs made for one view serves the other.
    specs = default_matrix_specs(nnx.to_pure_dict(state))
    assert resolve_matrix_specs(specs, state) == resolve_matrix_specs(None, state)
    assert resolve_matrix_specs(default_matrix_specs(state), nnx.to_pure_dict(state)) == resolve_matrix_specs(
        None, state
    )


def test_nnx_model_stacked_over_layers():
    state = nnx.state(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))), nnx.Param)
    stacked = jax.tree.map(lambda x: shapes(3, *x.shape), state)
    # The bias with two axes tells that the convolution is stacked, the names tell the rest.
    assert {path: blocks for path, blocks in blocks_of(stacked).items() if blocks} == {
        path: [(3, *shape) for shape in blocks] for path, blocks in NNX_MATRICES.items()
    }


def test_only_whole_components_name_embeddings_and_heads():
    kernel = {"kernel": shapes(4, 6)}
    matrices = ("overhead", "embedding_mixer", "multihead", "output", "logits_scale_mlp", "lnx", "headless")
    fallback = ("embed", "wte", "wpe", "lm_head", "unembed", "head", "logits", "Embed_0", "LM_Head")
    blocks = blocks_of(dict.fromkeys((*matrices, *fallback), kernel))
    assert {path.split("/")[0] for path, b in blocks.items() if b} == set(matrices)


def test_plain_and_flattened_trees():
    assert blocks_of({"w1": shapes(3, 4), "b1": shapes(4), "t": shapes()}) == {
        "b1": None,
        "t": None,
        "w1": [(3, 4)],
    }
    assert blocks_of([shapes(3, 4), (shapes(2, 3, 4),)]) == {"0": [(3, 4)], "1/0": [(2, 3, 4)]}
    assert blocks_of(shapes(3, 4)) == {"": [(3, 4)]}
    flat = {
        "encoder/attn/query/kernel": shapes(8, 2, 4),
        "lm_head.weight": shapes(8, 9),
        "h.0.mlp.weight": shapes(8, 9),
    }
    assert blocks_of(flat) == {
        "encoder/attn/query/kernel": [(8, 8)],
        "h.0.mlp.weight": [(8, 9)],
        "lm_head.weight": None,
    }


def test_names_alone_do_not_make_attention():
    assert blocks_of({"memory": {"key": {"kernel": shapes(3, 4, 5)}}}) == {"memory/key/kernel": [(3, 4, 5)]}
    assert blocks_of({"decoder": {"out": {"kernel": shapes(3, 4, 5)}}}) == {"decoder/out/kernel": [(3, 4, 5)]}
    siblings = {name: {"kernel": shapes(3, 4, 5)} for name in ("query", "key", "value")}
    assert blocks_of({"mixer": {**siblings, "out": {"kernel": shapes(4, 5, 3)}}})["mixer/out/kernel"] == [(20, 3)]


def test_stacked_names_the_ambiguous():
    params = {
        "trunk": {
            "conv": {"kernel": shapes(2, 3, 5, 7)},
            "attention": {"query": {"kernel": shapes(2, 6, 8)}},
        },
        "stem": {"conv": {"kernel": shapes(3, 3, 5, 7)}},
    }
    assert blocks_of(params) == {
        "stem/conv/kernel": [(45, 7)],
        "trunk/attention/query/kernel": [(2, 48)],
        "trunk/conv/kernel": [(30, 7)],
    }
    assert blocks_of(params, stacked=("trunk",)) == {
        "stem/conv/kernel": [(45, 7)],
        "trunk/attention/query/kernel": [(2, 6, 8)],
        "trunk/conv/kernel": [(2, 15, 7)],
    }
    with pytest.raises(ValueError, match="stacked names 'trunks/conv'"):
        default_matrix_specs(params, stacked=("trunks/conv",))


def test_masked_and_none_leaves():
    params = {"a": {"kernel": shapes(3, 4)}, "b": {"kernel": optax.MaskedNode()}, "c": None}
    assert list(resolve_matrix_specs(None, params)) == [("a", "kernel")]
    full = {"a": {"kernel": MatrixSpec(0, 1)}, "b": {"kernel": MatrixSpec(0, 1)}, "c": None}
    assert resolve_matrix_specs(full, params) == {("a", "kernel"): MatrixSpec(0, 1)}
    assert resolve_matrix_specs({"a": {"kernel": None}}, params) == {("a", "kernel"): None}


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (MatrixSpec(0, 1), (4,), "at least two axes.*'w'"),
        (MatrixSpec(0, 0), (4, 4), "must not overlap, got 0 and 0.*'w'"),
        (MatrixSpec((0, 1), -1), (4, 4), "must not overlap"),
        (MatrixSpec((), 1), (4, 4), r"row_axes must name at least one axis, got \(\)"),
        (MatrixSpec(0, 2), (4, 4), r"col_axes must be integers in \[-2, 2\), got 2"),
        (MatrixSpec(0, 1, (1, 2)), (4, 4), r"split must sum to the 4 flattened columns, got \(1, 2\).*'w'"),
        (MatrixSpec(0, 1, (4, 0)), (4, 4), "split must be positive integers"),
        (MatrixSpec(0, 1, ()), (4, 4), "split must be positive integers"),
        (MatrixSpec(0, 1, None, True), (4, 4), "per_head needs exactly one group of two axes"),
        (MatrixSpec((0, 1), (2, 3), None, True), (2, 2, 2, 2), "per_head needs exactly one group"),
    ],
)
def test_specs_that_do_not_fit(spec, shape, message):
    with pytest.raises(ValueError, match=message):
        resolve_matrix_specs({"w": spec}, {"w": jnp.zeros(shape)})


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"a": None}, r"no spec for \['b/w'\]"),
        ({"a": None, "b": {"w": None}, "c": None}, r"unknown leaves: \['c'\]"),
        ({"a": None, "b": {"v": MatrixSpec(0, 1)}}, r"no spec for \['b/w'\], specs for unknown leaves: \['b/v'\]"),
        ({"a": None, "b": {"w": "matrix"}}, "must hold MatrixSpec, .* or None, got 'matrix' for 'b/w'"),
    ],
)
def test_spec_trees_of_the_wrong_structure(specs, message):
    with pytest.raises(ValueError, match=message):
        resolve_matrix_specs(specs, {"a": shapes(3), "b": {"w": shapes(3, 4)}})


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_complex_and_integer_matrices_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match=f"leaf 'dense/kernel' has dtype {jnp.dtype(dtype)}"):
        resolve_matrix_specs(None, {"dense": {"kernel": jnp.zeros((3, 4), dtype)}})


def test_table_lists_every_leaf():
    params = {
        "attention": {"query": {"kernel": shapes(2, 8, 4, 3), "bias": shapes(2, 4, 3)}},
        "qkv": {"kernel": shapes(8, 12)},
    }
    specs = default_matrix_specs(params)
    specs["qkv"]["kernel"] = MatrixSpec(0, 1, (8, 2, 2))
    lines = matrix_spec_table(params, specs).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == [
        "rule",
        "fallback",
        "2 matrices of 8 x 12",
        "8 x 8|2|2",
        "288 parameters in matrices, 24 in the fallback",
    ]
    assert lines[1].startswith("attention/query/bias ")


MUON_PARAMS = {
    "embed": np.linspace(-1, 1, 60).reshape(10, 6),
    "attention": {"query": np.linspace(-2, 1, 48).reshape(6, 2, 4), "out": np.linspace(1, 3, 48).reshape(2, 4, 6)},
    "experts": {"up": np.linspace(-1, 2, 90).reshape(3, 6, 5), "down": np.linspace(0, 2, 90).reshape(3, 5, 6)},
    "bias": np.linspace(0, 1, 5),
}


def muon_numbers(_=None):
    return {
        "embed": None,
        "attention": {
            "query": optax.contrib.MuonDimensionNumbers(0, (1, 2)),
            "out": optax.contrib.MuonDimensionNumbers([0, 1], -1),
        },
        "experts": optax.contrib.MuonDimensionNumbers(1, 2),  # a prefix
        "bias": None,
    }


@pytest.mark.parametrize("given", [muon_numbers(), muon_numbers])
def test_muon_dimension_numbers_mean_what_they_mean_in_optax(given):
    """The same tree or callable, the same leaves, and per leaf the same matrices: one step of Muon agrees."""
    params = jax.tree.map(lambda x: jnp.sin(7 * jnp.asarray(x, jnp.float32)), MUON_PARAMS)
    theirs = optax.contrib.muon(0.1, consistent_rms=0.2, muon_weight_dimension_numbers=given)
    expected, _ = theirs.update(params, theirs.init(params), params)

    specs = resolve_matrix_specs(given, params)
    ours = optax.chain(muon_direction(matrix_specs=given, orthogonalizer="ns"), optax.scale(-0.1))
    updates, _ = ours.update(params, ours.init(params), params)
    for leaf, want in zip(tree_leaves(updates), jax.tree.leaves(expected), strict=True):
        if specs[leaf.parts] is None:
            assert leaf.path in ("embed", "bias")
        else:
            np.testing.assert_allclose(leaf.value, want, atol=2e-5)


def test_olion_takes_a_muon_setup():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), MUON_PARAMS)
    tx = olion(1.0, matrix_specs=muon_numbers, weight_decay=0.0)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    for matrix in (*jax.tree.leaves(updates["attention"]), *jax.tree.leaves(updates["experts"])):
        np.testing.assert_allclose(jnp.sqrt(jnp.mean(matrix**2)), 0.2, rtol=1e-6)
    assert "3 matrices of 6 x 5" in matrix_spec_table(params, muon_numbers)


def test_a_spec_for_a_subtree_and_a_leaf_below_it_is_refused():
    with pytest.raises(ValueError, match="a/b"):
        resolve_matrix_specs({"a": {"b": {"c": MatrixSpec(0, 1)}}}, {"a": {"b": shapes(2, 3)}})
    with pytest.raises(ValueError, match="for 'a'"):
        resolve_matrix_specs({"a": "matrix"}, {"a": shapes(2, 3)})
