"""Sizes and base models that make no sense are named."""

import dataclasses

import pytest

from jaxlib_icml.moe import UNIT_CONSTANTS, BaseSpec, MoEShape

SMALL = MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1)
BASE = BaseSpec(SMALL)


def test_derived_sizes():
    assert (SMALL.kappa, SMALL.alpha) == (0.25, 2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(SMALL, num_active=5), "num_active"),
        (lambda: dataclasses.replace(SMALL, width=65), "head_dim"),
        (lambda: dataclasses.replace(SMALL, num_layers=0), "num_layers"),
        (lambda: dataclasses.replace(BASE, router_exponent=0.4), "router_exponent"),
        (lambda: dataclasses.replace(BASE, learning_rate=float("nan")), "learning_rate"),
        (lambda: dataclasses.replace(BASE, optimizer="sgd"), "optimizer"),
        (lambda: dataclasses.replace(UNIT_CONSTANTS, down_std=0.0), "down_std"),
        (lambda: dataclasses.replace(SMALL, shared_expert_width=-1), "shared_expert_width"),
        (lambda: dataclasses.replace(BASE, weight_decay=-0.1), "weight_decay"),
    ],
)
def test_bad_numbers_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
