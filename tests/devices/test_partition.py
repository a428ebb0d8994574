"""How arrays are sharded over meshes that are not there: as JAX would, or refused."""

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orbax_safetensors.devices.partition import partition
from orbax_safetensors.errors import TensorMismatchError


def test_the_first_pattern_that_is_found_counts():
    rules = partition({"x": 2, "y": 4}, {"wi": ("x", None), "kernel$": (None, ("x", "y")), ".*": ("y",)})
    assert rules.spec("mlp.wi.kernel", (8, 8)) == ("x", None)
    assert rules.spec("mlp.wo.kernel", (8, 8)) == (None, ("x", "y"))
    assert rules.shard("mlp.wo.kernel", (8, 8)) == (8, 1)
    assert rules.shard("norm", (8, 3)) == (2, 3)
    assert rules.spec("scalar", ()) == ()
    assert partition({"x": 2}, {"a": ("x",)}).shard("b", (3, 5)) == (3, 5)
    assert partition(None, None).shard("b", (3, 5)) == (3, 5)


def test_boxes_are_those_of_jax(mesh):
    rules = partition({"x": 2, "y": 4}, {"": ("y", None, "x")})
    sharding = NamedSharding(mesh, PartitionSpec("y", None, "x"))
    indices = sharding.devices_indices_map((8, 3, 4))
    expected = [
        tuple(part.indices(n)[:2] for part, n in zip(indices[device], (8, 3, 4), strict=True))
        for device in mesh.devices.flat
    ]
    assert rules.boxes("a", (8, 3, 4)) == expected
    assert rules.shard("a", (8, 3, 4)) == sharding.shard_shape((8, 3, 4))


def test_a_target_of_many_leaves_is_asked_for_by_name():
    """One pattern for each would be tried for each."""
    sharding = NamedSharding(AbstractMesh((2,), ("x",)), PartitionSpec("x"))
    names = [f"layers.{number}.kernel" for number in range(1000)]
    rules = partition(None, None, {name: jax.ShapeDtypeStruct((4,), "float32", sharding=sharding) for name in names})
    rules.check((name, (4,)) for name in names)
    assert not rules.patterns
    assert [rules.shard(name, (4,)) for name in (names[-1], "layers.1", "other.layers.1.kernel")] == [(2,), (4,), (4,)]


@pytest.mark.parametrize(
    ("mesh_", "spec", "shape", "message"),
    [
        ({"x": 2}, {"a": ("z",)}, (4,), r"spec: 'a': the mesh has no axis 'z', it has \['x'\]"),
        ({"x": 2}, {"a": ("x", "x")}, (4, 4), "an axis of a mesh can shard one dimension only"),
        ({"x": 2}, {"a": (None, "x")}, (4,), "expected at most 1 entries"),
        ({"x": 4}, {"a": ("x",)}, (6,), "6 does not divide by 4"),
        ({"x": 0}, {}, (6,), "mesh: expected the sizes"),
        ({}, {}, (6,), "mesh: expected the sizes"),
        ([2], {}, (6,), "mesh: expected the sizes"),
        ({"x": 2}, ["x"], (6,), "spec: expected axes by pattern"),
        ({"x": 2}, {"(": ("x",)}, (6,), r"spec: '\(' is not a regular expression"),
        ({"x": 2}, {"*a": ("x",)}, (6,), r"spec: '\*a' is a regular expression, .* for the glob '\*a' write 'a\$'"),
        ({"x": 2}, {"a": "x"}, (6,), "spec: 'a': expected a tuple"),
        (None, {"a": ("x",)}, (6,), "pass mesh"),
    ],
)
def test_what_does_not_fit(mesh_, spec, shape, message):
    with pytest.raises(TensorMismatchError, match=message):
        partition(mesh_, spec).check([("a", shape)])


def test_arrays_that_a_pattern_names_by_accident_stay_whole(caplog):
    """They do not fit its axes, and others do."""
    shapes = {"mlp.wi": (8, 4), "mlp.count": (3,), "mlp.bias": (8,), "mlp.scale": (), "mlp.big": (6, 8), "other": (3,)}
    rules = partition({"x": 4}, {"mlp": ("x", None), "other": ()})
    rules.check(shapes.items())
    assert {name for name, shape in shapes.items() if rules.spec(name, shape)} == {"mlp.wi"}
    assert all(rules.shard(name, shape) == shape for name, shape in shapes.items() if name != "mlp.wi")
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == (
        "spec: 'mlp': fits 1 of 4 arrays, and the others are left whole: 'mlp.big' of shape (6, 8) (6 does not divide "
        "by 4), 'mlp.bias' of shape (8,) (expected at most 1 entries), 'mlp.count' of shape (3,) (expected at most 1 "
        "entries)"
    )


def test_a_pattern_that_fits_nothing_is_an_error():
    rules = partition({"x": 4}, {"mlp": ("x",), "": (None, "x")})
    with pytest.raises(TensorMismatchError, match=r"^spec: 'mlp': 'mlp.a' .*: 6 does not divide by 4$"):
        rules.check([("mlp.a", (6,)), ("mlp.b", (3,)), ("mlp.c", ()), ("w", (2, 4))])


def test_the_value_at_the_end_of_an_nnx_path_may_be_left_out():
    names = dict.fromkeys(("a.kernel.value", "a.bias.value", "value.kernel", "b.kernel"), (8,))
    for pattern, found in {
        r"kernel$": {"a.kernel.value", "value.kernel", "b.kernel"},
        r"kernel\.value$": {"a.kernel.value"},
        r"^a\.bias$": {"a.bias.value"},
    }.items():
        rules = partition({"x": 2}, {pattern: ("x",)})
        rules.check(names.items())
        assert {name for name, shape in names.items() if rules.spec(name, shape)} == found
    leaf = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(AbstractMesh((2,), ("x",)), PartitionSpec("x")))
    rules = partition(None, None, {"a": {"kernel": leaf}, "b": {"kernel": {"value": leaf}}})
    rules.check(names.items())
    assert {name for name, shape in names.items() if rules.spec(name, shape)} == {"a.kernel.value", "b.kernel"}
