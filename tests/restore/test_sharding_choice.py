"""Arrays that a mesh alone shards: each in the dimension of which shards read least."""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, Tree, stack, tensor
from tests.support.family_samples import CHOSEN, DATA
from tests.support.files import random_bits, write

RNG = np.random.default_rng(0)
OPTIONS = ost.SafetensorsOptions(max_gap_bytes=0)


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def stored(directory, **tensors):
    arrays = {name: random_bits(RNG, shape, np.dtype("f4")) for name, shape in tensors.items()}
    directory.mkdir(exist_ok=True)
    write(directory / "model.safetensors", arrays)
    return arrays


def test_each_array_is_sharded_where_it_reads_least(tmp_path):
    arrays = stored(tmp_path / "m", a=(16, 24), b=(3, 8), c=(8,), d=(), e=(3, 5), f=(1, 16, 8), g=(0, 8))
    params = ost.load(tmp_path / "m", mesh_of(8))
    specs = {"a": P("x"), "b": P(None, "x"), "c": P("x"), "d": P(), "e": P(), "f": P(None, "x"), "g": P(None, "x")}
    assert {name: array.sharding.spec for name, array in params.items()} == specs
    assert all(np.asarray(params[name]).tobytes() == array.tobytes() for name, array in arrays.items())


def test_axes_of_a_mesh_shard_one_dimension_together(tmp_path):
    stored(tmp_path / "m", a=(8, 4), b=(4, 6), c=(6, 5), d=(2, 8))
    params = ost.load(tmp_path / "m", mesh_of(2, 4))
    assert params["a"].sharding.spec == P(("x", "y"))
    assert params["b"].sharding.spec == P("y")
    assert params["c"].sharding.spec == P("x")
    assert params["d"].sharding.spec == P(None, ("x", "y"))


def test_a_transposed_array_is_sharded_where_it_is_stored_first(tmp_path):
    arrays = stored(tmp_path / "m", a=(64, 32), b=(64, 32))
    family = Family(
        "mine.two", ("Two",), lambda config: Tree({"w": stack([tensor(name, (64, 32)).T for name in "ab"])})
    )
    params = ost.load(tmp_path / "m", mesh_of(8), family=family)
    assert params["w"].sharding.spec == P(None, None, "x")
    both = np.stack([arrays[name].T for name in "ab"])
    assert np.asarray(params["w"]).tobytes() == both.tobytes()
    plan = ost.plan_restore(tmp_path / "m", AbstractMesh((8,), ("x",)), family=family, process_count=8)
    assert plan.over_reads == ()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3).map(tuple),
    order=st.permutations(range(3)),
    sizes=st.sampled_from([{"x": 8}, {"x": 2, "y": 4}, {"x": 3, "y": 2}, {"x": 1, "y": 4}]),
)
def test_no_other_dimension_reads_less(tmp_path, shape, order, sizes):
    stored(tmp_path / "m", a=shape)
    axes = [axis for axis in order if axis < len(shape)]
    family = Family("mine.one", ("One",), lambda config: Tree({"w": tensor("a", shape).transpose(axes)}))
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    viewed = [shape[axis] for axis in axes]

    def planned(target):
        processes = ost.plan_restore(
            tmp_path / "m", target, family=family, process_count=mesh.size, all_processes=True, options=OPTIONS
        ).processes
        return max(cost.destination_bytes for cost in processes), sum(cost.read_bytes for cost in processes)

    found = planned(mesh)
    everything = tuple(axis for axis, size in sizes.items() if size > 1)
    for dimension, size in enumerate(viewed):
        if size % mesh.size == 0:
            assert found <= planned(NamedSharding(mesh, P(*[None] * dimension, everything)))


@pytest.mark.parametrize("model", [name for name, _ in CHOSEN])
def test_plans_of_a_mesh_have_no_better_advice(model):
    """`plan` recommends other partitions for leaves that read too much; here none does."""
    for sizes in ({"x": 8}, {"x": 2, "y": 4}):
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        plan = ost.plan_restore(DATA / model / "hf", mesh, family="maxtext", process_count=8, options=OPTIONS)
        assert plan.num_arrays > 10
        assert plan.over_reads == ()


def test_a_saved_tree_goes_over_another_mesh(tmp_path):
    tree = {"layers": [{"w": np.ones((16, 4), np.float32)}], "step": 7}
    ost.save(tmp_path / "m", tree)
    loaded = ost.load(tmp_path / "m", mesh_of(8))
    assert loaded["layers"][0]["w"].sharding.spec == P("x")
    assert loaded["step"] == 7


def test_a_mesh_without_axes(tmp_path):
    stored(tmp_path / "m", a=(8,))
    with pytest.raises(ost.TensorMismatchError, match="expected a mesh with axes, found"):
        ost.load(tmp_path / "m", jax.sharding.Mesh(np.empty((), object), ()))


def test_an_abstract_mesh_has_no_devices(tmp_path):
    stored(tmp_path / "m", a=(8,))
    with pytest.raises(ost.TensorMismatchError, match="'a'"):
        ost.load(tmp_path / "m", AbstractMesh((8,), ("x",)))
