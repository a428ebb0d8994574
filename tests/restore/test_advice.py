"""Other partitions for leaves that are read badly: what is promised is what a restore with them costs."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.open import open_checkpoint
from orbax_safetensors.restore.match import match
from orbax_safetensors.restore.plan import PlannedRestore
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "qwen3"
MESH = AbstractMesh((2, 4), ("data", "model"))


def target(checkpoint, specs):
    return {
        name: jax.ShapeDtypeStruct(
            view.shape, view.dtype, sharding=NamedSharding(MESH, PartitionSpec(*specs.get(name, ())))
        )
        for name, view in checkpoint.leaves.items()
    }


def advice(path, specs, process_count=4, **family):
    checkpoint = open_checkpoint(path, **family)
    targets = match(checkpoint, target(checkpoint, specs), None, partial=True).targets
    found = PlannedRestore(checkpoint, targets, process_count, ost.SafetensorsOptions())
    return found.cheaper_shardings(found.plan())


def check(path, name, others, process_count=4, **family):
    """Plans the leaf alone with each of its other partitions."""
    checkpoint = open_checkpoint(path, **family)
    for other in others:
        alone = {name: target(checkpoint, {name: [axes or None for axes in other.axes]})[name]}
        plan = ost.plan_restore(path, alone, process_count=process_count, **family)
        assert other.read_bytes == sum(cost.read_bytes for cost in plan.processes)
        assert other.needed_bytes == sum(cost.needed_bytes for cost in plan.processes)
    assert [other.read_bytes for other in others] == sorted(other.read_bytes for other in others)


@pytest.fixture
def path(tmp_path):
    save_file(
        {"wide": np.zeros((64, 48), np.float32), "tall": np.zeros((4, 6, 64), np.float32)}, tmp_path / "a.safetensors"
    )
    return tmp_path


def test_all_axes_on_one_dimension(path):
    found = advice(path, {"wide": (None, ("data", "model"))})
    (best,) = found["wide"]
    assert best.axes == (("data", "model"), ())
    assert best.over_read == 1.0
    check(path, "wide", found["wide"])


def test_axes_apart_where_no_one_dimension_will_do(path):
    found = advice(path, {"tall": (None, None, ("data", "model"))})["tall"]
    assert (("model",), ("data",), ()) in [other.axes for other in found]
    assert (("data",), ("model",), ()) not in [other.axes for other in found]  # 6 rows do not divide by 4
    assert found[0].over_read == 1.0
    check(path, "tall", found)


def test_leaves_of_one_geometry_get_the_same(tmp_path):
    save_file({f"{n}.kernel": np.zeros((32, 16), np.float32) for n in range(3)}, tmp_path / "a.safetensors")
    found = advice(tmp_path, {f"{n}.kernel": (None, "model") for n in range(3)})
    assert len(found) == 3
    assert found["0.kernel"] is found["1.kernel"] is found["2.kernel"]


def test_what_is_read_well_gets_none(path):
    assert advice(path, {"wide": (("data", "model"),)}) == {}


def test_a_family(path):
    family = {"family": "maxtext", "variant": {"scan_layers": True}}
    name = "params.decoder.layers.mlp.wi_0.kernel"
    found = advice(QWEN3, {name: ("data",)}, 2, **family)
    assert found[name][0].over_read == 1.0
    check(QWEN3, name, found[name], 2, **family)
