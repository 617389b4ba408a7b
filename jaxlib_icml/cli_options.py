"""The options of `icml`'s commands, as typed dataclasses, and how a command line becomes one."""

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from jaxlib_icml.lm import Sampling

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


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Cut a dense run's feed-forward blocks into a shared part and routed experts, without training."""

    run: str
    """Folder of a run with a dense model; it stays as it is."""
    out: str
    """The new folder."""
    shared_ratio: float = 0.25
    """Share of the hidden units that every token uses."""
    num_experts: int = 12
    """Routed experts."""
    num_active: int = 2
    """Experts per token."""
    tokens: int = 32768
    """Tokens to calibrate on."""
    own_text: bool = True
    """Measure activity on text of the model's own, instead of on the run's text."""
    compensate: bool = True
    """Repair what the cut has cost."""
    router_delta: int = 0
    """Hidden width of a learned correction of the routers; 0: none."""
    learning_rate: float | None = None
    """Peak learning rate of the training to come; None: a tenth of the old run's."""
    steps: int | None = None
    """Steps of the training to come; None: as the old run has it."""
    seed: int = 0
    """Of the model's own text."""


def closest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, 1)
    return f"; did you mean {close[0]}?" if close else ""


def parse(kind: type[_T], args: list[str], prog: str, default: Any = None) -> _T:
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


def option(args: list[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE`, before the real parse."""
    for i, arg in enumerate(args):
        if arg == name and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith(name + "="):
            return arg.partition("=")[2]
    return None


def positional(args: list[str], name: str) -> list[str]:
    """Let the first argument be a value instead of `--name VALUE`."""
    if args and not args[0].startswith("-"):
        return [f"--{name}", *args]
    return args
