"""`plan_link`: the content of a link, and what stock Orbax would read of it. Nothing is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.cost.orbax_restore import OrbaxRestorePlan, plan_arrays
from orbax_safetensors.devices.partition import MeshLike, Spec
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.link.decide import decide, nbytes
from orbax_safetensors.link.objects import staging_of
from orbax_safetensors.link.request import CHUNK_BYTES, LinkRequest, link_places
from orbax_safetensors.orbax_store import OrbaxLeaf
from orbax_safetensors.orbax_store.addressed_item import item_files
from orbax_safetensors.orbax_store.ocdbt import write_references
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.streaming.pipeline import MEMORY_BYTES


@dataclass(frozen=True)
class LinkedArray:
    """An array of the checkpoint that a link makes.

    Attributes:
      name: the name by which `spec` finds the array.
      num_chunks: stored chunks; chunks of padding are not stored.
      made: the reason if the array has to be made, None if it stays where it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    num_chunks: int
    nbytes: int
    made: str | None


@dataclass(frozen=True)
class LinkPlan:
    """What `link` will make.

    Attributes:
      path: the directory.
      arrays: all arrays, in the order of the tree.
      metadata_bytes: bytes of the index: addresses, and Orbax's metadata of all arrays.
      restore: the reads of stock Orbax for a restore on the mesh, None without a mesh. Chunks are read whole.
    """

    path: str
    arrays: tuple[LinkedArray, ...]
    metadata_bytes: int
    restore: OrbaxRestorePlan | None

    @property
    def linked_bytes(self) -> int:
        """Bytes of the arrays that stay where they are."""
        return sum(array.nbytes for array in self.arrays if array.made is None)

    @property
    def made_bytes(self) -> int:
        """Bytes of the arrays that have to be made."""
        return sum(array.nbytes for array in self.arrays if array.made is not None)

    @property
    def num_chunks(self) -> int:
        """Chunks of all arrays."""
        return sum(array.num_chunks for array in self.arrays)

    def to_json(self) -> str:
        """Return the plan as a JSON object with the names of the attributes."""
        return json.dumps(
            {
                "path": self.path,
                "linked_bytes": self.linked_bytes,
                "made_bytes": self.made_bytes,
                "metadata_bytes": self.metadata_bytes,
                "num_chunks": self.num_chunks,
                "arrays": [asdict(array) for array in self.arrays],
                "restore": None if self.restore is None else json.loads(self.restore.to_json()),
            }
        )


def plan_link(
    source: PathLike,
    destination: PathLike | None = None,
    *,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    mesh: MeshLike = None,
    spec: Mapping[str, Spec] | None = None,
    like: Any = None,
    chunk_bytes: int = CHUNK_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    process_count: int = 1,
) -> LinkPlan:
    """Plan a `link` with the same arguments from the headers alone; write nothing.

    Args:
      process_count: how many processes restore the checkpoint on the mesh; they share its devices in order.
      others: as for `link`.

    Raises: the errors of `link` before it writes, also if something is in the way at the destination.
    """
    if type(process_count) is not int or process_count < 1:
        raise SafetensorsError(f"process_count is {process_count!r}, must be an integer of at least 1")
    request = LinkRequest(
        **link_places(source, destination),
        family=family,
        variant=variant,
        mesh=mesh,
        spec=spec,
        like=like,
        chunk_bytes=chunk_bytes,
        memory_bytes=memory_bytes,
        hard_links=False,
    )
    decision, staging = decide(request), staging_of(request)
    staging.check_free()
    made: Mapping[str, OrbaxLeaf] = {}
    if (making := decision.making(staging.path)) is not None:
        work, made = making
        work.source.close()
    above = decision.envelope.above
    leaves = {name: decision.linked[name].leaf if name in decision.linked else made[name] for name in decision.sharded}
    written = [0]

    def count(_: str, content: bytes) -> None:
        written[0] += len(content)

    write_references(decision.entries(), count)
    for content in item_files(decision.tree(made), whole=decision.whole).values():
        count("", content)
    arrays = tuple(
        LinkedArray(
            name.removeprefix(above),
            leaf.dtype.name,
            leaf.shape,
            leaf.chunk_shape,
            decision.num_chunks(name, leaf),
            nbytes(leaf),
            decision.reasons.get(name),
        )
        for name, leaf in leaves.items()
    )
    restore = None
    if mesh is not None or like is not None:
        restored = {name.removeprefix(above): leaf for name, leaf in leaves.items()}
        file_bytes = sum(file.stamp.nbytes for file in decision.checkpoint.files)
        restore = plan_arrays(restored, request.partition, process_count, file_bytes)
    return LinkPlan(request.destination, arrays, written[0], restore)
