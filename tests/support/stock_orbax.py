"""Restores checkpoints with Orbax alone, in every way that it has, and compares them with checkpoints of its own.

    python stock_orbax.py < PAIRS
    python stock_orbax.py damaged < PAIRS

`PAIRS` is a JSON list of two directories each: what was saved as safetensors, and what Orbax saved of the same tree, or
a copy with damage, and the same without. Prints a JSON dict of differences by directory and way, or by the directory
with damage. As a program, it never imports the package under test.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1

WITHOUT_A_TARGET = "StandardCheckpointer"


def facts(tree: Any) -> dict[str, tuple[Any, ...]]:
    """Kind, dtype, shape, sharding and bytes of every leaf and empty node, and the structure of all."""
    found: dict[str, tuple[Any, ...]] = {"": (str(jax.tree.structure(tree)),)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is None or not node_of(node)):
        value = None if leaf is None or isinstance(leaf, dict | list | tuple) else np.asarray(leaf).tobytes().hex()
        facts_of_leaf = (getattr(leaf, name, None) for name in ("dtype", "shape", "sharding"))
        found[jax.tree_util.keystr(path)] = (type(leaf).__name__, *map(str, facts_of_leaf), value)
    return found


def node_of(node: Any) -> bool:
    """Whether a container has something in it; what is no container counts as such."""
    return not isinstance(node, dict | list | tuple) or bool(node)


def differences(found: Any, expected: Any) -> list[str]:
    """What is not the same in two trees, a line each."""
    ours, theirs = facts(found), facts(expected)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [f"{name}: found {ours.get(name)}, expected {theirs.get(name)}"[:600] for name in names]


def target(tree: Any) -> Any:
    """The tree as somebody would ask for it: arrays sharded otherwise, over all devices if that is possible."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    def asked(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharded = leaf.ndim and leaf.shape[-1] % 2 == 0
        spec = jax.sharding.PartitionSpec(*[None] * (leaf.ndim - 1), "b") if sharded else jax.sharding.PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(asked, tree)


def ways(wanted: Any) -> dict[str, Callable[[str], Any]]:
    """Every way to restore a directory; `wanted` is the target of those that have one."""

    def standard(*args: Any) -> Callable[[str], Any]:
        def restore(path: str) -> Any:
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(path, *args)

        return restore

    def pytree(path: str) -> Any:
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path)

    return {
        "PyTreeCheckpointer": pytree,
        WITHOUT_A_TARGET: standard(),
        "StandardCheckpointer, target": standard(wanted),
        "v1": by_v1,
        "v1, target": lambda path: by_v1(path, wanted),
    }


def by_v1(path: str, *args: Any) -> Any:
    """Restores an item by the step that it is of, if it is of one."""
    if os.path.exists(os.path.join(path, "_CHECKPOINT_METADATA")):
        return v1.load(path, *args)
    step, name = os.path.split(path)
    return v1.load(step, *args, checkpointable_name=name)


def without_a_target(path: str) -> list[dict[str, tuple[Any, ...]]]:
    """What restores without a target return of a directory, all of its tree and with the recorded shardings."""
    return [facts(ways(None)[way](path)) for way in ("PyTreeCheckpointer", WITHOUT_A_TARGET)]


def main_damaged() -> None:
    found: dict[str, str] = {}
    expected: dict[str, Any] = {}
    for damaged, good in json.load(sys.stdin):
        if good not in expected:
            expected[good] = without_a_target(good)
        try:
            if without_a_target(damaged) != expected[good]:
                found[damaged] = "other leaves"
        except Exception as error:
            found[damaged] = repr(error)[:300]
    print(json.dumps(found))


def main() -> None:
    found = {}
    for ours, stock in json.load(sys.stdin):
        with ocp.StandardCheckpointer() as checkpointer:
            wanted = target(checkpointer.restore(stock))
        for way, restore in ways(wanted).items():
            if lines := differences(restore(ours), restore(stock)):
                found[f"{ours}: {way}"] = lines
    assert not [name for name in sys.modules if name.startswith("orbax_safetensors")]
    print(json.dumps(found))


if __name__ == "__main__":
    main_damaged() if sys.argv[1:] == ["damaged"] else main()
