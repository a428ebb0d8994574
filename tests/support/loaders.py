"""What the loaders of Tunix and Bonsai make of their tables, in NumPy."""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import jax
import numpy as np


def by_the_table(stored: Mapping[str, np.ndarray], table: Mapping[str, tuple[str, Any]]) -> dict[str, np.ndarray]:
    """Return the leaves of a loader by path.

    A loader uses the only row whose pattern matches the beginning of the name, replaces the pattern in the name, and
    permutes and reshapes: permutes first, unless a third value, Bonsai's `reshape_first`, is true.
    """
    leaves: dict[str, np.ndarray] = {}
    for name, array in stored.items():
        matches = [(pattern, row) for pattern, row in table.items() if re.match(pattern, name)]
        assert len(matches) == 1, (name, matches)
        ((pattern, (template, transform)),) = matches
        path = re.sub(pattern, template, name).replace("\\.", ".")
        permute, reshape, *reshape_first = (transform.value if isinstance(transform, Enum) else transform) or (
            None,
            None,
        )
        if reshape and any(reshape_first):
            array = array.reshape(reshape)
        if permute:
            array = array.transpose(permute)
        if reshape and not any(reshape_first):
            array = array.reshape(reshape)
        assert path not in leaves
        leaves[path] = array
    return leaves


def nested_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of nested dicts by key path, joined by dots."""
    return {".".join(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
