"""Writes of a checkpoint that fail at the end or for want of space, and what memory they take."""

import contextlib
import os
import shutil
import subprocess
import threading

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath

from orbax_safetensors.errors import StorageError
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.orbax_store import (
    OrbaxLeaf,
    directories,
    item_writer,
    open_orbax,
    operations,
    unfinished,
)
from tests.support.disks import file_system
from tests.support.orbax_items import (
    BF16,
    FORMATS,
    LEAVES,
    all_formats,
    file_names,
    fill,
    is_not_there,
    is_values,
    json_files,
    leaf_of,
    random,
    same_bits,
    tree_of,
    values,
    write,
)
from tests.support.sinks import missing, step_sink
from tests.support.steps import step_of


@pytest.mark.parametrize(
    ("lost", "ocdbt", "zarr3"),
    [*(("params.kernel", *form) for form in FORMATS), ("step", *FORMATS[0]), ("_METADATA", *FORMATS[-1])],
)
def test_a_finished_item_is_looked_at_before_it_has_its_name(tmp_path, lost, ocdbt, zarr3, monkeypatch):
    """Whatever TensorStore or a disk has made of it."""
    check = item_writer.ItemWriter._check_whole

    def lose(item):
        if lost == "_METADATA":
            (item.directory / lost).unlink()
        else:
            context = ocp.type_handlers.get_ts_context(use_ocdbt=ocdbt)
            store = directories.kvstore(os.fspath(item.directory), context, ocdbt=ocdbt)
            store.write(f"{lost}/{'zarr.json' if zarr3 else '.zarray'}", None).result()
        check(item)

    with step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt, zarr3=zarr3) as sink:
        fill(sink, values())
        with monkeypatch.context() as patched, pytest.raises(StorageError, match=lost):
            patched.setattr(item_writer.ItemWriter, "_check_whole", lose)
            sink.commit()
    is_not_there(tmp_path)


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 0)])
def test_what_the_index_points_to_is_looked_at(tmp_path, damage, monkeypatch):
    """As where a run that was interrupted has written, or deleted, after the next one began."""
    merge = item_writer.merge

    def lose(databases, root):
        merge(databases, root)
        for file in list(epath.Path(databases[0]).glob("d/*")):
            damage(file)

    array = random(np.dtype(np.int32), (512, 64))  # a small one would be in the index itself
    with step_sink(tmp_path, {"a": OrbaxLeaf(array.shape, array.dtype, (32, 64))}) as sink:
        fill(sink, {"a": array})
        monkeypatch.setattr(item_writer, "merge", lose)
        with pytest.raises(StorageError, match="was not stored: .* expected at least .* bytes, found"):
            sink.commit()
    is_not_there(tmp_path)


class Interrupted:
    """Makes the futures of a function, and interrupts whoever waits first for the `number`-th of them."""

    def __init__(self, begin, number):
        self.futures, self._begin, self._number = [], begin, number

    def __call__(self, *args, **kwargs):
        begun, number = self._begin(*args, **kwargs), len(self.futures)
        self.futures.append(begun)

        class Future:
            def result(_):
                if number == self._number:
                    self._number = None
                    raise KeyboardInterrupt
                return begun.result()

            exception = begun.exception

        return Future()


@all_formats
def test_an_interrupt_waits_for_what_is_under_way(tmp_path, ocdbt, zarr3, monkeypatch):
    """Otherwise it would write into the files of the next run. Arrays are made and opened, then scalars are made."""
    real = ts.open
    for number in (1, len(LEAVES), 2 * len(LEAVES), None):
        opened = Interrupted(real, number)
        monkeypatch.setattr(item_writer.ts, "open", opened)
        with contextlib.suppress(KeyboardInterrupt), step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt) as sink:
            fill(sink, values())
            sink.commit()
        assert len(opened.futures) > 7
        assert all(future.done() for future in opened.futures)
        monkeypatch.undo()
        if number is not None:
            is_not_there(tmp_path)
    is_values(open_orbax(tmp_path).tree(lambda name, leaf: open_orbax(tmp_path).value(name)))


def test_a_merge_that_makes_nothing(tmp_path, monkeypatch):
    with step_sink(tmp_path, tree_of(leaf_of)) as sink:
        fill(sink, values())
        with monkeypatch.context() as patched, pytest.raises(StorageError, match="was not stored: .* is missing"):
            patched.setattr(item_writer, "merge", lambda *_: None)
            sink.commit()
    is_not_there(tmp_path)
    with step_sink(tmp_path, tree_of(leaf_of), resume=True) as sink:
        assert not any(missing(sink, name) for name in LEAVES)
        sink.commit()


STAGES = {
    "scalars": (item_writer.ItemWriter, "_write_scalars"),
    "metadata": (item_writer, "item_files"),
    "merge": (item_writer, "merge"),
    "rename": (type(epath.Path("/")), "rename"),
    "the step's metadata": (unfinished, "finished_record"),
    "flush": (unfinished, "flush"),
    "last rename": (os, "rename"),
    "listing": (item_writer.ItemWriter, "_keys"),
}


@pytest.mark.parametrize(("stage", "ocdbt"), [*((stage, True) for stage in STAGES), ("metadata", False)])
def test_a_commit_that_fails(tmp_path, stage, ocdbt, monkeypatch):
    with step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt) as sink:
        fill(sink, values())
        with monkeypatch.context() as patched:

            def fail(*_, **__):
                raise RuntimeError("nothing works")

            patched.setattr(*STAGES[stage], fail)
            with pytest.raises(StorageError, match="nothing works"):
                sink.commit()
    is_not_there(tmp_path)
    with step_sink(tmp_path, tree_of(leaf_of), ocdbt=ocdbt, resume=True) as sink:
        assert not any(missing(sink, name) for name in LEAVES)
        sink.commit()
    write(tmp_path / "at once", ocdbt=ocdbt)
    assert json_files(tmp_path) == json_files(tmp_path / "at once")
    shutil.move(tmp_path / "at once", tmp_path.parent / f"{tmp_path.name} at once")
    assert file_names(tmp_path) == file_names(tmp_path.parent / f"{tmp_path.name} at once")


@pytest.fixture
def small_disk(tmp_path):
    with file_system(tmp_path / "disk", "1m") as disk:
        yield disk


def enlarge(disk):
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)


@pytest.mark.parametrize(("ocdbt", "zarr3"), [FORMATS[0], FORMATS[-1]])
def test_a_disk_that_is_full(small_disk, ocdbt, zarr3):
    array = random(np.dtype(np.int32), (512, 1024))
    tree = {"a": OrbaxLeaf(array.shape, array.dtype, (32, 1024))}

    def work(**options):
        with step_sink(small_disk / "new", tree, ocdbt=ocdbt, zarr3=zarr3, **options) as sink:
            fill(sink, {"a": array})
            sink.commit()

    with pytest.raises(StorageError, match="No space left on device") as caught:
        work()
    assert "'a'" in str(caught.value)
    is_not_there(small_disk / "new")
    enlarge(small_disk)
    work(resume=True)
    same_bits(open_orbax(small_disk / "new").value("a"), array)


@pytest.mark.parametrize("free", [0, 16_000])
def test_a_disk_that_is_full_when_all_has_been_written(small_disk, free):
    enlarge(small_disk)  # TensorStore makes more files of the same bytes if it is slower than this process
    tree = {f"layer_{number:03}": OrbaxLeaf((4,), BF16, (4,)) for number in range(200)}
    with step_sink(small_disk / "new", tree) as sink:
        fill(sink, {name: np.ones(4, BF16) for name in tree})
        with open(small_disk / "filler", "wb") as filler:
            status = os.statvfs(small_disk)
            filler.write(bytes(status.f_bavail * status.f_frsize - free))
        try:
            sink.commit()
        except StorageError:
            is_not_there(small_disk / "new")
            (small_disk / "filler").unlink()
            with step_sink(small_disk / "new", tree, resume=True) as sink:
                assert not any(missing(sink, name) for name in tree)
                sink.commit()
    checkpoint = open_orbax(small_disk / "new")
    for name in tree:
        same_bits(checkpoint.value(name), np.ones(4, BF16))


def test_in_flight_bytes_are_bounded(tmp_path, monkeypatch):
    """All that is written and not yet done, at every moment, as the sink counts it."""
    in_flight = peak = 0
    lock = threading.Lock()
    whole_add = operations.Operations.add

    def add(self, operation, budget, taken):
        nonlocal in_flight, peak
        with lock:
            in_flight += 1
            peak = max(peak, in_flight)

        def done(_):
            nonlocal in_flight
            with lock:
                in_flight -= 1

        operation.add_done_callback(done)
        whole_add(self, operation, budget, taken)

    monkeypatch.setattr(operations.Operations, "add", add)
    array = random(np.dtype(np.int32), (64, 8192))
    tree = {"a": OrbaxLeaf(array.shape, array.dtype, (1, 8192))}
    with step_sink(tmp_path, tree, compression=False, memory_bytes=8 * 50_000) as sink:
        fill(sink, {"a": array})
        sink.commit()
    assert 2 <= peak <= 8
    peak = 0
    with step_sink(tmp_path, tree, step=1, memory_bytes=1) as sink:  # less than a tile
        fill(sink, {"a": array})
        sink.commit()
    assert peak == 1
    peak = 0
    checkpoint = open_orbax(tmp_path, memory_bytes=2 * 2 * array.nbytes // 16)
    assert step_of(checkpoint) == 1
    same_bits(checkpoint.value("a"), array)
    assert 2 <= peak <= 4


def test_memory_that_somebody_waits_for_when_a_write_fails(tmp_path, monkeypatch):
    """Threads that wait for their turn go on, and learn what has failed."""
    array = random(np.dtype(np.int32), (8, 8))
    sink = step_sink(tmp_path, {"a": OrbaxLeaf((8, 8), array.dtype, (1, 8))}, memory_bytes=1)
    shutil.rmtree(tmp_path / f"0{ocp.path.atomicity.TMP_DIR_SUFFIX}")
    (tmp_path / f"0{ocp.path.atomicity.TMP_DIR_SUFFIX}").write_text("")
    failures = []

    def work(number):
        try:
            sink.write_box("a", Box(((number, number + 1), (0, 8))), array[number : number + 1])
        except StorageError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 8
    assert all("'a': NOT_FOUND" in str(failure) for failure in failures)
    with pytest.raises(StorageError, match="Not a directory"):
        sink.commit()


def test_larger_chunks_than_orbax_keeps_in_one_file(tmp_path):
    shape = (3, 1 << 30)
    with step_sink(tmp_path, {"a": OrbaxLeaf(shape, np.dtype(np.int8), shape)}) as sink:
        assert np.prod(sink.leaves["a"].chunk_shape) <= 1 << 31
        assert len(missing(sink, "a")) > 1
