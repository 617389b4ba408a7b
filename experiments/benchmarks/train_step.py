"""One training step of a dense decoder, ours against the same model in PyTorch on the same CPU.

Width 256, 4 layers, 8 heads of 32, SwiGLU of 704, 2048 tokens of vocabulary, 8 x 256 tokens, float32, AdamW. PyTorch
runs eager and compiled; the faster one is the peer. Peak memory is the growth of resident memory over three steps in a
process of its own, counted from before the parameters exist (for us: after compilation; for PyTorch: eager).
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.peers import import_torch
from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import Ratio, paired_times
from experiments.context import Context
from experiments.protocol import at_least, at_most

BATCH, SEQ, VOCAB, WIDTH, LAYERS, HEADS, HIDDEN = 8, 256, 2048, 256, 4, 8, 704
LEARNING_RATE = 1e-3


def _tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ + 1))


def make_ours() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns (build, step): `build` makes the parameters; `step` trains once and returns the loss."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxlib_icml.lm import LMConfig
    from jaxlib_icml.training.mesh import make_mesh
    from jaxlib_icml.training.step import make_train_program

    config = LMConfig(
        vocab_size=VOCAB,
        context_length=SEQ,
        width=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        mlp_width=HIDDEN,
    )
    program = make_train_program(config, lambda rate: optax.adamw(rate, b2=0.95), make_mesh())
    tokens = _tokens()
    batch = {
        "tokens": jnp.asarray(tokens[:, :-1], jnp.int32),
        "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
    }
    rate = jnp.float32(LEARNING_RATE)
    step = program.step.lower(program.abstract, batch, rate).compile()
    init = program.init.lower(jax.random.key(0)).compile()
    state: Any = None

    def build() -> Any:
        nonlocal state
        state = init(jax.random.key(0))
        return jax.block_until_ready(state)

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch, rate)
        return float(metrics.loss)

    return build, run


def make_torch(compiled: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same in PyTorch."""
    torch = import_torch()
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
            self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            q, k, v = self.qkv(self.norm1(x)).view(BATCH, SEQ, 3, HEADS, -1).unbind(2)
            q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(BATCH, SEQ, WIDTH))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            half = WIDTH // HEADS // 2
            angles = torch.arange(SEQ)[:, None] * 10000.0 ** (-torch.arange(half) / half)
            self.register_buffer("cos", angles.cos()[:, None])
            self.register_buffer("sin", angles.sin()[:, None])

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB), targets.reshape(-1))

    tokens = torch.as_tensor(_tokens())
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model: Any = None
    optimizer: Any = None
    forward: Any = None

    def build() -> Any:
        nonlocal model, optimizer, forward
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=1e-4, fused=True
        )
        forward = torch.compile(model) if compiled else model

    def run() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return build, run


def run(context: Context) -> BenchmarkOutcome:
    """Time the three in one process, then the memory of ours and PyTorch's in two."""
    steps: dict[str, Callable[[], Any]] = {}
    makers = {
        "ours": make_ours,
        "torch eager": lambda: make_torch(False),
        "torch compiled": lambda: make_torch(True),
    }
    first_losses = {}
    for name, maker in makers.items():
        context.log(f"compiling: {name}")
        build, step = maker()
        build()
        first_losses[name] = step()
        steps[name] = step
    times = paired_times(steps, repeats=context.pick(smoke=3, laptop=21, full=41))
    peer = min(("torch eager", "torch compiled"), key=times.median)
    peaks = {name: _peak_bytes(name) for name in ("ours", "torch")}
    ratio = peaks["ours"] / peaks["torch"]
    return BenchmarkOutcome(
        {"speed": times.speedup("ours", over=peer), "memory": Ratio(ratio, ratio, ratio)},
        times,
        data={
            "tokens_per_step": BATCH * SEQ,
            "peak_bytes": peaks,
            "peer": peer,
            "first_losses": first_losses,
        },
        notes=(f"The peer is {peer}, the faster of the two.",),
    )


def _peak_bytes(which: str) -> int:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "experiments.benchmarks.train_step", which]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def _measure_memory(which: str) -> None:
    build, step = make_ours() if which == "ours" else make_torch(False)
    before = _status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    build()
    for _ in range(3):
        step()
    print(json.dumps({"peak_bytes": 1024 * (_status_kib("VmHWM") - before)}))


BENCHMARK = Benchmark(
    name="train_step",
    title="One training step of a dense decoder against PyTorch on the same CPU (float32, 8 x 256 tokens)",
    targets=(
        Target(
            "speed",
            "our tokens per second over PyTorch's, eager or compiled, whichever is faster",
            at_least(1.0),
            goal="1.3",
        ),
        Target("memory", "our peak memory over PyTorch's", at_most(1.0)),
    ),
    run=run,
)

if __name__ == "__main__":
    _measure_memory(sys.argv[1])
