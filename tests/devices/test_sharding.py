"""Shards as boxes: our geometry of a mesh against JAX's own."""

import itertools

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_safetensors.devices import sharding as arrays
from orbax_safetensors.errors import TensorMismatchError

ENTRIES = [None, "x", "y", ("x", "y"), ("y", "x")]
SPECS = [
    P(*spec)
    for rank in (1, 2)
    for spec in itertools.product(ENTRIES, repeat=rank)
    if len(names := [n for entry in spec if entry for n in ((entry,) if isinstance(entry, str) else entry)])
    == len(set(names))
]


@pytest.mark.parametrize("shape", [(8, 16), (16, 8, 3)])
def test_boxes_of_a_mesh_are_jaxs(mesh, shape):
    for spec in (P(), *SPECS):
        sharding = NamedSharding(mesh, spec)
        indices = sharding.devices_indices_map(shape)
        boxes = arrays.device_boxes(sharding, shape)
        assert boxes == [arrays.box_of(indices[device], shape) for device in mesh.devices.flat], spec
        abstract = NamedSharding(jax.sharding.AbstractMesh((2, 4), ("x", "y")), spec)
        assert arrays.device_boxes(abstract, shape) == boxes
        assert set(arrays.local_boxes(sharding, shape)) == set(boxes)


def test_a_permuted_mesh(mesh):
    permuted = jax.sharding.Mesh(mesh.devices[::-1, [2, 0, 3, 1]], ("x", "y"))
    sharding = NamedSharding(permuted, P("y", "x"))
    indices = sharding.devices_indices_map((8, 4))
    assert arrays.device_boxes(sharding, (8, 4)) == [
        arrays.box_of(indices[device], (8, 4)) for device in permuted.devices.flat
    ]


def test_other_shardings(mesh):
    single = jax.sharding.SingleDeviceSharding(mesh.devices[0, 0])
    assert arrays.device_boxes(single, (3, 2)) == [((0, 3), (0, 2))]
    assert arrays.device_owners(single, (3, 2), None) == [0]
    assert arrays.local_boxes(single, (3, 2)) == (((0, 3), (0, 2)),)


def test_dimensions_that_do_not_divide_are_rounded_up():
    sharding = NamedSharding(jax.sharding.AbstractMesh((4,), ("x",)), P("x"))
    assert arrays.device_boxes(sharding, (5,)) == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]


def test_devices_are_dealt_in_order(mesh):
    abstract = NamedSharding(jax.sharding.AbstractMesh((2, 4), ("x", "y")), P("y"))
    assert arrays.device_owners(abstract, (8,), 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert arrays.device_owners(abstract, (8,), None) == [0] * 8
    assert arrays.device_owners(NamedSharding(mesh, P("y")), (8,), None) == [0] * 8
    assert arrays.is_abstract(abstract)
    assert not arrays.is_abstract(NamedSharding(mesh, P()))


def test_devices_that_cannot_be_dealt_evenly():
    sharding = NamedSharding(jax.sharding.AbstractMesh((4,), ("x",)), P("x"))
    with pytest.raises(TensorMismatchError, match="4 devices cannot be dealt to 3 processes evenly"):
        arrays.device_owners(sharding, (8,), 3)


def test_a_spec_that_is_too_long(mesh):
    for boxes in (arrays.device_boxes, arrays.local_boxes):
        for shape in ((8,), ()):
            with pytest.raises(TensorMismatchError, match=rf"expected a partition of at most {len(shape)} entries"):
                boxes(NamedSharding(mesh, P("x", "y")), shape)


def test_uneven_shards_are_jaxs_error_with_a_type(mesh):
    with pytest.raises(TensorMismatchError, match=r"shape \(7, 8\) cannot be sharded"):
        arrays.local_boxes(NamedSharding(mesh, P("x")), (7, 8))


def test_default_sharding_is_jaxs_default_device():
    assert arrays.default_sharding().device_set == {jax.devices()[0]}
    with jax.default_device(jax.devices()[3]):
        assert arrays.default_sharding().device_set == {jax.devices()[3]}
