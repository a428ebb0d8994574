"""Broadcasts of what one replica has read; here all replicas are devices of this process."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.restore import replicas
from tests.support.files import random_bits

RNG = np.random.default_rng(0)
# Of each width and kind one; each is compiled for itself.
NAMES = ("BF16", "BOOL", "C64", "F32", "F64", "F8_E4M3", "I8")


@dataclass
class Wanted:
    """What a broadcast needs of a target."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    name: str = "w"
    broadcast: bool = True


def target(shape, dtype, spec, kind=AxisType.Auto):
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(kind,) * 3)
    return Wanted(shape, dtype, NamedSharding(mesh, spec))


@pytest.fixture
def broadcast(monkeypatch):
    """Returns an array of a target on both replicas, of which only the first has the values."""
    monkeypatch.setattr(replicas, "readers", lambda *_: frozenset({0}))

    def broadcast(wanted, host):
        def fill(targets):
            (read,) = targets
            with jax.transfer_guard("allow"):
                return [jax.make_array_from_callback(host.shape, read.sharding, lambda index: host[index])]

        with jax.transfer_guard_host_to_device("disallow_explicit"):
            (made,) = replicas.fill_and_broadcast(fill, [wanted])
        return made

    return broadcast


def assert_on_all_devices(made, wanted, host):
    assert (made.sharding, made.dtype) == (wanted.sharding, host.dtype)
    assert len(made.addressable_shards) == 8
    for shard in made.addressable_shards:
        assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes()


@pytest.mark.parametrize(
    ("name", "shape", "spec"), [*((name, (8, 4), P(None, "y")) for name in NAMES), ("F32", (), P())], ids=str
)
def test_all_bits_arrive_and_no_host_memory_is_sent(broadcast, name, shape, spec):
    dtype = DTYPES[name].numpy
    host = random_bits(RNG, shape, dtype)
    with jax.enable_x64():
        wanted = target(shape, dtype, spec)
        assert_on_all_devices(broadcast(wanted, host), wanted, host)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        *((spec, AxisType.Auto) for spec in (P("y"), P(None, "y"), P(("y", "z")), P("z", "y"), P())),
        (P("z", "y"), AxisType.Explicit),
    ],
    ids=str,
)
def test_any_sharding(broadcast, spec, kind):
    host = random_bits(RNG, (8, 4), np.dtype("f4"))
    wanted = target(host.shape, host.dtype, spec, kind)
    assert_on_all_devices(broadcast(wanted, host), wanted, host)


@pytest.mark.parametrize(
    ("shape", "spec", "processes", "expected"),
    [
        ((8, 4), P("y"), 2, frozenset({0})),
        ((8, 4), P("y"), 4, frozenset({0, 1})),
        ((8, 4), P("y"), 1, None),
        ((8, 4), P("x"), 2, None),
        ((0, 4), P(None, "y"), 2, None),  # XLA has other shards of empty arrays
    ],
)
def test_who_reads_for_all(shape, spec, processes, expected):
    assert replicas.readers(target(shape, np.dtype("f4"), spec), processes) == expected
