"""What `test_matrix.py` runs in several processes: every case of the matrix, measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import orbax_safetensors as ost
from tests.multiprocess import workers_accelerator
from tests.support import cases
from tests.support.checkpoints import Reference
from tests.support.measure import counted, different_shards, measured

# Another thread of this process may read a few bytes meanwhile; hardly twice at once.
_ATTEMPTS = 3


def run(directory: str) -> dict[str, dict[str, Any]]:
    """Of CPU devices and of accelerators what each case found."""
    return {"CPU devices": _on_cpus(directory), "accelerators": workers_accelerator.run(directory)}


def _on_cpus(directory: str) -> dict[str, dict[str, Any]]:
    """By the id of each case: what the plans say, what the restore cost, and which shards are wrong."""
    reference = Reference(Path(directory))
    _restore(directory, _target(cases.matrix()[0], abstract=False))  # imports read files, too
    return {case.id: _run(directory, case, reference) for case in cases.matrix()}


def _run(directory: str, case: cases.Case, reference: Reference) -> dict[str, Any]:
    target = _target(case, abstract=False)
    plan = ost.plan_restore(directory, target)
    abstract = ost.plan_restore(directory, _target(case, abstract=True), process_count=jax.process_count())
    costs = []
    for _ in range(_ATTEMPTS):
        restored, cost = measured(lambda: _restore(directory, target))
        costs.append(cost)
        if cost["rchar"] == reference.header_bytes + plan.processes[jax.process_index()].read_bytes:
            break
    counts = [counted(array) for array in restored.values()]
    return {
        "planned": _figures(plan),
        "planned_abstract": _figures(abstract),
        "measured": min(costs, key=lambda cost: cost["rchar"]),
        "header_bytes": reference.header_bytes,
        "needed": sum(count["needed"] for count in counts),
        "spanned": sum(count["spanned"] for count in counts),
        "one_box": all(count["one_box"] for count in counts),
        "wrong": [
            f"{name} {shard}"
            for name, array in restored.items()
            for shard in different_shards(array, reference.tensors[name])
        ],
        "shards": sum(len(array.addressable_shards) for array in restored.values()),
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
    return ost.SafetensorsHandler().restore(directory, args)


def _figures(plan: ost.RestorePlan) -> list[dict[str, int]]:
    return [
        {
            "needed_bytes": process.needed_bytes,
            "read_bytes": process.read_bytes,
            "num_requests": process.num_requests,
            "destination_bytes": process.destination_bytes,
        }
        for process in plan.processes
    ]
