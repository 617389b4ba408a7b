"""What hyper-parameter transfer needs to know of a model: its sizes, and the tuned small model it starts from."""

import dataclasses
import math

OPTIMIZERS = ("adam", "adamw", "olion", "muon")


@dataclasses.dataclass(frozen=True)
class MoEShape:
    """Sizes of a mixture-of-experts transformer. A dense one has one expert, which is always active.

    Raises:
      ValueError: sizes below 1 or that do not fit one another; the message names the field.

    >>> MoEShape(width=64, num_layers=2, expert_width=128, num_experts=4, num_active=1).kappa
    0.25
    """

    width: int
    """n, width of the residual stream."""
    num_layers: int
    """L, number of blocks."""
    expert_width: int
    """m, hidden width of one expert."""
    num_experts: int
    """E, experts per layer."""
    num_active: int
    """a, experts per token."""
    head_dim: int = 64
    """d_h, size of an attention head, the same in every model of a family."""
    vocab_size: int = 257
    """Number of token ids."""
    context: int = 256
    """Longest sequence in tokens."""
    shared_expert_width: int = 0
    """Hidden width of an expert that every token uses; 0: none."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < (0 if field.name == "shared_expert_width" else 1):
                raise ValueError(f"{field.name}: must be at least 1, got {value}")
        if self.num_active > self.num_experts:
            raise ValueError(f"num_active: {self.num_active} experts per token of only {self.num_experts}")
        if self.width % self.head_dim:
            raise ValueError(f"head_dim: {self.head_dim} does not divide width {self.width}")

    @property
    def kappa(self) -> float:
        """κ = a / E, the share of the experts that a token uses."""
        return self.num_active / self.num_experts

    @property
    def alpha(self) -> float:
        """α = m / n, the relative width of an expert."""
        return self.expert_width / self.width


@dataclasses.dataclass(frozen=True)
class Constants:
    """Factors on initial standard deviations and learning rates that belong to the base model and travel with it.

    The defaults are the paper's (arXiv:2601.20205, App. D.1): without tuning them at the base, the load balance becomes
    unstable near the best learning rate.

    Raises:
      ValueError: a factor that is not positive.
    """

    value_std: float = 1 / 16
    """c_v, on the initial values' projection."""
    down_std: float = 1 / 4
    """c_d, on the experts' last matrices."""
    qkv_rate: float = 1 / 16
    """On the learning rate of the query, key and value projections."""
    router_rate: float = 1 / 16
    """On the router's learning rate."""
    down_rate: float = 1 / 16
    """On the learning rate of the experts' last matrices."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"constants.{field.name}: must be positive, got {value}")


UNIT_CONSTANTS = Constants(1.0, 1.0, 1.0, 1.0, 1.0)
"""No factors: all rules as the table has them."""


@dataclasses.dataclass(frozen=True)
class BaseSpec:
    """A tuned small model, from which all larger ones of its family take their hyper-parameters.

    Raises:
      ValueError: a number out of range; the message names the field.
    """

    shape: MoEShape
    """Its sizes."""
    learning_rate: float = 2**-6
    """η, the peak learning rate that was best for it."""
    eps: float = 1e-12
    """ε₀ of Adam."""
    weight_decay: float = 0.0
    """λ, decoupled weight decay."""
    embedding_std: float = 0.02
    """σ_e, standard deviation of the initial embeddings and of an untied unembedding."""
    router_exponent: float = 1.0
    """γ: the router starts with standard deviation n^-γ, 1/2 ≤ γ ≤ 1."""
    constants: Constants = Constants()
    """Factors of the base model."""
    optimizer: str = "adam"
    """What it was tuned with: adam, adamw, olion or muon."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "embedding_std"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}: must be positive, got {value}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay: must be at least 0, got {self.weight_decay}")
        if not 0.5 <= self.router_exponent <= 1:
            raise ValueError(f"router_exponent: must be in [1/2, 1], got {self.router_exponent}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
