"""The rules of transfer: the table, groups, initial values and what experts do with them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_icml.moe import (
    UNIT_CONSTANTS,
    BaseSpec,
    MoEShape,
    check_routers,
    group_of,
    init_params,
    rule_table,
    rules,
)
from jaxlib_icml.moe.parameterization import GROUPS, MATRIX_GROUPS, grouped_leaves, optimizer_rules

SMALL = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1)
BASE = BaseSpec(SMALL, constants=UNIT_CONSTANTS)
LARGE = MoEShape(width=256, num_layers=4, expert_width=1024, num_experts=4, num_active=1)  # rn, rL, ra = 4, 2, 2


def params(shape=SMALL, dtype=jnp.float32):
    n, m, experts = shape.width, shape.expert_width, shape.num_experts
    heads = (n // shape.head_dim, shape.head_dim)
    make = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    return {
        "embed": {"embedding": make(50, n)},
        "layers": {
            "0": {
                "attention_norm": {"scale": make(n)},
                "attention": {
                    "query": {"kernel": make(n, *heads), "bias": make(*heads)},
                    "key": {"kernel": make(n, *heads)},
                    "value": {"kernel": make(n, *heads)},
                    "out": {"kernel": make(*heads, n)},
                },
                "moe": {
                    "router": {"kernel": make(n, experts)},
                    "experts": {"up": {"kernel": make(experts, n, m)}, "down": {"kernel": make(experts, m, n)}},
                },
            }
        },
        "head": {"kernel": make(n, 50)},
    }


def test_multipliers_are_one_at_the_base():
    for scheme in ("moe_mup", "completep", "mup", "sp"):
        for group, rule in rules(BASE, SMALL, scheme).items():
            assert (rule.lr_mult, rule.eps_mult) == (1, 1)
            assert rule.wd_mult == (0 if group in ("norm", "bias") else 1)


def test_table_as_the_paper_has_it():
    table = rules(BASE, LARGE)
    base = rules(BASE, SMALL)
    down, up, router = table["expert_down"], table["expert_up"], table["router"]
    assert down.init_std / base["expert_down"].init_std == 1 / 4
    assert (down.lr_mult, down.eps_mult, down.wd_mult) == (1 / 8, 1 / 32, 8)
    assert (up.lr_mult, up.eps_mult, up.wd_mult) == (1 / 4, 1 / 16, 4)
    assert (router.lr_mult, router.init_std) == (1 / 4, 1 / 256)
    assert (table["norm"].lr_mult, table["norm"].init_std, table["norm"].eps_mult) == (1, 1, 1 / 4)
    assert (table["embedding"].lr_mult, table["embedding"].init_std) == (1, 0.02)
    assert (table["unembedding"].fwd_mult, down.fwd_mult, table["attention_out"].fwd_mult) == (1 / 4, 1 / 4, 1 / 4)
    assert table["bias"].eps_mult == 1 / 2
    for group in ("query_key", "value", "attention_out"):
        assert (table[group].init_std, table[group].lr_mult, table[group].eps_mult) == (1 / 16, 1 / 4, 1 / 8)


def test_number_of_experts_is_in_no_rule():
    more = dataclasses.replace(LARGE, num_experts=16, num_active=4)
    for scheme in ("moe_mup", "completep", "mup", "sp"):
        assert rules(BASE, more, scheme) == rules(BASE, LARGE, scheme)


def test_constants_multiply_and_sp_has_none():
    table, unit = rules(BaseSpec(SMALL), LARGE), rules(BASE, LARGE)
    assert table["value"].init_std == unit["value"].init_std / 16
    assert table["expert_down"].init_std == unit["expert_down"].init_std / 4
    for group in ("query_key", "value", "router", "expert_down"):
        assert table[group].lr_mult == unit[group].lr_mult / 16
    assert rules(BaseSpec(SMALL), LARGE, "sp") == rules(BASE, LARGE, "sp")


def test_schemes_differ_where_they_should():
    ours, fan_in, width = (rules(BASE, LARGE, scheme) for scheme in ("moe_mup", "completep", "mup"))
    assert {group for group in GROUPS if ours[group] != fan_in[group]} == {"expert_down", "shared_down"}
    assert fan_in["expert_down"].init_std == 1024**-0.5
    assert width["attention_out"].fwd_mult == 1
    assert width["expert_up"].eps_mult == 1 / 8
    standard = rules(BASE, LARGE, "sp")
    assert {rule.lr_mult for rule in standard.values()} == {1}
    assert standard["router"].init_std == standard["unembedding"].init_std == 256**-0.5


def test_shared_expert_scales_with_its_own_width():
    base = BaseSpec(dataclasses.replace(SMALL, shared_expert_width=64), constants=UNIT_CONSTANTS)
    table = rules(base, dataclasses.replace(LARGE, shared_expert_width=256))
    assert (table["shared_down"].lr_mult, table["shared_down"].init_std) == (1 / 4, 16 / 256)
    assert table["expert_down"].lr_mult == 1 / 8
    with pytest.raises(ValueError, match="shared_expert_width"):
        rules(base, LARGE)


def test_decay_times_rate_stays():
    for optimizer, exponent in itertools.product(("adam", "olion", "muon"), (1.0, 0.5)):
        for group, rule in optimizer_rules(BASE, LARGE, optimizer, hidden_exponent=exponent).items():
            if rule.wd_mult:
                assert rule.wd_mult * rule.lr_mult == pytest.approx(1), (optimizer, group)


def test_rows_of_other_optimizers():
    muon, adam = optimizer_rules(BASE, LARGE, "muon"), rules(BASE, LARGE)
    assert muon["expert_up"].lr_mult == muon["value"].lr_mult == 1 / 2
    assert muon["expert_down"].lr_mult == 2 / 8
    assert muon["router"].lr_mult == 1 / 4
    assert optimizer_rules(BASE, LARGE, "olion") == {
        group: rule._replace(wd_mult=1 / rule.lr_mult) if group in MATRIX_GROUPS else rule
        for group, rule in adam.items()
    }
    half = optimizer_rules(BASE, LARGE, "olion", hidden_exponent=0.5)
    assert half["router"].lr_mult == 1 / 2
    assert half["embedding"] == adam["embedding"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, "κ = 1/8"),
        ({"head_dim": 32}, "head_dim"),
        ({"shared_expert_width": 8}, "shared_expert_width"),
    ],
)
def test_shapes_outside_the_theory_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        rules(BASE, dataclasses.replace(LARGE, **change))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules(BASE, SMALL, "ntk"), "scheme"),
        (lambda: optimizer_rules(BASE, SMALL, "sgd"), "optimizer"),
        (lambda: optimizer_rules(BASE, SMALL, "olion", hidden_exponent=2.0), "hidden_exponent"),
    ],
)
def test_bad_numbers_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_leaf_has_one_group():
    groups = {leaf.path.split("/", 2)[-1]: group for leaf, group in grouped_leaves(params(), SMALL)}
    assert groups["attention/query/bias"] == "bias"
    assert groups["attention/value/kernel"] == "value"
    assert groups["moe/router/kernel"] == "router"
    assert sorted(set(groups.values())) == sorted(set(GROUPS) - {"shared_up", "shared_down"})


def test_users_own_names():
    assert group_of("net/w_in", groups={"w_in": "expert_up"}) == "expert_up"
    assert group_of("net/router/kernel", groups={"net/router/kernel": "unembedding"}) == "unembedding"
    assert group_of("x/kernel", jnp.zeros(3), lambda path, leaf: "norm" if leaf.ndim == 1 else None) == "norm"
    with pytest.raises(ValueError, match="net/w_in belongs to no group"):
        group_of("net/w_in")
    with pytest.raises(ValueError, match="a/b/c is matched as expert_up and as router"):
        group_of("a/b/c", groups={"c": "router", "b/c": "expert_up"})
    with pytest.raises(ValueError, match="none of"):
        group_of("a", groups={"a": "attention"})
    with pytest.raises(ValueError, match="belongs to no group"):
        group_of("layers/0/attention/router/kernel")


def test_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match="another model"):
        grouped_leaves(params(), LARGE)
    with pytest.raises(ValueError, match="router"):
        grouped_leaves(params(), dataclasses.replace(SMALL, num_experts=8, num_active=2))


def test_initial_values_follow_the_table():
    wide = MoEShape(width=256, num_layers=2, expert_width=512, num_experts=4, num_active=1)
    made = init_params(params(wide), jax.random.key(0), BaseSpec(SMALL), wide)
    table = rules(BaseSpec(SMALL), wide)
    for leaf, group in grouped_leaves(made, wide):
        if group in ("norm", "bias"):
            assert np.all(leaf.value == (group == "norm"))
        else:
            std = float(jnp.std(leaf.value))
            assert std == pytest.approx(table[group].init_std, rel=5 / np.sqrt(2 * leaf.value.size)), leaf.path
    half = init_params(params(wide, jnp.bfloat16), jax.random.key(0), BaseSpec(SMALL), wide)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}


def test_draws_depend_on_key_and_path_only():
    made = init_params(params(), jax.random.key(3), BASE, SMALL)
    alone = init_params({"head": params()["head"]}, jax.random.key(3), BASE, SMALL)
    np.testing.assert_array_equal(made["head"]["kernel"], alone["head"]["kernel"])
    attention = made["layers"]["0"]["attention"]
    assert np.all(attention["query"]["kernel"] != attention["key"]["kernel"])
    again = jax.jit(lambda key: init_params(params(), key, BASE, SMALL))(jax.random.key(4))
    assert np.any(again["head"]["kernel"] != made["head"]["kernel"])


def test_routers_that_tie_are_refused():
    made = init_params(params(), jax.random.key(0), BASE, SMALL)
    check_routers(made, {"bias": jnp.zeros(4)})
    made["layers"]["0"]["moe"]["router"]["kernel"] = jnp.zeros((64, 4))
    check_routers(made, {"bias": jnp.arange(4.0)})
    with pytest.raises(ValueError, match="layers/0/moe/router/kernel"):
        check_routers(made, {"bias": jnp.zeros(4)})


def test_printed_table_has_every_leaf_and_merges_layers():
    tree = params()
    tree["layers"]["1"] = tree["layers"]["0"]
    text = rule_table(tree, BaseSpec(SMALL, learning_rate=0.5, eps=1e-8), SMALL)
    assert "layers/*/moe/experts/down/kernel (2 x)" in text
    line = next(line for line in text.splitlines() if line.startswith("layers/*/moe/router"))
    assert line.split()[-5:] == ["router", "0.015625", "0.03125", "1e-08", "0"]
    assert len(text.splitlines()) == 1 + 2 + len(jax.tree.leaves(tree["layers"]["0"]))


# One sign step on one expert, the proxy by which the rules are derived (the sheet's check 3).


def sign_step(alpha, down_std, width=96, rate=0.01, draws=16):
    """RMS of an expert's initial output, of dW_down φ and of W_down dφ, geometric means over draws."""
    hidden = alpha * width

    def one(key):
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (width,))
        x = x / jnp.sqrt(jnp.mean(x**2))
        up = jax.random.normal(keys[1], (width, hidden)) * width**-0.5
        down = jax.random.normal(keys[2], (hidden, width)) * down_std(width, hidden)
        out_bar = jax.random.normal(keys[3], (width,))
        pre, pull = jax.vjp(jax.nn.gelu, x @ up)
        new_up = up + rate * jnp.sign(x[:, None] * pull(down @ out_bar)[0])
        step_down = rate / alpha * jnp.sign(pre[:, None] * out_bar)
        rms = lambda v: jnp.sqrt(jnp.mean(v**2))  # noqa: E731
        return jnp.log(jnp.array([rms(pre @ down), rms(pre @ step_down), rms((jax.nn.gelu(x @ new_up) - pre) @ down)]))

    return jnp.mean(jax.lax.map(one, jax.random.split(jax.random.key(alpha), draws)), axis=0)


def slopes(down_std):
    alphas = np.array([1, 2, 4, 8, 16, 32, 64])
    found = np.array([sign_step(int(alpha), down_std) for alpha in alphas])
    logs = np.log(alphas)
    fit = lambda rows, column: np.polyfit(logs[rows], found[rows, column], 1)[0]  # noqa: E731
    return fit(slice(None), 0), fit(slice(None), 1), fit(slice(4, None), 2)


@pytest.mark.slow
def test_experts_learn_alike_at_every_width():
    at_init, of_down, of_up = slopes(lambda n, m: n**0.5 / m)
    assert at_init == pytest.approx(-0.5, abs=0.05)
    assert of_down == pytest.approx(0, abs=0.06)
    assert of_up == pytest.approx(0, abs=0.08)


@pytest.mark.slow
def test_with_fan_in_wide_experts_learn_too_much():
    at_init, of_down, of_up = slopes(lambda n, m: m**-0.5)
    assert at_init == pytest.approx(0, abs=0.06)
    assert of_down == pytest.approx(0, abs=0.06)
    assert 0.38 < of_up < 0.55
