"""JAX's transfer guard: a restore or a save is a transfer that somebody asks for."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.accelerator import accelerator
from tests.support.saves import assert_same_bits

SHAPE = (64, 256)


@pytest.fixture
def tree(mesh):
    array = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return {"w": jax.device_put(array, NamedSharding(mesh, P("x"))), "n": np.ones(3), "step": 7}


@pytest.fixture
def saved(tmp_path, tree):
    ost.save(tmp_path / "saved", tree)
    return tmp_path / "saved"


def single_replica(path, tree):
    sharding = tree["w"].sharding
    args = ocp.type_handlers.SingleReplicaArrayRestoreArgs(
        sharding=sharding, single_replica_sharding=None, global_shape=SHAPE
    )
    item = ost.SafetensorsRestore({"w": tree["w"]}, {"w": args}, partial_restore=True)
    return ocp.Checkpointer(ost.SafetensorsHandler()).restore(path, args=item)


def through_orbax(path, tree):
    ost.register()
    try:
        return ocp.PyTreeCheckpointer().restore(path, item=tree)
    finally:
        ost.unregister()


LOADS = {
    "as it was saved": lambda path, tree: ost.load(path),
    "over a mesh": lambda path, tree: ost.load(path, tree["w"].sharding.mesh),
    "into a tree": ost.load,
    "on the default device": lambda path, tree: ost.load(path, {name: ocp.ArrayRestoreArgs() for name in tree}),
    "cast": lambda path, tree: ost.load(path, tree, dtype="float16"),
    "one replica for all": single_replica,
    "stock Orbax, with register()": through_orbax,
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("way", LOADS)
def test_a_restore_is_explicit(saved, tree, way, capfd):
    for level in ("disallow", "log"):
        with jax.transfer_guard(level):
            found = LOADS[way](saved, tree)
        assert_same_bits(np.asarray(found["w"]), np.asarray(tree["w"]).astype(found["w"].dtype))
    assert "device transfer" not in capfd.readouterr().err  # nothing to log


def test_a_restore_in_parts_is_explicit(saved, tree):
    """Devices put leaves together that are longer than what may be under way."""
    options = ost.SafetensorsOptions(in_flight_bytes=4096)
    with accelerator(), jax.transfer_guard("disallow"):
        found = ost.load(saved, tree, options=options)
    assert_same_bits(np.asarray(found["w"]), np.asarray(tree["w"]))


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_a_save_is_explicit(tmp_path, tree, kind):
    with jax.transfer_guard("disallow"), kind(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree))
    assert_same_bits(np.asarray(ost.load(tmp_path / "saved")["w"]), np.asarray(tree["w"]))


def test_a_guard_against_explicit_transfers_counts(saved, tree):
    with jax.transfer_guard("disallow_explicit"):
        assert ost.load(saved, {"n": tree["n"]}, partial=True)["n"].tolist() == [1, 1, 1]
        with pytest.raises(ost.SafetensorsError, match="jax_transfer_guard forbids explicit transfers as well"):
            ost.load(saved, tree)
