"""`verify(data=True)`: bytes against the checksums of their save."""

import json
import shutil
import threading

import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.storage import local
from tests.support.files import random_bits, write
from tests.support.saves import RNG

U8 = np.dtype(np.uint8)
TREE = {f"{number}": random_bits(RNG, (size,), U8) for number, size in enumerate([1, 70_000, 0, 5, 300_000, 33, 1])}
TREE["long"] = random_bits(RNG, (40 * 2**20,), U8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    ost.save(directory, TREE, max_file_bytes=200_000, index=False)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def flip(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def messages(path, **options):
    return [str(fault) for fault in ost.verify(path, data=True, options=ost.SafetensorsOptions(**options))]


@pytest.mark.parametrize("options", [{}, {"threads": 1}, {"threads": 7, "direct": True}])
def test_a_checkpoint_as_it_was_saved(saved, options):
    assert messages(saved, **options) == []


def test_links_to_files_of_a_save(directory, tmp_path):
    link = tmp_path / "link"
    ost.link(directory, link)
    assert messages(link) == []
    (name,) = [path.name for path in link.iterdir() if path.name.startswith("model-00001")]
    flip(directory / name, 8 * (directory / name).stat().st_size - 1)
    (fault,) = messages(link)
    assert fault.startswith(f"{link / name}: tensor ")
    (directory / CHECKSUMS_NAME).write_text("{")
    assert all("there is nothing to check its data against" in fault for fault in messages(link))


def test_nothing_below_the_directory_is_listed(directory, monkeypatch):
    monkeypatch.delattr(local.LocalStore, "below")
    assert ost.verify(directory) == []


def test_every_flipped_bit_is_found_with_the_tensor(directory):
    rng = np.random.default_rng(1)
    checkpoint = ost.open_checkpoint(directory)
    for _ in range(40):
        file = checkpoint.files[rng.integers(len(checkpoint.files))]
        bit = int(rng.integers(8 * file.stamp.nbytes))
        at = bit // 8 - file.header.data_start
        flip(file.path, bit)
        found = messages(directory)
        flip(file.path, bit)
        if at >= 0:
            (name,) = [name for name, entry in file.header.tensors.items() if entry.begin <= at < entry.end]
            assert len(found) == 1
            assert found[0].startswith(
                f"{file.path}: tensor {name!r}: its bytes are not those that safetensors.checksums.json records"
            )
        else:
            assert found
    assert messages(directory) == []


def test_several_tensors_are_all_named(directory):
    checkpoint = ost.open_checkpoint(directory)
    for name in ("1", "4", "long"):
        number, begin, *_ = checkpoint.location(name)
        flip(checkpoint.files[number].path, 8 * begin)
    assert sorted(found.partition(": tensor ")[2].partition(":")[0] for found in messages(directory)) == [
        "'1'",
        "'4'",
        "'long'",
    ]


def test_bytes_that_changed_places_are_found(directory):
    checkpoint = ost.open_checkpoint(directory)
    number, begin, *_ = checkpoint.location("long")
    with open(checkpoint.files[number].path, "r+b") as file:
        file.seek(begin)
        head, tail = file.read(2**24), file.read(2**24)
        file.seek(begin)
        file.write(tail + head)
    assert len(messages(directory)) == 1


def test_another_file_of_the_same_name(directory):
    name = "model-00001-of-00004.safetensors"
    header = ost.open_checkpoint(directory).files[0].header
    write(directory / name, {tensor: TREE[tensor] for tensor in header.tensors}, {"a": "b"})
    (found,) = messages(directory)
    assert found.startswith(f"{directory / name}: is not the file that {CHECKSUMS_NAME} records")


def test_one_file_of_several(directory):
    file = ost.open_checkpoint(directory).files[0].path
    assert messages(file) == []
    flip(file, 8 * 2000)
    assert len(messages(file)) == 1


def test_nothing_to_check_against(directory):
    (directory / CHECKSUMS_NAME).unlink()
    assert all("there is nothing to check its data against" in found for found in messages(directory))
    assert len(messages(directory)) == 4
    assert ost.verify(directory) == []


def test_a_file_that_the_record_lacks_and_one_that_the_checkpoint_lacks(directory):
    record = json.loads((directory / CHECKSUMS_NAME).read_text())
    del record["files_sha256"]
    record["files"]["other.safetensors"] = record["files"].pop("model-00002-of-00004.safetensors")
    (directory / CHECKSUMS_NAME).write_text(json.dumps(record))
    lacking, missing = sorted(messages(directory))
    assert lacking.startswith(f"{directory}/model-00002-of-00004.safetensors: there is nothing to check")
    assert missing == f"{directory}/other.safetensors: is missing, and the save wrote it"


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"algorithm": "md5", "files": {}}', b'{"algorithm": "crc32", "files": {"a": 1}}', b"\xff"],
)
def test_a_damaged_record(directory, content):
    (directory / CHECKSUMS_NAME).write_bytes(content)
    for data in (False, True):
        (fault,) = ost.verify(directory, data=data)
        assert isinstance(fault, ost.ChecksumError)
        assert f"{CHECKSUMS_NAME}: does not have the checksums of a save" in str(fault)


def test_a_flipped_bit_of_the_record_blames_the_record(directory):
    rng = np.random.default_rng(2)
    path = directory / CHECKSUMS_NAME
    content = path.read_bytes()
    begin = content.index(b'"files"')
    for bit in rng.integers(8 * begin, 8 * len(content), 60).tolist():
        if not content[bit // 8 : bit // 8 + 1].isspace():  # between values, other spaces mean the same
            flip(path, bit)
            (message,) = messages(directory)
            assert f"{CHECKSUMS_NAME}: does not have the checksums of a save" in message
            path.write_bytes(content)
    record = json.loads(content)
    record["files"]["model-00001-of-00004.safetensors"]["tensors"]["long"] = "00000000"
    path.write_text(json.dumps(record))
    (message,) = messages(directory)
    assert "the record was changed: its files_sha256" in message


def test_a_record_without_a_digest_of_itself(directory):
    """Earlier versions wrote none. What differs may be the tensor or the record, and the message blames neither."""
    path = directory / CHECKSUMS_NAME
    record = json.loads(path.read_text())
    del record["files_sha256"]
    path.write_text(json.dumps(record))
    assert messages(directory) == []
    tensors = record["files"]["model-00001-of-00004.safetensors"]["tensors"]
    name, found = next(iter(tensors.items()))
    tensors[name] = "00000000"
    path.write_text(json.dumps(record))
    (fault,) = messages(directory)
    assert fault.endswith(f"{CHECKSUMS_NAME} records: expected CRC-32 00000000, found {found}")


def test_a_read_that_fails_is_a_fault(directory, monkeypatch):
    real = local.os.preadv

    def failing(descriptor, buffers, offset, *flags):
        if sum(memoryview(buffer).nbytes for buffer in buffers) > 2**20 and offset > 2**24:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(local.os, "preadv", failing)
    (found,) = messages(directory)
    assert "Input/output error" in found


def test_an_interrupt_ends_requests(saved, monkeypatch):
    cancelled = []

    def interrupted(futures, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr("orbax_safetensors.transfer.threads.wait", interrupted)
    monkeypatch.setattr(local.LocalFile, "cancel", lambda file: cancelled.append(file.path))
    with pytest.raises(KeyboardInterrupt):
        messages(saved)
    assert cancelled


def test_threads_end(saved):
    before = set(threading.enumerate())
    assert messages(saved) == []
    assert before.issuperset(threading.enumerate())


def test_orbax_checkpoints_are_refused(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"a": np.ones(3)})
    with pytest.raises(ost.ChecksumError, match="is a checkpoint of Orbax"):
        ost.verify(tmp_path / "orbax", data=True)
