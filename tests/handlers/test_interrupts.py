"""A Ctrl-C at any change of files: a save or a delta is whole or is not there, and nothing is left beside it."""

import contextlib
import os
import shutil

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.storage import replace
from orbax_safetensors.storage.workspace import Lock
from tests.support.interrupts import interrupted
from tests.support.tiers import cross

TREES = {"old": {"a": np.arange(1000, dtype=np.float32), "b": np.arange(7)}}
TREES["new"] = {"a": -TREES["old"]["a"], "b": TREES["old"]["b"]}
DELTA = "weight_v000001"


@pytest.fixture
def made(tmp_path):
    """Where there is a checkpoint, `old`, another one, `new`, and what changes between them."""
    for name, tree in TREES.items():
        ost.save(tmp_path / name, tree)
    ost.delta(tmp_path / "old", tmp_path / "new", tmp_path / "published", version=1, options=ONE)
    return tmp_path


ONE = ost.SafetensorsOptions(threads=1)
# What is there before, and what puts `new` in its place.
CALLS = {
    "save": (None, lambda made, path: ost.save(path, TREES["new"])),
    "save in missing directories": (None, lambda made, path: ost.save(path / "below" / "model", TREES["new"])),
    "forced save": ("old", lambda made, path: ost.save(path, TREES["new"], force=True)),
    "delta": (None, lambda made, path: ost.delta(made / "old", made / "new", path, version=1, options=ONE)),
    "apply": ("old", lambda made, path: ost.apply_delta(path, made / "published" / DELTA, path, options=ONE)),
    "apply elsewhere": (
        None,
        lambda made, path: ost.apply_delta(made / "old", made / "published" / DELTA, path, options=ONE),
    ),
}


def names(path):
    """All names below a directory, except random ones."""
    return sorted(os.path.join(at, name) for at, _, files in os.walk(path) for name in files if len(name) != 32)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("call", "exchanges"),
    cross(
        [*((call, True) for call in CALLS), ("forced save", False), ("apply", False)],
        {("save in missing directories", True), ("forced save", False)},
    ),
)
def test_at_any_change(made, monkeypatch, call, exchanges, after):
    if not exchanges:
        monkeypatch.setattr(replace, "_RENAMEAT2", None)
    before, run = CALLS[call]
    work = made / "work"

    def prepared():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        if before:
            shutil.copytree(made / before, work / "model")
        return names(work)

    prepared()
    with interrupted(0, after=after) as calls:
        run(made, work / "model")
    whole = names(work)
    assert len(calls) > 30
    for number in range(1, len(calls) + 1):
        untouched = prepared()
        with interrupted(number, after=after) as calls:
            try:
                run(made, work / "model")
            except KeyboardInterrupt:
                assert names(work) in (untouched, whole), calls[-1]
            else:  # the call has failed by itself, as where a directory is there already
                assert names(work) == whole
        assert before or sorted(os.listdir(work)) == ["model"] * bool(names(work))


# What is resumed: its unfinished part stays until the next run.
RESUMED = {
    "convert": lambda made, path, **more: ost.convert(made / "old", path, to="orbax", **more),
    "reshard": lambda made, path, **more: ost.reshard(made / "old", path, mesh={"x": 2}, spec={"a": ("x",)}, **more),
    "link": lambda made, path, **more: ost.link(made / "old", path, **more),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", cross(RESUMED, ()))
def test_what_is_resumed(made, call, after):
    run, work = RESUMED[call], made / "work"
    with interrupted(0, after=after) as calls:
        run(made, work / "model")
    whole = names(work)
    for number in range(1, len(calls) + 1):
        shutil.rmtree(work)
        with interrupted(number, after=after), contextlib.suppress(KeyboardInterrupt):
            run(made, work / "model")
        if names(work) != whole:
            run(made, work / "model", resume=number % 2 == 0)
            assert names(work) == whole


def test_a_lock_that_a_kill_has_left_goes_with_the_next_run(made):
    """Also if the checkpoint was complete by then, and the next run is refused."""
    ost.convert(made / "old", made / "orbax", to="orbax")
    locks = {
        made / ".old.lock": lambda: ost.save(made / "old", TREES["new"]),
        made / "orbax" / ".0.lock": lambda: ost.convert(made / "old", made / "orbax", to="orbax"),
        made / "old.partial.lock": lambda: ost.convert(made / "orbax", made / "old", to="safetensors"),
        made / "old.link.lock": lambda: ost.link(made / "new", made / "old"),
        made / "published" / f".{DELTA}.lock": lambda: ost.apply_delta(
            made / "old", made / "published" / DELTA, made / "published" / DELTA
        ),
    }
    for path, run in locks.items():
        path.touch()
        with pytest.raises(ost.StorageError, match="already exists"):
            run()
        assert not path.exists()
    lock = Lock(os.fspath(made / ".old.lock"), "old")
    with pytest.raises(ost.StorageError, match="another save or conversion is writing here"):
        ost.save(made / "old", TREES["new"], force=True)
    assert (made / ".old.lock").exists()
    lock.release()
    assert not (made / ".old.lock").exists()
