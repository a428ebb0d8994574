"""What conversions say when they begin, and file systems with too little room, which they refuse at once."""

import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.orbax_store import OrbaxLeaf
from orbax_safetensors.storage.room import free_bytes, taken_bytes
from orbax_safetensors.streaming.partial_directory import PartialDirectory
from tests.support.conversions import checkpoint
from tests.support.interrupted import CALLS
from tests.support.killed_conversions import OF_SAFETENSORS, arrays, check, make_source
from tests.support.orbax_items import FORMATS
from tests.support.sinks import missing, step_sink
from tests.support.steps import PARAMS, is_whole, save

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

NBYTES = sum(array.nbytes for array in arrays().values())


class Disk:
    """A file system with room for so many bytes."""

    def __init__(self):
        self.free = 2**40

    def facts(self, path):
        return SimpleNamespace(f_blocks=2**40, f_frsize=2, f_bavail=self.free // 2, f_bfree=self.free // 2)


@pytest.fixture
def disk(monkeypatch):
    made = Disk()
    monkeypatch.setattr(os, "statvfs", made.facts)
    return made


def needed_by(call, disk):
    """The bytes that a conversion needs according to its error on a full disk."""
    disk.free = 0
    with pytest.raises(ost.StorageError, match="needs [0-9]+ bytes, and its file system has 0 bytes free") as raised:
        call()
    return int(str(raised.value).split(" needs ")[1].split()[0])


@pytest.mark.parametrize("kind", ["to_orbax", "to_safetensors", "reshard_orbax", "reshard_safetensors"])
def test_too_little_room_is_refused_at_once(kind, disk, tmp_path):
    source = make_source("to_orbax" if kind in OF_SAFETENSORS else "to_safetensors", tmp_path / "from")
    asked = {"compression": False} if kind.endswith("orbax") else {}
    (tmp_path / "made").mkdir()
    to = tmp_path / "made" / "new" / "to"
    needed = needed_by(lambda: CALLS[kind](source, to, **asked), disk)
    assert NBYTES <= needed < 1.3 * NBYTES  # the headers of four files are long for such arrays
    disk.free = needed // 2 * 2 - 2
    with pytest.raises(ost.StorageError, match=rf"to.*: needs {needed} bytes, and its file system has {disk.free} "):
        CALLS[kind](source, to, **asked)
    assert list((tmp_path / "made").iterdir()) == []
    disk.free = needed + 2
    CALLS[kind](source, to, **asked)
    check(kind, to)


def test_chunks_that_are_compressed_may_fit(disk, tmp_path, caplog):
    source = make_source("to_orbax", tmp_path / "from")
    disk.free = NBYTES - 2
    CALLS["to_orbax"](source, tmp_path / "to")
    check("to_orbax", tmp_path / "to")
    (warning,) = caplog.messages
    assert warning.startswith("Making ")
    assert warning.endswith(" free: may not fit unless it compresses")


@pytest.mark.parametrize("resume", [True, False])
def test_what_was_begun_makes_room(resume, disk, tmp_path, caplog):
    """It is taken up, or deleted first. A run that resumes says how much is left."""
    source = make_source("reshard_safetensors", tmp_path / "from")

    def stop(done, total):
        if done > total // 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        CALLS["reshard_safetensors"](source, tmp_path / "to", progress=stop)
    written = taken_bytes(str(tmp_path / "to.partial"))
    assert written > NBYTES // 4
    needed = needed_by(lambda: CALLS["reshard_safetensors"](source, tmp_path / "to", resume=resume), disk)
    assert needed < NBYTES - written + 20_000  # headers
    disk.free = needed + 2
    totals = []
    with caplog.at_level("INFO"):
        CALLS["reshard_safetensors"](
            source, tmp_path / "to", resume=resume, progress=lambda done, total: totals.append(total)
        )
    check("reshard_safetensors", tmp_path / "to")
    assert (totals[0] < NBYTES) == resume
    assert f" {human_bytes(totals[0])} to write, " in caplog.messages[0]


def test_bytes_that_no_record_has_are_no_reason_to_warn(disk, tmp_path, caplog, monkeypatch):
    """A run that was killed between a write and its record has taken the room for what is written again."""

    def fail(directory, numbers):
        raise InterruptedError

    source = make_source("reshard_safetensors", tmp_path / "from")
    with monkeypatch.context() as killed, pytest.raises(InterruptedError):
        killed.setattr(PartialDirectory, "add", fail)
        CALLS["reshard_safetensors"](source, tmp_path / "to")
    disk.free = needed_by(lambda: CALLS["reshard_safetensors"](source, tmp_path / "to", resume=True), disk) + 2
    assert disk.free < NBYTES
    totals = []
    CALLS["reshard_safetensors"](
        source, tmp_path / "to", resume=True, progress=lambda done, total: totals.append(total)
    )
    assert totals[0] == NBYTES
    assert caplog.messages == []


def test_room_that_nobody_knows_is_enough(monkeypatch, tmp_path):
    def refuse(path):
        raise OSError("not supported")

    checkpoint(tmp_path / "from")
    for number, statvfs in enumerate((refuse, lambda path: SimpleNamespace(f_blocks=0))):
        monkeypatch.setattr(os, "statvfs", statvfs)
        assert free_bytes(str(tmp_path / "not" / "yet" / "there")) is None
        ost.reshard(tmp_path / "from", tmp_path / str(number))


@pytest.mark.parametrize(("user", "blocks"), [(0, 5), (1000, 3)])
def test_root_may_use_the_reserve(user, blocks, monkeypatch, tmp_path):
    facts = SimpleNamespace(f_blocks=100, f_frsize=4096, f_bavail=3, f_bfree=5)
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert free_bytes(str(tmp_path)) == blocks * 4096


def test_holes_take_no_room(tmp_path):
    (tmp_path / "below").mkdir()
    with open(tmp_path / "below" / "file", "wb") as file:
        file.write(bytes(5000))
        file.truncate(2**30)
    assert 5000 <= taken_bytes(str(tmp_path)) < 2**20
    assert taken_bytes(str(tmp_path / "nowhere")) == 0


def test_items_that_are_copied_need_room(disk, tmp_path, monkeypatch):
    """A run that resumes copies them anew."""
    large = np.ones((16, 2**14), np.float32)  # far more than the blocks of small files
    monkeypatch.setitem(PARAMS["layers"], "w", large)
    save(tmp_path / "from")
    (tmp_path / "from" / "7" / "other").mkdir()
    (tmp_path / "from" / "7" / "other" / "content").write_bytes(bytes(2 * large.nbytes))
    reshard = partial(ost.reshard, tmp_path / "from", tmp_path / "to", compression=False)

    def stop(done, total):
        raise InterruptedError

    needed = needed_by(reshard, disk)
    assert needed > 3 * large.nbytes
    disk.free = needed + 2
    with pytest.raises(InterruptedError):
        reshard(progress=stop)
    assert needed_by(partial(reshard, resume=True), disk) < 2 * large.nbytes
    disk.free = needed + 2
    reshard(resume=True)
    is_whole(tmp_path / "to")


@pytest.mark.parametrize(("ocdbt", "zarr3"), FORMATS)
def test_chunks_at_the_edges_are_stored_whole(ocdbt, zarr3, tmp_path):
    leaf = OrbaxLeaf((50_001,), np.dtype(np.float32), (50_000,))
    with step_sink(tmp_path, {"w": leaf}, ocdbt=ocdbt, zarr3=zarr3, compression=False) as sink:
        for box in missing(sink, "w"):
            sink.write_box("w", box, np.ones(box.shape, np.float32))
        sink.commit()
    assert 2 * 50_000 * 4 == sink.workspace.nbytes <= taken_bytes(str(tmp_path))


def test_what_a_conversion_says_when_it_begins(disk, tmp_path, caplog):
    checkpoint(tmp_path / "from", large=np.zeros((64, 1 << 14), np.uint8))
    disk.free = 5 * 2**30
    told = []
    with caplog.at_level("INFO"):
        ost.reshard(
            tmp_path / "from", tmp_path / "to", memory_bytes=2**20, progress=lambda *_: told.append(len(caplog.records))
        )
    assert told[0] == 1
    assert caplog.messages[0] == (
        f"Making {tmp_path}/to from {tmp_path}/from: 1.0 MiB to read, 1.0 MiB to write, 1.0 MiB of memory at most, "
        "5.0 GiB free"
    )
