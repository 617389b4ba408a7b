"""Checkpoints of a training run: Orbax, asynchronous and atomic, the newest few kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def named_arrays(tree: Any) -> dict[str, Any]:
    """A pytree as a flat dictionary, e.g. `layers.0.attention.query.kernel`.

    Checkpoints hold names and arrays only, so they outlive the Python types of the state.

    Args:
      tree: any pytree of arrays.

    Returns:
      Name -> leaf, in the tree's order.

    Raises:
      ValueError: two leaves with the same name.

    >>> sorted(named_arrays({"a": {"b": 1, "c": (2, 3)}}))
    ['a.b', 'a.c.0', 'a.c.1']
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {_name(path): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("tree: two leaves share a name")
    return named


def _name(path: tuple[Any, ...]) -> str:
    parts = []
    for entry in path:
        part = getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", None)))
        if part is not None and part != "value":
            parts.append(str(part))
    return ".".join(parts)


def from_named_arrays(like: Any, named: Mapping[str, Any]) -> Any:
    """The inverse of `named_arrays`.

    Args:
      like: a tree with the wanted structure, shapes and dtypes (abstract leaves will do).
      named: name -> array.

    Returns:
      A tree like `like` with the arrays of `named`.

    Raises:
      ValueError: a name is missing or unknown, or a shape or dtype differs.
    """
    wanted = named_arrays(like)
    if missing := wanted.keys() - named.keys():
        raise ValueError(f"checkpoint: lacks {', '.join(sorted(missing)[:5])}")
    if unknown := named.keys() - wanted.keys():
        raise ValueError(f"checkpoint: holds unknown {', '.join(sorted(unknown)[:5])}")
    for name, leaf in wanted.items():
        if (leaf.shape, leaf.dtype) != (named[name].shape, named[name].dtype):
            raise ValueError(
                f"checkpoint: {name} is {named[name].dtype}{named[name].shape}, not {leaf.dtype}{leaf.shape}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in wanted])


def abstract_arrays(tree: Any, shardings: Any) -> Any:
    """`jax.ShapeDtypeStruct`s of a tree with shardings (one, or a tree of them), as checkpoints want them."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


class Checkpointer:
    """Saves and restores one run's checkpoints under a folder; a context manager that waits for pending saves.

    Args:
      directory: the folder; made on the first save.
      keep: how many of the newest checkpoints stay.

    Raises:
      ValueError: `keep` below 1.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep: must be at least 1, got {keep}")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        handlers = {
            "model": ocp.StandardCheckpointHandler(),
            "optimizer": ocp.StandardCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(Path(directory).resolve(), options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def can_continue(self, step: int) -> bool:
        """Whether a checkpoint has more than a model: the state of the optimizer, the position in the data."""
        return self._manager.item_metadata(step).get("optimizer") is not None

    def save(self, step: int, model: Any, optimizer: Any | None, meta: Mapping[str, Any]) -> None:
        """Start saving; returns once the arrays are copied to host memory.

        Args:
          step: the step number, larger than that of any earlier save.
          model: pytree of the model's arrays.
          optimizer: pytree of everything else that continuing needs; None: a model that nothing was trained of here.
          meta: JSON-able values (data position, elapsed time).
        """
        items = {"model": ocp.args.StandardSave(named_arrays(model)), "meta": ocp.args.JsonSave(dict(meta))}
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardSave(named_arrays(optimizer))
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, step: int, model: Any, optimizer: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Read a whole checkpoint.

        Args:
          step: which one.
          model: abstract tree (`jax.ShapeDtypeStruct` leaves with shardings) like the saved one.
          optimizer: likewise.

        Returns:
          `(model, optimizer, meta)`, arrays placed as the abstract leaves say.

        Raises:
          ValueError: names, shapes or dtypes differ from the saved ones.
        """
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                model=ocp.args.StandardRestore(self._expect(step, "model", model)),
                optimizer=ocp.args.StandardRestore(self._expect(step, "optimizer", optimizer)),
                meta=ocp.args.JsonRestore(),
            ),
        )
        return (
            from_named_arrays(model, restored["model"]),
            from_named_arrays(optimizer, restored["optimizer"]),
            dict(restored["meta"]),
        )

    def restore_model(self, step: int, model: Any) -> Any:
        """Read only the model's arrays.

        Args:
          step: which checkpoint.
          model: abstract tree like the saved one.

        Returns:
          The model's arrays.

        Raises:
          ValueError: names, shapes or dtypes differ from the saved ones.
        """
        restored = self._manager.restore(
            step, args=ocp.args.Composite(model=ocp.args.StandardRestore(self._expect(step, "model", model)))
        )
        return from_named_arrays(model, restored["model"])

    def _expect(self, step: int, item: str, like: Any) -> dict[str, Any]:
        """Check the saved names and shapes before any array is read."""
        saved = self._manager.item_metadata(step).get(item)
        if saved is None:
            raise ValueError(f"checkpoint: holds no {item}; an imported model is trained with --init-from")
        described = {name: jax.ShapeDtypeStruct(meta.shape, np.dtype(meta.dtype)) for name, meta in dict(saved).items()}
        from_named_arrays(like, described)
        return named_arrays(like)
