"""Checkpoints of Orbax with a pipe, a device or a monstrous file in the place of a small one: each is refused, soon."""

import json
import os
import shutil
import tracemalloc

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.errors import StorageError
from orbax_safetensors.orbax_store.reader import open_step

JOBS = {
    "open": lambda source, to: open_step(source),
    "verify": lambda source, to: ost.verify(source),
    "reshard": lambda source, to: ost.reshard(source, to),
}
PLACES = {
    "pipe": os.mkfifo,
    "device": lambda path: os.symlink("/dev/zero", path),
    "link to a directory": lambda path: os.symlink(".", path),
    "sparse": lambda path: (path.touch(), os.truncate(path, 2**38)),
}
SAID = {"sparse": "expected at most ", "link to a directory": "is a link to a directory, which is not followed"}
OCDBT = [
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "_sharding",
    "_strings.json",
    "array_metadatas/process_0",
    "manifest.ocdbt",
    "ocdbt.process_0/manifest.ocdbt",
    "d/x",
]
FILES = ["a/.zarray", "a/0"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkpoint with a database, and one with a file for each chunk."""
    root = tmp_path_factory.mktemp("sources")
    for ocdbt in (True, False):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
        ocp.Checkpointer(handler).save(root / str(ocdbt), {"a": jnp.arange(8.0), "text": "x"})
    return root


def attacked(source, name, place, tmp_path):
    """A copy of a checkpoint with something else at a path in it."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / name).unlink(missing_ok=True)
    PLACES[place](copy / name)
    return copy


def faults(job, source, tmp_path):
    try:
        found = JOBS[job](source, tmp_path / "to")
        return found if job == "verify" else []
    except StorageError as error:
        return [error]


@pytest.mark.parametrize(
    ("ocdbt", "name", "place"),
    [
        *((True, name, "pipe") for name in OCDBT),
        *((False, name, "pipe") for name in FILES),
        *((True, name, place) for name in ("_METADATA", "manifest.ocdbt") for place in PLACES if place != "pipe"),
        *((False, "a/0", place) for place in PLACES if place != "pipe"),
    ],
    ids=str,
)
def test_what_is_not_a_small_regular_file_is_refused(sources, tmp_path, ocdbt, name, place):
    copy = attacked(sources / str(ocdbt), name, place, tmp_path)
    said = f"{name}: {SAID.get(place, 'is not a regular file')}"
    for job in ("reshard",) if (name, place) == ("a/0", "sparse") else ("open", "verify"):  # which read no chunk
        assert any(said in str(fault) for fault in faults(job, copy, tmp_path))


def test_other_items_are_copied_only_if_they_are_regular_files(sources, tmp_path):
    step = tmp_path / "1"
    shutil.copytree(sources / "True", step / "params")
    (step / "notes").mkdir()
    os.mkfifo(step / "notes" / "pipe")
    with pytest.raises(StorageError, match="pipe: is not a regular file"):
        ost.reshard(step, tmp_path / "to")


@pytest.fixture(scope="module")
def tracing():
    """Traces memory until the last test here has ended: to stop it is not safe while other threads allocate."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.memory
@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("open", "_METADATA"),
        ("verify", "_sharding"),
        ("open", "array_metadatas/process_0"),
        ("verify", "_CHECKPOINT_METADATA"),
    ],
)
def test_a_record_of_many_lists_takes_no_memory(sources, tmp_path, name, job, tracing):
    copy = tmp_path / "copy"
    shutil.copytree(sources / "True", copy)
    text = json.dumps([[]] * 10**6).encode()
    (copy / name).write_bytes(text)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    assert any("objects and lists" in str(fault) for fault in faults(job, copy, tmp_path))
    assert tracemalloc.get_traced_memory()[1] - before < 12 * len(text)
