"""What `test_hub.py` runs in several processes."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.storage import hub_api
from orbax_safetensors.storage.retries import RefusedError
from tests.support import hang


def refused(job: dict[str, Any]) -> dict[str, Any]:
    """Restores that the Hub refuses the last process, then one of this process alone, then one of all."""
    last = jax.process_count() - 1
    mine = jax.process_index() == last

    async def refuse(*_: Any) -> None:
        raise RefusedError("you may not", 403)

    errors = []
    for _ in range(2):
        with mock.patch.object(hub_api.HubApi, "commit", refuse) if mine else contextlib.nullcontext():
            try:
                _restored(job, jax.devices())
            except ost.StorageError as error:
                errors.append(str(error))
    if mine:
        _restored(job, jax.local_devices())
    return {"errors": errors, "values": _restored(job, jax.devices())}


def alone(job: dict[str, Any]) -> dict[str, Any]:
    """Restores of one process after the other, then of all, then of the first of a commit."""
    own = []
    for process in range(jax.process_count()):
        if process == jax.process_index():
            own = _restored(job, jax.local_devices())
        multihost_utils.sync_global_devices(f"alone {process}")
    if jax.process_index() == 0:  # of which the restore of all knows nothing
        _restored(job, jax.local_devices())
    values = _restored(job, jax.devices())
    of_commit = []
    if jax.process_index() == 0:
        job = job | {"url": ost.open_checkpoint(job["url"]).path}
        of_commit = _restored(job, jax.devices())
    return {"own": own, "values": values, "of_commit": of_commit}


def some(job: dict[str, Any]) -> list[str]:
    """What is said of arrays over devices of these processes, where there is one more: of each URL."""
    return [_error_of_some(job | {"url": url}) for url in job["urls"]]


def _error_of_some(job: dict[str, Any]) -> str:
    with mock.patch.object(jax, "process_count", return_value=jax.process_count() + 1):
        try:
            _restored(job, jax.devices())
        except ost.SafetensorsError as error:
            return str(error)
    return ""


def _restored(job: dict[str, Any], devices: list[jax.Device]) -> list[float]:
    """The values of rows over `devices` that there are in this process."""
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    item = dict.fromkeys(job["names"], jax.ShapeDtypeStruct(tuple(job["shape"]), np.float32, sharding=sharding))
    named = {"user_agent": _user_agent()}
    options = ost.SafetensorsOptions(join_timeout_secs=hang.SECONDS / 2, storage_options=named)
    found = ost.SafetensorsHandler(options=options).restore(job["url"], ost.SafetensorsRestore(item))
    return sorted(
        {float(value) for leaf in found.values() for one in leaf.addressable_shards for value in np.unique(one.data)}
    )


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Restores rows, several times; tells the values that each time there are in this process."""
    return {"values": [_restored(job, jax.devices()) for _ in range(job["times"])], "user_agent": _user_agent()}


def _user_agent() -> str:
    """What the servers see of this process."""
    return f"process {os.getpid()}"
