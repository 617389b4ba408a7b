"""The command `icml`: train, generate, eval, import, prune, grow, convert-moe, export, info.

A mistake of the caller is one line on standard error and exit code 2; a traceback means a bug.
"""

import dataclasses
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlib_icml.cli_options import (
    ConvertConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    GrowConfig,
    ImportConfig,
    PruneConfig,
    closest,
    option,
    parse,
    positional,
)

if TYPE_CHECKING:
    import numpy as np

    from jaxlib_icml.lm.tokenizer import Tokenizer
    from jaxlib_icml.training.config import TrainConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; None: `sys.argv[1:]`.

    Returns:
      The exit code: 0, 2 for a mistake of the caller, 130 when interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    try:
        if args[0] not in _COMMANDS:
            raise ValueError(f"unknown command {args[0]!r}{closest(args[0], list(_COMMANDS))}; try: icml --help")
        return _COMMANDS[args[0]][0](args[1:])
    except (ValueError, ImportError, OSError) as error:
        print(f"icml: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("icml: interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"  {name:<13}{text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: icml COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "icml COMMAND --help lists the options of a command.",
        ]
    )


def _train_defaults(args: list[str]) -> tuple["TrainConfig", list[str]]:
    """Preset, then the TOML file; the remaining flags go on top."""
    from jaxlib_icml.training.config import updated, with_preset

    file = option(args, "--config")
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"config: cannot read {file} ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"config: {file} is not valid TOML: {error}") from error
        where = [i for i, arg in enumerate(args) if arg == "--config" or arg.startswith("--config=")]
        drop = {j for i in where for j in ((i,) if "=" in args[i] else (i, i + 1))}
        args = [arg for i, arg in enumerate(args) if i not in drop]
    resumed = option(args, "--resume")
    if resumed is not None:
        return _resume_defaults(resumed, args, values)
    name = option(args, "--preset") or values.get("preset", "tiny-moe")
    if not isinstance(name, str):
        raise ValueError(f"preset: must be a name, got {name!r}")
    default = with_preset(name)
    source = option(args, "--init-from") or values.get("init_from")
    if isinstance(source, str):
        from jaxlib_icml.training.runs import has_checkpoint, model_of, read_config

        run_dir = Path(option(args, "--run-dir") or values.get("run_dir") or "")
        # A run that has saved its own weights goes on without the model that it began with.
        goes_on = has_checkpoint(run_dir) and (run_dir / "config.json").is_file()
        default = dataclasses.replace(default, model=read_config(run_dir).model if goes_on else model_of(source))
    base = option(args, "--base") or values.get("base")
    if isinstance(base, str):
        from jaxlib_icml.training.transfer import with_base

        default = with_base(default, base)
    return updated(default, {**values, "preset": name}), args


def _resume_defaults(run: str, args: list[str], values: dict[str, Any]) -> tuple["TrainConfig", list[str]]:
    """The configuration of the run, with the TOML file on top; the remaining flags go above both."""
    from jaxlib_icml.training.config import updated
    from jaxlib_icml.training.runs import read_config

    if option(args, "--run-dir") is not None:
        raise ValueError("run_dir, resume: give one of them, not both")
    # The run holds its base model itself; the file that it came from may be gone.
    default = dataclasses.replace(read_config(Path(run)), run_dir=run, base=None)
    # Whatever ended the run before gives way to what is asked for now.
    if "steps" in values or option(args, "--steps") is not None:
        default = dataclasses.replace(default, minutes=None)
    if "minutes" in values or option(args, "--minutes") is not None:
        default = dataclasses.replace(default, steps=None)
    at = next(i for i, arg in enumerate(args) if arg.partition("=")[0] == "--resume")
    return updated(default, values), args[:at] + args[at + (1 if "=" in args[at] else 2) :]


def _train(args: list[str]) -> int:
    from jaxlib_icml.training.config import TrainConfig
    from jaxlib_icml.training.loop import Interrupted, train
    from jaxlib_icml.training.progress import make_reporter

    args = [f"--model.{arg[2:]}" if arg.partition("=")[0] == "--attention" else arg for arg in args]
    if {"-h", "--help"} & set(args):
        print("--attention KIND is short for --model.attention KIND.")
        print("--resume RUN continues a run with its own options; others may be given on top, such as --steps.\n")
    default, args = _train_defaults(args)
    config = parse(TrainConfig, args, "icml train", default)
    try:
        result = train(config, make_reporter())
    except Interrupted as stop:
        print(f"icml: {stop}", file=sys.stderr)
        return 130
    print(f"\nheld-out text   {result.held_out_bits_per_byte:.3f} bits per byte after {result.steps} steps")
    for order, bits in result.ngram_bits_per_byte.items():
        verdict = "beaten" if result.held_out_bits_per_byte < bits else "not beaten"
        print(f"byte {order}-gram     {bits:.3f} bits per byte ({verdict})")
    if result.skipped_steps:
        print(f"{result.skipped_steps} steps were skipped: their gradients were not finite")
    if result.samples:
        print(f"\na sample:\n{'-' * 80}\n{result.samples[0].strip()}\n{'-' * 80}")
    print(f"\nrun folder      {result.run_dir} (loss.png, samples.txt, metrics.jsonl, checkpoints)")
    print(f'next            icml generate {result.run_dir} --prompt "def main("')
    print(f"                icml eval {result.run_dir} --data PATH")
    return 0


def _generate(args: list[str]) -> int:
    config = parse(GenerateConfig, positional(args, "model"), "icml generate")
    import jax
    import numpy as np

    from jaxlib_icml.lm import cache_bytes, generate, pad_prompts
    from jaxlib_icml.training.runs import load_model

    sampling = config.sampling()
    if config.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: must be at least 1, got {config.max_new_tokens}")
    if not -(2**63) <= config.seed < 2**63:
        raise ValueError("seed: must fit into 64 bits")
    if config.system is not None and not config.chat:
        raise ValueError("system: needs --chat")
    run = load_model(config.model)
    prompts = _prompts(config, run.tokenizer)
    longest = max(len(prompt) for prompt in prompts)
    if longest >= run.config.context_length:
        raise ValueError(
            f"prompt: {longest} tokens leave no room in the model's context of {run.config.context_length}"
        )
    tokens, lengths = pad_prompts(prompts)
    out = generate(
        run.graphdef,
        run.state,
        tokens,
        lengths,
        jax.random.key(config.seed),
        max_new_tokens=min(config.max_new_tokens, run.config.context_length - longest),
        sampling=sampling,
        stop_tokens=getattr(run.tokenizer, "stop_ids", (run.tokenizer.eos_id,)),
    )
    for prompt, new, length in zip(prompts, np.asarray(out.tokens), np.asarray(out.lengths), strict=True):
        if len(prompts) > 1:
            print("-" * 80)
        ids = new[:length] if config.chat else np.concatenate([prompt, new[:length]])
        print(run.tokenizer.decode(ids[ids < run.tokenizer.vocab_size]))  # a model may have rows to spare
    if run.config.attention == "l2a":
        longest += int(np.asarray(out.lengths).max())
        held, everything = cache_bytes(run.config, longest)
        saved = f"{100 * (1 - held / everything):.0f} % less than the {everything} of all layers"
        print(f"KV cache: {held} bytes for {longest} tokens, {saved}", file=sys.stderr)
    return 0


def _prompts(config: GenerateConfig, tokenizer: "Tokenizer") -> list["np.ndarray"]:
    import numpy as np

    if config.chat:
        from jaxlib_icml.lm.chat import Message, render_chat
        from jaxlib_icml.lm.hub_tokenizer import HubTokenizer

        if not isinstance(tokenizer, HubTokenizer):
            raise ValueError("chat: the model's tokenizer has no chat tokens")
        system = [] if config.system is None else [Message("system", config.system)]
        return [render_chat(tokenizer, [*system, Message("user", text)]) for text in config.prompt]
    start = np.array([tokenizer.start_id], np.int32)
    texts = tokenizer.encode_batch(config.prompt)
    return [np.concatenate([start, ids]) if tokenizer.starts_prompts or not len(ids) else ids for ids in texts]


def _eval(args: list[str]) -> int:
    config = parse(EvalConfig, positional(args, "model"), "icml eval")
    import math

    from jaxlib_icml.lm.hub import is_pretrained
    from jaxlib_icml.training.corpus import load_corpus
    from jaxlib_icml.training.data import bits_per_byte
    from jaxlib_icml.training.evaluate import total_nats
    from jaxlib_icml.training.runs import load_model, read_config

    run = load_model(config.model)
    if config.data is None:
        if is_pretrained(config.model):
            raise ValueError("data: name a text; only a run has held-out text of its own")
        trained = read_config(Path(config.model))
        documents = load_corpus(
            trained.data, held_out_fraction=trained.held_out_fraction, text_field=trained.text_field
        ).held_out
        if not documents:
            raise ValueError("data: the run held nothing out; name a text")
    else:
        documents = load_corpus(config.data, held_out_fraction=0.0, text_field=config.text_field).train
    longest = min(run.config.context_length, 1024) if is_pretrained(config.model) else run.config.context_length
    nats, targets = total_nats(
        run.graphdef,
        run.state,
        run.tokenizer.encode_batch([document.text for document in documents]),
        eos_id=run.tokenizer.eos_id,
        start_id=run.tokenizer.start_id,
        batch_size=config.batch_size,
        seq_len=longest if config.context_length is None else config.context_length,
    )
    num_bytes = sum(document.num_bytes for document in documents)
    print(f"text            {len(documents)} documents, {num_bytes} bytes, {targets} tokens")
    per_token = nats / targets
    print(f"perplexity      {math.exp(per_token) if per_token < 700 else math.inf:.3f} per token")
    print(f"bits per byte   {bits_per_byte(nats, num_bytes):.4f}")
    return 0


def _import(args: list[str]) -> int:
    config = parse(ImportConfig, positional(args, "path"), "icml import")
    import jax

    from jaxlib_icml.training.runs import import_model

    run_dir = config.run_dir or str(Path("runs") / Path(config.path).stem)
    model = import_model(config.path, run_dir)
    parameters = sum(x.size for x in jax.tree.leaves(model.state))
    print(
        f"model           {parameters / 1e6:.2f} M parameters, {model.config.num_layers} layers, "
        f"context {model.config.context_length}"
    )
    print(f"run folder      {run_dir}")
    print(f"next            icml generate {run_dir} --prompt TEXT")
    print(f"                icml train --init-from {run_dir} --data PATH")
    return 0


def _export(args: list[str]) -> int:
    config = parse(ExportConfig, positional(args, "run"), "icml export")
    from jaxlib_icml.lm.hub import export_model
    from jaxlib_icml.training.runs import load_model

    if config.out is None and not Path(config.run, "checkpoints").is_dir():
        raise ValueError(f"out: name the folder to write; {config.run} is no run's folder")
    out = config.out or str(Path(config.run) / "safetensors")
    run = load_model(config.run)
    family = export_model(
        out,
        run.config,
        run.state,
        run.tokenizer,
        dtype=config.dtype,
        max_shard_bytes=config.max_shard_bytes,
        overwrite=config.overwrite,
    )
    print(f"written         {out} ({family}, {config.dtype})")
    return 0


def _prune(args: list[str]) -> int:
    config = parse(PruneConfig, positional(args, "run"), "icml prune")
    from jaxlib_icml.lm import cache_bytes
    from jaxlib_icml.training.pruning import prune_run

    model, usage = prune_run(config.run, config.out, data=config.data, eps=config.eps, max_drop=config.max_drop)
    for layer, used in enumerate(usage):
        verdict = "pruned" if layer in model.config.pruned_layers else ""
        print(f"layer {layer:<9} {100 * used:6.2f} % of the tokens routed  {verdict}".rstrip())
    context = model.config.context_length
    held, everything = cache_bytes(model.config, context)
    print(f"KV cache        {held} bytes for {context} tokens instead of {everything}")
    print(f"run folder      {config.out}")
    return 0


def _grow(args: list[str]) -> int:
    config = parse(GrowConfig, positional(args, "run"), "icml grow")
    import jax

    from jaxlib_icml.lm.growth import active_parameters
    from jaxlib_icml.training.growing import grow_run

    model, report = grow_run(
        config.run,
        config.out,
        depth=config.depth_factor,
        width=config.expert_factor,
        noise=config.noise,
        method=config.method,
        seed=config.seed,
        policy=config.policy,
        steps=config.steps,
    )
    parameters = sum(x.size for x in jax.tree.leaves(model.state))
    print(
        f"model           {parameters / 1e6:.2f} M parameters, {active_parameters(model.config) / 1e6:.2f} M active, "
        f"{model.config.num_layers} layers, {model.config.num_experts} experts"
    )
    print(f"logits          differ by at most {report.largest_difference:.3g}")
    print(f"loss            {report.loss[0]:.4f} before, {report.loss[1]:.4f} after (nats per token of a sample)")
    print(
        f"largest step    {report.cliff[0]:.2f} before, {report.cliff[1]:.2f} after (mean steps between layers' norms)"
    )
    print(f"run folder      {config.out}")
    if report.continues:
        print(f"optimizer       {config.policy}; the data go on where {config.run} was")
    print(f"next            icml train {'--resume' if report.continues else '--init-from'} {config.out}")
    return 0


def _convert(args: list[str]) -> int:
    config = parse(ConvertConfig, positional(args, "run"), "icml convert-moe")
    from jaxlib_icml.moe.prism_convert import LayerReport
    from jaxlib_icml.moe.prism_moe import PrismConfig
    from jaxlib_icml.training.converting import convert_run

    prism = PrismConfig(config.shared_ratio, config.num_experts, config.num_active)

    def show(layer: int, report: LayerReport) -> None:
        errors = f"{report.shared_error:.3f} of the shared part, {report.cut_error:.3f} with experts"
        print(f"layer {layer:<9} error {errors}, {report.error:.3f} repaired; load entropy {report.entropy:.3f}")

    model, report = convert_run(
        config.run,
        config.out,
        prism,
        tokens=config.tokens,
        own_text=config.own_text,
        compensate=config.compensate,
        router_delta=config.router_delta,
        learning_rate=config.learning_rate,
        steps=config.steps,
        seed=config.seed,
        on_layer=show,
    )
    print(f"active          {100 * prism.active_share:.1f} % of the hidden units of {model.config.num_layers} layers")
    exact = f"{report.exact_difference:.3g} with all experts"
    print(f"logits          differ by at most {report.largest_difference:.3g}, {exact}")
    print(f"loss            {report.loss[0]:.4f} before, {report.loss[1]:.4f} after (nats per token of a sample)")
    print(f"run folder      {config.out}")
    print(f"next            icml train --resume {config.out}")
    return 0


def _info(args: list[str]) -> int:
    if args:
        raise ValueError(f"info takes no arguments, got {' '.join(args)}")
    from importlib.metadata import PackageNotFoundError, version

    import jax

    from jaxlib_icml.lm import PRESETS

    print("devices   " + ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()))
    print(f"python    {sys.version.split()[0]}")
    for package in (
        "jaxlib-icml",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "tokenizers",
    ):
        try:
            print(f"{package:<18}{version(package)}")
        except PackageNotFoundError:
            print(f"{package:<18}not installed")
    print("presets")
    for name, config in PRESETS.items():
        experts = f", {config.num_active_experts} of {config.num_experts} experts" if config.num_experts else ""
        print(
            f"  {name:<12}{config.num_layers} layers of width {config.width}, {config.num_heads} heads{experts}, "
            f"context {config.context_length}"
        )
    return 0


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train a language model, or continue a run"),
    "generate": (_generate, "continue prompts with a run or another model"),
    "eval": (_eval, "perplexity and bits per byte of a text"),
    "import": (_import, "make a run of a model that somebody else trained"),
    "prune": (_prune, "shrink the cache of a run with L2A: no global attention where it is hardly used"),
    "grow": (_grow, "make a run's model deeper, and its experts more, to go on training"),
    "convert-moe": (_convert, "cut a dense run's feed-forward blocks into experts"),
    "export": (_export, "write a run as a Hugging Face folder"),
    "info": (_info, "devices, versions and presets"),
}

if __name__ == "__main__":
    sys.exit(main())
