"""A model that somebody else trained: loading, prompts and generation against transformers with PyTorch.

SmolLM2-135M-Instruct in float32 on this machine's CPU. Loading is `load_pretrained` of a safetensors folder, tokenizer
and checks of every value included, against reading the bytes of the files into memory and against `from_pretrained`
of the same folder; all of it lies in the page cache. `prefill` is the first new token after a prompt of 512 random
tokens, `generate` is 64 tokens after a prompt of 16, both greedy and through `generate` on either side.
"""

import functools
import gc
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.benchmarks.peers import import_torch, import_transformers, smollm2
from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import paired_times
from experiments.context import Context
from experiments.protocol import at_least, at_most
from jaxlib_icml.lm import LMConfig, Sampling, Transformer, generate
from jaxlib_icml.lm.hub import PretrainedModel, export_model, load_pretrained
from jaxlib_icml.lm.tokenizer import ByteTokenizer

SMALL = LMConfig(vocab_size=257, context_length=64, width=32, num_layers=2, num_heads=4)
GREEDY = Sampling(temperature=0.0)


def _folder(context: Context) -> Path:
    """The model as a safetensors folder, in float32."""
    folder = context.scratch / "model"
    if context.scale == "smoke":
        export_model(folder, SMALL, nnx.split(Transformer(SMALL, rngs=nnx.Rngs(0)))[1], ByteTokenizer())
    else:
        model = load_pretrained(smollm2())
        export_model(folder, model.config, model.state, model.tokenizer)
    return folder


def _generate(model: PretrainedModel, prompt: np.ndarray, tokens: int) -> Any:
    lengths = np.array([prompt.shape[1]])
    return generate(
        model.graphdef, model.state, prompt, lengths, jax.random.key(0), max_new_tokens=tokens, sampling=GREEDY
    )


def run(context: Context) -> BenchmarkOutcome:
    """Time loading, then prompts and generation."""
    torch, transformers = import_torch(), import_transformers()
    torch.set_num_threads(os.cpu_count())
    folder = _folder(context)
    prompt_tokens, new_tokens = context.pick(smoke=(16, 4), laptop=(512, 64), full=(512, 64))
    repeats = context.pick(smoke=2, laptop=11, full=21)
    times = {}

    def read() -> Any:
        return [np.fromfile(file, np.uint8) for file in sorted(folder.glob("*.safetensors"))]

    def ours() -> PretrainedModel:
        return load_pretrained(folder, dtype="float32")

    def theirs() -> Any:
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return peer.eval(), transformers.AutoTokenizer.from_pretrained(folder)

    loading = {
        "bytes": lambda: read() and gc.collect(),
        "ours": lambda: jax.block_until_ready(ours().state) and gc.collect(),
        "transformers": lambda: theirs() and gc.collect(),
    }
    times["load"] = paired_times(loading, repeats=repeats, warmup=1)

    model, (peer, _) = ours(), theirs()
    prompt = np.random.default_rng(0).integers(0, model.tokenizer.vocab_size - 20, (1, prompt_tokens))

    @torch.no_grad()
    def peer_generate(beginning: np.ndarray, tokens: int) -> Any:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        mask = torch.tensor(np.ones_like(beginning))
        return peer.generate(torch.tensor(beginning), attention_mask=mask, **options)

    for case, beginning, tokens in (("prefill", prompt, 1), ("generate", prompt[:, :16], new_tokens)):
        sides = {
            "ours": functools.partial(_generate, model, beginning, tokens),
            "transformers": functools.partial(peer_generate, beginning, tokens),
        }
        times[case] = paired_times(sides, repeats=repeats, warmup=1)

    with torch.no_grad():
        wanted = peer(torch.tensor(prompt)).logits[0].numpy()

    @jax.jit
    def logits(state: nnx.State) -> jax.Array:
        net = nnx.merge(model.graphdef, state)
        return net.logits(net(jnp.asarray(prompt, jnp.int32)).hidden)

    done = {"prefill": prompt_tokens, "generate": new_tokens}
    return BenchmarkOutcome(
        {
            "load": times["load"].speedup("bytes", over="ours"),
            "load_peer": times["load"].speedup("ours", over="transformers"),
            "prefill": times["prefill"].speedup("ours", over="transformers"),
            "generate": times["generate"].speedup("ours", over="transformers"),
        },
        times,
        data={
            "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            "prompt_tokens": prompt_tokens,
            "tokens_per_second": {
                case: {name: tokens / times[case].median(name) for name in times[case].seconds}
                for case, tokens in done.items()
            },
            "largest_difference_of_logits": float(np.abs(logits(model.state)[0] - wanted).max()),
        },
    )


BENCHMARK = Benchmark(
    name="real_model",
    title="SmolLM2-135M against transformers with PyTorch (CPU, float32)",
    targets=(
        Target("load", "time to load the model over time to read its bytes", at_most(1.2)),
        Target("load_peer", "loading, speed over transformers", at_least(1.0)),
        Target("prefill", "first token after a prompt of 512, speed over transformers", at_least(1.0)),
        Target("generate", "tokens per second of generation over transformers", at_least(1.0)),
    ),
    run=run,
)
