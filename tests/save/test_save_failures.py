"""Saves in which any call fails, and interrupts: an error that says which file, and no checkpoint."""

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.devices import agreement
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.names import some
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY
from orbax_safetensors.save import job
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.storage import local
from tests.support.files import nothing_left, random_bits, stored_arrays
from tests.support.saves import BF16, RNG, TREE, assert_same_bits, save, sharded

FAULTY = {
    "a": random_bits(RNG, (16, 64), np.dtype("f4")),
    "b": random_bits(RNG, (64,), np.dtype("i1")),
    "c": random_bits(RNG, (32, 16), BF16),
}


def faulty_tree():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    return {
        "a": sharded(FAULTY["a"], NamedSharding(mesh, P("y"))),
        "b": FAULTY["b"],
        "c": sharded(FAULTY["c"], NamedSharding(mesh, P(None, "x"))),
    }


@contextlib.contextmanager
def failing(function, number, code, only=lambda *_: True):
    """The `number`-th call of `os.<function>` for which `only` holds fails; yields a list of these calls."""
    real, calls = getattr(os, function), []
    lock = threading.Lock()

    def maybe(*args, **kwargs):
        if only(*args, **kwargs):
            with lock:
                calls.append(args)
                fails = len(calls) == number
            if fails:
                raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with mock.patch.object(local.os, function, maybe):
        yield calls


def is_of_index(name):
    return "safetensors" not in name


# What another save may find: it writes these files again, under the same names or others.
OVERWRITTEN = (DATA_DIRECTORY, CHECKSUMS_NAME)


def creates(path, flags, *_):
    return bool(flags & os.O_CREAT)


# Each with the calls that it makes of a save of `FAULTY` into two files.
OPERATIONS = {
    "writes": ("pwritev", errno.ENOSPC, lambda *_: True),
    "writes, badly": ("pwritev", errno.EIO, lambda *_: True),
    "creates": ("open", errno.EACCES, creates),
    "flushes files": ("fsync", errno.EIO, lambda descriptor: os.path.isfile(f"/proc/self/fd/{descriptor}")),
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # by Orbax, of its own file
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_a_failure_of_any_call(tmp_path, operation):
    """Whichever call fails: one error, nothing that restores, nothing left open.

    Another save names what was left, and succeeds without it.
    """
    function, code, only = OPERATIONS[operation]
    settings = {"max_file_bytes": 4200, "fsync": True}
    stock = ocp.PyTreeCheckpointHandler()
    with failing(function, -1, code, only) as calls:
        save(tmp_path / "whole", faulty_tree(), **settings)
    assert len(calls) >= 5
    restorable = []
    for number in range(1, len(calls) + 1):
        directory = tmp_path / str(number)
        with (
            nothing_left(tmp_path),
            failing(function, number, code, only),
            pytest.raises(ost.StorageError, match=os.strerror(code)),
        ):
            save(directory, faulty_tree(), **settings)
        with contextlib.suppress(ost.SafetensorsError):
            restorable.append((number, ost.open_checkpoint(directory).path, sorted(os.listdir(directory))))
        with contextlib.suppress(FileNotFoundError):
            restorable.append((number, stock.restore(epath.Path(directory)), sorted(os.listdir(directory))))
        left = sorted(path.name for path in directory.iterdir())
        if in_the_way := sorted((name for name in left if name not in OVERWRITTEN), key=is_of_index):
            with pytest.raises(ost.StorageError, match=f"holds {some(in_the_way)}; delete these files"):
                save(directory, faulty_tree(), **settings)
            assert sorted(path.name for path in directory.iterdir()) == left
        for name in in_the_way:
            if name == "array_metadatas":
                shutil.rmtree(directory / name)
            else:
                (directory / name).unlink()
        save(directory, faulty_tree(), **settings)
        for restored in (stored_arrays(directory), stock.restore(epath.Path(directory))):
            assert restored.keys() == FAULTY.keys()
            for name, array in restored.items():
                assert_same_bits(array, FAULTY[name])
    if operation == "flushes files":  # the files are whole by then, and only may not outlive a loss of power
        assert [number for number, _, _ in restorable] in ([], [len(calls)])
    else:
        assert not restorable


def test_a_directory_that_cannot_be_flushed(tmp_path):
    def is_directory(descriptor):
        return os.path.isdir(f"/proc/self/fd/{descriptor}")

    with (
        nothing_left(tmp_path),
        failing("fsync", 1, errno.EIO, is_directory),
        pytest.raises(ost.StorageError, match="flushing"),
    ):
        save(tmp_path, faulty_tree(), fsync=True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_that_cannot_be_closed(tmp_path, monkeypatch, number):
    """As on file systems that write when a file is closed. The other files are closed all the same."""
    real, closed = os.close, []

    def close(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        written = path.is_relative_to(tmp_path) and path.suffix == ".safetensors"
        real(descriptor)
        closed.extend([descriptor] * written)
        if written and len(closed) == number:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(local.os, "close", close)
    with nothing_left(tmp_path), pytest.raises(ost.StorageError, match="closing failed: Disk quota exceeded"):
        save(tmp_path, faulty_tree(), max_file_bytes=4200)
    with pytest.raises(ost.SafetensorsError):
        ost.open_checkpoint(tmp_path)


def test_memory_that_runs_out_is_a_storage_error(tmp_path, monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError("no memory for a staging buffer")

    monkeypatch.setattr(job, "transfer_plan", no_memory)
    with nothing_left(tmp_path), pytest.raises(ost.StorageError, match="no memory for a staging buffer") as caught:
        save(tmp_path, faulty_tree())
    assert isinstance(caught.value.__cause__, MemoryError)


def test_an_interrupt_is_not_swallowed(tmp_path):
    with (
        nothing_left(tmp_path),
        mock.patch.object(local.os, "pwritev", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        save(tmp_path, faulty_tree())
    with pytest.raises(ost.SafetensorsError):
        ost.open_checkpoint(tmp_path)


@pytest.mark.parametrize("step", ["plan", "copies", "data", "facts"])
def test_an_interrupt_is_told_to_the_other_processes(tmp_path, monkeypatch, step):
    """They would wait for this one."""
    told = []
    monkeypatch.setattr(
        agreement, "all_gather", lambda key, own, *_: told.append((key.rpartition("/")[2], own)) or [own]
    )
    does = {
        "plan": (job, "contents_of"),
        "copies": (job, "kept"),
        "data": (job.SaveJob, "_write_data"),
        "facts": (job.SaveJob, "_complete_files"),
    }
    checkpointer = ocp.AsyncCheckpointer if step == "copies" else ocp.Checkpointer
    with mock.patch.object(*does[step], side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        checkpointer(ost.SafetensorsHandler()).save(tmp_path / "to", {"a": np.ones(3)})
    assert [(at, own.partition("\n")[2]) for at, own in told][-1] == (step, "KeyboardInterrupt: ")
    assert not agreement._alone  # what it has posted of its checksums


def test_writes_that_are_short_are_continued(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(local.os, "pwritev", lambda fd, buffers, offset: real(fd, [buffers[0][:100]], offset))
    save(tmp_path, faulty_tree(), max_file_bytes=4200)
    for name, array in stored_arrays(tmp_path).items():
        assert_same_bits(array, FAULTY[name])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_read_only(tmp_path):
    (tmp_path / "saved").mkdir(mode=0o500)
    with pytest.raises(ost.StorageError, match="cannot be created: Permission denied"):
        save(tmp_path / "saved", TREE)


def test_a_directory_that_is_missing(tmp_path):
    saving = job.prepare(SaveRequest(tmp_path / "missing", TREE))
    with pytest.raises(ost.StorageError, match="cannot be created: No such file"):
        saving.run()
