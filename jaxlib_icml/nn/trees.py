"""Parameter trees by the names on their leaves' paths."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.tree_util import GetAttrKey


class TreeLeaf(NamedTuple):
    """One array of a parameter tree, and the names on its path without wrappers such as nnx variables."""

    parts: tuple[str, ...]
    value: Any

    @property
    def path(self) -> str:
        """The names joined by slashes."""
        return "/".join(self.parts)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[TreeLeaf]:
    """The leaves of a tree in `jax.tree.leaves` order, with the names on their paths.

    Args:
        tree: any pytree; nnx variables and linen boxes count as their content.
        is_leaf: as in `jax.tree.leaves`.

    Yields:
        `TreeLeaf`s.
    """
    for path, value in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        # nnx.Variable and linen's Partitioned hold their array in an attribute.
        while path and isinstance(path[-1], GetAttrKey) and path[-1].name in ("value", "raw_value"):
            path = path[:-1]
        yield TreeLeaf(tuple(_key_name(key) for key in path), value)


def _key_name(key: Any) -> str:
    return str(next(getattr(key, attr) for attr in ("key", "name", "idx") if hasattr(key, attr)))
