"""`SafetensorsOptions(progress=...)`: told by restores, saves and conversions alike."""

import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.transfer import progress, threads
from tests.support.files import nothing_left

TREE = {"a": np.arange(16 * 1024, dtype=np.float32).reshape(16, 1024), "b": np.arange(8, dtype=np.float16)}
NBYTES = sum(array.nbytes for array in TREE.values())


class Enough(Exception):
    """Raised by a callback."""


def enough(done, total):
    raise Enough


@pytest.fixture
def told(monkeypatch):
    """What is told if there is no pause between calls, in which threads."""
    monkeypatch.setattr(threads, "SECONDS", 0)
    monkeypatch.setattr(progress, "SECONDS", 0)
    return []


def options(told, **others):
    return ost.SafetensorsOptions(
        progress=lambda done, total: told.append((done, total, threading.current_thread())), **others
    )


def assert_complete(told, total, thread=None):
    assert told[0][:2] == (0, total)
    assert told[-1][:2] == (total, total)
    done = [call[0] for call in told]
    assert done == sorted(set(done))
    assert {call[1] for call in told} == {total}
    assert {call[2] for call in told} == {thread or threading.current_thread()}


@pytest.fixture
def path(tmp_path):
    ost.save(tmp_path / "model", TREE)
    return tmp_path / "model"


@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P()], ids=str)
@pytest.mark.both_devices
def test_a_restore_counts_the_bytes_of_its_arrays(path, told, mesh, spec):
    target = {
        "a": jax.ShapeDtypeStruct((16, 1024), np.float32, sharding=NamedSharding(mesh, spec)),
        "b": jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P())),
    }
    restored = ost.load(path, target, options=options(told))
    assert_complete(told, TREE["a"].nbytes + 2 * TREE["b"].nbytes)
    np.testing.assert_array_equal(restored["a"], TREE["a"])


def test_arrays_that_share_pages_of_the_file_count_as_well(path, told):
    ost.load(path, jax.sharding.SingleDeviceSharding(jax.devices()[0]), options=options(told, alias=True))
    assert_complete(told, NBYTES)


def test_handlers_take_it(path, tmp_path, told):
    handler = ost.SafetensorsHandler(options=options(told))
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(path)
        assert_complete(told, NBYTES)
        told.clear()
        checkpointer.save(tmp_path / "new", restored)
        assert_complete(told, NBYTES)


def test_an_asynchronous_save_calls_from_the_background(tmp_path, told):
    with ocp.AsyncCheckpointer(ost.SafetensorsHandler(options=options(told))) as checkpointer:
        checkpointer.save(tmp_path / "new", args=ost.SafetensorsSave(TREE))
        checkpointer.wait_until_finished()
    assert told[0][2] is not threading.current_thread()
    assert_complete(told, NBYTES, told[0][2])


def test_a_conversion_takes_that_of_its_options(path, tmp_path, told):
    ost.reshard(path, tmp_path / "new", options=options(told))
    assert [call[:2] for call in told] == [(0, NBYTES), (NBYTES, NBYTES)]


@pytest.mark.both_devices
def test_a_callback_that_fails_ends_a_restore(path):
    with nothing_left(path), pytest.raises(Enough):
        ost.load(path, options=ost.SafetensorsOptions(progress=enough))


@pytest.mark.parametrize("last", [False, True])
def test_a_callback_that_fails_leaves_nothing_that_restores(tmp_path, last):
    def fail(done, total):
        if done == total or not last:
            raise Enough

    with pytest.raises(Enough):
        ost.save(tmp_path / "new", TREE, options=ost.SafetensorsOptions(progress=fail))
    assert not (tmp_path / "new").exists()
    ost.save(tmp_path / "new", TREE)
    for name, array in load_file(tmp_path / "new" / "model.safetensors").items():
        assert array.tobytes() == TREE[name].tobytes()
