"""Full-size models, planned from headers: files of the published names, shapes and sizes, with holes for data."""

import re
from math import prod

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors.cli.partition import spread
from orbax_safetensors.format.dtypes import nbytes
from tests.support.full_size import make, stored

MESH = {"fsdp": 64, "tensor": 8}
# What a layer of multi-token prediction shares with the model.
NOT_RESTORED = re.compile(r"model\.layers\.61\.(embed_tokens|shared_head)\..*")


def sharded(leaves, mesh):
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    return {
        path: jax.ShapeDtypeStruct(
            view.shape, view.dtype, sharding=NamedSharding(abstract, PartitionSpec(*(spread(view.shape, mesh))))
        )
        for path, view in leaves.items()
    }


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("name", "scan_layers"), [("deepseek-v3-fp8", True), ("gpt-oss-120b-mxfp4", False), ("llama-3.1-405b", True)]
)
def test_every_tensor_is_used_once_on_512_devices(name, scan_layers, tmp_path):
    directory = make(name, tmp_path)
    variant = {"scan_layers": scan_layers}
    leaves = ost.open_checkpoint(directory, family="maxtext", variant=variant).leaves
    tensors = {name: facts for name, facts in stored(name).items() if not NOT_RESTORED.fullmatch(name)}
    stored_bytes = sum(nbytes(*facts) for facts in tensors.values())
    plain = stored(name.removesuffix("-fp8").removesuffix("-mxfp4"))
    params = sum(prod(shape) for name, (_, shape) in plain.items() if not NOT_RESTORED.fullmatch(name))

    whole = ost.plan_restore(directory, sharded(leaves, {"one": 1}), family="maxtext", variant=variant)
    assert whole.total_params == params
    assert whole.processes[0].needed_bytes == stored_bytes
    # Two windows of codes can need the same scales.
    assert stored_bytes <= whole.processes[0].read_bytes <= (1.001 if "fp8" in name else 1) * stored_bytes

    plan = ost.plan_restore(directory, sharded(leaves, MESH), family="maxtext", variant=variant, process_count=64)
    assert plan.total_params == params
    assert (plan.process_count, len(plan.processes)) == (64, 4)
    needed = sum(process.needed_bytes for process in plan.processes)
    # The four that are looked at hold a sixteenth; norms and the like are on every device.
    assert stored_bytes <= 16 * needed < 1.2 * stored_bytes
    assert all(process.needed_bytes <= process.read_bytes for process in plan.processes)
    read = sum(process.read_bytes for process in plan.processes)
    assert (read > 1.1 * needed) <= bool(plan.over_reads)
