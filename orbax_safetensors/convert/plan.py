"""Plans of conversions: what `convert` and `reshard` would read and write in each process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.convert.decide import decide
from orbax_safetensors.convert.request import ConvertRequest, ReshardRequest, location
from orbax_safetensors.cost.conversion import ConversionPlan
from orbax_safetensors.devices.partition import MeshLike, Spec
from orbax_safetensors.devices.sharding import num_processes
from orbax_safetensors.format.layout import MAX_FILE_BYTES
from orbax_safetensors.options import SafetensorsOptions
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.streaming.pipeline import MEMORY_BYTES


def plan_convert(
    source: PathLike,
    destination: PathLike,
    *,
    to: str,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    config: Any = None,
    dtype: Any = None,
    mesh: MeshLike = None,
    spec: Mapping[str, Spec] | None = None,
    like: Any = None,
    step: int = 0,
    compression: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    process_count: int | None = None,
    options: SafetensorsOptions | None = None,
) -> ConversionPlan:
    """Return the cost of `convert` with the same arguments in each process; make nothing, and read no array.

    The plan has the same tiles, in the same shares and batches. Bytes and requests are exactly those of a conversion
    that is not resumed, except for headers, indexes, metadata and files beside the tensors. Bytes of an Orbax
    checkpoint are decoded bytes, see `ConversionPlan`.

    Args:
      process_count: how many processes share the work; by default those of this program.
      others: as for `convert`.

    Raises: the errors of `convert` before it moves the first byte, also if the destination is there already.
    """
    request = ConvertRequest(
        source=location("source", source),
        destination=location("destination", destination),
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
        options=options or SafetensorsOptions(),
    )
    return _plan(request, process_count)


def plan_reshard(
    source: PathLike,
    destination: PathLike,
    *,
    mesh: MeshLike = None,
    spec: Mapping[str, Spec] | None = None,
    like: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    compression: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    process_count: int | None = None,
    options: SafetensorsOptions | None = None,
) -> ConversionPlan:
    """Return the cost of `reshard` with the same arguments in each process; see `plan_convert`."""
    request = ReshardRequest(
        source=location("source", source),
        destination=location("destination", destination),
        mesh=mesh,
        spec=spec,
        like=like,
        max_file_bytes=max_file_bytes,
        compression=compression,
        memory_bytes=memory_bytes,
        options=options or SafetensorsOptions(),
    )
    return _plan(request, process_count)


def _plan(request: ConvertRequest | ReshardRequest, process_count: int | None) -> ConversionPlan:
    count = num_processes((), process_count)
    work = decide(request)
    try:
        return work.plan(count)
    finally:
        work.source.close()
