"""What `test_cooperative.py` runs in several processes: restores in which each reads a part and devices exchange."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import orbax_safetensors as ost
from tests.multiprocess import cases
from tests.multiprocess.checkpoints import Reference
from tests.multiprocess.measure import different_shards, measured

OPTIONS = ost.SafetensorsOptions(cooperative=True)
# Of one size each, which is all that matters to who reads what; the trees have the others.
_DTYPES = ("bf16", "f32")


def matrix() -> list[cases.Case]:
    """The cases of the matrix that tell ways to exchange apart."""
    return [
        case for case in cases.matrix() if len(case.specs) > 1 or next(iter(case.specs)).split(".")[0] in _DTYPES
    ]


def run(directory: str) -> dict[str, dict[str, Any]]:
    """By the id of each case: what the plans say, what the restore cost, and which shards are wrong."""
    reference = Reference(Path(directory))
    return {case.id: _run(directory, case, reference) for case in matrix()}


def _run(directory: str, case: cases.Case, reference: Reference) -> dict[str, Any]:
    target = _target(case, abstract=False)
    plan = ost.plan_restore(directory, target, options=OPTIONS)
    abstract = ost.plan_restore(
        directory, _target(case, abstract=True), process_count=jax.process_count(), options=OPTIONS
    )
    restored, cost = measured(lambda: _restore(directory, target))
    return {
        "planned": _figures(plan),
        "planned_abstract": _figures(abstract),
        "bytes_read": cost["bytes_read"],
        "num_arrays": len(target),
        "wrong": [
            f"{name} {shard}"
            for name, array in restored.items()
            for shard in different_shards(array, reference.tensors[name])
        ]
        + [name for name, array in restored.items() if array.sharding != target[name].sharding],
    }


def _target(case: cases.Case, *, abstract: bool) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = cases.MESHES[case.mesh]
    devices = mesh.abstract() if abstract else mesh.mesh()
    tensors = cases.tensors()
    return {
        name: jax.ShapeDtypeStruct(*tensors[name], sharding=jax.sharding.NamedSharding(devices, spec))
        for name, spec in case.specs.items()
    }


def _restore(directory: str, target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    args = ost.SafetensorsRestore(item=target, partial_restore=True)
    return ost.SafetensorsHandler(options=OPTIONS).restore(directory, args)


def _figures(plan: ost.RestorePlan) -> dict[str, Any]:
    together = plan.cooperation
    assert together is not None
    return {
        "read_bytes": [process.read_bytes for process in plan.processes],
        "direct": [process.read_bytes for process in together.direct],
        "cooperative": [process.read_bytes for process in together.cooperative],
        "received": [process.received_bytes for process in together.cooperative],
        "possible": together.possible_arrays,
        "chosen": together.chosen_arrays,
    }
