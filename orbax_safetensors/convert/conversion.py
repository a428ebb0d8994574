"""From files to files, at any size: `convert` between safetensors and Orbax, `reshard` within either format.

`prepare` makes the `TileJob` of a request.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.typing import DTypeLike

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.checkpoint.files import is_orbax
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.convert.announce import announce
from orbax_safetensors.convert.convert_request import ConvertRequest, ReshardRequest
from orbax_safetensors.convert.into_files import files_from_files, files_from_orbax, plain_files_from_files
from orbax_safetensors.convert.into_orbax import orbax_from_files, orbax_from_orbax
from orbax_safetensors.devices.agreement import new_key, same_arguments, together
from orbax_safetensors.devices.partition import MeshLike, Spec
from orbax_safetensors.devices.reported_progress import reported_progress
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.format.layout import MAX_FILE_BYTES
from orbax_safetensors.mapping.families import DEQUANTIZED
from orbax_safetensors.options import Progress, SafetensorsOptions, check_progress
from orbax_safetensors.orbax_store import open_step
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.process_memory import peak_bytes
from orbax_safetensors.streaming.cutting import MEMORY_BYTES
from orbax_safetensors.streaming.tile_job import TileJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversion:
    """What a conversion did in this process.

    ```python
    done = ost.convert("/models/qwen3", "/models/maxtext", to="orbax", family="maxtext")
    print(f"{done.path}: {done.nbytes:,} bytes in {done.seconds:.1f} s, at most {done.peak_bytes:,} bytes of memory")
    ```

    Attributes:
      path: the new directory: of safetensors files, or what Orbax restores, an item, or a step if it has several.
      nbytes: bytes of arrays that this process wrote, in the dtypes of the destination, before compression; less than
        all if other processes shared the work, or if the conversion was resumed.
      seconds: how long it took.
      peak_bytes: the most memory that the process had since it began.
      requests: reads and writes of the storage.
      family: the name of the tree's family; None without one.
      variant: the family's switches; {} without one.
    """

    path: str
    nbytes: int
    seconds: float
    peak_bytes: int
    requests: int
    family: str | None
    variant: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a dict."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def convert(
    source: PathLike,
    destination: PathLike,
    *,
    to: str,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    config: Any = None,
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    mesh: MeshLike = None,
    spec: Mapping[str, Spec] | None = None,
    like: Any = None,
    step: int = 0,
    compression: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    resume: bool = False,
    progress: Progress | bool | None = None,
    options: SafetensorsOptions | None = None,
) -> Conversion:
    """Convert safetensors files to a checkpoint of Orbax, or back, in tiles; or decode a quantised checkpoint.

    ```python
    ost.convert("/models/qwen3", "/models/maxtext", to="orbax", family="maxtext")
    ost.convert("/models/maxtext", "/models/back", to="safetensors", family="maxtext", config="/models/qwen3")
    ost.convert("/models/qwen3", "/models/plain", to="safetensors", family="dequantized")
    ```

    Memory holds tiles, within `memory_bytes`. Every process of a program makes the same call and moves its part. No
    reader opens the destination before it is complete. An unfinished checkpoint has Orbax's name for one, or is in
    `<destination>.partial`, and stays after a failure for a call with `resume`.

    Args:
      source: safetensors files, as for `open_checkpoint`, or a checkpoint of Orbax: an item, a step, or a directory of
        steps. Either may be a URL.
      destination: to Orbax, a directory of steps, which gets `<destination>/<step>/items`; `gs://` works too. To
        safetensors, a new directory.
      to: `"orbax"` or `"safetensors"`.
      family, variant: as for `SafetensorsRestore`. MaxText's families make MaxText's tree with its metadata. To
        safetensors, `variant` takes precedence over the switches that a conversion or MaxText has recorded in the
        checkpoint. Without a family, arrays are tensors of the same names. From safetensors to safetensors, the family
        is `"dequantized"`: names stay, quantised tensors become plain ones.
      config: to safetensors, the `config.json` to write: its content, an object with a `to_dict`, the path of a file,
        or a directory; small files of the directory other than weights are also copied. From safetensors, the default
        is the config beside the source, without its `quantization_config`.
      dtype: what to cast floating-point arrays to: one dtype for all, which also enters the config, or a dict from
        regular expressions to dtypes. The first that `re.search` finds in an array's name counts. To Orbax, names are
        those of `spec`, to safetensors those of the tensors. Other arrays keep their dtype.
      mesh, spec: to Orbax, the mesh and the partitions for which chunks are cut, as for `reshard`. Names are those of
        `open_checkpoint(source, family=family).leaves`, for example `params.decoder.decoder_norm.scale`.
      like: to Orbax, instead of mesh and spec, the target of a restore, as for `reshard`.
      step: to Orbax, the number of the step.
      compression: to Orbax, whether chunks are compressed.
      memory_bytes: host memory for tiles and their buffers.
      resume: go on with what a call with the same arguments has left unfinished.
      progress: True for a bar on stderr, or a function that gets the bytes that this process has moved, and all bytes
        of its part. The default is that of `options`. An exception of the function ends the conversion and reaches the
        caller; other processes raise a `StorageError`.
      options: `direct`, `progress`, and `storage_options` for safetensors files behind a URL and for a config. Orbax
        reaches its checkpoints with credentials of the environment.

    Raises:
      StorageError: the destination exists, its file system has too little room, or a file cannot be read or written,
        or changed meanwhile.
      TensorMismatchError: mesh, spec or dtype does not fit the arrays, or `resume` finds another conversion.
      MappingError: there is no such family, or it does not fit the checkpoint.
      HeaderError, IndexFileError: the source is not valid.
    """
    request = partial(
        ConvertRequest.of,
        source,
        destination,
        to=to,
        family=family,
        variant=variant,
        config=config,
        dtype=dtype,
        mesh=mesh,
        spec=spec,
        like=like,
        step=step,
        compression=compression,
        memory_bytes=memory_bytes,
        options=options,
    )
    return _run("convert", request, resume, progress)


def reshard(
    source: PathLike,
    destination: PathLike,
    *,
    mesh: MeshLike = None,
    spec: Mapping[str, Spec] | None = None,
    like: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    compression: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    resume: bool = False,
    progress: Progress | bool | None = None,
    options: SafetensorsOptions | None = None,
) -> Conversion:
    """Store a checkpoint again in its own format, laid out for another mesh, in tiles; see `convert`.

    ```python
    ost.reshard("/models/qwen3", "/models/for-4", mesh={"fsdp": 4}, spec={"proj.weight$": ("fsdp", None)})
    ```

    Of a step of Orbax, `reshard` stores all items. Trees get chunks that are shards, or even parts of shards; other
    items are copied. Names, metadata and handlers are kept, and without a mesh also the recorded shardings.

    A safetensors checkpoint gets one file for each device of the mesh, in which each shard is one range, like PyTorch's
    distributed checkpoints. Without a mesh, tensors go into files of at most `max_file_bytes`. Files beside them are
    copied.

    Args:
      source: the directory of a step of Orbax, of steps (the latest counts) or of one item; or safetensors files.
      destination: as for `convert`. A step of Orbax keeps the name of its directory, in this directory; an item alone
        becomes this directory.
      mesh: the sizes of axes by name, such as `{"fsdp": 16}`, or a mesh of JAX. No device is needed.
      spec: a dict from regular expressions to partitions. The first that `re.search` finds in an array's name counts. A
        partition has an entry for each leading dimension: an axis, a tuple of axes, or None; a `PartitionSpec` works
        too. Other arrays are not sharded. Axes have to divide the dimensions: an array that its partition does not fit
        stays whole, with a warning, and each pattern has to fit at least one array.
      like: the target of a restore, instead of mesh and spec: a tree with the names of the checkpoint, whose leaves
        have a `sharding`, such as `jax.ShapeDtypeStruct`. Arrays without one are not sharded.
      max_file_bytes: as for `SafetensorsSave`.
      compression, memory_bytes, resume, progress, options: as for `convert`.

    Raises: as `convert`.
    """
    request = partial(
        ReshardRequest.of,
        source,
        destination,
        mesh=mesh,
        spec=spec,
        like=like,
        max_file_bytes=max_file_bytes,
        compression=compression,
        memory_bytes=memory_bytes,
        options=options,
    )
    return _run("reshard", request, resume, progress)


# Makes the job of a `convert`, by the formats of the source and of the destination.
_JOBS = {("safetensors", "orbax"): orbax_from_files, ("orbax", "safetensors"): files_from_orbax}


def prepare(request: ConvertRequest | ReshardRequest) -> TileJob:
    """Return the job of a `convert` or `reshard`, with their errors; the caller closes its source."""
    path = request.source
    # Orbax reaches its checkpoints with credentials of the environment.
    from_orbax_only = isinstance(request, ConvertRequest) and request.to == "safetensors"
    from_orbax = is_orbax(path, None if from_orbax_only else request.options.storage_options)
    if isinstance(request, ReshardRequest):
        request.check_for(orbax=from_orbax)
        return orbax_from_orbax(request) if from_orbax else files_from_files(request)
    if (job := _JOBS.get(("orbax" if from_orbax else "safetensors", request.to))) is not None:
        return job(request)
    if not from_orbax and request.family in (DEQUANTIZED, DEQUANTIZED.name):
        return plain_files_from_files(request)
    if from_orbax:
        open_step(path)  # raises the error of a directory that is neither
        raise SafetensorsError(f"{path}: is a checkpoint of Orbax already: use reshard")
    read_checkpoint(path, request.options.storage_options)  # raises the error of a path that is neither
    raise SafetensorsError(
        f"{path}: is safetensors already: use reshard, or family={DEQUANTIZED.name!r} (--family {DEQUANTIZED.name}) if "
        "it is quantised"
    )


def _run(
    label: str,
    build: Callable[[], ConvertRequest | ReshardRequest],
    resume: bool,
    progress: Progress | bool | None,
) -> Conversion:
    """Build the request and run its job, in all processes or in none; their arguments have to be alike."""
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:

        def prepared() -> tuple[ConvertRequest | ReshardRequest, TileJob]:
            check_progress(progress, "progress")  # here, so that all processes fail
            request = build()
            job = prepare(request)
            stack.callback(job.source.close)  # also if another process fails
            return request, job

        def facts(made: tuple[ConvertRequest | ReshardRequest, TileJob]) -> str:
            request, job = made
            return f"resume={resume!r} {request.facts} {job.digest}"

        # A process that begins a link meets this as well, and all fail.
        request, job = together(new_key("job"), prepared, facts, check=same_arguments)
        with reported_progress(request.options.progress if progress is None else progress, label) as report:
            job.run(resume=resume, progress=report, begun=partial(announce, job, request.memory_bytes))
    read, written = job.source.counters, job.sink.counters
    done = Conversion(
        job.sink.path,
        written.nbytes,
        time.perf_counter() - started,
        peak_bytes(),
        read.num_requests + written.num_requests,
        **job.use.record(),
    )
    logger.info(
        "Made %s: %d bytes in %.2f s, %.2f GB/s, with at most %d bytes of memory",
        done.path,
        done.nbytes,
        done.seconds,
        done.nbytes / max(done.seconds, 1e-9) / 1e9,
        done.peak_bytes,
    )
    return done
