"""An independent mixture of experts, one token at a time in float64, and layers to compare it with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlib_icml.moe import ExpertBias, SparseMoE

WIDTH, HIDDEN, EXPERTS = 12, 20, 6


def _gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def _softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def _feed_forward(x, kernels):
    up = x @ kernels["up"]
    hidden = x @ kernels["gate"] / (1 + np.exp(-(x @ kernels["gate"]))) * up if "gate" in kernels else _gelu(up)
    return hidden @ kernels["down"]


@dataclasses.dataclass
class Oracle:
    """Outputs and per-token routing of the loop; `tree` holds float64 copies of the layer's arrays."""

    gate: str
    combine: str
    num_active: int

    def route(self, x, tree):
        router, bias = tree["router"]["kernel"], tree["expert_bias"]
        if self.gate == "cosine":
            logits = 10.0 * (x @ router) / (np.linalg.norm(x) * np.linalg.norm(router, axis=0))
        else:
            logits = x @ router
        squashed = 1 / (1 + np.exp(-logits)) if self.gate == "sigmoid" else _softmax(logits)
        score = (logits if self.gate == "cosine" else squashed) + bias
        chosen = sorted(range(len(score)), key=lambda i: (-score[i], i))[: self.num_active]
        total = sum(squashed[i] for i in chosen)
        weights = {}
        for i in chosen:
            if self.combine == "soft":
                weights[i] = self.num_active * squashed[i] / total
                continue
            value = {"sigmoid": squashed[i], "softmax": squashed[i], "softmax_renorm": squashed[i] / total}
            weights[i] = value.get(self.gate, 1.0) / (self.num_active if self.combine == "mean" else 1)
        return logits, squashed / squashed.sum(), weights

    def __call__(self, xs, tree):
        out = np.zeros_like(xs)
        for t, x in enumerate(xs):
            for i, weight in self.route(x, tree)[2].items():
                kernels = {name: matrix["kernel"][i] for name, matrix in tree["experts"].items()}
                out[t] += weight * _feed_forward(x, kernels)
            if "shared" in tree:
                out[t] += _feed_forward(x, {name: matrix["kernel"] for name, matrix in tree["shared"].items()})
        return out


def _numpy_tree(layer):
    pure = nnx.to_pure_dict(nnx.state(layer))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), pure)


def _layer(path="blocked", num_active=2, **options):
    options = {"block_size": 8, "activation": "swiglu"} | options
    return SparseMoE(WIDTH, HIDDEN, EXPERTS, num_active, path=path, rngs=nnx.Rngs(3), **options)


def _tokens(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), (*shape, WIDTH))


_apply = nnx.jit(lambda layer, x: layer(x)[0])
_route = nnx.jit(lambda layer, x: layer.route(x))


def _value_and_grads(layer):
    """A function of (layer, x, token_mask): output, statistics, gradients of a generic loss."""
    graph = nnx.graphdef(layer)

    @jax.jit
    def run(params, rest, x, token_mask):
        def loss(params, x):
            y, stats = nnx.merge(graph, params, rest)(x, token_mask=token_mask)
            return jnp.sum(jnp.sin(y)) + 0.3 * stats.aux_loss + 0.1 * stats.z_loss, (y, stats)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def call(layer, x, token_mask=None):
        (_, (y, stats)), grads = run(nnx.state(layer, nnx.Param), nnx.state(layer, ExpertBias), x, token_mask)
        return y, stats, jax.tree.map(jnp.asarray, nnx.to_pure_dict(grads[0])), grads[1]

    return call
