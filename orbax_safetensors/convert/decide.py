"""Decides on the work for a request, before the first byte of an array moves."""

from __future__ import annotations

from orbax_safetensors.checkpoint.files import SUFFIX, is_orbax
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.convert.into_files import files_from_files, files_from_orbax
from orbax_safetensors.convert.into_orbax import orbax_from_files, orbax_from_orbax
from orbax_safetensors.convert.request import ConvertRequest, ReshardRequest
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.orbax_store import open_step
from orbax_safetensors.streaming.work import Work


def decide(request: ConvertRequest | ReshardRequest) -> Work:
    """Return the work of a `convert` or `reshard`, with their errors; the caller closes its source."""
    path, from_orbax = request.source, is_orbax(request.source, request.source_options)
    if isinstance(request, ReshardRequest):
        request.check_for(orbax=from_orbax)
        return orbax_from_orbax(request) if from_orbax else files_from_files(request)
    if request.to == "orbax":
        if from_orbax:
            open_step(path)  # raises the error of a directory that is neither
            raise SafetensorsError(f"{path}: has no {SUFFIX} files; reshard makes another checkpoint of one of Orbax")
        return orbax_from_files(request)
    if not from_orbax:
        read_checkpoint(path, request.storage_options)  # raises the error of a path that is neither
        raise SafetensorsError(f"{path}: is not a checkpoint of Orbax; reshard lays out safetensors files anew")
    return files_from_orbax(request)
