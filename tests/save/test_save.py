"""Saves without Orbax around them: the bytes of the files, who writes which of them, and storage that fails."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.devices import agreement
from orbax_safetensors.format.names import some
from orbax_safetensors.orbax_store.ocdbt import DATA_DIRECTORY
from orbax_safetensors.save import prepare as saving
from orbax_safetensors.save import write
from orbax_safetensors.save.prepare import prepare_save
from orbax_safetensors.save.write import write_save
from orbax_safetensors.storage import local
from tests.support import files
from tests.support.files import DTYPES, nothing_left, other_names, random_bits, stored_arrays
from tests.support.strategies import tensor_names

RNG = np.random.default_rng(0)
INDEX = "model.safetensors.index.json"
BF16 = np.dtype(ml_dtypes.bfloat16)


def save(directory, tree, save_args=None, metadata=None, max_file_bytes=5_000_000_000, **options):
    directory.mkdir(exist_ok=True)
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(**options))
    handler.save(epath.Path(directory), ost.SafetensorsSave(tree, save_args, metadata, max_file_bytes))
    return directory


def assert_same_bits(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.asarray(found).tobytes() == expected.tobytes()


def sharded(host, sharding):
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)


def content(directory):
    return {name: (directory / name).read_bytes() for name in other_names(directory)}


@contextlib.contextmanager
def temporary():
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


# --- files ---

TREE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.int8),
    "c": {"d": np.arange(4, dtype=BF16), "e": np.float64(1.5)},
}


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


@settings(max_examples=60)
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


def test_one_line_is_logged(tmp_path, caplog):
    with caplog.at_level("INFO", logger="orbax_safetensors"):
        save(tmp_path, TREE)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("orbax_safetensors")]
    assert f"Saved 4 tensors to {tmp_path}: 45 bytes written here" in line


# --- leaves ---


@pytest.mark.parametrize("dtype", [np.float32, np.int8, BF16, np.complex64], ids=str)
def test_arrays_that_are_not_contiguous(tmp_path, dtype):
    base = random_bits(RNG, (8, 12, 10), np.dtype(dtype))
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
    restored = stored_arrays(save(tmp_path, tree, max_file_bytes=700))
    for name, array in tree.items():
        assert_same_bits(restored[name], np.asarray(array))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_with_any_sharding(tmp_path, dtype):
    host = random_bits(RNG, (8, 16, 6), DTYPES[dtype])
    with jax.enable_x64(True):
        tree = {name: sharded(host, sharding) for name, sharding in shardings().items()}
        restored = stored_arrays(save(tmp_path, tree, max_file_bytes=3000))
    for name in tree:
        assert_same_bits(restored[name], host)


CASTS = [np.float16, BF16, np.float32, np.float64, np.int32, ml_dtypes.float8_e4m3fn, np.bool_]


@pytest.mark.parametrize("wanted", CASTS, ids=str)
@pytest.mark.parametrize("held", [np.float32, BF16, np.int8, ml_dtypes.float8_e5m2, ">f8"], ids=str)
def test_a_cast_is_numpys(tmp_path, held, wanted):
    host = np.linspace(-100, 100, 8 * 16 * 6).reshape(8, 16, 6).astype(held)
    tree = {"numpy": host[:, ::-1], "scalar": host[0, 0, 0]}
    if host.dtype.isnative:
        tree |= {name: sharded(host, sharding) for name, sharding in shardings().items()}
    args = {name: ocp.SaveArgs(dtype=wanted) for name in tree}
    restored = stored_arrays(save(tmp_path, tree, args, max_file_bytes=3000))
    with np.errstate(all="ignore"):
        for name, leaf in tree.items():
            assert_same_bits(restored[name], np.asarray(leaf).astype(wanted))


def test_nothing_is_made_of_a_tree_that_cannot_be_stored(tmp_path):
    for tree in ({"a": np.ones(2), "b": "text"}, {}, {"a": 1, "z": np.ones(1, np.complex128)}):
        with pytest.raises(ost.TensorMismatchError):
            save(tmp_path, tree)
    assert not os.listdir(tmp_path)


# --- who writes what ---


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


@settings(max_examples=60)
@given(sharded_trees(), st.integers(1, 4), st.integers(1, 300), st.booleans(), st.randoms(use_true_random=False))
def test_however_boxes_are_dealt_the_parts_make_the_whole(drawn, parts, max_file_bytes, copied, random):
    """As if each part were the share of one process: it writes its own boxes, each byte once, and nothing else."""
    hosts, placed = drawn
    with jax.enable_x64(True), temporary() as directory, temporary() as expected:
        tree = {name: sharded(host, placed[name]) if name in placed else host for name, host in hosts.items()}
        save(expected, hosts, max_file_bytes=max_file_bytes)
        plan = prepare_save(
            tree,
            None,
            directory=directory,
            metadata=None,
            max_file_bytes=max_file_bytes,
            options=ost.SafetensorsOptions(threads=2),
        )
        boxes = [(source, box) for group in plan.groups for source, own in group for box in own]
        dealt = [random.randrange(parts) for _ in boxes]
        with recorded_writes() as data:
            for part in range(parts):
                own = {}
                for (source, box), to in zip(boxes, dealt, strict=True):
                    if to == part:
                        own.setdefault(source.name, (source, []))[1].append(box)
                owned = tuple((source, tuple(taken)) for source, taken in own.values())
                share = dataclasses.replace(plan, groups=(owned,), key=f"{plan.key}/{part}")
                shards = saving.Shards.copied(share) if copied else saving.Shards(share)
                write_save(share, shards, directory)
        assert content(directory) == content(expected)
        for name, header in plan.layout.files:
            ranges = [(low, high) for low, high in data[name] if low >= header.data_start]
            assert_tiled(ranges, header.data_start, header.file_bytes)


def test_scalars_of_one_save(tmp_path):
    found = {}

    def listen(event, value, **_):
        if event.startswith("/jax/orbax/write/safetensors/"):
            assert event not in found
            found[event] = value

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    host = random_bits(RNG, (16, 64), np.dtype("f4"))
    tree = {"both": sharded(host, NamedSharding(mesh, P("x", "y"))), "all": sharded(host, NamedSharding(mesh, P()))}
    jax.monitoring.register_scalar_listener(listen)
    try:
        with recorded_writes() as writes:
            save(tmp_path, tree)
    finally:
        jax.monitoring.unregister_scalar_listener(listen)
    assert found[write.EVENT_BYTES_WRITTEN] == 2 * host.nbytes
    data = [begin for begin, _ in writes["model.safetensors"] if begin]
    assert found[write.EVENT_STORAGE_WRITES] == found[write.EVENT_NUM_WRITES] == len(data)


def test_copies_of_device_memory_are_held_to_the_budget(monkeypatch):
    """As on a GPU; here nothing has to be copied."""
    leaves = {f"w{number}": jax.numpy.full((1024,), float(number)) for number in range(10)}
    options = ost.SafetensorsOptions(in_flight_bytes=3 * 4096 + 1)
    plan = prepare_save(leaves, None, directory="x", metadata=None, max_file_bytes=10**9, options=options)
    assert [len(batch) for batch in saving.Shards(plan).batches(options.in_flight_bytes)] == [10]
    monkeypatch.setattr(saving, "on_host", lambda sharding: False)
    batches = list(saving.Shards(plan).batches(options.in_flight_bytes))
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    values = [memory.view(np.float32)[0] for batch in batches for _, memory in batch]
    assert values == list(range(10))
    too_big = saving.Shards(plan).batches(1)
    assert [len(batch) for batch in too_big] == [1] * 10


def test_what_was_copied_does_not_change():
    host, device = np.ones(100), jax.numpy.ones(100)
    options = ost.SafetensorsOptions()
    plan = prepare_save([host, device], None, directory="x", metadata=None, max_file_bytes=10**9, options=options)
    shards = saving.Shards.copied(plan)
    host[...] = 2
    device.delete()
    (batch,) = shards.batches(1)
    assert [memory.view(kind)[0] for (_, memory), kind in zip(batch, ("f8", "f4"), strict=True)] == [1, 1]


# --- storage that fails ---

FAULTY = {
    "a": random_bits(RNG, (16, 64), np.dtype("f4")),
    "b": random_bits(RNG, (64,), np.dtype("i1")),
    "c": random_bits(RNG, (32, 16), BF16),
}


def faulty_tree():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    return {
        "a": sharded(FAULTY["a"], NamedSharding(mesh, P("y"))),
        "b": FAULTY["b"],
        "c": sharded(FAULTY["c"], NamedSharding(mesh, P(None, "x"))),
    }


@contextlib.contextmanager
def failing(function, number, code, only=lambda *_: True):
    """The `number`-th call of `os.<function>` for which `only` holds fails; yields a list of these calls."""
    real, calls = getattr(os, function), []
    lock = threading.Lock()

    def maybe(*args, **kwargs):
        if only(*args, **kwargs):
            with lock:
                calls.append(args)
                fails = len(calls) == number
            if fails:
                raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with mock.patch.object(local.os, function, maybe):
        yield calls


def is_of_index(name):
    return "safetensors" not in name


def creates(path, flags, *_):
    return bool(flags & os.O_CREAT)


# Each with the calls that it makes of a save of `FAULTY` into two files.
OPERATIONS = {
    "writes": ("pwritev", errno.ENOSPC, lambda *_: True),
    "writes, badly": ("pwritev", errno.EIO, lambda *_: True),
    "creates": ("open", errno.EACCES, creates),
    "flushes files": ("fsync", errno.EIO, lambda descriptor: os.path.isfile(f"/proc/self/fd/{descriptor}")),
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # by Orbax, of its own file
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_a_failure_of_any_call(tmp_path, operation):
    """Whichever call fails: one error, nothing that restores, nothing left open.

    Another save names what was left, and succeeds without it.
    """
    function, code, only = OPERATIONS[operation]
    settings = {"max_file_bytes": 4200, "fsync": True}
    stock = ocp.PyTreeCheckpointHandler()
    with failing(function, -1, code, only) as calls:
        save(tmp_path / "whole", faulty_tree(), **settings)
    assert len(calls) >= 5
    restorable = []
    for number in range(1, len(calls) + 1):
        directory = tmp_path / str(number)
        with (
            nothing_left(tmp_path),
            failing(function, number, code, only),
            pytest.raises(ost.StorageError, match=os.strerror(code)),
        ):
            save(directory, faulty_tree(), **settings)
        with contextlib.suppress(ost.SafetensorsError):
            restorable.append((number, ost.open_checkpoint(directory).path, sorted(os.listdir(directory))))
        with contextlib.suppress(FileNotFoundError):
            restorable.append((number, stock.restore(epath.Path(directory)), sorted(os.listdir(directory))))
        left = sorted(path.name for path in directory.iterdir())
        if in_the_way := sorted((name for name in left if name != DATA_DIRECTORY), key=is_of_index):
            with pytest.raises(ost.StorageError, match=f"holds {some(in_the_way)}; delete these files"):
                save(directory, faulty_tree(), **settings)
            assert sorted(path.name for path in directory.iterdir()) == left
        for name in in_the_way:
            if name == "array_metadatas":
                shutil.rmtree(directory / name)
            else:
                (directory / name).unlink()
        save(directory, faulty_tree(), **settings)
        for restored in (stored_arrays(directory), stock.restore(epath.Path(directory))):
            assert restored.keys() == FAULTY.keys()
            for name, array in restored.items():
                assert_same_bits(array, FAULTY[name])
    if operation == "flushes files":  # the files are whole by then, and only may not outlive a loss of power
        assert [number for number, _, _ in restorable] in ([], [len(calls)])
    else:
        assert not restorable


def test_a_directory_that_cannot_be_flushed(tmp_path):
    def is_directory(descriptor):
        return os.path.isdir(f"/proc/self/fd/{descriptor}")

    with (
        nothing_left(tmp_path),
        failing("fsync", 1, errno.EIO, is_directory),
        pytest.raises(ost.StorageError, match="flushing"),
    ):
        save(tmp_path, faulty_tree(), fsync=True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_that_cannot_be_closed(tmp_path, monkeypatch, number):
    """As on file systems that write when a file is closed. The other files are closed all the same."""
    real, closed = os.close, []

    def close(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        written = path.is_relative_to(tmp_path) and path.suffix == ".safetensors"
        real(descriptor)
        closed.extend([descriptor] * written)
        if written and len(closed) == number:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(local.os, "close", close)
    with nothing_left(tmp_path), pytest.raises(ost.StorageError, match="closing failed: Disk quota exceeded"):
        save(tmp_path, faulty_tree(), max_file_bytes=4200)
    with pytest.raises(ost.SafetensorsError):
        ost.open_checkpoint(tmp_path)


def test_memory_that_runs_out_is_a_storage_error(tmp_path, monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError("no memory for a staging buffer")

    monkeypatch.setattr(write, "transfer_plan", no_memory)
    with nothing_left(tmp_path), pytest.raises(ost.StorageError, match="no memory for a staging buffer") as caught:
        save(tmp_path, faulty_tree())
    assert isinstance(caught.value.__cause__, MemoryError)


def test_an_interrupt_is_not_swallowed(tmp_path):
    with (
        nothing_left(tmp_path),
        mock.patch.object(local.os, "pwritev", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        save(tmp_path, faulty_tree())
    with pytest.raises(ost.SafetensorsError):
        ost.open_checkpoint(tmp_path)


@pytest.mark.parametrize("step", ["plan", "copies", "data", "facts"])
def test_an_interrupt_is_told_to_the_other_processes(tmp_path, monkeypatch, step):
    """They would wait for this one."""
    told = []
    monkeypatch.setattr(agreement, "exchange", lambda key, own: told.append((key.rpartition("/")[2], own)) or [own])
    does = {
        "plan": (saving, "resolve"),
        "copies": (saving, "_copies"),
        "data": (write, "_write_data"),
        "facts": (write, "_write_facts"),
    }
    checkpointer = ocp.AsyncCheckpointer if step == "copies" else ocp.Checkpointer
    with mock.patch.object(*does[step], side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        checkpointer(ost.SafetensorsHandler()).save(tmp_path / "to", {"a": np.ones(3)})
    assert [(at, own.partition("\n")[2]) for at, own in told][-1] == (step, "KeyboardInterrupt: ")


def test_writes_that_are_short_are_continued(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(local.os, "pwritev", lambda fd, buffers, offset: real(fd, [buffers[0][:100]], offset))
    save(tmp_path, faulty_tree(), max_file_bytes=4200)
    for name, array in stored_arrays(tmp_path).items():
        assert_same_bits(array, FAULTY[name])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a file system: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("rows", [20, 8])
def test_a_disk_that_is_full(small_disk, rows):
    """Full amid the data, or so that all of it fits and the index does not."""
    tree = {f"w{number:02}": np.full((1024,), number, np.float32) for number in range(rows)}
    with nothing_left(small_disk), pytest.raises(ost.StorageError, match="No space left on device"):
        save(small_disk / "saved", tree, max_file_bytes=4096)
    with pytest.raises(ost.SafetensorsError):
        ost.open_checkpoint(small_disk / "saved")
    shutil.rmtree(small_disk / "saved")
    smaller = dict(list(tree.items())[:5])
    restored = stored_arrays(save(small_disk / "saved", smaller))
    for name, array in smaller.items():
        assert_same_bits(restored[name], array)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_read_only(tmp_path):
    (tmp_path / "saved").mkdir(mode=0o500)
    with pytest.raises(ost.StorageError, match="cannot be created: Permission denied"):
        save(tmp_path / "saved", TREE)


def test_a_directory_that_is_missing(tmp_path):
    options = ost.SafetensorsOptions()
    plan = prepare_save(
        TREE, None, directory=tmp_path / "missing", metadata=None, max_file_bytes=10**9, options=options
    )
    with pytest.raises(ost.StorageError, match="cannot be created: No such file"):
        write.write_save(plan, saving.Shards(plan), str(tmp_path / "missing"))
