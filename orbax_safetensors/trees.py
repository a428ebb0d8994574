"""Trees and names: a leaf's name in a checkpoint is its key path joined by dots."""

from __future__ import annotations

from typing import Any

import jax

from orbax_safetensors.errors import TensorMismatchError


def flatten(tree: Any) -> tuple[jax.tree_util.PyTreeDef, dict[str, Any]]:
    """A tree's structure, and its leaves by name, in the order of the tree.

    Raises `TensorMismatchError` where two leaves have one name.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, Any] = {}
    for path, leaf in paths:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise TensorMismatchError(f"two leaves of the tree have the name {name!r}")
        leaves[name] = leaf
    return structure, leaves
