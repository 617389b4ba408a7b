"""Models that somebody else trained: reading and writing their checkpoints.

Reads Hugging Face folders (`config.json`, safetensors) and GGUF files of the families in `families.py`, one tensor
after the other, so that memory holds the model and one tensor more; writes Hugging Face folders. Files are not trusted
(`safetensors`, `gguf`), and nothing is fetched from anywhere unless the path says so (`hf://owner/name`).
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from jaxlib_icml.lm.config import LMConfig
from jaxlib_icml.lm.families import (
    Row,
    config_from_gguf,
    config_from_hub,
    config_to_hub,
    family_of,
    gguf_rows,
    hub_rows,
)
from jaxlib_icml.lm.gguf import GGUFFile, unpermute_rotary
from jaxlib_icml.lm.hub_tokenizer import HubTokenizer
from jaxlib_icml.lm.safetensors import open_checkpoint, write_checkpoint
from jaxlib_icml.lm.tokenizer import ByteTokenizer, Tokenizer, byte_alphabet
from jaxlib_icml.lm.transformer import abstract_transformer
from jaxlib_icml.nn import state_shardings

__all__ = [
    "PretrainedModel",
    "as_hub_tokenizer",
    "export_model",
    "is_pretrained",
    "load_pretrained",
    "pretrained_config",
]

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 1 << 24
_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer_info.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
# Buffers that older checkpoints carry along, and heads of models whose head is the embedding.
_IGNORED_ENDS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_EXPORT_DTYPES = ("float32", "bfloat16", "float16")

Path_ = tuple[str | int, ...]
Read = Callable[[str], np.ndarray]


class PretrainedModel(NamedTuple):
    """A model and its tokenizer, ready for `generate`."""

    config: LMConfig
    tokenizer: HubTokenizer
    graphdef: nnx.GraphDef
    state: nnx.State
    family: str


def is_pretrained(path: str | os.PathLike[str]) -> bool:
    """Whether the path looks like something that `load_pretrained` reads.

    Args:
      path: a folder or a file.

    Returns:
      True for `hf://` paths, GGUF and safetensors files, folders whose `config.json` has a `model_type`, and those
      with GGUF files and no `config.json`.

    >>> is_pretrained("no/such/folder")
    False
    """
    if str(path).startswith("hf://"):
        return True
    place = Path(path)
    if place.is_dir():
        file = place / _CONFIG
        return "model_type" in _read_json(file) if file.is_file() else _has_gguf(place)
    return place.is_file() and place.suffix in (".gguf", ".safetensors")


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    param_dtype: Any = jnp.float32,
    dtype: str = "auto",
    scan_layers: bool = False,
    context_length: int | None = None,
    check_finite: bool = True,
    follow_symlinks: bool = False,
) -> PretrainedModel:
    """Read a model that somebody else trained.

    Args:
      path: a folder with `config.json`, `tokenizer.json` and safetensors files; a GGUF file, or a folder with one in
        it; or `hf://owner/name[@revision]`, which the package huggingface_hub downloads into its cache.
      mesh: put every parameter straight where its logical axes belong; None: on the default device.
      param_dtype: dtype of the parameters; matrix products happen in `dtype` whatever this is.
      dtype: `LMConfig.dtype` of the result.
      scan_layers: stack the layers (one compiled block however deep the model).
      context_length: a shorter context than the model's own; None: its own.
      check_finite: refuse NaN and infinite values.
      follow_symlinks: accept links out of the folder (as in the cache of huggingface_hub, whose paths do not need it).

    Returns:
      `PretrainedModel`.

    Raises:
      ValueError: a file is missing, damaged or does not fit its configuration, or the architecture is not one of
        `FAMILIES`; the message names file and tensor.
      ImportError: an optional package is missing; the message says which extra to install.
    """
    if str(path).startswith("hf://"):
        path, follow_symlinks = _download(str(path)), True
    place = Path(path)
    if not place.exists():
        raise ValueError(f"{place}: does not exist")
    if not jnp.issubdtype(param_dtype, jnp.floating):
        raise ValueError(f"param_dtype: must be a floating-point dtype, got {param_dtype}")
    source = _open_gguf(place) if _has_gguf(place) else _open_hub(place, check_finite, follow_symlinks)
    config = dataclasses.replace(source.config, dtype=dtype, scan_layers=scan_layers)  # type: ignore[arg-type]
    if context_length is not None:
        if type(context_length) is not int or not 1 <= context_length <= config.context_length:
            raise ValueError(f"context_length: must be between 1 and {config.context_length}, got {context_length}")
        config = dataclasses.replace(config, context_length=context_length)
    tokenizer = source.read_tokenizer()
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"{place}: the tokenizer has {tokenizer.vocab_size} ids, the model only {config.vocab_size}")
    graphdef, state = _load_state(source, config, mesh, np.dtype(param_dtype))
    return PretrainedModel(config, tokenizer, graphdef, state, source.family)


def pretrained_config(path: str | os.PathLike[str]) -> LMConfig:
    """The architecture of a model that somebody else trained, without its weights.

    Args:
      path: as for `load_pretrained`.

    Returns:
      The configuration.

    Raises:
      ValueError: as for `load_pretrained`.
    """
    place = _download(str(path)) if str(path).startswith("hf://") else Path(path)
    return (_open_gguf(place) if _has_gguf(place) else _open_hub(place, True, str(path).startswith("hf://"))).config


class _Source(NamedTuple):
    """An opened checkpoint: what it is, what it has, and how to read it."""

    where: str
    family: str
    config: LMConfig
    read_tokenizer: Callable[[], HubTokenizer]
    shapes: dict[str, tuple[int, ...]]
    """Of all tensors, by name."""
    read: Read
    is_mapped: bool
    """Whether `read` returns views, which cost no memory."""


def _open_hub(place: Path, check_finite: bool, follow_symlinks: bool) -> _Source:
    folder = place if place.is_dir() else place.parent
    if not (folder / _CONFIG).is_file():
        raise ValueError(f"{place}: no GGUF file, and no {_CONFIG} in {folder}")
    for name in (_CONFIG, *_SIDE_FILES):
        file = folder / name
        if not follow_symlinks and file.is_symlink() and file.resolve().parent != folder.resolve():
            raise ValueError(f"{file}: is a link out of its folder; follow_symlinks=True accepts it")
    values = _read_json(folder / _CONFIG)
    where = str(folder / _CONFIG)
    config, family = config_from_hub(values, where), family_of(values, where)
    checkpoint = open_checkpoint(place, follow_symlinks=follow_symlinks)
    # GPT-2's own files name their tensors as if the model were nothing but its body.
    prefix = "transformer." if "wte.weight" in checkpoint.names() else ""
    shapes = {prefix + name: checkpoint.info(name).shape for name in checkpoint.names()}
    read_any = checkpoint.read_finite if check_finite else checkpoint.read
    read_tokenizer = partial(HubTokenizer.from_folder, folder)
    return _Source(
        str(place), family, config, read_tokenizer, shapes, lambda name: read_any(name.removeprefix(prefix)), True
    )


def _has_gguf(place: Path) -> bool:
    return (place.suffix == ".gguf" and place.is_file()) or (
        place.is_dir() and not (place / _CONFIG).exists() and any(place.glob("*.gguf"))
    )


def _open_gguf(place: Path) -> _Source:
    if place.is_dir():
        files = sorted(place.glob("*.gguf"))
        if len(files) > 1:
            raise ValueError(f"{place}: has {len(files)} GGUF files; name one of them")
        (place,) = files
    file = GGUFFile(place)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    family, config = config_from_gguf(file.metadata, shapes, str(place))
    if shapes.pop("rope_freqs.weight", None) is not None:
        config = _llama3_scaling(config, file.read("rope_freqs.weight"), str(place))
    read_tokenizer = partial(HubTokenizer.from_gguf, file.metadata)
    return _Source(str(place), family, config, read_tokenizer, shapes, file.read, False)


def _llama3_scaling(config: LMConfig, divisors: np.ndarray, where: str) -> LMConfig:
    """GGUF files spell the scaling of Llama 3.1 out; it must be the published one, for some factor."""
    scaled = dataclasses.replace(
        config, rope_scaling="llama3", rope_factor=float(divisors.max()), rope_original_context=8192
    )
    half = config.resolved_head_dim // 2
    plain = config.rope_theta ** (-np.arange(half) / half)
    scaling = scaled.resolved_rope_scaling
    assert scaling is not None
    if divisors.shape != (half,) or not np.allclose(plain / divisors, scaling.frequencies(plain, 0.0), rtol=1e-3):
        raise ValueError(f"{where}: rope_freqs.weight is not the rotary scaling of Llama 3.1")
    return scaled


def _load_state(
    source: _Source, config: LMConfig, mesh: Mesh | None, param_dtype: np.dtype
) -> tuple[nnx.GraphDef, nnx.State]:
    """Fill the parameters one by one, once all shapes are known to be right."""
    rows = _by_parameter(_checked_rows(source), config.scan_layers)
    graphdef, abstract = nnx.split(abstract_transformer(config))
    flat, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    shardings: list[Any] = [SingleDeviceSharding(jax.devices()[0])] * len(flat)
    if mesh is not None:
        shardings = jax.tree.leaves(state_shardings(abstract, mesh))
    for path, leaf in flat:
        if _key(path)[-1] != "expert_bias":
            for row in rows[_key(path)]:
                _check_shapes(source, row, leaf.shape[1:] if _is_stacked(row, config) else leaf.shape)

    def load(entry: tuple[Any, Any], sharding: Any) -> jax.Array:
        path, leaf = entry
        key = _key(path)
        if key[-1] == "expert_bias":
            host = np.zeros(leaf.shape, leaf.dtype)
        else:
            host = np.empty(leaf.shape, param_dtype)
            _read_parameter(source, rows[key], host, config)
        return jax.make_array_from_callback(leaf.shape, sharding, host.__getitem__)

    if mesh is not None or not source.is_mapped:  # one tensor at a time, besides the model
        return graphdef, jax.tree.unflatten(treedef, map(load, flat, shardings))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return graphdef, jax.tree.unflatten(treedef, pool.map(load, flat, shardings))


def _by_parameter(rows: Sequence[Row], scan_layers: bool) -> dict[Path_, list[Row]]:
    """Rows by path; the layers of one parameter together where they are stacked."""
    found: dict[Path_, list[Row]] = {}
    for row in rows:
        stacked = scan_layers and row.path[0] == "layers"
        found.setdefault((row.path[0], *row.path[2:]) if stacked else row.path, []).append(row)
    return found


def _key(path: tuple[Any, ...]) -> Path_:
    """A parameter's path without the attribute that holds a variable's array."""
    parts = [getattr(entry, "key", getattr(entry, "idx", None)) for entry in path]
    return tuple(part for part in parts if part is not None)


def _is_stacked(row: Row, config: LMConfig) -> bool:
    return config.scan_layers and row.path[0] == "layers"


def _checked_rows(source: _Source) -> list[Row]:
    """The rows of the family, all of whose tensors are there, and no others."""
    config = source.config
    # Before anything is made of numbers that a file only claims.
    longest = max((max(shape, default=0) for shape in source.shapes.values()), default=0)
    hidden = config.resolved_expert_width if config.num_experts else config.resolved_mlp_width
    claims = {
        "num_layers": (config.num_layers, len(source.shapes)),
        "num_experts": (config.num_experts, longest),
        "vocab_size": (config.vocab_size, longest),
        "width": (config.width, longest),
        "mlp_width": (hidden, longest),
        "num_heads x head_dim": (config.num_heads * config.resolved_head_dim, longest),
    }
    for field, (claim, limit) in claims.items():
        if claim > limit:
            raise ValueError(f"{source.where}: {field} is {claim}, more than any tensor there has room for")
    rows = list((hub_rows if source.is_mapped else gguf_rows)(source.family, config))
    wanted = {name for row in rows for name in row.names}
    missing = sorted(wanted - source.shapes.keys())
    if missing:
        raise ValueError(f"{source.where}: lacks {len(missing)} tensors, such as {', '.join(missing[:3])}")
    known = {"lm_head.weight", "output.weight"} if config.tie_embeddings else set()
    unknown = sorted(name for name in source.shapes.keys() - wanted - known if not name.endswith(_IGNORED_ENDS))
    if unknown:
        raise ValueError(
            f"{source.where}: has {len(unknown)} tensors that {source.family} does not, such as "
            f"{', '.join(unknown[:3])}"
        )
    return rows


def _check_shapes(source: _Source, row: Row, shape: tuple[int, ...]) -> None:
    """The tensors of a parameter (of one layer) against its shape."""
    flat = _matrix_shape(row, shape[1:] if len(row.names) > 1 else shape)
    expected = (*flat[:-2], *flat[-2:][::-1]) if row.transposed else (*flat[:-1], flat[-1] * row.part[1])
    for name in row.names:
        given = source.shapes[name]
        if row.path[0] == "position_embed" and given[0] > expected[0]:
            given = (expected[0], *given[1:])  # a shorter context
        if given != expected:
            raise ValueError(f"{source.where}: tensor {name} must have shape {expected}, got {source.shapes[name]}")


def _read_parameter(source: _Source, rows: list[Row], out: np.ndarray, config: LMConfig) -> None:
    """One parameter, (layers, ...) of several rows."""
    for row, target in zip(rows, out if _is_stacked(rows[0], config) else [out], strict=True):
        if len(row.names) > 1:
            for name, expert in zip(row.names, target, strict=True):
                _copy(source, row, name, expert, config)
        else:
            _copy(source, row, row.names[0], target, config)


def _copy(source: _Source, row: Row, name: str, target: np.ndarray, config: LMConfig) -> None:
    """Put one tensor of the file where it belongs."""
    array = source.read(name)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise ValueError(
            f"{source.where}: tensor {name} has dtype {array.dtype}, not floating point of 16 bits or more"
        )
    flat, (part, parts) = _matrix_shape(row, target.shape), row.part
    if row.rotated != "no":
        heads = config.num_heads if row.rotated == "query" else config.resolved_num_kv_heads
        array = unpermute_rotary(array, heads)
    if row.path[0] == "position_embed":
        array = array[: target.shape[0]]
    array = array[..., part * flat[-1] : (part + 1) * flat[-1]] if parts > 1 else array
    narrower = array.dtype.itemsize > target.dtype.itemsize
    with np.errstate(over="ignore"):
        _assign(target.reshape(flat), array.swapaxes(-1, -2) if row.transposed else array)
    if narrower and not np.isfinite(target.astype(np.float32, copy=False)).all():
        raise ValueError(f"{source.where}: tensor {name} holds values too large for {target.dtype}")


def _matrix_shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...]:
    """(in, out) of a matrix, (experts, in, out) of a stack, the size of a vector."""
    if row.path[-1] in ("bias", "scale"):
        return (math.prod(shape),)
    if row.path[-1] == "embedding" or (row.path[2:4] == ("moe", "experts") and len(shape) == 3):
        return shape
    inputs = 2 if row.path[-2] == "out" else 1
    return math.prod(shape[:inputs]), math.prod(shape[inputs:])


def _assign(target: np.ndarray, array: np.ndarray, block: int = 64) -> None:
    """target[...] = array, in blocks that stay in cache while a transposed array is read along its rows."""
    if array.flags.c_contiguous or array.ndim < 2:
        target[...] = array
        return
    for start in range(0, array.shape[-2], block):
        target[..., start : start + block, :] = array[..., start : start + block, :]


def export_model(
    folder: str | os.PathLike[str],
    config: LMConfig,
    state: nnx.State,
    tokenizer: Tokenizer,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> str:
    """Write a model as a Hugging Face folder, which `transformers` and `load_pretrained` read.

    Args:
      folder: where to; made if missing.
      config: the architecture; it must be that of one of `FAMILIES`.
      state: all variables of the model.
      tokenizer: its tokenizer.
      dtype: "float32", "bfloat16" or "float16".
      max_shard_bytes: size of a safetensors file at most.
      overwrite: replace a checkpoint that is there.

    Returns:
      The family that the files belong to.

    Raises:
      ValueError: no family has this architecture (the message names the field), experts with selection biases,
        non-finite parameters, or a folder that is not empty (with `overwrite`: that holds no checkpoint either).
    """
    if dtype not in _EXPORT_DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(_EXPORT_DTYPES)}, got {dtype!r}")
    values = config_to_hub(config)
    family = values["model_type"]
    arrays = {_key(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
    for path, leaf in arrays.items():
        if path[-1] == "expert_bias" and bool(jnp.any(leaf != 0)):
            raise ValueError("state: the experts' selection biases are not zero, and no family has them")
    place, hub_tokenizer = Path(folder), as_hub_tokenizer(tokenizer)
    _make_way(place, overwrite)
    write_checkpoint(
        place,
        _tensors(family, config, arrays, jnp.dtype(dtype)),
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )
    hub_tokenizer.save(place)
    ids = {"eos_token_id": hub_tokenizer.eos_id}
    if hub_tokenizer.bos_id is not None:
        ids["bos_token_id"] = hub_tokenizer.bos_id
    stops = {**ids, "eos_token_id": list(hub_tokenizer.stop_ids)}
    # The configuration last: without it the folder is no model.
    for name, content in (("generation_config.json", stops), (_CONFIG, {**values, **ids, "torch_dtype": dtype})):
        temporary = place / f".{name}.tmp"
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.replace(place / name)
    return str(family)


def _make_way(place: Path, overwrite: bool) -> None:
    """Refuse to write among other things; of an earlier checkpoint, remove everything but the weights."""
    if not place.exists():
        return
    if not place.is_dir():
        raise ValueError(f"folder: {place} is not a folder")
    if not any(place.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"folder: {place} is not empty; overwrite=True replaces a checkpoint there")
    begun = any(place.glob("*.safetensors")) and not (place / _CONFIG).exists()
    if (place / "checkpoints").exists() or not (begun or is_pretrained(place)):
        raise ValueError(f"folder: {place} holds something else than a checkpoint")
    for name in (_CONFIG, *_SIDE_FILES):
        (place / name).unlink(missing_ok=True)


def _tensors(
    family: str, config: LMConfig, arrays: dict[Path_, Any], dtype: np.dtype
) -> Iterator[tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]]:
    """Name, shape, dtype and contents of every tensor; contents are made when they are asked for."""
    by_name: dict[str, list[tuple[Row, int | None]]] = {}
    for row in hub_rows(family, config):
        for i, name in enumerate(row.names):
            by_name.setdefault(name, []).append((row, i if len(row.names) > 1 else None))

    def array_of(row: Row, expert: int | None) -> Any:
        if config.scan_layers and row.path[0] == "layers":
            array = arrays[(row.path[0], *row.path[2:])][row.path[1]]
        else:
            array = arrays[row.path]
        array = array if expert is None else array[expert]
        array = array.reshape(_matrix_shape(row, array.shape))
        return array.swapaxes(-1, -2) if row.transposed else array

    for name, parts in by_name.items():
        shapes = [jax.eval_shape(lambda row=row, i=i: array_of(row, i)).shape for row, i in parts]
        shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

        def contents(parts: list[tuple[Row, int | None]] = parts) -> np.ndarray:
            pieces = [np.asarray(array_of(row, i)) for row, i in parts]
            return np.concatenate(pieces, axis=-1).astype(dtype) if len(pieces) > 1 else pieces[0].astype(dtype)

        yield name, shape, dtype, contents


def as_hub_tokenizer(tokenizer: Tokenizer) -> HubTokenizer:
    """The tokenizer of a run in the form that published models have, with the same ids.

    Args:
      tokenizer: any tokenizer of this package.

    Returns:
      Its equal; the document boundary becomes the control token "<|endoftext|>".

    Raises:
      ValueError: the vocabulary has a token of that name.

    >>> as_hub_tokenizer(ByteTokenizer()).encode("né").tolist()
    [110, 195, 169]
    """
    if isinstance(tokenizer, HubTokenizer):
        return tokenizer
    boundary = {"id": tokenizer.eos_id, "content": "<|endoftext|>", "special": True, "normalized": False}
    boundary |= {"single_word": False, "lstrip": False, "rstrip": False}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(folder)
        if isinstance(tokenizer, ByteTokenizer):
            vocabulary = {sign: value for value, sign in enumerate(byte_alphabet())}
            level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            data: dict[str, Any] = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
            data |= {"pre_tokenizer": level, "decoder": level}
        else:
            data = _read_json(folder / "tokenizer.json")
        data["added_tokens"] = [boundary]
        (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
        names = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
        return HubTokenizer.from_folder(folder)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise ValueError(f"{file}: not a regular file")
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"{file}: too large for a configuration")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror or error})") from error
    except RecursionError:
        raise ValueError(f"{file}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise error if str(error).startswith(str(file)) else ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: must hold an object, got {type(values).__name__}")
    return values


def _download(path: str) -> Path:
    """Fetch what `load_pretrained` reads from huggingface.co; a later call finds it in the cache."""
    name, _, revision = path.removeprefix("hf://").partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(f"path: must be hf://owner/name[@revision], got {path!r}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError("hf:// paths need the package huggingface_hub: pip install 'jaxlib-icml[lm]'") from error
    patterns = ["*.safetensors", "*.json", "*.jinja", "merges.txt"]
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # of many kinds, depending on what failed where
        raise ValueError(f"{path}: cannot be downloaded ({type(error).__name__}: {error})") from error
