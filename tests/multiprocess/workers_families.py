"""What `test_families.py` runs in several processes: MaxText's trees of all samples, restored and saved by shards."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_safetensors as ost
from tests.multiprocess.workers_save import array, error_of, written
from tests.support.measure import different_shards, measured
from tests.support.roots import TESTDATA

# What MaxText's own converter made of small models, and what it made that of.
DATA = TESTDATA / "maxtext"
SAMPLES = ("deepseek3_mtp", "gpt-oss", "llama3.1", "qwen3")

# The axes of a mesh that each dimension of a leaf is sharded over, as far as it has that dimension and divides evenly.
Axes = tuple[str | tuple[str, ...] | None, ...]
BOTH = ("x", "y")
LAYOUTS: dict[str, dict[str, Axes]] = {
    "scanned": {
        "first": (BOTH,),
        "third": (None, None, BOTH[::-1]),
        "first and last": ("y", None, None, "x"),
        "layers and last": (None, "x", None, "y"),
    },
    "unscanned": {
        "second": (None, BOTH),
        "first and second": BOTH,
        "third and first": ("y", None, "x"),
        "replicated": (),
    },
}

# So that every sample is saved as several files.
MAX_FILE_BYTES = 60_000


def stored_directory(sample: str) -> Path:
    """What was converted: files of the Hub's layout."""
    return DATA / sample / "hf"


def config_of(sample: str) -> dict[str, Any]:
    """The content of a sample's `config.json`."""
    return json.loads((stored_directory(sample) / "config.json").read_text())


def made_by_maxtext(sample: str, mode: str) -> dict[str, Any]:
    """The tree that MaxText's converter made."""
    tree: dict[str, Any] = {}
    with np.load(DATA / sample / f"mt_{mode}.npz") as arrays:
        for name in arrays:
            *above, last = name.split("-")
            at = tree
            for part in above:
                at = at.setdefault(part, {})
            at[last] = arrays[name]
    return tree


def full_mesh() -> Mesh:
    """All devices, process by process."""
    return Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))


def laid_out(shape: tuple[int, ...], mesh: Mesh | jax.sharding.AbstractMesh, axes: Axes) -> NamedSharding:
    """The sharding of an array of `shape` over the axes for its dimensions, where they divide them."""
    spec = []
    for size, names in zip(shape, axes, strict=False):
        parts = 1 if names is None else np.prod([mesh.shape[name] for name in np.atleast_1d(names)])
        spec.append(names if size % parts == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def target(tree: Any, mesh: Mesh | jax.sharding.AbstractMesh, axes: Axes) -> Any:
    """`tree` as it is to be restored."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=laid_out(leaf.shape, mesh, axes)), tree
    )


def sharded(tree: Any, mesh: Mesh, axes: Axes) -> Any:
    """`tree` on devices."""
    return jax.tree.map(lambda leaf: array(leaf, mesh, *laid_out(leaf.shape, mesh, axes).spec), tree)


def variant(mode: str) -> dict[str, bool]:
    return {"scan_layers": mode == "scanned"}


def planned(sample: str, mode: str, item: Any, process_count: int | None = None) -> list[dict[str, int]]:
    """What each process needs and reads, and with how many requests."""
    plan = ost.plan_restore(
        stored_directory(sample), item, family="maxtext", variant=variant(mode), process_count=process_count
    )
    return [
        {"needed": cost.needed_bytes, "read": cost.read_bytes, "requests": cost.num_requests} for cost in plan.processes
    ]


def save(directory: Path, sample: str, mode: str, tree: Any, **changes: Any) -> None:
    """A save with Orbax around it, of a sample's tree or one like it."""
    args = {"family": "maxtext", "variant": variant(mode), "config": config_of(sample)} | changes
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(directory, args=ost.SafetensorsSave(tree, max_file_bytes=MAX_FILE_BYTES, **args))


def cases() -> Iterator[tuple[str, str, str]]:
    """Sample, mode and layout of every restore."""
    for sample in SAMPLES:
        for mode, layouts in LAYOUTS.items():
            for layout in layouts:
                yield sample, mode, layout


def saves() -> Iterator[tuple[str, str, str]]:
    """Sample, mode and layout of every save: all layouts by turns."""
    for number, sample in enumerate(SAMPLES):
        for mode, layouts in LAYOUTS.items():
            yield sample, mode, list(layouts)[number % len(layouts)]


def run(root: str) -> dict[str, Any]:
    """What was restored, saved and refused, each by name; a traceback in place of what was to be found."""
    out: dict[str, Any] = {}
    for part in (_restored, _saved, _saved_like, _refused):
        try:
            out[part.__name__.removeprefix("_")] = part(Path(root))
        except Exception:
            out[part.__name__.removeprefix("_")] = traceback.format_exc()
        multihost_utils.sync_global_devices(part.__name__)
    return out


def _restored(root: Path) -> dict[str, dict[str, Any]]:
    mesh = full_mesh()
    trees = {(sample, mode): made_by_maxtext(sample, mode) for sample in SAMPLES for mode in LAYOUTS}
    out = {}
    for sample, mode, layout in cases():
        tree = trees[sample, mode]
        item = target(tree, mesh, LAYOUTS[mode][layout])
        args = ost.SafetensorsRestore(item=item, family="maxtext", variant=variant(mode))
        directory = stored_directory(sample)
        restored, cost = measured(lambda args=args, at=directory: ost.SafetensorsHandler().restore(at, args))
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
        out[f"{sample} {mode} {layout}"] = {
            "wrong": [
                f"{jax.tree_util.keystr(path)}: {wrong}"
                for (path, found), expected in zip(
                    jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(tree), strict=True
                )
                for wrong in different_shards(found, expected)
            ],
            "shards": sum(len(leaf.addressable_shards) for leaf in jax.tree.leaves(restored)),
            "planned": planned(sample, mode, item),
            "measured": [cost["bytes_read"], cost["num_reads"]],
        }
    return out


def _saved(root: Path) -> dict[str, dict[str, list[int]]]:
    out = {}
    for sample, mode, layout in saves():
        tree = sharded(made_by_maxtext(sample, mode), full_mesh(), LAYOUTS[mode][layout])
        with written() as out[f"{sample} {mode} {layout}"]:
            save(root / f"{sample} {mode} {layout}", sample, mode, tree)
    return out


def _saved_like(root: Path) -> None:
    """A save that is like the files that were converted, which are aligned as the reference writer aligns them."""
    tree = sharded(made_by_maxtext("qwen3", "scanned"), full_mesh(), LAYOUTS["scanned"]["layers and last"])
    options = ost.SafetensorsOptions(alignment=8)
    ost.save(root / "like", tree, family="maxtext", like=stored_directory("qwen3"), options=options)
    # Its towers have no leaf.
    tree = sharded(made_by_maxtext("gemma4_small", "unscanned"), full_mesh(), ("x", "y"))
    ost.save(root / "towers", tree, family="maxtext", like=stored_directory("gemma4_small"))


def _refused(root: Path) -> dict[str, dict[str, Any] | None]:
    """Saves that cannot be, and after them one that can."""
    tree = sharded(made_by_maxtext("llama3.1", "scanned"), full_mesh(), LAYOUTS["scanned"]["first"])
    config = config_of("llama3.1")
    without_norm = {"params": {**tree["params"], "decoder": {**tree["params"]["decoder"]}}}
    del without_norm["params"]["decoder"]["decoder_norm"]
    last = jax.process_index() == jax.process_count() - 1
    changed = {
        "no norm": (without_norm, {}),
        "no config in one process": (tree, {"config": None} if last else {}),
        "another config in one process": (tree, {"config": config | ({"rope_theta": 1.0} if last else {})}),
    }
    out: dict[str, dict[str, Any] | None] = {}
    for name, (given, changes) in changed.items():
        try:
            out[name] = error_of(
                lambda at=root / name, given=given, more=changes: save(at, "llama3.1", "scanned", given, **more)
            )
        except AssertionError:  # there was none
            out[name] = None
    save(root / "after errors", "llama3.1", "scanned", tree)
    return out
