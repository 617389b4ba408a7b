"""Reading and editing activations inside the transformer.

`model(tokens, capture=("residual",))` also returns the named activations of all layers, `model(tokens,
edits={"mlp_output": Edit(keep=0.0)})` changes them on their way. What is captured is part of the program; edits are
data, so that one compiled program serves a whole sweep over edits (ablations, steering vectors, patches from another
run). Without either, the program is the one that knows nothing of hooks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

HOOK_POINTS = {
    "residual": "(layers, batch, seq, width), the residual stream that enters each block",
    "attention_pattern": "(layers, batch, heads, seq, keys), attention weights; costs memory quadratic in seq",
    "routing_probability": "(layers, batch, seq), how likely L2A lets each token attend globally; edited, it decides",
    "head_output": "(layers, batch, seq, heads, head_dim), each head's mixture of values",
    "attention_output": "(layers, batch, seq, width), what attention adds to the residual stream",
    "mlp_output": "(layers, batch, seq, width), what the feed-forward or the experts add to it",
}
"""Names of activations and their shapes when captured."""


class Edit(NamedTuple):
    """A change of one kind of activation: value * keep + add.

    `keep` and `add` are scalars, or arrays with a leading axis of size layers whose other axes broadcast against the
    activation (its shape is in `HOOK_POINTS`): `Edit(keep=mask)` with a mask of shape (layers, heads, 1) silences
    heads at "head_output"; `Edit(keep=0.0, add=other)` puts the activations of another run in place.
    """

    keep: Any = 1.0
    add: Any = 0.0


class Tap:
    """The hooks of one layer: edits what passes and remembers what is captured, as edited."""

    def __init__(self, capture: Sequence[str], edits: Mapping[str, Edit]):
        self._capture, self._edits = capture, edits
        self.captured: dict[str, Array] = {}

    def wants(self, name: str) -> bool:
        """Whether anybody reads or edits the activation."""
        return name in self._capture or name in self._edits

    def __call__(self, name: str, value: Float[Array, "..."]) -> Float[Array, "..."]:
        """The activation, edited."""
        if name in self._edits:
            keep, add = self._edits[name]
            edited = value * keep + add
            if edited.shape != value.shape:
                raise ValueError(f"edits: {name} has shape {value.shape} in a layer, the edit makes it {edited.shape}")
            value = edited.astype(value.dtype)
        if name in self._capture:
            self.captured[name] = value
        return value


def stacked_edits(edits: Mapping[str, Edit], capture: Sequence[str], num_layers: int) -> dict[str, Edit]:
    """Edits with a leading layer axis everywhere.

    Args:
      edits: by name of the activation.
      capture: names to capture.
      num_layers: size of the leading axis.

    Returns:
      The same edits, float32 arrays.

    Raises:
      ValueError: an unknown name, or an array whose first axis is not the layers.

    >>> stacked_edits({"residual": Edit(keep=0.5)}, (), 3)["residual"].keep.shape
    (3,)
    """
    for argument, names in (("capture", capture), ("edits", edits)):
        unknown = [name for name in names if name not in HOOK_POINTS]
        if unknown:
            raise ValueError(f"{argument}: unknown activation {unknown[0]!r}; there are {', '.join(HOOK_POINTS)}")

    for name, edit in edits.items():
        if not isinstance(edit, Edit):
            raise ValueError(f"edits: {name} must be an Edit, got {type(edit).__name__}")

    def stack(name: str, field: str, value: Any) -> Array:
        array = jnp.asarray(value, jnp.float32)
        if array.ndim == 0:
            return jnp.broadcast_to(array, (num_layers,))
        if array.shape[0] != num_layers:
            raise ValueError(
                f"edits: {field} of {name} must be a scalar or have {num_layers} layers in its first axis, "
                f"got shape {array.shape}"
            )
        return array

    return {
        name: Edit(*(stack(name, field, getattr(edit, field)) for field in Edit._fields))
        for name, edit in edits.items()
    }
