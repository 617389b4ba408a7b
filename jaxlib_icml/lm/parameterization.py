"""The rules of `jaxlib_icml.moe.parameterization` for the language model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.lm.loss import Batch, loss_fn
from jaxlib_icml.lm.transformer import Transformer, abstract_transformer, split_model
from jaxlib_icml.moe import BaseSpec, MoEShape, init_params, rules
from jaxlib_icml.moe.coord_check import Probe, moe_activations

__all__ = ["moe_shape", "parameterized", "transformer_probe"]


def moe_shape(config: LMConfig) -> MoEShape:
    """The sizes that the rules look at; a dense model has one expert, always active.

    Args:
      config: The architecture.

    Returns:
      Its sizes.

    Raises:
      ValueError: Heads whose size does not divide the width.

    >>> moe_shape(LMConfig(num_experts=8, expert_width=256)).kappa
    0.25
    """
    experts = config.num_experts > 0
    return MoEShape(
        width=config.width,
        num_layers=config.num_layers,
        expert_width=config.resolved_expert_width if experts else config.resolved_mlp_width,
        num_experts=config.num_experts or 1,
        num_active=config.num_active_experts if experts else 1,
        head_dim=config.resolved_head_dim,
        vocab_size=config.vocab_size,
        context=config.context_length,
        shared_expert_width=config.shared_expert_width if experts else 0,
    )


def parameterized(config: LMConfig, base: BaseSpec, scheme: str = "moe_mup") -> LMConfig:
    """The architecture with the factors that the rules put into the forward pass, and the paper's experts.

    Experts get the sigmoid gate, and balance by selection biases alone; factors replace what `config` has.

    Args:
      config: The architecture.
      base: The tuned model.
      scheme: As in `jaxlib_icml.moe.rules`.

    Returns:
      The new architecture.

    Raises:
      ValueError: Attention by L2A, whose routers no rule is known for; what `jaxlib_icml.moe.rules` refuses.

    >>> config = LMConfig(num_layers=4, num_experts=4, num_active_experts=1)
    >>> new = parameterized(config, BaseSpec(moe_shape(config)))
    >>> new.residual_scale, new.attention_scale, new.moe_gate
    (0.25, 0.03125, 'sigmoid')
    """
    if config.attention != "full":
        raise ValueError(f"attention: no rule is known for {config.attention}")
    table = rules(base, moe_shape(config), scheme)
    return dataclasses.replace(
        config,
        residual_scale=table["expert_down"].fwd_mult,
        attention_scale=None if scheme == "sp" else 1 / config.resolved_head_dim,
        logit_scale=table["unembedding"].fwd_mult,
        moe_gate="sigmoid",
        moe_balance="bias",
    )


def transformer_probe(config: LMConfig, base: BaseSpec, scheme: str = "moe_mup") -> Probe:
    """The language model for `jaxlib_icml.moe.coord_check`.

    Args:
      config: Any architecture of the family; the rules' factors are put in.
      base: The tuned model.
      scheme: As in `jaxlib_icml.moe.rules`.

    Returns:
      A probe whose batches are those of `jaxlib_icml.lm.loss.loss_fn`. It watches the router's logits, the experts'
      pre-activations and outputs (all experts; stacked over layers), the stream and the logits.
    """
    shape, config = moe_shape(config), parameterized(config, base, scheme)
    graphdef, abstract, abstract_rest = split_model(abstract_transformer(config))

    def init(key: Array) -> tuple[Any, Any]:
        rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_rest)
        return init_params(abstract, key, base, shape, scheme=scheme), rest

    def loss(params: Any, rest: Any, batch: Batch) -> tuple[Array, Any]:
        value, aux = loss_fn(graphdef, nnx.merge_state(params, rest), batch)
        if aux.routing is None:
            return value, rest
        model = nnx.merge(graphdef, *jax.lax.stop_gradient((params, rest)))
        model.update_expert_biases(jax.lax.stop_gradient(aux.routing.load))
        return value, split_model(model)[2]

    def activations(params: Any, rest: Any, batch: Batch) -> dict[str, Array]:
        model: Transformer = nnx.merge(graphdef, params, rest)
        out = model(batch["tokens"], capture=("residual", "attention_output", "mlp_output"))
        stream = out.activations
        found = {"stream": stream["residual"][-1] + stream["attention_output"][-1] + stream["mlp_output"][-1]}
        seen: dict[str, list[Array]] = {}
        for i in range(config.num_layers if config.num_experts else 0):
            block = _layer(model, i)
            tokens = block.mlp_norm(stream["residual"][i] + stream["attention_output"][i]).reshape(-1, config.width)
            for name, value in moe_activations(block.moe, tokens).items():
                seen.setdefault(name, []).append(value)
        return found | {name: jnp.stack(x) for name, x in seen.items()} | {"logits": model.logits(out.hidden)}

    return Probe(init, loss, activations)


def _layer(model: Transformer, i: int) -> Any:
    if not model.config.scan_layers:
        return model.layers[i]
    graphdef, state = nnx.split(model.layers)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[i], state))
