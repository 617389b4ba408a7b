"""Run folders: who may write where, and loading what a run has learned."""

import dataclasses
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxlib_icml.lm import LMConfig, abstract_transformer, split_model
from jaxlib_icml.lm.tokenizer import Tokenizer, load_tokenizer
from jaxlib_icml.nn import state_shardings
from jaxlib_icml.training.checkpoints import Checkpointer, abstract_arrays, named_arrays
from jaxlib_icml.training.config import TrainConfig, differences, updated

CONFIG_FILE = "config.json"
_MAX_CONFIG_BYTES = 1 << 24


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Args:
      path: the file, replaced if it exists.
      text: its contents.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class RunFolder:
    """A run's folder, locked against a second process; a context manager.

    Entering makes the folder and its `config.json`, or checks that the folder holds the same run.

    Args:
      path: the folder.
      config: the run asked for.

    Raises:
      ValueError: on entering: the folder cannot be written, holds something else or another run, or is in use.
    """

    def __init__(self, path: Path, config: TrainConfig):
        self.path = path
        self.config = config
        self._lock: int | None = None
        self._created = False

    def __enter__(self) -> "RunFolder":
        try:
            self._created = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            others = [p.name for p in self.path.iterdir() if p.name != ".lock"]
            if others and CONFIG_FILE not in others:
                raise ValueError(f"run_dir: {self.path} is not empty and holds no run")
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(f"run_dir: cannot write {self.path} ({error.strerror or error})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._claim()
        except BlockingIOError as error:
            self.__exit__()
            raise ValueError(f"run_dir: {self.path} is in use by another process") from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove the folder of a run that could not start, unless it was there before."""
        if self._created:
            shutil.rmtree(self.path)

    def _claim(self) -> None:
        if (self.path / CONFIG_FILE).exists():
            changed = differences(read_config(self.path), self.config)
            if changed:
                raise ValueError(f"run_dir: {self.path} already holds another run ({'; '.join(changed)})")
        try:
            write_text(self.path / CONFIG_FILE, json.dumps(dataclasses.asdict(self.config), indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"run_dir: cannot write {self.path} ({error.strerror or error})") from error


def read_config(run_dir: Path) -> TrainConfig:
    """The configuration of a run.

    Args:
      run_dir: its folder.

    Returns:
      The configuration it was started with.

    Raises:
      ValueError: no run there, or a damaged file.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise ValueError(f"run: {run_dir} holds no run ({CONFIG_FILE} is missing)")
    return updated(TrainConfig(), read_object(run_dir / CONFIG_FILE, "run"))


def read_object(path: Path, argument: str) -> dict[str, Any]:
    """The object in a small JSON file.

    Args:
      path: the file.
      argument: what a complaint names.

    Returns:
      Its fields.

    Raises:
      ValueError: no such file, a file too large to be one, or something else in it.
    """
    if path.exists() and not (path.is_file() and path.stat().st_size <= _MAX_CONFIG_BYTES):
        raise ValueError(f"{argument}: {path} is not a configuration (no regular file, or too large)")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}: cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{argument}: {path} must hold an object")
    return values


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a run has saved anything whole yet.

    Args:
      run_dir: its folder.

    Returns:
      True once there is a checkpoint; unfinished ones have other names than their step.
    """
    return any(path.name.isdecimal() for path in (run_dir / "checkpoints").glob("*"))


class LoadedRun(NamedTuple):
    """A trained model: its configuration, tokenizer and pure `(graphdef, state)` view."""

    config: LMConfig
    tokenizer: Tokenizer
    graphdef: nnx.GraphDef
    state: nnx.State
    step: int


def load_run(run_dir: str | Path, *, mesh: Mesh | None = None, like: LMConfig | None = None) -> LoadedRun:
    """Load the newest checkpoint of a run.

    Args:
      run_dir: the folder that `icml train` or `icml import` wrote.
      mesh: put every parameter where its logical axes belong; None: on the default device.
      like: an architecture with the same parameters to use instead of the run's own, for example with a longer
        context; None: the run's. Where it has L2A and the run has not, the result has not either.

    Returns:
      `LoadedRun`.

    Raises:
      ValueError: no run or no checkpoint there, or files that do not fit one another.
    """
    run_dir = Path(run_dir)
    train_config = read_config(run_dir)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    like = _without_new_routers(like, train_config.model)
    config = model_config(train_config if like is None else dataclasses.replace(train_config, model=like), tokenizer)
    graphdef, params, rest = split_model(abstract_transformer(config))
    shardings: Any = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if mesh is not None:
        shardings = (state_shardings(params, mesh), state_shardings(rest, mesh))
    abstract = abstract_arrays((params, rest), shardings)
    if not (run_dir / "checkpoints").is_dir():
        raise ValueError(f"run: {run_dir} has no checkpoint yet")
    with Checkpointer(run_dir / "checkpoints") as checkpointer:
        step = checkpointer.latest_step
        if step is None:
            raise ValueError(f"run: {run_dir} has no checkpoint yet")
        params, rest = checkpointer.restore_model(step, abstract)
    return LoadedRun(config, tokenizer, graphdef, nnx.merge_state(params, rest), step)


def load_model(path: str | Path, *, mesh: Mesh | None = None, like: LMConfig | None = None) -> LoadedRun:
    """Load a run, or a model that somebody else trained.

    Args:
      path: a run's folder, or what `jaxlib_icml.lm.hub.load_pretrained` reads.
      mesh: put every parameter where its logical axes belong; None: on the default device.
      like: an architecture with the same parameters to use instead of the model's own; None: its own. Where it has L2A
        and the model has not, the result has not either.

    Returns:
      `LoadedRun`; `step` is 0 for other people's models.

    Raises:
      ValueError: nothing to load there, or files that do not fit one another.
    """
    from jaxlib_icml.lm.hub import is_pretrained, load_pretrained

    if not is_pretrained(path):
        return load_run(path, mesh=mesh, like=like)
    model = load_pretrained(path, mesh=mesh, scan_layers=like is not None and like.scan_layers)
    config, graphdef = model.config, model.graphdef
    like = _without_new_routers(like, config)
    if like is not None:
        config = dataclasses.replace(like, vocab_size=config.vocab_size)
        graphdef, abstract = nnx.split(abstract_transformer(config))
        _check_same_parameters(abstract, model.state, str(path))
    return LoadedRun(config, model.tokenizer, graphdef, model.state, 0)


def model_of(path: str | Path) -> LMConfig:
    """The architecture of a run, or of a model that somebody else trained, without its weights.

    Args:
      path: as for `load_model`.

    Returns:
      The configuration.

    Raises:
      ValueError: nothing to load there.
    """
    from jaxlib_icml.lm.hub import is_pretrained, pretrained_config

    if is_pretrained(path):
        return pretrained_config(path)
    return model_config(read_config(Path(path)), load_tokenizer(Path(path) / "tokenizer"))


def import_model(path: str | Path, run_dir: str | Path) -> LoadedRun:
    """Turn a model that somebody else trained into a run folder, with its weights as the checkpoint of step 0.

    Args:
      path: what `jaxlib_icml.lm.hub.load_pretrained` reads.
      run_dir: a new folder.

    Returns:
      The model.

    Raises:
      ValueError: nothing to load there, or a folder that is in use.
    """
    run_dir = new_folder(run_dir, "run_dir")
    model = load_model(path)
    config = TrainConfig(preset=Path(path).name or "imported", model=model.config, init_from=str(path))
    write_run(run_dir, config, model.tokenizer, lambda checkpointer: save_model(checkpointer, model))
    return model


def new_folder(path: str | Path, argument: str) -> Path:
    """`path`, unless something is there: then a ValueError that names the argument."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{argument}: {path} is not an empty folder")
    return path


def save_model(checkpointer: Checkpointer, model: LoadedRun) -> None:
    """Save a model's weights as the checkpoint of step 0."""
    checkpointer.save(0, nnx.split_state(model.state, nnx.Param, ...), None, {})


def write_run(
    run_dir: Path,
    config: TrainConfig,
    tokenizer: Tokenizer,
    save: Callable[[Checkpointer], None],
    files: Mapping[str, str] | None = None,
) -> None:
    """Make a run folder, whole or not at all.

    Args:
      run_dir: A folder that is new or empty.
      config: Its configuration.
      tokenizer: Its tokenizer.
      save: Saves its first checkpoint.
      files: Name -> contents of further files.
    """
    with RunFolder(run_dir, config) as folder:
        try:
            tokenizer.save(run_dir / "tokenizer")
            for name, contents in (files or {}).items():
                write_text(run_dir / name, contents)
            with Checkpointer(run_dir / "checkpoints") as checkpointer:
                save(checkpointer)
        except BaseException:
            folder.discard()
            raise


def _without_new_routers(like: LMConfig | None, given: LMConfig) -> LMConfig | None:
    """`like` with full attention where only it has L2A, whose routers no weights exist for."""
    if like is None or like.attention == given.attention or given.attention != "full":
        return like
    return dataclasses.replace(like, attention="full", pruned_layers=())


def _check_same_parameters(wanted: nnx.State, given: nnx.State, where: str) -> None:
    shapes = [{name: x.shape for name, x in named_arrays(state).items()} for state in (wanted, given)]
    if shapes[0] != shapes[1]:
        different = sorted({name for name, _ in set(shapes[0].items()) ^ set(shapes[1].items())})
        raise ValueError(f"init_from: {where} and the model differ in {', '.join(different[:3])}")


def model_config(config: TrainConfig, tokenizer: Tokenizer) -> LMConfig:
    """The model of a run, with the vocabulary of its tokenizer; models from elsewhere may have rows to spare."""
    if config.init_from is not None and config.model.vocab_size >= tokenizer.vocab_size:
        return config.model
    return dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
