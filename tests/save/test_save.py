"""Saves without Orbax around them: the bytes of the files, who writes which of them, and storage that fails."""

import contextlib
import dataclasses
import json
import os
import threading
from pathlib import Path
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.save import job
from orbax_safetensors.save.job import prepare
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.save.shards import Shards
from orbax_safetensors.storage import local
from tests.support import files
from tests.support.files import DTYPES, other_names, random_bits, stored_arrays
from tests.support.saves import BF16, INDEX, RNG, TREE, assert_same_bits, content, save, sharded, temporary
from tests.support.strategies import examples, tensor_names


def test_one_file(tmp_path):
    save(tmp_path, TREE, max_file_bytes=24 + 5 + 8 + 8)
    assert other_names(tmp_path) == ["model.safetensors"]


def test_several_files_and_their_index(tmp_path):
    save(tmp_path, TREE, max_file_bytes=13)
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert other_names(tmp_path) == [*names, INDEX]
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 45},
        "weight_map": {"a": names[0], "b": names[1], "c.d": names[1], "c.e": names[2]},
    }
    assert ost.verify(tmp_path) == []
    for name, array in stored_arrays(tmp_path).items():
        assert_same_bits(array, {"a": TREE["a"], "b": TREE["b"], "c.d": TREE["c"]["d"], "c.e": np.array(1.5)}[name])


@pytest.mark.parametrize(
    ("given_metadata", "expected"),
    [
        (None, {"format": "pt"}),
        ({}, {"format": "pt"}),
        ({"b": "2", "a": "é"}, {"format": "pt", "b": "2", "a": "é"}),
        ({"format": "flax"}, {"format": "flax"}),
    ],
)
def test_every_file_has_the_metadata(tmp_path, given_metadata, expected):
    save(tmp_path, TREE, metadata=given_metadata, max_file_bytes=13)
    for path in tmp_path.glob("*.safetensors"):
        assert ost.open_checkpoint(path).metadata == expected


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}, {"a": ["b"]}, {"a": "\ud800"}, ["a"], "text", 3])
def test_metadata_that_is_not_text(tmp_path, metadata):
    with pytest.raises(ost.SafetensorsError):
        save(tmp_path, TREE, metadata=metadata)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("max_file_bytes", [0, -1, None, "5GB"])
def test_files_of_no_size(tmp_path, max_file_bytes):
    with pytest.raises(ost.SafetensorsError, match="max_file_bytes"):
        save(tmp_path, TREE, max_file_bytes=max_file_bytes)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_where_the_data_begins(tmp_path, alignment):
    save(tmp_path, TREE, max_file_bytes=13, **({} if alignment == 64 else {"alignment": alignment}))
    for raw in (path.read_bytes() for path in tmp_path.glob("*.safetensors")):
        assert (8 + int.from_bytes(raw[:8], "little")) % alignment == 0


@pytest.mark.parametrize("alignment", [0, 4, 12, -8])
def test_alignments_that_the_format_does_not_have(alignment):
    with pytest.raises(ost.SafetensorsError, match="alignment"):
        ost.SafetensorsOptions(alignment=alignment)


host_arrays = st.builds(
    lambda dtype, shape, seed: random_bits(np.random.default_rng(seed), shape, dtype),
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), max_size=3).map(tuple),
    st.integers(0, 99),
)
flat_trees = st.dictionaries(tensor_names, host_arrays, min_size=1, max_size=6)


@examples(60)
@given(flat_trees, st.integers(1, 400), st.sampled_from([{"format": "pt"}, {"format": "é"}]))
def test_the_bytes_are_the_references(tree, max_file_bytes, metadata):
    with temporary() as directory, temporary() as scratch:
        save(directory, tree, metadata=metadata, max_file_bytes=max_file_bytes, alignment=8)
        parts = {}
        if (directory / INDEX).exists():
            for name, file in json.loads((directory / INDEX).read_text())["weight_map"].items():
                parts.setdefault(file, {})[name] = tree[name]
        else:
            parts["model.safetensors"] = tree
        found = content(directory)
        found.pop(INDEX, None)
        assert sorted(found) == sorted(parts)
        for file, tensors in parts.items():
            files.write(scratch / file, tensors, metadata)
            assert found[file] == (scratch / file).read_bytes()


def test_the_same_bytes_every_time(tmp_path):
    metadata = {str(number): "text" for number in range(20)}
    first = save(tmp_path / "1", TREE, metadata=metadata, max_file_bytes=13)
    second = save(tmp_path / "2", TREE, metadata=dict(reversed(metadata.items())), max_file_bytes=13, threads=1)
    assert content(first) == content(second)


def test_files_have_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path / "saved", TREE, max_file_bytes=13)
    finally:
        os.umask(before)
    modes = {path.is_dir(): set() for path in (tmp_path / "saved").rglob("*")}
    for path in (tmp_path / "saved").rglob("*"):
        modes[path.is_dir()].add(path.stat().st_mode & 0o777)
    assert modes == {False: {0o640}, True: {0o750}}


@pytest.mark.parametrize("fsync", [False, True])
def test_flushing(tmp_path, monkeypatch, fsync):
    real, flushed = os.fsync, []

    def record(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path.name.removesuffix(".unfinished"), path.stat().st_size))
        return real(descriptor)

    monkeypatch.setattr(local.os, "fsync", record)
    save(tmp_path, TREE, max_file_bytes=13, fsync=fsync)
    if not fsync:
        assert not flushed
        return
    # After the last byte of each file, and of the directory once all names are in it.
    last = dict(flushed)
    assert flushed[-1][0] == tmp_path.name
    for path in tmp_path.rglob("*"):
        assert last[path.name] == path.stat().st_size
    headers = [position for position, (name, _) in enumerate(flushed) if name.endswith(".safetensors")]
    assert len(headers) == 6  # the data of three files before any header, then the headers


@pytest.mark.parametrize("force", [False, True])
def test_one_line_is_logged(tmp_path, caplog, force):
    if force:
        ost.save(tmp_path / "new", TREE)
    caplog.clear()
    with caplog.at_level("INFO", logger="orbax_safetensors"):
        ost.save(tmp_path / "new", TREE, force=force)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("orbax_safetensors")]
    assert f"Saved 4 tensors to {tmp_path}/new: 45 bytes written here" in line


def test_arrays_that_are_not_contiguous(tmp_path):
    trees = {str(dtype): not_contiguous(np.dtype(dtype)) for dtype in ("f4", "i1", BF16, "c8")}
    save(tmp_path, trees, max_file_bytes=700)
    restored = stored_arrays(tmp_path)
    for dtype, tree in trees.items():
        for name, array in tree.items():
            assert_same_bits(restored[f"{dtype}.{name}"], np.asarray(array))


def not_contiguous(dtype):
    base = random_bits(RNG, (8, 12, 10), dtype)
    tree = {
        "transposed": base.T,
        "permuted": base.transpose(1, 0, 2),
        "strided": base[::2, 1::3],
        "inner": base[..., ::2],
        "backwards": base[::-1, :, ::-1],
        "broadcast": np.broadcast_to(base[0, 0], (3, 10)),
        "fortran": np.asfortranarray(base),
        "one": base[1, 2, 3],
        "scalar": np.array(base[0, 0, 0]),
        "none": base[:0],
        "inner none": base[:, :0],
        "read only": base.copy(),
    }
    tree["read only"].flags.writeable = False
    return tree


def test_scalars(tmp_path):
    tree = {"i": 3, "f": 2.5, "b": True, "u": 2**63, "n": np.float16(1.5), "c": np.complex64(1 + 2j)}
    restored = stored_arrays(save(tmp_path, tree))
    for name, value in tree.items():
        assert_same_bits(restored[name], np.asarray(value))


def shardings():
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, 4), ("x", "y"))
    woven = Mesh(devices.reshape(4, 2).T[::-1], ("x", "y"))
    return {
        "leading": NamedSharding(mesh, P(("x", "y"))),
        "inner": NamedSharding(mesh, P(None, "y")),
        "both": NamedSharding(mesh, P("y", "x")),
        "third": NamedSharding(mesh, P(None, None, "x")),
        "replicated": NamedSharding(mesh, P()),
        "woven": NamedSharding(woven, P("x", "y")),
        "woven inner": NamedSharding(woven, P(None, ("y", "x"))),
        "some devices": NamedSharding(Mesh(devices[[5, 2]], ("d",)), P(None, "d")),
        "one device": SingleDeviceSharding(devices[3]),
    }


@pytest.mark.both_devices
def test_arrays_of_any_dtype_with_any_sharding(tmp_path):
    hosts = {name: random_bits(RNG, (8, 16, 6), dtype) for name, dtype in DTYPES.items()}
    with jax.enable_x64(True):
        tree = {
            dtype: {name: sharded(host, sharding) for name, sharding in shardings().items()}
            for dtype, host in hosts.items()
        }
        restored = stored_arrays(save(tmp_path, tree, max_file_bytes=30_000))
    assert len(restored) == len(hosts) * len(shardings())
    for name, array in restored.items():
        assert_same_bits(array, hosts[name.rpartition(".")[0]])


CASTS = [np.float16, BF16, np.float32, np.float64, np.int32, ml_dtypes.float8_e4m3fn, np.bool_]


@pytest.mark.parametrize("held", [np.float32, BF16, np.int8, ml_dtypes.float8_e5m2, ">f8"], ids=str)
def test_a_cast_is_numpys(tmp_path, held):
    host = np.linspace(-100, 100, 8 * 16 * 6).reshape(8, 16, 6).astype(held)
    leaves = {"numpy": host[:, ::-1], "scalar": host[0, 0, 0]}
    if host.dtype.isnative:
        leaves |= {name: sharded(host, sharding) for name, sharding in shardings().items()}
    tree = {f"{number}": leaves for number in range(len(CASTS))}
    args = {f"{number}": dict.fromkeys(leaves, ocp.SaveArgs(dtype=wanted)) for number, wanted in enumerate(CASTS)}
    restored = stored_arrays(save(tmp_path, tree, args, max_file_bytes=30_000))
    with np.errstate(all="ignore"):
        for number, wanted in enumerate(CASTS):
            for name, leaf in leaves.items():
                assert_same_bits(restored[f"{number}.{name}"], np.asarray(leaf).astype(wanted))


def test_nothing_is_made_of_a_tree_that_cannot_be_stored(tmp_path):
    for tree in ({"a": np.ones(2), "b": "text"}, {}, {"a": 1, "z": np.ones(1, np.complex128)}):
        with pytest.raises(ost.TensorMismatchError):
            save(tmp_path, tree)
    assert not os.listdir(tmp_path)


@contextlib.contextmanager
def recorded_writes():
    """The ranges that are written meanwhile, by the name of the file."""
    real, found = os.pwritev, {}
    lock = threading.Lock()

    def record(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        with lock:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
            found.setdefault(name, []).append((offset, offset + count))
        return count

    with mock.patch.object(local.os, "pwritev", record):
        yield found


def assert_tiled(ranges, begin, end):
    """Every byte once."""
    at = begin
    for low, high in sorted(ranges):
        assert low == at, sorted(ranges)
        at = high
    assert at == end


@st.composite
def sharded_trees(draw):
    """NumPy arrays by name, and the sharding of those that are to be `jax.Array`s."""
    hosts, placed = {}, {}
    for number in range(draw(st.integers(1, 5))):
        host = draw(host_arrays)
        hosts[f"w{number}"] = host
        if draw(st.integers(0, 3)):
            placed[f"w{number}"] = draw(array_shardings(host.shape))
    return hosts, placed


@st.composite
def array_shardings(draw, shape):
    """A mesh of some of the devices, in any order, and a spec that divides `shape`."""
    devices = draw(st.permutations(jax.devices()))
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (2, 2), (4,), (1,)]))
    axes = [f"a{number}" for number in range(len(sizes))]
    mesh = Mesh(np.array(devices[: int(np.prod(sizes))]).reshape(sizes), axes)
    free = draw(st.permutations(axes))
    spec = []
    for size in shape:
        taken = []
        while free and draw(st.booleans()) and size % (np.prod([mesh.shape[axis] for axis in [*taken, free[0]]])) == 0:
            taken.append(free.pop(0))
        spec.append(tuple(taken) or None)
    return NamedSharding(mesh, P(*spec))


@pytest.mark.both_devices
@examples(60)
@given(sharded_trees(), st.integers(1, 4), st.integers(1, 300), st.booleans(), st.randoms(use_true_random=False))
def test_however_boxes_are_dealt_the_parts_make_the_whole(drawn, parts, max_file_bytes, kept, random):
    """As if each part were the share of one process: it writes its own boxes, each byte once, and nothing else."""
    hosts, placed = drawn
    with jax.enable_x64(True), temporary() as directory, temporary() as expected:
        tree = {name: sharded(host, placed[name]) if name in placed else host for name, host in hosts.items()}
        save(expected, hosts, max_file_bytes=max_file_bytes)
        options = ost.SafetensorsOptions(threads=2)
        plan = prepare(SaveRequest(directory, tree, max_file_bytes=max_file_bytes, options=options))
        boxes = [(source, box) for group in plan.shards.groups for source, own in group for box in own]
        dealt = [random.randrange(parts) for _ in boxes]
        with recorded_writes() as data:
            for part in range(parts):
                own = {}
                for (source, box), to in zip(boxes, dealt, strict=True):
                    if to == part:
                        own.setdefault(source.name, (source, []))[1].append(box)
                owned = tuple((source, tuple(taken)) for source, taken in own.values())
                share = dataclasses.replace(plan, shards=Shards((owned,)), key=f"{plan.key}/{part}")
                (share.kept() if kept else share).run()
        assert content(directory) == content(expected)
        for name, header in plan.layout.files:
            ranges = [(low, high) for low, high in data[name] if low >= header.data_start]
            assert_tiled(ranges, header.data_start, header.file_bytes)


def test_scalars_of_one_save(tmp_path, mesh, scalars):
    host = random_bits(RNG, (16, 64), np.dtype("f4"))
    tree = {"both": sharded(host, NamedSharding(mesh, P("x", "y"))), "all": sharded(host, NamedSharding(mesh, P()))}
    with recorded_writes() as writes:
        save(tmp_path, tree)
    assert scalars[job.EVENT_BYTES_WRITTEN] == 2 * host.nbytes
    data = [begin for begin, _ in writes["model.safetensors"] if begin]
    assert scalars[job.EVENT_STORAGE_WRITES] == scalars[job.EVENT_NUM_WRITES] == len(data)
