"""`link`: an index that makes safetensors files a checkpoint of Orbax, where they are; and its plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Unpack

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.devices.agreement import new_key, same_arguments, together
from orbax_safetensors.devices.partition import MeshLike, Spec
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.link.link_job import LinkJob, LinkPlan, prepare
from orbax_safetensors.link.link_request import CHUNK_BYTES, LinkArguments, LinkRequest
from orbax_safetensors.options import Progress, check_progress
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.process_memory import peak_bytes
from orbax_safetensors.streaming.cutting import MEMORY_BYTES


@dataclass(frozen=True)
class Link:
    """The result of `link`.

    ```python
    done = ost.link("/models/qwen3", "/models/linked", family="maxtext")
    print(f"{done.path}: {done.linked_bytes:,} bytes stay where they are, {done.made_bytes:,} were written")
    ```

    Attributes:
      path: the directory that is now a checkpoint of Orbax.
      linked_bytes: bytes of arrays that stay in their files.
      made_bytes: bytes of arrays that had to be written, by all processes.
      num_arrays: arrays in the index.
      num_chunks: chunks in the index.
      seconds: how long it took.
      peak_bytes: the most memory that this process had since it began.
      family: the name of the tree's family; None without one.
      variant: the family's switches; {} without one.
    """

    path: str
    linked_bytes: int
    made_bytes: int
    num_arrays: int
    num_chunks: int
    seconds: float
    peak_bytes: int
    family: str | None
    variant: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a dict."""
        return asdict(self)


def link(
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
    hard_links: bool = False,
    resume: bool = False,
    progress: Progress | bool | None = None,
) -> Link:
    """Make safetensors files a checkpoint of Orbax by writing an index of the bytes of each chunk.

    ```python
    ost.link("/models/qwen3", "/models/linked", family="maxtext")
    params = ocp.PyTreeCheckpointer().restore("/models/linked")  # stock Orbax, MaxText's tree
    ```

    Orbax then restores the arrays, or a family's tree of them, from these files, without this package. Arrays whose
    bytes are not in the files, because they are scaled, cast, decoded or permuted within a dimension, are computed as
    by `convert`, in `memory_bytes`. The files must not change afterwards without their index; `verify` checks that.

    Every process of a program makes the same call.

    Args:
      source: files, or a directory, as for `open_checkpoint`, on a file system, or a `gs://` directory.
      destination: a directory to make, with symbolic links to the files. By default, and always below `gs://`, the
        index is written beside the files. If the directory is an item of a step, as `ROOT/0/state`, the step's record
        gets the item, for Orbax's managers of steps; a step without a record gets one only if you pass a destination,
        which may be the directory of the files.
      family, variant: as for `SafetensorsRestore`; MaxText's families make MaxText's tree with its metadata.
      mesh, spec, like: as for `convert`: chunks are cut at the edges of shards if they can be, and shardings recorded.
      chunk_bytes: the most bytes of a chunk, if its dimensions divide well.
      memory_bytes: host memory for arrays that are computed.
      hard_links: link the files by hard links.
      resume: go on with what a call with the same arguments has left unfinished.
      progress: True for a bar, or a function that gets the bytes that this process has computed, and all bytes of its
        part. An exception of the function reaches the caller; other processes raise a `StorageError`.

    Raises:
      StorageError: the destination exists, the file system has too little room for arrays that are computed, or a file
        cannot be read or written.
      TensorMismatchError: mesh or spec do not fit the arrays, or `resume` finds another link.
      MappingError: there is no such family, or it does not fit the checkpoint.
      HeaderError, IndexFileError: the source is not valid.
    """
    started = time.perf_counter()

    def prepared() -> LinkJob:
        check_progress(progress, "progress")
        request = LinkRequest.of(
            source,
            destination,
            family=family,
            variant=variant,
            mesh=mesh,
            spec=spec,
            like=like,
            chunk_bytes=chunk_bytes,
            memory_bytes=memory_bytes,
            hard_links=hard_links,
        )
        return prepare(request)

    job = together(
        new_key("job"),  # as of a conversion: a process that begins one meets this, and all fail
        prepared,
        lambda job: f"resume={resume!r} {job.staging.record}",
        check=same_arguments,
    )
    job.run(resume=resume, progress=progress)
    arrays = job.arrays
    made_bytes = sum(array.nbytes for array in arrays if array.made is not None)
    return Link(
        job.staging.destination,
        sum(array.nbytes for array in arrays) - made_bytes,
        made_bytes,
        len(arrays),
        sum(array.num_chunks for array in arrays),
        time.perf_counter() - started,
        peak_bytes(),
        **job.checkpoint.use.record(),
    )


def plan_link(
    source: PathLike,
    destination: PathLike | None = None,
    *,
    process_count: int = 1,
    **arguments: Unpack[LinkArguments],
) -> LinkPlan:
    """Plan a `link` with the same arguments from the headers alone; write nothing.

    ```python
    plan = ost.plan_link("/models/qwen3", "/models/linked", family="maxtext", mesh={"fsdp": 4}, process_count=2)
    print(plan.made_bytes, [cost.read_bytes for cost in plan.restore.processes])
    ```

    Args:
      process_count: how many processes restore the checkpoint on the mesh; they share its devices in order.
      source, destination, arguments: as for `link`.

    Raises: the errors of `link` before it writes, also if something is in the way at the destination.
    """
    if type(process_count) is not int or process_count < 1:
        raise SafetensorsError(f"process_count is {process_count!r}, must be an integer of at least 1")
    return prepare(LinkRequest.of(source, destination, **arguments)).plan(process_count)
