"""Memory, files and threads of a restore: what is mapped and shared, and what a failure leaves."""

import dataclasses
import errno
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.checkpoint import Checkpoint
from orbax_safetensors.restore import run as restoring
from orbax_safetensors.storage import local
from orbax_safetensors.storage import memory as arena
from orbax_safetensors.transfer.reader import Reader
from tests.support import hang
from tests.support.accelerator import accelerator
from tests.support.compare import assert_same_bits
from tests.support.files import nothing_left, random_bits, write
from tests.support.small_model import RNG, STEP, B, W, restore_alone, struct


def aligned_file(path, tensors):
    """A file of the reference writer with its header padded so that the data begins at a multiple of 64."""
    write(path, tensors)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    padded = -(-(8 + length) // 64) * 64 - 8
    path.write_bytes(padded.to_bytes(8, "little") + raw[8 : 8 + length].ljust(padded) + raw[8 + length :])


def addresses(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def mapped(address, path):
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return line.rstrip().endswith(str(path))
    return False


def test_alias_maps_what_lies_in_the_file_as_in_memory(tmp_path, mesh):
    tensors = {"even": random_bits(RNG, (64, 64), np.dtype("f4")), "odd": random_bits(RNG, (3,), np.dtype("i1"))}
    tensors["last"] = random_bits(RNG, (8, 8), np.dtype("i1"))
    aligned_file(tmp_path / "x.safetensors", tensors)
    item = {
        "even": struct(tensors["even"], NamedSharding(mesh, P("x"))),
        "odd": struct(tensors["odd"], NamedSharding(mesh, P())),
        "last": struct(tensors["last"], NamedSharding(mesh, P(None, "y"))),
    }
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(alias=True))
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(tmp_path, item=item)
    (tmp_path / "x.safetensors").rename(tmp_path / "y.safetensors")
    for name, array in tensors.items():
        assert_same_bits(restored[name], array)
    assert all(mapped(address, tmp_path / "y.safetensors") for address in addresses(restored["even"]))
    assert not any(mapped(address, tmp_path / "y.safetensors") for address in addresses(restored["last"]))


def test_arrays_are_not_mapped_unless_asked(tmp_path, checkpointer, mesh):
    array = random_bits(RNG, (64, 64), np.dtype("f4"))
    aligned_file(tmp_path / "x.safetensors", {"w": array})
    restored = checkpointer.restore(tmp_path, item={"w": struct(array, NamedSharding(mesh, P("x")))})["w"]
    assert len(addresses(restored)) == 2
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()


def test_replicas_are_read_once_and_share_one_buffer(tmp_path, checkpointer, mesh, scalars):
    array = random_bits(RNG, (64, 64), np.dtype("f4"))
    write(tmp_path / "x.safetensors", {"w": array})
    restored = checkpointer.restore(tmp_path, item={"w": struct(array, NamedSharding(mesh, P()))})["w"]
    assert len(addresses(restored)) == 1
    assert scalars["/jax/orbax/read/safetensors/bytes_read"] == array.nbytes
    assert scalars["/jax/orbax/read/safetensors/num_reads"] == 1
    assert scalars["/jax/orbax/read/safetensors/storage_reads"] == 1


def test_one_line_is_logged(directory, checkpointer, caplog):
    with caplog.at_level("INFO", logger="orbax_safetensors"):
        checkpointer.restore(directory)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("orbax_safetensors")]
    assert f"Restored 3 arrays from {directory}: {W.nbytes + B.nbytes + 4} bytes read in 2 requests" in line


def test_bytes_on_their_way_are_held_to_the_budget(tmp_path):
    arrays = {f"w{number}": random_bits(RNG, (64, 64), np.dtype("f4")) for number in range(10)}
    write(tmp_path / "x.safetensors", arrays)
    options = ost.SafetensorsOptions(in_flight_bytes=4 * 64 * 64 * 4)
    with accelerator() as device, ocp.Checkpointer(ost.SafetensorsHandler(options=options)) as checkpointer:
        restored = checkpointer.restore(tmp_path, restore_args=dict.fromkeys(arrays, ocp.ArrayRestoreArgs()))
    assert device.num_transfers == 10
    assert device.most_bytes <= options.in_flight_bytes
    for name, array in arrays.items():
        assert_same_bits(restored[name], array)


@pytest.mark.parametrize(
    "bad", [{"threads": 0}, {"in_flight_bytes": 0}, {"max_gap_bytes": -1}, {"threads": "4"}, {"alignment": 4}], ids=str
)
def test_options_out_of_range(bad):
    with pytest.raises(ost.SafetensorsError, match="must be an integer of at least"):
        ost.SafetensorsOptions(**bad)


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan"), "60"])
def test_a_timeout_out_of_range(bad):
    with pytest.raises(ost.SafetensorsError, match="join_timeout_secs is .*, must be a positive number"):
        ost.SafetensorsOptions(join_timeout_secs=bad)


def sharded_item(mesh):
    return {"layer": {"w": struct(W, NamedSharding(mesh, P("x", "y"))), "b": struct(B)}, "step": struct(STEP)}


@pytest.mark.both_devices
def test_a_read_that_fails_is_one_error_and_leaves_nothing(directory, mesh, monkeypatch):
    real, calls = os.preadv, []

    def fail_later(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) == 7:  # prefix and header of two files, then data
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(local.os, "preadv", fail_later)
    message = r"model-0000.*: reading .* failed: Input/output error"
    with nothing_left(directory), pytest.raises(ost.StorageError, match=message):
        restore_alone(directory, sharded_item(mesh))


@pytest.mark.both_devices
def test_a_failed_restore_gives_its_memory_back_at_once(directory, mesh, monkeypatch):
    arenas = []
    real = arena.arena_of

    def remember(nbytes):
        memory = real(nbytes)
        arenas.append(weakref.ref(memory))
        return memory

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(arena, "arena_of", remember)
    checkpoint = ost.open_checkpoint(directory)
    monkeypatch.setattr(restoring, "read_checkpoint", lambda *_, **__: checkpoint)
    monkeypatch.setattr(local.os, "preadv", fail)
    gc.disable()
    try:
        with pytest.raises(ost.StorageError) as caught:
            restore_alone(directory, sharded_item(mesh))
        del caught
        assert arenas
        assert not [memory for memory in arenas if memory() is not None]
    finally:
        gc.enable()


def test_a_thread_that_cannot_be_started_stops_the_others(directory, monkeypatch):
    real, calls = ThreadPoolExecutor.submit, []

    def submit(self, work):
        calls.append(work)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, work)

    read, stopped = [], threading.Event()
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(Reader, "_move", lambda *_: (read.append(1), stopped.wait(hang.SECONDS)))
    monkeypatch.setattr(Reader, "cancel", lambda _: stopped.set())
    monkeypatch.setattr(local.LocalStore, "cost", dataclasses.replace(local.COST, max_request_bytes=16))
    with pytest.raises(KeyboardInterrupt):
        ost.SafetensorsHandler().restore(epath.Path(directory))
    assert len(read) <= 1


def test_memory_that_cannot_be_had(monkeypatch):
    with pytest.raises(ost.StorageError, match="bytes of memory cannot be allocated"):
        arena.allocate([2**60])


@pytest.mark.parametrize("change", ["touch", "truncate", "grow", "overwrite"])
@pytest.mark.both_devices
def test_a_file_that_changes_while_it_is_read(directory, mesh, monkeypatch, change):
    path = directory / "model-00001-of-00002.safetensors"
    real, calls = os.preadv, []

    def change_it(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) == 6:
            before = path.stat()
            raw = path.read_bytes()
            if change == "truncate":
                os.truncate(path, before.st_size - 20)
            elif change == "grow":
                os.truncate(path, before.st_size + 1)
            elif change == "overwrite":
                path.write_bytes(raw[:-4] + b"\0\0\0\0")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(local.os, "preadv", change_it)
    with (
        nothing_left(directory),
        pytest.raises(
            ost.StorageError,
            match=r"00001-of-00002\.safetensors: (changed while|expected .* found the file's end)",
        ),
    ):
        restore_alone(directory, sharded_item(mesh))


def test_a_file_that_is_replaced_between_header_and_data(directory, checkpointer, monkeypatch):
    real = Checkpoint.open_file

    def replace_first(self, index):
        stored = self.files[index].path
        os.rename(stored, stored + ".old")
        write(epath.Path(stored), {"other": W})
        return real(self, index)

    monkeypatch.setattr(Checkpoint, "open_file", replace_first)
    with pytest.raises(ost.StorageError, match="changed while it was in use"):
        checkpointer.restore(directory)


@pytest.mark.both_devices
def test_a_restore_from_many_threads_at_once(directory, checkpointer, mesh):
    errors = []

    def work():
        try:
            assert_same_bits(checkpointer.restore(directory, item=sharded_item(mesh))["layer"]["w"], W)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
