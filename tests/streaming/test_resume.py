"""Conversions that are killed at any time: nothing opens as complete, and the next one takes up what is there."""

import os

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, Tree, tensor
from orbax_safetensors.orbax_store import open_orbax
from tests.support.interrupted import CALLS
from tests.support.killed_conversions import arrays, check, make_source, opens


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("to_orbax", 5),
        ("to_orbax", "before_the_end"),
        ("to_safetensors", 0),
        ("to_safetensors", 5),
        ("reshard_orbax", 1),
        ("reshard_safetensors", "before_the_end"),
    ],
)
def test_killed_and_resumed(forks, kind, where, tmp_path):
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    forks.killed(kind, source, destination, where)
    assert not opens(kind, destination)
    told = []
    result = CALLS[kind](source, destination, resume=True, progress=lambda *now: told.append(now))
    check(kind, destination)
    total = sum(array.nbytes for array in arrays().values())
    assert told[0] == (0, result.nbytes)
    assert told[-1] == (result.nbytes, result.nbytes)
    assert 0 < result.nbytes < total if where in (1, 5) else result.nbytes == (total if where == 0 else 0)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("where", ["before_the_rename", "after_the_rename"])
def test_killed_at_the_very_end(forks, where, tmp_path):
    kind = "to_safetensors"
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    forks.killed(kind, source, destination, where)
    if where == "after_the_rename":
        check(kind, destination)
        with pytest.raises(ost.StorageError, match="to: already exists"):
            CALLS[kind](source, destination, resume=True)
        return
    assert not opens(kind, destination)
    assert CALLS[kind](source, destination, resume=True).nbytes == 0
    check(kind, destination)


@pytest.mark.parametrize("kind", list(CALLS))
def test_another_source_is_not_mixed_in_and_without_resume_all_begins_anew(kind, tmp_path):
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    stopped(CALLS[kind], source, destination)
    make_source(kind, tmp_path / "from", seed=1)
    with pytest.raises(ost.TensorMismatchError, match="cannot be resumed"):
        CALLS[kind](source, destination, resume=True)
    result = CALLS[kind](source, destination)
    assert result.nbytes == sum(array.nbytes for array in arrays().values())
    check(kind, destination, seed=1)


def stopped(call, *args, **arguments):
    """A call that ends after the first tiles, with all that it has written left behind."""

    def stop(done, total):
        if done:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        call(*args, progress=stop, **arguments)


def family_of(view):
    """A family of one leaf, always of the same name."""
    return Family("mine", ("Mine",), lambda config: Tree({"w": view()}, unused=[".*"]))


OF_W0 = family_of(lambda: tensor("w0", (16, 64)))
OF_W1 = family_of(lambda: tensor("w1", (16, 72)).slice(slice(None), slice(64)))
TWICE = family_of(lambda: tensor("w0", (16, 64)).scale(2))


@pytest.mark.parametrize(
    ("begun", "now"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float16"}),
        ({"dtype": "bfloat16"}, {}),
        ({"family": OF_W0}, {"family": OF_W1}),
        ({"family": OF_W0}, {"family": TWICE}),
    ],
)
def test_other_arguments_are_not_mixed_in(begun, now, tmp_path):
    source, small = make_source("to_orbax", tmp_path / "from"), {"to": "orbax", "memory_bytes": 5_000}
    stopped(ost.convert, source, tmp_path / "to", **small, **begun)
    with pytest.raises(ost.TensorMismatchError, match="cannot be resumed"):
        ost.convert(source, tmp_path / "to", resume=True, **small, **now)
    moved = ost.convert(source, tmp_path / "to", resume=True, **small, **begun).nbytes
    leaves = open_orbax(tmp_path / "to").leaves.values()
    assert 0 < moved < sum(leaf.dtype.itemsize * np.prod(leaf.shape) for leaf in leaves)


@pytest.mark.parametrize("kind", list(CALLS))
def test_a_source_that_changes_meanwhile(kind, tmp_path):
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    file = next(path for path in sorted(source.rglob("*")) if path.is_file() and path.suffix != ".json")

    def touch(done, total):
        if done == total:
            os.utime(file, ns=(1, 1))

    with pytest.raises(ost.StorageError, match="changed while"):
        CALLS[kind](source, destination, progress=touch)
    assert not opens(kind, destination)


@pytest.mark.parametrize("kind", list(CALLS))
def test_a_destination_that_is_there(kind, tmp_path):
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"
    (destination / "0").mkdir(parents=True)
    for resume in (False, True):
        with pytest.raises(ost.StorageError, match="already exists"):
            CALLS[kind](source, destination, resume=resume)
    assert list(destination.rglob("*")) == [destination / "0"]


@pytest.mark.parametrize("kind", list(CALLS))
def test_a_callback_that_fails(kind, tmp_path):
    source, destination = make_source(kind, tmp_path / "from"), tmp_path / "to"

    def fail(done, total):
        if done > total // 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="^enough$"):
        CALLS[kind](source, destination, progress=fail)
    assert not opens(kind, destination)
    CALLS[kind](source, destination, resume=True)
    check(kind, destination)
