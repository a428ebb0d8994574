"""Saves whose process ends at any change of files: the checkpoint before or the new one is there, and whole."""

import errno
import os
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_safetensors as ost
from orbax_safetensors.storage import local, replace
from tests.support.interrupts import crashes

ONE = ost.SafetensorsOptions(threads=1)
TWO_FILES = 2500  # bytes at most


def version(number):
    """A checkpoint in several files that all say which one it is."""
    return {name: np.full(250, number, np.float32) for name in "abc"}


def save(path, number):
    """Replace the checkpoint, by one that has two files."""
    ost.save(path, version(number), force=True, max_file_bytes=TWO_FILES, options=ONE)


def is_version(path, number):
    found = ost.load(path)
    assert {name: set(array.tolist()) for name, array in found.items()} == {name: {number} for name in "abc"}


def holds(path, number):
    is_version(path, number)
    assert ost.verify(path, data=True) == []


@pytest.mark.parametrize("exchanges", [True, pytest.param(False, marks=pytest.mark.cross)])
def test_a_forced_save_loses_no_checkpoint(tmp_path, monkeypatch, exchanges):
    """Also for programs that know nothing of this package, if the file system can exchange names."""
    if not exchanges:
        monkeypatch.setattr(replace, "_RENAMEAT2", None)
    model, seen = tmp_path / "model", []
    save(model, 1)
    for _ in crashes(lambda: save(model, 2)):
        assert not exchanges or model.exists()
        seen.append(int(ost.load(model)["a"][0]))
        holds(model, seen[-1])
        save(model, 1)
        holds(model, 1)
        assert os.listdir(tmp_path) == ["model"]
    assert seen == sorted(seen)
    assert seen.count(1) > 10
    assert seen.count(2) > 3


def test_a_save_that_is_not_whole_restores_nothing(tmp_path):
    """Of a handler alone, without a temporary directory around it."""
    handler, stock, directory = ost.SafetensorsHandler(options=ONE), ocp.PyTreeCheckpointHandler(), epath.Path(tmp_path)
    args, whole = ost.SafetensorsSave(version(1), max_file_bytes=TWO_FILES), []
    for _ in crashes(lambda: handler.save(directory, args)):
        try:
            ost.open_checkpoint(directory)
        except ost.SafetensorsError:
            whole.append(False)
            for reader in (handler, stock):
                with pytest.raises((ValueError, FileNotFoundError)):
                    reader.restore(directory)
        else:
            whole.append(True)
            is_version(directory, 1)  # what is for Orbax alone may follow
        for path in directory.iterdir():
            path.rmtree() if path.is_dir() else path.unlink()
    assert whole == sorted(whole)
    assert whole.count(False) > 10
    assert whole[-1]


def test_a_disk_that_takes_no_more_loses_and_keeps_nothing(tmp_path, monkeypatch):
    save(tmp_path / "model", 1)
    real = os.pwritev
    for force in (True, False):
        for room in range(4):
            writes = []

            def pwritev(descriptor, buffers, offset, writes=writes, room=room):
                writes.append(offset)
                if len(writes) > room:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
                return real(descriptor, buffers, offset)

            with monkeypatch.context() as patched, pytest.raises(ost.StorageError, match="File too large"):
                patched.setattr(local.os, "pwritev", pwritev)
                ost.save(tmp_path / ("model" if force else "other"), version(2), force=force, max_file_bytes=TWO_FILES)
            assert os.listdir(tmp_path) == ["model"]
            holds(tmp_path / "model", 1)


def test_a_program_that_looks_all_the_time_finds_whole_checkpoints(tmp_path):
    """A reader may be overtaken between two files, but it notices."""
    save(tmp_path / "model", 0)
    seen, done = [], threading.Event()

    def look():
        while not done.is_set():
            assert (tmp_path / "model" / "model.safetensors.index.json").exists()
            try:
                found = ost.load(tmp_path / "model")
                seen.append({float(value) for array in found.values() for value in (array[0], array[-1])})
            except ost.StorageError as error:
                assert "changed while it was in use" in str(error)  # noqa: PT017, the alternative is no error

    failures = []

    def looking():
        try:
            look()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=looking)
    reader.start()
    try:
        for number in range(1, 10):
            save(tmp_path / "model", number)
    finally:
        done.set()
        reader.join()
    assert not failures
    assert seen
    assert all(len(versions) == 1 for versions in seen)
