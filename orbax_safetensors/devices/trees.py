"""Trees and names: a leaf's name in a checkpoint is its key path joined by dots."""

from __future__ import annotations

from typing import Any

import jax

from orbax_safetensors.errors import TensorMismatchError

Path = tuple[Any, ...]  # JAX's keys


def flatten(tree: Any) -> tuple[jax.tree_util.PyTreeDef, dict[str, Any]]:
    """Return a tree's structure, and its leaves by name, in the order of the tree.

    Raises `TensorMismatchError` if two leaves have the same name.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, Any] = {}
    for path, leaf in paths:
        name = _name(path)
        if name in leaves:
            raise TensorMismatchError(f"two leaves of the tree have the name {name!r}")
        leaves[name] = leaf
    return structure, leaves


def empty_nodes(tree: Any) -> set[str]:
    """Return the names of the nodes of a tree that have no children: None, empty containers and states."""
    return {name for _, name, node in nodes(tree) if is_empty(node)}


def nodes(tree: Any) -> list[tuple[Path, str, Any]]:
    """Return the leaves and the nodes without children of a tree, each with its key path and its name, in order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)
    return [(path, _name(path), node) for path, node in paths]


def is_random(dtype: Any) -> bool:
    """Return whether this is the dtype of random keys, which only JAX has."""
    kind = getattr(dtype, "type", dtype)
    return isinstance(kind, type) and issubclass(kind, jax.dtypes.extended)


def is_empty(node: Any) -> bool:
    """Return whether this is a node without children: None, an empty container, or a class that JAX takes for one."""
    level = jax.tree_util.default_registry.flatten_one_level(node)
    return level is not None and not list(level[0])


def _name(path: Path) -> str:
    # Most trees are dicts, whose keys are names; `keystr` takes a microsecond for each.
    return ".".join(
        [key.key if type(key) is jax.tree_util.DictKey and type(key.key) is str else key_name(key) for key in path]
    )


def key_name(key: Any) -> str:
    """Return the part of a leaf's name that is this key of its path."""
    return jax.tree_util.keystr((key,), simple=True)
