"""A checkpoint that another one replaces while it is read: it changed, and nothing says that it is damaged."""

import contextlib
import itertools
import os
import threading
from unittest import mock

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.checkpoint import checksums, one_state
from orbax_safetensors.storage.replace import replace

# All by which a path is looked at; what is read later comes from files that are open.
CALLS = ("open", "listdir", "scandir", "stat", "lstat")


@contextlib.contextmanager
def replaced(path, new, number):
    """`new` takes the place of `path` before the `number`-th call that looks at it; yields a list of these calls."""
    path, new = os.fspath(path), os.fspath(new)
    calls, lock = [], threading.RLock()

    def hooked(function):
        def call(at=".", *args, **kwargs):
            text = os.fspath(at) if isinstance(at, str | os.PathLike) else ""
            if text.startswith(path):
                with lock:
                    calls.append((function.__name__, text))
                    if len(calls) == number:
                        replace(new, path)
            return function(at, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, hooked(getattr(os, name))))
        yield calls


def save(path, seed, **settings):
    tree = {"a": np.full((8, 40), seed, np.float32), f"b{seed}": np.arange(seed, seed + 9, dtype=np.int32)}
    ost.save(path, tree, **settings)
    return path


def orbax(path, seed):
    source = save(path.parent / f"source-{seed}", seed, index=False)
    ost.convert(source, path, to="orbax")
    return path


MADE = {
    "files": lambda path, seed: save(path, seed, index=False, max_file_bytes=100),
    "indexed": lambda path, seed: save(path, seed, max_file_bytes=100),
    "one file": lambda path, seed: save(path, seed, index=False),
    "orbax": orbax,
}


def checked_load(path):
    try:
        ost.load(path, options=ost.SafetensorsOptions(checksums=True))
    except ost.StorageError as error:  # of a file that is opened when the other one is there already
        return "changed" if "changed while it was in use" in str(error) else error
    return "loaded"


READS = {
    "verify": lambda path: ost.verify(path),
    "verify data": lambda path: ost.verify(path, data=True),
    "checked load": checked_load,
}


@pytest.mark.parametrize(
    ("made", "read"),
    [(made, read) for made in MADE for read in READS if made != "orbax" or read == "verify"],
)
def test_at_any_call(tmp_path, made, read):
    path, other = MADE[made](tmp_path / "model", 1), MADE[made](tmp_path / "other", 2)
    with replaced(path, other, 0) as calls:
        READS[read](path)
    assert len(calls) > 3
    for number in range(1, len(calls) + 1):
        with replaced(path, other, number):
            found = READS[read](path)
        assert found in ([], "changed", "loaded")


def test_again_and_again(tmp_path, monkeypatch):
    path = save(tmp_path / "model", 1)
    states = itertools.count()
    monkeypatch.setattr(one_state, "_identity", lambda _: next(states))
    with pytest.raises(ost.StorageError, match="model: was replaced while it was verified, 10 times"):
        ost.verify(path)


def test_other_files_may_change(tmp_path, monkeypatch):
    """A program that trains writes its log, and further checkpoints, beside the files."""
    path = save(tmp_path / "model", 1)
    read = checksums.parse

    def write(*args, **kwargs):
        with open(path / "log", "a") as log:
            log.write("step\n")
        (path / f"checkpoint-{len(os.listdir(path))}").mkdir()
        return read(*args, **kwargs)

    monkeypatch.setattr(checksums, "parse", write)
    assert ost.verify(path, data=True) == []
