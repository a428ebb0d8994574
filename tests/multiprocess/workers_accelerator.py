"""What `test_matrix.py` runs in several processes as well: restores onto devices that are emulated accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import orbax_safetensors as ost
from tests.support import cases
from tests.support.accelerator import accelerator
from tests.support.checkpoints import Reference
from tests.support.measure import different_shards

# So little that every restore of more than a few tensors has to wait for transfers before it ends.
IN_FLIGHT_BYTES = 10_000


def run(directory: str) -> dict[str, Any]:
    """By the name of each restore, how many shards it handed over and which of them are wrong."""
    reference = Reference(Path(directory)).tensors
    found = {}
    for number, (name, args) in enumerate(_restores()):
        handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(in_flight_bytes=IN_FLIGHT_BYTES))
        with accelerator("random" if number % 2 else "late") as device:
            request = ost.SafetensorsRestore(restore_args=args, partial_restore=True)
            restored = handler.restore(directory, request)
        wrong = [f"{leaf} {shard}" for leaf in args for shard in different_shards(restored[leaf], reference[leaf])]
        found[name] = {"transfers": device.num_transfers, "wrong": wrong}
    return found


def _restores() -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the leaves of every restore."""
    for case in cases.matrix():
        if len(case.specs) > 1 or (case.mesh == "2x4" and "bf16.cube" in case.specs):
            yield case.id, _args(case, ocp.ArrayRestoreArgs)
    case = next(case for case in cases.matrix() if case.id == "2x4 all leading")
    own = {
        name: jax.sharding.PartitionSpec(*("y" if axes else None for axes in spec)) for name, spec in case.specs.items()
    }
    yield "one replica reads", _args(cases.Case("", "2x4", own), ocp.type_handlers.SingleReplicaArrayRestoreArgs)


def _args(case: cases.Case, kind: type) -> dict[str, Any]:
    mesh = cases.MESHES[case.mesh].mesh()
    return {name: kind(sharding=jax.sharding.NamedSharding(mesh, spec)) for name, spec in case.specs.items()}
