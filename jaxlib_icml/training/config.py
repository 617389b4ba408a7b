"""Configuration of a training run: typed, from presets, TOML files and flags."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from jaxlib_icml.lm import LMConfig, preset
from jaxlib_icml.training.mesh import MeshConfig

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and schedule.

    Raises:
      ValueError: a number outside its range.
    """

    name: Literal["olion", "adamw"] = "olion"
    """olion: matrices by OLion, the rest by AdamW. adamw: everything by AdamW(0.9, 0.95)."""
    learning_rate: float = 3e-2
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, embeddings and head."""
    stabilize: bool = True
    """Put GradientStabilizer before the optimizer."""
    clip_norm: float | None = None
    """Clip the global norm of the gradients first; None: do not."""
    warmup_steps: int = 30
    """Steps of linear warm-up."""
    decay: Literal["linear", "cosine", "constant"] = "linear"
    """Shape of the schedule after the warm-up."""
    final_fraction: float = 0.0
    """Learning rate at the end, as a fraction of the peak."""

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"optimizer.learning_rate: must be positive, got {self.learning_rate}")
        if not self.weight_decay >= 0:
            raise ValueError(f"optimizer.weight_decay: must be at least 0, got {self.weight_decay}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm: must be positive, got {self.clip_norm}")
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps: must be at least 0, got {self.warmup_steps}")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"optimizer.final_fraction: must be in [0, 1], got {self.final_fraction}")


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens.

    Raises:
      ValueError: a number outside its range.
    """

    kind: Literal["bpe", "bytes"] = "bpe"
    """bpe: byte-level BPE trained on the corpus. bytes: one token per byte."""
    vocab_size: int = 2048
    """Size of the BPE vocabulary."""

    def __post_init__(self) -> None:
        if self.kind == "bpe" and self.vocab_size < 258:
            raise ValueError(f"tokenizer.vocab_size: must be at least 258, got {self.vocab_size}")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run; the defaults learn the Python standard library in about five minutes on two cores.

    Raises:
      ValueError: values that are out of range or contradict one another.
    """

    preset: str = "tiny-moe"
    """Model preset that the --model flags start from (`icml info` lists them)."""
    data: str | None = None
    """File, folder, glob or JSONL file to learn; None: the running Python's standard library."""
    run_dir: str | None = None
    """Folder of the run; None: a new one under runs/. A folder with the same run in it is continued."""
    init_from: str | None = None
    """Start from the weights and tokenizer of this run, Hugging Face folder or GGUF file; None: from scratch."""
    parameterization: Literal["none", "moe-mup", "completep", "mup", "sp"] = "none"
    """Rules that make hyper-parameters carry over to larger models (jaxlib_icml.moe.rules); experts then have the
    sigmoid gate and balance by selection biases. none: this library's usual initial values, one learning rate."""
    base: str | None = None
    """With parameterization: the run, or its base.json, that was tuned; None: this run is the base of larger ones."""
    steps: int | None = None
    """Number of steps (reproducible bit for bit); None: --minutes decides."""
    minutes: float | None = None
    """Minutes of training, compilation included; None: 5, unless --steps is given."""
    batch_size: int = 8
    """Sequences per step, over all devices and micro-batches."""
    accumulation_steps: int = 1
    """Micro-batches per step."""
    seed: int = 0
    """Seeds parameters, data order and samples."""
    held_out_fraction: float = 0.05
    """Share of the corpus held out for evaluation."""
    text_field: str = "text"
    """Field of JSONL lines that holds the text."""
    evaluate_every: int = 200
    """Steps between evaluations on a part of the held-out text; 0: only at the end."""
    diagnose_every: int = 100
    """Steps between looks at OLion's momentum (isotropy, signs); 0: none."""
    checkpoint_every: int = 500
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    sample_tokens: int = 120
    """Length of the samples written at the end; 0: none."""
    model: LMConfig = dataclasses.field(default_factory=lambda: preset("tiny-moe"))
    """Architecture."""
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    """Tokenizer."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Device mesh."""

    def __post_init__(self) -> None:
        for field in ("batch_size", "accumulation_steps", "keep_checkpoints"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: must be at least 1, got {getattr(self, field)}")
        for field in ("seed", "evaluate_every", "diagnose_every", "checkpoint_every", "sample_tokens"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}: must be at least 0, got {getattr(self, field)}")
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"accumulation_steps: {self.accumulation_steps} does not divide batch_size {self.batch_size}"
            )
        if self.base is not None and self.parameterization == "none":
            raise ValueError("base: needs a parameterization")
        if self.steps is not None and self.minutes is not None:
            raise ValueError("steps, minutes: give one of them, not both")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: must be at least 1, got {self.steps}")
        if self.minutes is not None and not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise ValueError(f"minutes: must be positive, got {self.minutes}")

    @property
    def time_limit(self) -> float | None:
        """Seconds of training, or None when `steps` decides."""
        return None if self.steps is not None else 60.0 * (5.0 if self.minutes is None else self.minutes)


# What may change when a run is continued: how long, how fast and where, not what is learned.
_FREE_ON_RESUME = frozenset(
    {
        *("base", "run_dir", "steps", "minutes", "evaluate_every", "diagnose_every", "checkpoint_every"),
        *("keep_checkpoints", "sample_tokens", "mesh", "accumulation_steps", "optimizer.learning_rate"),
    }
)


def with_preset(name: str) -> TrainConfig:
    """The default run of a preset.

    Args:
      name: a key of `jaxlib_icml.lm.PRESETS`.

    Returns:
      The configuration.

    Raises:
      ValueError: unknown preset.
    """
    return TrainConfig(preset=name, model=preset(name))


def updated(base: _T, values: Mapping[str, Any], where: str = "") -> _T:
    """A dataclass with the fields of a nested mapping replaced, types and names checked.

    Args:
      base: any of the configuration dataclasses.
      values: field -> value; nested mappings for nested dataclasses.
      where: prefix for messages.

    Returns:
      The new configuration.

    Raises:
      ValueError: an unknown field, or a value of the wrong type.

    >>> updated(TrainConfig(), {"seed": 3, "model": {"width": 96}}).model.width
    96
    """
    hints = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            close = difflib.get_close_matches(name, hints, 1)
            raise ValueError(f"{where}{name}: unknown key" + (f"; did you mean {close[0]}?" if close else ""))
        current = getattr(base, name)
        if dataclasses.is_dataclass(current) and not isinstance(current, type):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}{name}: must be a table, got {value!r}")
            changes[name] = updated(current, value, f"{where}{name}.")
        else:
            changes[name] = _checked(value, hints[name], where + name)
    return dataclasses.replace(base, **changes)  # type: ignore[type-var]


def _checked(value: Any, hint: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{where}: must be one of {', '.join(map(str, options))}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return _checked(value, next(option for option in options if option is not type(None)), where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: must be a list, got {value!r}")
        return tuple(_checked(entry, options[0], f"{where}[{i}]") for i, entry in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{where}: must be {hint.__name__}, got {value!r}")
    return value


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Fields that make `new` another run than `old`, as `name: old -> new`.

    Args:
      old: the configuration a run folder holds.
      new: the one asked for.

    Returns:
      One line per field; empty when `new` may continue `old`.

    >>> differences(TrainConfig(seed=1, steps=5), TrainConfig(seed=2, steps=9))
    ['seed: 1 -> 2']
    """

    def flat(config: Any, prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in config.items():
            path = prefix + name
            if path not in _FREE_ON_RESUME:
                out.update(flat(value, path + ".") if isinstance(value, dict) else {path: value})
        return out

    before, after = flat(dataclasses.asdict(old)), flat(dataclasses.asdict(new))
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
