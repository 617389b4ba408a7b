"""A dense decoder written with NumPy loops over heads, in float64: the tests' independent truth."""

import numpy as np


def rms_norm(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def rotate(x, theta):
    """x (seq, head_dim): pairs (i, i + half) turned by position times theta^(-2i/head_dim), as complex numbers."""
    seq, head_dim = x.shape
    half = head_dim // 2
    angle = np.arange(seq)[:, None] * theta ** (-2 * np.arange(half) / head_dim)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=1)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(x, p, config):
    head_dim = config.resolved_head_dim
    group = config.num_heads // config.resolved_num_kv_heads
    seq = len(x)
    out = np.zeros_like(x)
    for h in range(config.num_heads):
        q = x @ p["query"]["kernel"][:, h] + p["query"].get("bias", np.zeros((config.num_heads, head_dim)))[h]
        kv = h // group
        zeros = np.zeros((config.resolved_num_kv_heads, head_dim))
        k = x @ p["key"]["kernel"][:, kv] + p["key"].get("bias", zeros)[kv]
        v = x @ p["value"]["kernel"][:, kv] + p["value"].get("bias", zeros)[kv]
        if config.qk_norm:
            q = rms_norm(q, p["query_norm"]["scale"], config.norm_epsilon)
            k = rms_norm(k, p["key_norm"]["scale"], config.norm_epsilon)
        q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
        for t in range(seq):
            scores = k[: t + 1] @ q[t] / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[t] += (weights / weights.sum()) @ v[: t + 1] @ p["out"]["kernel"][h]
    return out


def logits(tokens, p, config):
    """tokens (seq,), p the model's parameters as a nested dict of float64 arrays."""
    x = p["embed"]["embedding"][tokens]
    for i in range(config.num_layers):
        layer = p["layers"][i]
        x = x + attention(
            rms_norm(x, layer["attention_norm"]["scale"], config.norm_epsilon), layer["attention"], config
        )
        y = rms_norm(x, layer["mlp_norm"]["scale"], config.norm_epsilon)
        mlp = layer["mlp"]
        hidden = y @ mlp["up"]["kernel"]
        hidden = silu(y @ mlp["gate"]["kernel"]) * hidden if config.activation == "swiglu" else gelu(hidden)
        x = x + hidden @ mlp["down"]["kernel"]
    x = rms_norm(x, p["final_norm"]["scale"], config.norm_epsilon)
    return x @ (p["embed"]["embedding"].T if config.tie_embeddings else p["head"]["kernel"])
