"""Deltas as `apply_delta` makes checkpoints of them, and what is refused."""

import json
import os
import sys
import threading
import zlib
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import orbax_safetensors as ost
from orbax_safetensors.delta import applying, frames, publishing
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.transfer import progress, threads
from tests.support.deltas import BF16, SHAPES, adam_steps, changed, copied, save_steps, tensor_files
from tests.support.files import DTYPES, nothing_left, random_bits, write, write_indexed
from tests.support.saves import temporary
from tests.support.strategies import examples

STEPS = 20
DELTA = "weight_v000001"


@pytest.fixture
def steps(tmp_path):
    return save_steps(tmp_path / "steps", 2)


def test_a_chain_of_deltas_makes_the_bytes_of_each_save(tmp_path):
    steps = save_steps(tmp_path, STEPS, max_file_bytes=20_000)
    published, engine = tmp_path / "published", copied(steps[0], tmp_path / "engine")
    shares = []
    for version, (old, new) in enumerate(pairwise(steps), 1):
        done = ost.delta(old, new, published, version=version)
        shares.append(done.changed_elements / done.elements)
        assert ost.apply_delta(engine, done.path, engine) == version
        assert tensor_files(engine) == tensor_files(new)
        assert ost.verify(engine, data=True) == []
    assert 0 < np.mean(shares) < 0.1
    assert sorted(os.listdir(published)) == [f"weight_v{version:06}" for version in range(1, STEPS + 1)]


def test_the_layout_is_that_of_its_readers(steps, tmp_path):
    done = ost.delta(steps[0], steps[1], tmp_path, version=1)
    index = json.loads((tmp_path / DELTA / INDEX_NAME).read_text())
    assert index["metadata"] == {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    old, new = (ost.load(step, family="identity") for step in steps[:2])
    tensors, checksums = {}, {}
    for path in (tmp_path / DELTA).glob("*.safetensors"):
        found = safetensors.numpy.load_file(path)
        assert [name for name, file in index["weight_map"].items() if file == path.name] == sorted(found)
        tensors |= found
        with safetensors.safe_open(path, "numpy") as file:
            checksums |= file.metadata() or {}
    assert tensors.keys() == checksums.keys() == index["weight_map"].keys()
    for name, frame in tensors.items():
        before, after = (np.asarray(step[name]).view(np.uint8).reshape(-1) for step in (old, new))
        assert (frame.dtype, frame.ndim) == (np.uint8, 1)
        difference = frames.zstandard().ZstdDecompressor().decompress(frame.tobytes())
        assert difference == (before ^ after).tobytes()
        assert checksums[name] == f"{zlib.adler32(after.tobytes()):08x}"
    assert done.changed_tensors == len(tensors)
    assert done.changed_elements == sum(
        np.sum(old[name].view(np.uint16) != new[name].view(np.uint16)) for name in SHAPES
    )
    assert done.delta_bytes == sum(path.stat().st_size for path in (tmp_path / DELTA).glob("*.safetensors"))


def test_identical_checkpoints_make_an_empty_delta(steps, tmp_path):
    done = ost.delta(steps[0], copied(steps[0], tmp_path / "same"), tmp_path / "published", version=1)
    assert (done.changed_tensors, done.changed_elements, done.delta_bytes) == (0, 0, 0)
    assert ost.apply_delta(steps[0], done.path, tmp_path / "made") == 1
    assert tensor_files(tmp_path / "made") == tensor_files(steps[0])


@st.composite
def _pairs(draw):
    """Two states of tensors of any dtypes, and in how many files and pieces they are stored and read."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old, new = {}, {}
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(list(DTYPES.values())))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        name = f"{number}.{draw(st.text(max_size=4).filter(lambda text: text.isprintable()))}"
        old[name] = new[name] = random_bits(rng, shape, dtype)
        if draw(st.booleans()):
            new[name] = random_bits(rng, shape, dtype)
    return old, new, draw(st.integers(1, 3)), draw(st.integers(1, 5)), 8 * draw(st.integers(1, 9))


@examples(40)
@given(_pairs())
def test_any_tensors_come_back(pair):
    old, new, threads, files, piece_bytes = pair
    with temporary() as root, pytest.MonkeyPatch.context() as patched:
        for module in (frames, publishing, applying):
            patched.setattr(module, "PIECE_BYTES", piece_bytes)
        names = list(old)
        for directory, tensors in (("old", old), ("new", new)):
            (root / directory).mkdir()
            write_indexed(root / directory, [{name: tensors[name] for name in names[n::files]} for n in range(files)])
        done = ost.delta(
            root / "old", root / "new", root / "published", version=1, options=ost.SafetensorsOptions(threads=threads)
        )
        assert done.changed_tensors == sum(old[name].tobytes() != new[name].tobytes() for name in names)
        ost.apply_delta(root / "old", done.path, root / "made")
        assert tensor_files(root / "made") == tensor_files(root / "new")


def test_a_tensor_longer_than_a_piece_is_one_frame(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "PIECE_BYTES", 4096)
    rng = np.random.default_rng(0)
    old = {"w": random_bits(rng, (100, 501), BF16)}
    for name, tree in (("old", old), ("new", {"w": random_bits(rng, (100, 501), BF16)})):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "model.safetensors", tree)
    done = ost.delta(tmp_path / "old", tmp_path / "new", tmp_path, version=1)
    ost.apply_delta(tmp_path / "old", done.path, tmp_path / "made")
    assert tensor_files(tmp_path / "made") == tensor_files(tmp_path / "new")


def test_a_base_that_is_laid_out_otherwise_keeps_its_layout(steps, tmp_path):
    tree = next(adam_steps())
    (base := tmp_path / "base").mkdir()
    names = list(tree)
    write_indexed(base, [{name: tree[name] for name in part} for part in (names[:3], names[3:])])
    (base / "config.json").write_text("{}")
    done = ost.delta(steps[0], steps[1], tmp_path, version=1)
    ost.apply_delta(base, done.path, tmp_path / "made")
    assert sorted(os.listdir(tmp_path / "made")) == sorted([*os.listdir(base), CHECKSUMS_NAME])
    found, expected = (ost.load(path, family="identity") for path in (tmp_path / "made", steps[1]))
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    assert ost.verify(tmp_path / "made", data=True) == []


BF16_ONES = np.ones((4, 4), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "new",
    [
        {"a": BF16_ONES},
        {"a": BF16_ONES, "b": BF16_ONES, "c": BF16_ONES},
        {"a": BF16_ONES, "b": BF16_ONES.reshape(2, 8)},
        {"a": BF16_ONES, "b": BF16_ONES.view(np.float16)},
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_other_tensors_ask_for_a_full_version(tmp_path, new):
    for name, tree in (("old", {"a": BF16_ONES, "b": BF16_ONES}), ("new", new)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "model.safetensors", tree)
    with pytest.raises(ost.TensorMismatchError, match="publish a full version"):
        ost.delta(tmp_path / "old", tmp_path / "new", tmp_path / "published", version=1)
    assert not (tmp_path / "published").exists()


def test_versions_follow_each_other(steps, tmp_path):
    def publish(version):
        return ost.delta(steps[0], steps[1], tmp_path / "published", version=version)

    with pytest.raises(ost.StorageError, match="version 2 does not follow: expected 1"):
        publish(2)
    publish(1)
    with pytest.raises(ost.StorageError, match="already exists; a published version never changes"):
        publish(1)
    with pytest.raises(ost.StorageError, match="version 3 does not follow: expected 2"):
        publish(3)
    copied(steps[0], tmp_path / "published" / "weight_v000010")  # a full version
    with pytest.raises(ost.StorageError, match="version 2 does not follow: expected 11"):
        publish(2)
    assert publish(11).version == 11


@pytest.mark.parametrize("version", [0, -1, 1_000_000, 1.0, True, "1"])
def test_versions_are_numbers_of_six_digits(steps, tmp_path, version):
    with pytest.raises(ost.SafetensorsError, match="must be an integer from 1 to 999999"):
        ost.delta(steps[0], steps[1], tmp_path, version=version)


def test_another_base_than_the_published_one_is_refused(steps, tmp_path):
    published = tmp_path / "published"
    ost.delta(steps[0], steps[1], published, version=1)
    with pytest.raises(ost.ChecksumError, match="is not the checkpoint that .*weight_v000001 has published"):
        ost.delta(steps[0], steps[2], published, version=2)
    assert os.listdir(published) == [DELTA]
    ost.delta(steps[1], steps[2], published, version=2)
    copied(steps[0], published / "weight_v000003")  # a full version
    with pytest.raises(ost.ChecksumError, match="is not the checkpoint that .*weight_v000003 has published"):
        ost.delta(steps[2], steps[1], published, version=4)


@pytest.mark.parametrize("which", [0, 1])
def test_bytes_that_differ_from_their_save_are_refused(steps, tmp_path, which):
    path = steps[which] / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ost.ChecksumError, match="not those of its save"):
        ost.delta(steps[0], steps[1], tmp_path / "published", version=1)
    assert not (tmp_path / "published").exists()


def test_one_of_two_publishers_publishes(steps, tmp_path):
    published, outcomes = tmp_path / "published", []

    def publish(new):
        try:
            outcomes.append(ost.delta(steps[0], new, published, version=1))
        except ost.StorageError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=publish, args=(steps[1],)) for _ in range(4)]
    with nothing_left(tmp_path):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, ost.StorageError)]
    assert len(errors) == 3
    assert all("already exists" in str(error) or "another save" in str(error) for error in errors)
    assert os.listdir(published) == [DELTA]
    ost.apply_delta(steps[0], published / DELTA, tmp_path / "made")
    assert tensor_files(tmp_path / "made") == tensor_files(steps[1])


def test_a_file_that_changes_meanwhile_is_noticed(steps, tmp_path, monkeypatch):
    real = publishing.encode

    def encode(*args):
        os.utime(steps[1] / "model.safetensors", ns=(1, 1))
        return real(*args)

    monkeypatch.setattr(publishing, "encode", encode)
    with pytest.raises(ost.StorageError, match="changed while it was in use"):
        ost.delta(steps[0], steps[1], tmp_path / "published", version=1)
    assert not (tmp_path / "published").exists()


def test_the_extra_is_named_if_it_is_missing(steps, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for call in (
        lambda: ost.delta(steps[0], steps[1], tmp_path, version=1),
        lambda: ost.apply_delta(steps[0], tmp_path, tmp_path / "made"),
    ):
        with pytest.raises(ost.SafetensorsError, match="pip install zstandard"):
            call()


def test_what_changed_is_counted_in_elements(tmp_path):
    tree = {"f32": np.ones((8,), np.float32), "i8": np.ones((3, 2), np.int8)}
    ost.save(tmp_path / "old", tree)
    ost.save(tmp_path / "new", {"f32": changed(tree["f32"], 3), "i8": changed(tree["i8"], 2)})
    done = ost.delta(tmp_path / "old", tmp_path / "new", tmp_path, version=1)
    assert (done.tensors, done.changed_tensors, done.elements, done.changed_elements) == (2, 2, 14, 5)
    assert (done.model_bytes, done.version, done.path) == (38, 1, str(tmp_path / DELTA))


def test_the_bytes_that_are_read_are_told(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    monkeypatch.setattr(threads, "SECONDS", 0)
    told = []
    options = ost.SafetensorsOptions(progress=lambda *now: told.append(now))
    done = ost.delta(steps[0], steps[1], tmp_path / "published", version=1, options=options)
    total = 4 * done.model_bytes  # both are compared with each other, and each with its checksums
    assert told == sorted(set(told))
    assert (told[0], told[-1]) == ((0, total), (total, total))
    assert {total // 2, total * 3 // 4} <= {bytes for bytes, _ in told}

    told.clear()
    ost.apply_delta(steps[0], done.path, tmp_path / "made", options=options)
    assert told == []  # of several passes over the files, the last is none to tell of alone

    def stop(done, total):
        raise InterruptedError("enough")

    with nothing_left(tmp_path / "published"), pytest.raises(InterruptedError, match="enough"):
        ost.delta(steps[1], steps[2], tmp_path / "published", version=2, options=replace(options, progress=stop))
