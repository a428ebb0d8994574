"""The file `_sharding` of an item, in which Orbax records the shardings of its arrays: written and read."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from orbax_safetensors.devices.partition import Partition
from orbax_safetensors.errors import StorageError, storage_errors
from orbax_safetensors.orbax_store._compat import get_sharding_tensorstore_spec
from orbax_safetensors.orbax_store.directories import parse_json
from orbax_safetensors.orbax_store.leaf import OrbaxLeaf

logger = logging.getLogger(__name__)

SHARDING_FILE = "_sharding"

# Orbax's names of the kinds of shardings that it can record.
_KINDS: dict[str, type[ocp.metadata.ShardingMetadata]] = {
    "NamedSharding": ocp.metadata.NamedShardingMetadata,
    "SingleDeviceSharding": ocp.metadata.SingleDeviceShardingMetadata,
}


def sharding_file(shardings: Mapping[str, ocp.metadata.ShardingMetadata]) -> bytes:
    """Return the content of `SHARDING_FILE` for the shardings of an item's arrays, by name."""
    texts = _texts(shardings)
    return json.dumps({base64.urlsafe_b64encode(name.encode()).decode(): text for name, text in texts.items()}).encode()


def add_shardings(directory: str, shardings: Mapping[str, ocp.metadata.ShardingMetadata]) -> None:
    """Add the shardings of arrays to `SHARDING_FILE` in a directory, to which Orbax may be adding others meanwhile."""
    context, transaction = ts.Context(), ts.Transaction()
    with storage_errors(f"{directory}/{SHARDING_FILE}"):
        for name, text in _texts(shardings).items():
            spec = get_sharding_tensorstore_spec(directory, name)
            entry = ts.open(spec, open=True, context=context).result()
            entry.with_transaction(transaction).write(text).result()
        transaction.commit_sync()


def warn(fault: StorageError) -> None:
    """Log that a sharding is left out."""
    logger.warning("%s; it is left out", fault)


def parse_shardings(
    content: bytes | None, directory: str, unknown: Callable[[StorageError], None] = warn
) -> dict[str, ocp.metadata.ShardingMetadata]:
    """Return the shardings of an item's arrays by name, given the content of its `SHARDING_FILE`; none if it is None.

    Shardings of a kind that this Orbax cannot describe are left out, and passed to `unknown` as errors. Raises
    `StorageError` if the file is not what Orbax writes.
    """
    path = f"{directory}/{SHARDING_FILE}"
    shardings = {}
    with storage_errors(f"{path}: is not what Orbax writes"):
        for key, text in ({} if content is None else parse_json(content, path)).items():
            record = json.loads(text)
            kind = record["sharding_type"]
            try:
                if kind not in _KINDS:
                    raise ValueError(f"{kind!r} is not one of {list(_KINDS)}")
                sharding = _KINDS[kind].from_deserialized_dict(record)
            except ValueError as error:
                unknown(StorageError(f"{path}: the sharding of a leaf is not known: {error}"))
                continue
            if isinstance(sharding, ocp.metadata.NamedShardingMetadata):
                sharding = replace(sharding, partition_spec=partition_spec(sharding.partition_spec))
            shardings[base64.urlsafe_b64decode(key).decode()] = sharding
    return shardings


@lru_cache
def named_sharding(
    mesh: tuple[tuple[str, int], ...], spec: tuple[str | tuple[str, ...] | None, ...]
) -> ocp.metadata.NamedShardingMetadata:
    """The record of a `NamedSharding` over a mesh, by axis names and sizes, whose devices need not be here.

    Devices are numbered from 0 in the order of the mesh, as those of a real one usually are. Equal arguments have one
    record: it names every device, and is encoded once for all arrays that share it.
    """
    sizes = [size for _, size in mesh]
    devices = np.empty(prod(sizes), object)
    devices[:] = [{"id": number} for number in range(prod(sizes))]
    return ocp.metadata.NamedShardingMetadata.from_deserialized_dict(
        {
            "shape": sizes,
            "axis_names": [axis for axis, _ in mesh],
            "axis_types": [str(jax.sharding.AxisType.Auto)] * len(sizes),
            "partition_spec": spec,
            "device_mesh": {"mesh": devices.reshape(sizes).tolist()},
        }
    )


def sharded_leaf(partition: Partition, name: str, shape: tuple[int, ...], dtype: np.dtype) -> OrbaxLeaf:
    """Return an array whose chunks are its shards; `name` is the one that the rules of `partition` find."""
    record = named_sharding(tuple(partition.mesh.items()), partition.spec(name, shape))
    return OrbaxLeaf(shape, dtype, partition.shard(name, shape), sharding=record)


def partition_spec(spec: Sequence[str | Sequence[str] | None]) -> tuple[str | tuple[str, ...] | None, ...]:
    """A spec with tuples where JSON has lists."""
    return tuple(part if part is None or isinstance(part, str) else tuple(part) for part in spec)


def _texts(shardings: Mapping[str, ocp.metadata.ShardingMetadata]) -> dict[str, str]:
    """Return the record of each sharding by the name of its array; one that many arrays share is encoded once."""
    different: dict[int, Any] = {id(sharding): sharding for sharding in shardings.values()}
    texts = {number: sharding.to_serialized_string() for number, sharding in different.items()}
    return {name: texts[id(sharding)] for name, sharding in shardings.items()}
