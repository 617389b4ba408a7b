"""One optimizer update against Optax: OLion against Muon, GradientStabilizer against clipping, `gram` against `ns`.

The tree is GPT-2 small's (12 layers of width 768 with fused query-key-value kernels, vocabulary 50,257), float32, on
this machine's CPU. Muon is `optax.contrib.muon(consistent_rms=0.2)` with embeddings left to Adam, as in OLion. Memory
and state are what the compiler and the state tree report; compile times are of a 48-layer tree of width 64.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks.protocol import Benchmark, BenchmarkOutcome, Target
from experiments.benchmarks.timing import PairedTimes, Ratio, paired_times
from experiments.context import Context
from experiments.protocol import at_least, at_most
from jaxlib_icml.optim import gradient_stabilizer, olion, orthogonalize

Tree = dict[str, Any]
RATE = 1e-3


def _gpt2(layers: int, width: int, vocab: int, context: int, *, fused: bool = True) -> Tree:
    """Random parameters or gradients with GPT-2's shapes; separate query, key and value kernels unless `fused`."""
    rng = np.random.default_rng(0)

    def linear(rows: int, columns: int) -> Tree:
        kernel = 0.02 * rng.standard_normal((rows, columns), np.float32)
        return {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(kernel[0])}

    def norm() -> Tree:
        return {"scale": jnp.ones(width), "bias": jnp.full(width, 0.01)}

    tree: Tree = {}
    for i in range(layers):
        names = {"qkv": 3 * width} if fused else dict.fromkeys("qkv", width)
        tree[f"layer{i}"] = {
            "attention_norm": norm(),
            "attention": {name: linear(width, size) for name, size in names.items()} | {"proj": linear(width, width)},
            "mlp_norm": norm(),
            "mlp": {"up": linear(width, 4 * width), "down": linear(4 * width, width)},
        }
    for name, size in (("wte", vocab), ("wpe", context)):
        if size:
            tree[name] = linear(size, width)["kernel"]
    return tree


def _muon(params: Tree) -> optax.GradientTransformation:
    def numbers(path: Any, x: jax.Array) -> Any:
        embedding = str(path[0].key) in ("wte", "wpe")
        return None if x.ndim < 2 or embedding else optax.contrib.MuonDimensionNumbers()

    dimensions = jax.tree.map_with_path(numbers, params)
    return optax.contrib.muon(
        RATE, consistent_rms=0.2, muon_weight_dimension_numbers=dimensions, weight_decay=0.1, adam_weight_decay=0.1
    )


def _compile(tx: optax.GradientTransformation, params: Tree) -> tuple[Callable[[], Any], float, jax.stages.Compiled]:
    """The update as a function of no arguments, the seconds its compilation took, and the program."""
    state = tx.init(params)
    lowered = jax.jit(tx.update).lower(params, state, params)
    start = time.perf_counter()
    compiled = lowered.compile()
    return functools.partial(compiled, params, state, params), time.perf_counter() - start, compiled


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    return getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _exact(value: float) -> Ratio:
    return Ratio(value, value, value)


def run(context: Context) -> BenchmarkOutcome:
    smoke = context.scale == "smoke"
    ratios: dict[str, Ratio] = {}
    times: dict[str, PairedTimes] = {}
    data: dict[str, Any] = {}

    def compare(case: str, functions: dict[str, Callable[[], Any]], repeats: int) -> Ratio:
        """Time of the first function over that of the second, paired by round."""
        repeats = 2 if smoke else repeats
        with context.progress(case, total=repeats) as bar:
            times[case] = paired_times(functions, repeats=repeats, warmup=1, on_round=lambda _: bar.advance())
        ours, theirs = functions
        return times[case].speedup(theirs, over=ours)

    params = _gpt2(1, 32, 50, 16) if smoke else _gpt2(12, 768, 50257, 1024)
    ours, _, program = _compile(olion(RATE), params)
    theirs, _, peer = _compile(_muon(params), params)
    ratios["gpt2"] = compare("gpt2", {"OLion": ours, "Muon": theirs}, repeats=7)
    group = sum(layer["mlp"]["up"]["kernel"].nbytes for name, layer in params.items() if name.startswith("layer"))
    data["temporary bytes"] = {"OLion": _temporary_bytes(program), "Muon": _temporary_bytes(peer)}
    ratios["temporary"] = _exact(_temporary_bytes(program) / group)
    ratios["state"] = _exact(_bytes(olion(RATE).init(params)) / _bytes(_muon(params).init(params)))

    clip, _, _ = _compile(optax.clip_by_global_norm(1.0), params)
    stabilizer, _, _ = _compile(gradient_stabilizer(), params)
    ratios["stabilizer"] = compare("stabilizer", {"GradientStabilizer": stabilizer, "clipping": clip}, repeats=41)

    small = _gpt2(1, 32, 0, 0, fused=False) if smoke else _gpt2(6, 384, 0, 0, fused=False)
    ratios["six_layers"] = compare(
        "six_layers", {"OLion": _compile(olion(RATE), small)[0], "Muon": _compile(_muon(small), small)[0]}, repeats=15
    )

    for aspect in (4, 8):
        x = jax.random.normal(jax.random.key(0), (16, 16 * aspect) if smoke else (256, 256 * aspect))
        methods: dict[str, Callable[[], Any]] = {
            method: functools.partial(jax.jit(functools.partial(orthogonalize, method=method)), x)
            for method in ("ns", "gram")
        }
        ratios[f"gram_{aspect}"] = compare(f"gram_{aspect}", methods, repeats=41)

    deep = _gpt2(2 if smoke else 48, 64, 0, 0)
    seconds = {
        name: [_compile(tx, deep)[1] for _ in range(1 if smoke else 3)]
        for name, tx in (("OLion", olion(RATE)), ("Muon", _muon(deep)))
    }
    data["compile seconds"] = seconds
    ratios["compile"] = _exact(float(np.median(np.divide(seconds["OLion"], seconds["Muon"]))))
    return BenchmarkOutcome(ratios, times, data=data)


BENCHMARK = Benchmark(
    name="optimizers",
    title="One optimizer update against Optax (GPT-2 small's parameters, CPU, float32)",
    targets=(
        Target("gpt2", "OLion: time over optax.contrib.muon", at_most(0.5)),
        Target("six_layers", "the same, 6 layers of width 384, separate q, k, v", at_most(0.6)),
        Target("temporary", "OLion: temporary memory over its largest group of equal shapes", at_most(2.0)),
        Target("state", "OLion: bytes of state over optax.contrib.muon's", at_most(1.0)),
        Target("stabilizer", "GradientStabilizer: time over optax.clip_by_global_norm", at_most(1.05)),
        Target("gram_4", "`gram` over `ns`, speed, 256 x 1024", at_least(1.4)),
        Target("gram_8", "`gram` over `ns`, speed, 256 x 2048", at_least(2.0)),
        Target("compile", "OLion: compile time over optax.contrib.muon, 48 layers", at_most(1.0)),
    ),
    run=run,
)
