"""The cases of the matrix: every mesh, every way to lay a tensor out over it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tests.support.checkpoints import DTYPES, shapes


@dataclass(frozen=True)
class MeshCase:
    """A mesh of eight devices; `order` are their places among all, in the order of the mesh."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] = tuple(range(8))

    @property
    def in_order(self) -> bool:
        """Whether devices follow one another as their processes do, as those of an abstract mesh are taken to."""
        return self.order == tuple(range(8))

    def mesh(self) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(jax.devices())[list(self.order)].reshape(self.shape), self.axes)

    def abstract(self) -> jax.sharding.AbstractMesh:
        return jax.sharding.AbstractMesh(self.shape, self.axes)


MESHES = {
    "1d": MeshCase(("d",), (8,)),
    "1d-interleaved": MeshCase(("d",), (8,), (0, 4, 1, 5, 2, 6, 3, 7)),
    "2x4": MeshCase(("x", "y"), (2, 4)),
    "4x2": MeshCase(("x", "y"), (4, 2)),
}

_SPECS: dict[tuple[str, ...], dict[int, list[PartitionSpec]]] = {
    ("d",): {
        0: [PartitionSpec()],
        1: [PartitionSpec(), PartitionSpec("d")],
        2: [PartitionSpec(), PartitionSpec("d"), PartitionSpec(None, "d")],
        3: [PartitionSpec(), PartitionSpec("d"), PartitionSpec(None, "d"), PartitionSpec(None, None, "d")],
    },
    ("x", "y"): {
        0: [PartitionSpec()],
        1: [PartitionSpec(), PartitionSpec("x"), PartitionSpec("y"), PartitionSpec(("x", "y"))],
        2: [
            PartitionSpec(),
            PartitionSpec("x"),
            PartitionSpec("y"),
            PartitionSpec(("x", "y")),
            PartitionSpec(None, "x"),
            PartitionSpec(None, "y"),
            PartitionSpec(None, ("y", "x")),
            PartitionSpec("x", "y"),
            PartitionSpec("y", "x"),
        ],
        3: [
            PartitionSpec(),
            PartitionSpec("x"),
            PartitionSpec("y", "x"),
            PartitionSpec("x", None, "y"),
            PartitionSpec(None, "x", "y"),
            PartitionSpec(None, None, ("x", "y")),
        ],
    },
}

# For a whole tree in one restore, by the name of the layout: the spec for each rank.
TREES: dict[str, dict[str, dict[int, PartitionSpec]]] = {
    "1d": {
        "replicated": dict.fromkeys(range(4), PartitionSpec()),
        "leading": {0: PartitionSpec(), 1: PartitionSpec("d"), 2: PartitionSpec("d"), 3: PartitionSpec("d")},
        "inner": {0: PartitionSpec(), 1: PartitionSpec("d"), 2: PartitionSpec(None, "d"), 3: PartitionSpec(None, "d")},
    },
    "2x4": {
        "leading": {0: PartitionSpec(), 1: PartitionSpec("x"), 2: PartitionSpec("x"), 3: PartitionSpec(("x", "y"))},
        "both": {0: PartitionSpec(), 1: PartitionSpec("y"), 2: PartitionSpec("x", "y"), 3: PartitionSpec("y", "x")},
    },
}

# What a restore reads follows from the bytes of an element alone.
_ALONE = (DTYPES["f32"], DTYPES["bf16"])


@dataclass(frozen=True)
class Case:
    """What is restored in one go, and how it is laid out: a leaf for every name of `specs`."""

    id: str
    mesh: str
    specs: dict[str, PartitionSpec]

    @property
    def kind(self) -> str:
        """`replicated`, `leading` or `inner`: the innermost dimension that is sharded in any leaf."""
        sharded = [place for spec in self.specs.values() for place, axes in enumerate(spec) if axes is not None]
        return "replicated" if not sharded else "inner" if max(sharded) else "leading"


def tensors() -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every tensor, by name."""
    return {
        f"{name}.{kind}": (shape, dtype)
        for name, dtype in DTYPES.items()
        for kind, shape in shapes(dtype.itemsize).items()
    }


def matrix() -> list[Case]:
    """Each tensor of `_ALONE` in every layout, then all tensors together in a few."""
    out = []
    for label, mesh in MESHES.items():
        for name, (shape, dtype) in tensors().items():
            for spec in _SPECS[mesh.axes][len(shape)] if dtype in _ALONE else ():
                out.append(Case(f"{label} {name} {tuple(spec)}", label, {name: spec}))
    for label, layouts in TREES.items():
        for layout, specs in layouts.items():
            everything = {name: specs[len(shape)] for name, (shape, _) in tensors().items()}
            out.append(Case(f"{label} all {layout}", label, everything))
    return out
