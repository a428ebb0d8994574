"""Conversions from and to object stores, with the same conversions of local files as the oracle."""

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, Tree, tensor
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import read_small, write_small
from orbax_safetensors.streaming.orbax_source import OrbaxSource
from tests.support.files import random_bits, write_indexed
from tests.support.roots import TESTDATA
from tests.support.servers.faults import Answer

F4 = np.dtype(np.float32)
SMALL = 40_000

MAXTEXT = {"to": "safetensors", "family": "maxtext"}
CALLS = {
    "files": lambda source, to, **more: ost.reshard(source, to, max_file_bytes=6000, memory_bytes=SMALL, **more),
    "a device each": lambda source, to, **more: ost.reshard(
        source, to, mesh={"x": 4}, spec={"w": (None, "x")}, memory_bytes=SMALL, **more
    ),
    "one file": lambda source, to, **more: ost.reshard(source, to, memory_bytes=SMALL, **more),
}


@pytest.fixture
def place(gcs, monkeypatch):
    for name, value in gcs.environment.items():
        monkeypatch.setenv(name, value)
    return gcs


def arrays():
    rng = np.random.default_rng(0)
    made = {f"w{number}": random_bits(rng, (16, 64 + 8 * number), F4) for number in range(8)}
    return made | {"empty": np.zeros((0, 3), F4), "scalar": np.ones((), F4), "b": np.arange(5)}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "from"
    path.mkdir()
    whole = list(arrays().items())
    write_indexed(path, [dict(whole[:5]), dict(whole[5:])])
    (path / "config.json").write_text('{"model_type": "mine"}')
    (path / "tokenizer.json").write_text("{}")
    return path


def stop_halfway(done, total):
    if done > total // 2:
        raise InterruptedError("enough")


def content(url):
    """All files below a URL or in a directory, by name."""
    if "://" not in str(url):
        return {path.name: path.read_bytes() for path in Path(url).iterdir()}
    store, path = store_of(url, None)
    return {name: read_small(store.open(f"{path}/{name}"), 1 << 30) for name in store.list(path) or ()}


@pytest.mark.parametrize("kind", list(CALLS))
def test_as_on_a_disk(kind, source, place, tmp_path):
    local, remote = CALLS[kind](source, tmp_path / "to"), CALLS[kind](source, f"{place.url}/to")
    assert remote.nbytes == local.nbytes
    assert content(f"{place.url}/to") == content(tmp_path / "to")
    # And from there: sources on a store, to a disk and to the store.
    CALLS[kind](f"{place.url}/to", tmp_path / "again")
    CALLS[kind](f"{place.url}/to", f"{place.url}/again")
    assert content(f"{place.url}/again") == content(tmp_path / "again")
    found = ost.SafetensorsHandler().restore(f"{place.url}/again")
    for name, array in arrays().items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(("model", "memory_bytes"), [("qwen3_unscanned", 1 << 30), ("deepseek3_scanned", 200_000)])
def test_from_maxtext(model, memory_bytes, place, tmp_path):
    """Layers that are stacked, transposed and in several files, more than one of which wait for their bytes."""
    hf = TESTDATA / "maxtext" / model.split("_")[0] / "hf"
    ost.convert(TESTDATA / "orbax" / model, tmp_path / "to", config=hf, **MAXTEXT)
    ost.convert(TESTDATA / "orbax" / model, f"{place.url}/to", config=hf, memory_bytes=memory_bytes, **MAXTEXT)
    local, remote = (ost.SafetensorsHandler().restore(to) for to in (str(tmp_path / "to"), f"{place.url}/to"))
    assert sorted(local) == sorted(remote)
    assert all(local[name].tobytes() == remote[name].tobytes() for name in local)
    assert len(ost.open_checkpoint(f"{place.url}/to").files) > (1 if memory_bytes < 1 << 20 else 0)
    assert content(f"{place.url}/to")["config.json"] == content(tmp_path / "to")["config.json"]


@pytest.mark.parametrize(("memory_bytes", "warned"), [(200_000, True), (1 << 30, False)])
def test_chunks_that_are_read_more_than_once_are_told_of(memory_bytes, warned, place, caplog, monkeypatch):
    read, close = [], OrbaxSource.close

    def closed(own):
        read.append(own.counters.nbytes)
        close(own)

    monkeypatch.setattr(OrbaxSource, "close", closed)
    asked = {**MAXTEXT, "config": TESTDATA / "maxtext" / "deepseek3" / "hf", "memory_bytes": memory_bytes}
    found, to = TESTDATA / "orbax" / "deepseek3_scanned", f"{place.url}/to"
    done = ost.convert(found, to, **asked)
    assert (read[0] > done.nbytes) == warned
    said = [record.getMessage() for record in caplog.records if "bytes of chunks are read" in record.getMessage()]
    expected = f"{read[0]} bytes of chunks are read for {done.nbytes} bytes of arrays"
    assert [expected in one for one in said] == [True] * warned


def test_a_config_on_a_store(place, tmp_path):
    store, path = store_of(f"{place.url}/hf", None)
    for name, text in content(TESTDATA / "maxtext" / "qwen3" / "hf").items():
        with_bytes = store.create(f"{path}/{name}", len(text))
        with_bytes.write(0, [memoryview(text)])
        with_bytes.close()
    ost.convert(TESTDATA / "orbax" / "qwen3_unscanned", tmp_path / "to", config=f"{place.url}/hf", **MAXTEXT)
    assert json.loads((tmp_path / "to" / "config.json").read_text())["model_type"] == "qwen3"
    ost.convert(f"{place.url}/hf", tmp_path / "back", to="orbax", family="maxtext")
    assert (tmp_path / "back" / "0" / "items").is_dir()


@pytest.mark.parametrize("kind", list(CALLS))
def test_stopped_and_resumed(kind, source, place, tmp_path):
    to = f"{place.url}/to"
    whole = CALLS[kind](source, tmp_path / "to").nbytes

    with pytest.raises(InterruptedError, match="^enough$"):
        CALLS[kind](source, to, progress=stop_halfway)
    with pytest.raises(ost.SafetensorsError):
        ost.open_checkpoint(to)
    (source / "config.json").write_text("{ }")
    shutil.copystat(TESTDATA / "orbax", source / "config.json")
    resumed = CALLS[kind](source, to, resume=True)
    assert resumed.nbytes < whole if kind != "one file" else resumed.nbytes == whole
    (tmp_path / "to" / "config.json").write_text("{ }")
    assert content(to) == content(tmp_path / "to")
    with pytest.raises(ost.StorageError, match="already exists"):
        CALLS[kind](source, to)
    with pytest.raises(ost.StorageError, match="already exists"):
        CALLS[kind](source, to, resume=True)


def test_another_conversion_is_not_mixed_in(source, place, tmp_path):
    to = f"{place.url}/to"

    for again in (False, True):
        with pytest.raises(InterruptedError, match="^enough$"):
            CALLS["files"](source, to, progress=stop_halfway)
        if not again:
            with pytest.raises(ost.TensorMismatchError, match="cannot be resumed"):
                ost.reshard(source, to, max_file_bytes=9000, resume=True)
    ost.reshard(source, to, max_file_bytes=9000)
    ost.reshard(source, tmp_path / "to", max_file_bytes=9000)
    assert content(to) == content(tmp_path / "to")


@pytest.mark.parametrize("begun", list(CALLS))
def test_one_of_another_layout_is_told_apart_from_a_checkpoint(begun, source, place):
    """Whatever is in the place of the last file of either."""
    to = f"{place.url}/to"
    with pytest.raises(InterruptedError, match="^enough$"):
        CALLS[begun](source, to, progress=stop_halfway)
    before = content(to)
    for other in {*CALLS} - {begun}:
        for resume in (False, True):
            with pytest.raises(ost.StorageError, match=r"another conversion has begun.*--resume.*or delete it"):
                CALLS[other](source, to, resume=resume)
    assert content(to) == before
    CALLS[begun](source, to, resume=True)
    for other in {*CALLS} - {begun}:
        with pytest.raises(ost.StorageError, match="to: already exists"):
            CALLS[other](source, to)


def test_what_is_there_is_left_alone(source, place):
    store, path = store_of(f"{place.url}/to", None)
    file = store.create(f"{path}/mine", 4)
    file.write(0, [memoryview(b"mine")])
    file.close()
    for resume in (False, True):
        with pytest.raises(ost.StorageError, match="already exists, and holds 'mine'"):
            CALLS["files"](source, f"{place.url}/to", resume=resume)
    assert content(f"{place.url}/to") == {"mine": b"mine"}


def test_an_unfinished_one_is_deleted_alone(source, place):
    """Not what somebody has put there meanwhile, and not the source."""
    with pytest.raises(InterruptedError, match="^enough$"):
        CALLS["files"](source, f"{place.url}/to", progress=stop_halfway)
    store, path = store_of(f"{place.url}/to", None)
    write_small(store, f"{path}/more/mine", b"mine")
    with pytest.raises(ost.StorageError, match="already exists, and holds 'more'"):
        CALLS["files"](source, f"{place.url}/to")
    CALLS["one file"](source, f"{place.url}/to/more/from")
    with pytest.raises(ost.StorageError, match="is in gs://.*/to, the destination"):
        CALLS["files"](f"{place.url}/to/more/from", f"{place.url}/to")
    assert read_small(store.open(f"{path}/more/mine"), 4) == b"mine"
    assert sorted(content(f"{place.url}/to/more/from")) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_source_that_changes_meanwhile(source, place):
    def change(done, total):
        if done > total // 2:
            path = next(source.glob("*.safetensors"))
            path.write_bytes(path.read_bytes())

    with pytest.raises(ost.StorageError, match="changed while it was in use"):
        CALLS["files"](source, f"{place.url}/to", progress=change)
    with pytest.raises(ost.SafetensorsError):
        ost.open_checkpoint(f"{place.url}/to")


def test_leaves_whose_elements_alternate(place, tmp_path):
    """As gates and ups of experts do, which one tensor has: written in long runs, not one by one."""
    leaves = {name: np.arange(4096, dtype=F4).reshape(64, 64) + at for at, name in enumerate(("gate", "up"))}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "0" / "items", leaves)
    fused = Family("fused", ("Fused",), lambda config: Tree({
        name: tensor("gate_up", (64, 128)).slice(slice(None), slice(at, None, 2)) for at, name in enumerate(leaves)
    }))  # fmt: skip
    asked = {"to": "safetensors", "family": fused, "config": {"architectures": ["Fused"]}, "memory_bytes": 140_000}
    done = ost.convert(tmp_path / "0", f"{place.url}/to", **asked)
    assert done.requests < 50
    (found,) = ost.SafetensorsHandler().restore(f"{place.url}/to").values()
    np.testing.assert_array_equal(found[:, ::2], leaves["gate"])
    np.testing.assert_array_equal(found[:, 1::2], leaves["up"])


def test_a_store_that_refuses(source, place):
    place.server.fail(Answer(403), method="PUT", times=None)
    with pytest.raises(ost.StorageError, match=r"to/"):
        CALLS["files"](source, f"{place.url}/to")


def test_a_server_that_is_only_read_from(source, web):
    shutil.copytree(source, web.root / "from")
    with pytest.raises(ost.StorageError, match="can only be read from"):
        CALLS["files"](source, f"{web.url}/to")
    ost.reshard(f"{web.url}/from", source / "to")
    assert sorted(content(source / "to")) == ["config.json", "model.safetensors", "tokenizer.json"]
