"""The command `icml`: train, generate, eval, import, prune, grow, export, info.

A mistake of the caller is one line on standard error and exit code 2; a traceback means a bug.
"""

import contextlib
import dataclasses
import difflib
import io
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import numpy as np

    from jaxlib_icml.lm import Sampling
    from jaxlib_icml.lm.tokenizer import Tokenizer
    from jaxlib_icml.training.config import TrainConfig

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continue prompts with a run, or with a model that somebody else trained."""

    model: str
    """Folder of a run, a Hugging Face folder, a GGUF file, or hf://owner/name."""
    prompt: tuple[str, ...] = ("",)
    """One or more prompts; empty: start a new document."""
    chat: bool = False
    """Each prompt is a user's message, put into the model's chat template; print the reply only."""
    system: str | None = None
    """With --chat: the system message."""
    max_new_tokens: int = 200
    """Tokens to add at most; fewer when the context or the document ends."""
    temperature: float = 0.8
    """Divides the logits; 0: always the likeliest token."""
    top_k: int | None = None
    """Only the k likeliest tokens; None: all."""
    top_p: float | None = None
    """Only the likeliest tokens with at least this total probability; None: all."""
    seed: int = 0
    """The same seed gives the same text."""

    def sampling(self) -> "Sampling":
        """The sampling options."""
        from jaxlib_icml.lm import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Perplexity and bits per byte of a text under a run, or a model that somebody else trained."""

    model: str
    """Folder of a run, a Hugging Face folder, a GGUF file, or hf://owner/name."""
    data: str | None = None
    """File, folder, glob or JSONL file, all of it; None: the held-out part of the run's own corpus."""
    context_length: int | None = None
    """Tokens per row; None: the model's context, at most 1024 for other people's models."""
    batch_size: int = 16
    """Sequences per forward pass."""
    text_field: str = "text"
    """Field of JSONL lines that holds the text."""


@dataclasses.dataclass(frozen=True)
class ImportConfig:
    """Turn a model that somebody else trained into a run folder."""

    path: str
    """A Hugging Face folder, a GGUF file, or hf://owner/name."""
    run_dir: str | None = None
    """The new folder; None: one under runs/ with the model's name."""


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Write a run as a Hugging Face folder."""

    run: str
    """Folder of the run, or any model that `icml generate` takes."""
    out: str | None = None
    """The folder to write; None: `safetensors` in the run's folder."""
    format: Literal["safetensors"] = "safetensors"
    """Kind of checkpoint."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the tensors."""
    max_shard_bytes: int = 5_000_000_000
    """Size of one file at most."""
    overwrite: bool = False
    """Replace a checkpoint that is there."""


@dataclasses.dataclass(frozen=True)
class PruneConfig:
    """Take the global attention away from the L2A layers that hardly use it, for a smaller cache."""

    run: str
    """Folder of a run trained with --attention l2a."""
    out: str
    """The new folder, a run with the same weights."""
    data: str | None = None
    """File, folder, glob or JSONL file on which usage is measured; None: what the run held out."""
    eps: float = 0.02
    """Layers that route at most this share of the tokens may go."""
    max_drop: float = 0.5
    """Largest share of the layers that go."""


@dataclasses.dataclass(frozen=True)
class GrowConfig:
    """Make a run's model deeper, and its experts more, to go on training with train --resume."""

    run: str
    """Folder of a run; it stays as it is."""
    out: str
    """The new folder."""
    depth_factor: int = 2
    """Copies of a layer, itself included."""
    expert_factor: int = 2
    """How many experts stand where one was, in all and active; 1 for dense models."""
    noise: float = 0.01
    """Noise of new experts, relative to the weights."""
    method: Literal["interpose", "stack", "interpose_zero"] = "interpose"
    """Copies follow their layer; or the whole sequence again; or copies that write nothing until they are trained."""
    policy: Literal["reset", "copy", "scale"] = "reset"
    """The optimizer's state begins anew, goes with the weights, or is scaled to the gradients of copied experts."""
    steps: int | None = None
    """Steps of the training to come, the first hundredth of them warm-up; None: as the old run has it."""
    seed: int = 0
    """Of the noise."""


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
            raise ValueError(f"unknown command {args[0]!r}{_closest(args[0], list(_COMMANDS))}; try: icml --help")
        return _COMMANDS[args[0]][0](args[1:])
    except (ValueError, ImportError, OSError) as error:
        print(f"icml: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("icml: interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: icml COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "icml COMMAND --help lists the options of a command.",
        ]
    )


def _closest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _parse(kind: type[_T], args: list[str], prog: str, default: Any = None) -> _T:
    """Flags to a dataclass by tyro, with every complaint as one line."""
    try:
        import tyro
    except ImportError as error:
        raise ImportError("the command line needs the package tyro: pip install 'jaxlib-icml[lm]'") from error
    if {"-h", "--help"} & set(args):
        tyro.cli(kind, args=args, prog=prog, default=default)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            return tyro.cli(kind, args=args, prog=prog, default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
        text = " ".join(complaint.getvalue().translate(str.maketrans("╭╮╰╯│─", "      ")).split())
        text = text.removeprefix("Unrecognized options").removeprefix("Parsing error").removeprefix("Required options")
        raise ValueError(f"{text.split(' For full helptext')[0].strip()} (see {prog} --help)") from None


def _option(args: list[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE`, before the real parse."""
    for i, arg in enumerate(args):
        if arg == name and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith(name + "="):
            return arg.partition("=")[2]
    return None


def _train_defaults(args: list[str]) -> tuple["TrainConfig", list[str]]:
    """Preset, then the TOML file; the remaining flags go on top."""
    from jaxlib_icml.training.config import updated, with_preset

    file = _option(args, "--config")
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
    resumed = _option(args, "--resume")
    if resumed is not None:
        return _resume_defaults(resumed, args, values)
    name = _option(args, "--preset") or values.get("preset", "tiny-moe")
    if not isinstance(name, str):
        raise ValueError(f"preset: must be a name, got {name!r}")
    default = with_preset(name)
    source = _option(args, "--init-from") or values.get("init_from")
    if isinstance(source, str):
        from jaxlib_icml.training.runs import has_checkpoint, model_of, read_config

        run_dir = Path(_option(args, "--run-dir") or values.get("run_dir") or "")
        # A run that has saved its own weights goes on without the model that it began with.
        goes_on = has_checkpoint(run_dir) and (run_dir / "config.json").is_file()
        default = dataclasses.replace(default, model=read_config(run_dir).model if goes_on else model_of(source))
    base = _option(args, "--base") or values.get("base")
    if isinstance(base, str):
        from jaxlib_icml.training.transfer import with_base

        default = with_base(default, base)
    return updated(default, {**values, "preset": name}), args


def _resume_defaults(run: str, args: list[str], values: dict[str, Any]) -> tuple["TrainConfig", list[str]]:
    """The configuration of the run, with the TOML file on top; the remaining flags go above both."""
    from jaxlib_icml.training.config import updated
    from jaxlib_icml.training.runs import read_config

    if _option(args, "--run-dir") is not None:
        raise ValueError("run_dir, resume: give one of them, not both")
    default = dataclasses.replace(read_config(Path(run)), run_dir=run)
    # Whatever ended the run before gives way to what is asked for now.
    if "steps" in values or _option(args, "--steps") is not None:
        default = dataclasses.replace(default, minutes=None)
    if "minutes" in values or _option(args, "--minutes") is not None:
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
    config = _parse(TrainConfig, args, "icml train", default)
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
    config = _parse(GenerateConfig, _positional(args, "model"), "icml generate")
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
    config = _parse(EvalConfig, _positional(args, "model"), "icml eval")
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
    config = _parse(ImportConfig, _positional(args, "path"), "icml import")
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
    config = _parse(ExportConfig, _positional(args, "run"), "icml export")
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
    config = _parse(PruneConfig, _positional(args, "run"), "icml prune")
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
    config = _parse(GrowConfig, _positional(args, "run"), "icml grow")
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


def _positional(args: list[str], name: str) -> list[str]:
    """Let the first argument be a value instead of `--name VALUE`."""
    if args and not args[0].startswith("-"):
        return [f"--{name}", *args]
    return args


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
    "export": (_export, "write a run as a Hugging Face folder"),
    "info": (_info, "devices, versions and presets"),
}

if __name__ == "__main__":
    sys.exit(main())
