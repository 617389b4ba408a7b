"""Activations of the reduced model move alike at every width under the rules, and not without them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlib_icml.moe import UNIT_CONSTANTS, BaseSpec, MoEShape, transfer_optimizer
from jaxlib_icml.moe.coord_check import coord_check, lr_sweep, residual_moe_probe
from tests.moe.markov import markov_text

SMALL = MoEShape(width=32, num_layers=2, expert_width=64, num_experts=4, num_active=1, head_dim=8, vocab_size=32)
BASE = BaseSpec(SMALL, learning_rate=2**-6, constants=UNIT_CONSTANTS)


def text(steps, rows):
    return jnp.asarray(markov_text(steps, rows, 9))


def shape(width):
    return dataclasses.replace(SMALL, width=width, expert_width=2 * width)


def check(scheme, optimizer, widths):
    return coord_check(
        lambda shape: residual_moe_probe(BASE, shape, scheme=scheme),
        BASE,
        [shape(width) for width in widths],
        list(text(5, 512)),
        scheme=scheme,
        optimizer=optimizer,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "widths", "low", "low_router"),
    [
        ("adam", (32, 64, 128), -0.15, -0.15),
        # Orthogonalized updates spread over directions that tokens share less and less as width grows.
        ("olion", (32, 64, 128, 256), -0.4, -0.4),
        ("muon", (32, 64, 128, 256), -0.15, -0.4),
    ],
)
def test_activations_move_alike_at_every_width(optimizer, widths, low, low_router):
    found = check("moe_mup", optimizer, widths)
    assert set(found.slopes) == {"router_logits", "pre_activations", "expert_outputs", "stream", "logits"}
    for name, slope in found.slopes.items():
        assert (low_router if name == "router_logits" else low) < slope < 0.15, found.table()


@pytest.mark.slow
def test_without_rules_they_grow():
    found = check("sp", "adam", (32, 64, 128, 256))
    assert found.slopes["router_logits"] > 0.5, found.table()
    for name in ("pre_activations", "expert_outputs", "stream", "logits"):
        assert found.slopes[name] > 0.2, found.table()


@pytest.mark.slow
def test_table_and_arguments():
    found = coord_check(
        lambda shape: residual_moe_probe(BASE, shape), BASE, [shape(16), SMALL], list(text(1, 8)), seeds=(0,)
    )
    assert found.rms_change["logits"].shape == (2, 1)
    lines = found.table().splitlines()
    assert len(lines) == 6
    assert lines[0].split() == ["activation", "16", "32", "slope"]
    for message, options in {
        "two sizes": {"shapes": [SMALL, SMALL], "batches": [0]},
        "must not be empty": {"shapes": [SMALL, shape(64)], "batches": []},
    }.items():
        with pytest.raises(ValueError, match=message):
            coord_check(lambda shape: residual_moe_probe(BASE, shape), BASE, **options)


def test_sweep_equals_single_runs():
    batches = text(6, 16)
    probe = residual_moe_probe(BASE, SMALL)
    make = lambda rate: transfer_optimizer(BASE, SMALL, schedule=rate)  # noqa: E731
    grid = lr_sweep(probe, make, (0.01, 0.05), batches, seeds=(0, 3))
    assert grid.shape == (2, 2, 6)
    alone = lr_sweep(probe, make, (0.05,), batches, seeds=(3,))
    np.testing.assert_allclose(grid[1, 1], alone[0, 0], rtol=1e-4)
    np.testing.assert_allclose(grid[:, :, 0], np.log(32), rtol=0.05)
    assert np.all(grid[0, :, -1] < grid[0, :, 0])
    assert np.all(grid[0, 0, 1:] != grid[1, 0, 1:])
    for change in ({"learning_rates": ()}, {"learning_rates": (-1.0,)}, {"seeds": ()}):
        with pytest.raises(ValueError, match="must"):
            lr_sweep(probe, make, **({"learning_rates": (0.1,), "batches": batches} | change))


@pytest.mark.slow
def test_selection_biases_move_against_the_load():
    probe = residual_moe_probe(BASE, SMALL, bias_rate=0.5)
    params, rest = probe.init(jax.random.key(0))
    moved = jax.tree.leaves(probe.loss(params, rest, text(1, 64)[0])[1])
    assert len(moved) == 2
    for bias in moved:
        assert float(jnp.abs(bias).max()) > 0
        assert float(bias.sum()) == pytest.approx(0, abs=1e-6)
