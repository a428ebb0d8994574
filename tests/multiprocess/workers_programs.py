"""What `test_programs.py` runs in several processes: many leaves that devices exchange, and a process that waits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Orbax's barriers are those of jax.distributed.
from orbax.checkpoint._src.multihost import multihost

import orbax_safetensors as ost
from orbax_safetensors.restore import cooperative
from orbax_safetensors.save.job import prepare
from orbax_safetensors.save.request import SaveRequest
from tests.support.measure import different_shards

# Many times as many programs as XLA's CPU client lets be in flight: enough for any of them to hang if nothing waits.
LEAVES = 400
# In which a process that waits has to end, once it is told to.
PROMPT_SECONDS = 20
TOGETHER = ost.SafetensorsOptions(cooperative=True)


def tensors() -> dict[str, np.ndarray]:
    whole = np.arange(64 * 256, dtype=np.uint16).reshape(64, 256)
    return {f"{number:03}": whole + np.uint16(number) for number in range(LEAVES)}


def exchanged(directory: str) -> list[str]:
    """Restores leaves of which every process reads a part; returns the shards that are wrong."""
    return _wrong(directory, NamedSharding(_mesh(), P(None, ("x", "y"))), TOGETHER)


def broadcast(directory: str) -> list[str]:
    """Restores leaves that one process reads."""
    sharding = NamedSharding(_mesh(), P(None, "y"))
    args = ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=sharding)
    return _wrong(directory, sharding, ost.SafetensorsOptions(), dict.fromkeys(tensors(), args))


def saved(job: dict[str, Any]) -> list[str]:
    """Saves leaves to an object store, and restores them."""
    options = ost.SafetensorsOptions(storage_options=job["options"])
    sharding = NamedSharding(_mesh(), P(None, ("x", "y")))
    tree = {
        name: jax.make_array_from_callback(host.shape, sharding, lambda index, host=host: host[index])
        for name, host in list(tensors().items())[:104]  # each is a request
    }
    prepare(SaveRequest(job["url"], tree, options=options)).kept().run()
    restored = ost.SafetensorsHandler(options=options).restore(job["url"], ost.SafetensorsRestore(tree))
    return _different(restored)


def waits_for_agreement(directory: str) -> None:
    """The first process restores, the last one ends it with SIGTERM once it waits."""
    victim = _victim()
    client = multihost.get_jax_distributed_client()
    if jax.process_index() == 0:
        exchanged(directory)
    while not client.key_value_dir_get("orbax_safetensors/restore"):
        time.sleep(0.1)
    _end(victim)


def waits_for_devices(directory: str) -> None:
    """All agree, and the last one ends the first with SIGTERM rather than take part in the exchange."""
    victim = _victim()
    if jax.process_index() == 0:
        exchanged(directory)
    with mock.patch.object(cooperative, "_shards", side_effect=lambda *_: _end(victim)):
        exchanged(directory)


def _victim() -> int:
    """The first process."""
    client = multihost.get_jax_distributed_client()
    if jax.process_index() == 0:
        client.key_value_set("victim", str(os.getpid()))
    return int(client.blocking_key_value_get("victim", 20_000))


def _end(victim: int) -> None:
    time.sleep(1)  # until it waits
    os.kill(victim, signal.SIGTERM)
    time.sleep(PROMPT_SECONDS)  # this process is ended with it
    os._exit(1)  # and otherwise ends the other


def _wrong(directory: str | Path, sharding: NamedSharding, options: ost.SafetensorsOptions, args: Any = None) -> Any:
    item = {name: jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding) for name, host in tensors().items()}
    restored = ost.SafetensorsHandler(options=options).restore(directory, ost.SafetensorsRestore(item, args))
    assert len(restored) == LEAVES
    return _different(restored)


def _different(restored: dict[str, jax.Array]) -> list[str]:
    expected = tensors()
    return [f"{name} {shard}" for name, array in restored.items() for shard in different_shards(array, expected[name])]


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("x", "y"))
