"""Hyper-parameter transfer between runs: every run keeps the tuned base model that its own came from."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import optax
from flax import nnx
from jaxtyping import Array

from jaxlib_icml.lm.parameterization import moe_shape, parameterized
from jaxlib_icml.moe import BaseSpec, MoEShape, advise, init_params, rule_table, transfer_optimizer
from jaxlib_icml.training.config import OptimizerConfig, TrainConfig, updated
from jaxlib_icml.training.runs import read_object

BASE_FILE = "base.json"


class Transfer(NamedTuple):
    """The rules of one run: where they start, for which sizes, by which scheme."""

    base: BaseSpec
    shape: MoEShape
    scheme: str

    def optimizer(
        self, config: OptimizerConfig, learning_rate: Any, **direction: Any
    ) -> optax.GradientTransformationExtraArgs:
        """The base's optimizer for this run, with the run's own decay."""
        return transfer_optimizer(
            self._tuned(config), self.shape, schedule=learning_rate, scheme=self.scheme, **direction
        )

    def initialize(self, params: nnx.State, key: Array) -> nnx.State:
        """Initial parameters by the rules."""
        return init_params(params, key, self.base, self.shape, scheme=self.scheme)

    def describe(self, params: Any, config: OptimizerConfig) -> str:
        """Every parameter with its rule, and what to beware of."""
        warnings = advise(self.base, self.shape).warnings
        table = rule_table(params, self._tuned(config), self.shape, scheme=self.scheme)
        return "\n".join([table, *(f"beware: {warning}" for warning in warnings)])

    def _tuned(self, config: OptimizerConfig) -> BaseSpec:
        """The base with what a run may change."""
        return dataclasses.replace(
            self.base, learning_rate=config.learning_rate, weight_decay=config.weight_decay, optimizer=config.name
        )


def read_base(path: str | Path) -> BaseSpec:
    """A tuned base model.

    Args:
      path: A run that was started with a parameterization, or a file like its `base.json`.

    Returns:
      Its sizes and hyper-parameters.

    Raises:
      ValueError: Nothing there, or a damaged file.
    """
    path = Path(path)
    path = path / BASE_FILE if path.is_dir() else path
    values = read_object(path, "base")
    names = [field.name for field in dataclasses.fields(MoEShape) if field.default is dataclasses.MISSING]
    shape = values.get("shape")
    if not isinstance(shape, dict) or not set(names) <= shape.keys():
        raise ValueError(f"base: {path} must hold a shape with {', '.join(names)}")
    # Sizes are checked together, so they start from ones that fit any.
    start = MoEShape(1, 1, 1, 1, 1, head_dim=1)
    return updated(BaseSpec(start), {**values, "shape": {"head_dim": 64, **shape}}, "base.")


def base_text(base: BaseSpec) -> str:
    """A base model as the contents of a file for `read_base`."""
    return json.dumps(dataclasses.asdict(base), indent=2) + "\n"


def with_base(config: TrainConfig, path: str | Path) -> TrainConfig:
    """A run's configuration with the optimizer, learning rate and decay of a tuned base model.

    Args:
      config: A run; without a parameterization it gets "moe-mup".
      path: As in `read_base`.

    Returns:
      The configuration of the run that transfers from the base.

    Raises:
      ValueError: What `read_base` refuses; a base tuned with an optimizer that runs do not have.
    """
    base = read_base(path)
    scheme = "moe-mup" if config.parameterization == "none" else config.parameterization
    optimizer = {
        "name": base.optimizer,
        "learning_rate": base.learning_rate,
        "weight_decay": base.weight_decay,
    }
    changes = {"parameterization": scheme, "base": str(path), "optimizer": optimizer}
    return updated(config, changes)


def transferred(config: TrainConfig, run_dir: Path) -> tuple[TrainConfig, Transfer | None]:
    """The run with the factors of its parameterization in the model, and its rules.

    Args:
      config: The run asked for.
      run_dir: Its folder; a base model that it already holds must be the one asked for.

    Returns:
      The configuration that is trained, and its rules; None without a parameterization.

    Raises:
      ValueError: A base that is not there, differs from the one of the folder, was tuned with another optimizer, or
        does not carry over to the model.
    """
    if config.parameterization == "none":
        return config, None
    own = run_dir / BASE_FILE
    asked = None if config.base is None else read_base(config.base)
    held = read_base(own) if own.exists() else None
    if asked is not None and held is not None and asked != held:
        raise ValueError(f"base: {run_dir} was started from another base model than {config.base}")
    base = asked or held or _own_base(config)
    if config.optimizer.name != base.optimizer:
        raise ValueError(f"optimizer.name: the base was tuned with {base.optimizer}, not with {config.optimizer.name}")
    scheme = config.parameterization.replace("-", "_")
    # Weights that come from elsewhere keep the factors that they were trained with.
    model = config.model if config.init_from is not None else parameterized(config.model, base, scheme)
    return dataclasses.replace(config, model=model), Transfer(base, moe_shape(model), scheme)


def _own_base(config: TrainConfig) -> BaseSpec:
    optimizer = config.optimizer
    return BaseSpec(
        moe_shape(config.model),
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        embedding_std=config.model.init_std,
        optimizer=optimizer.name,
    )
