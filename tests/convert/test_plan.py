"""Plans of conversions and reshards, with what the conversions themselves then do as the oracle."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import Gather
from orbax_safetensors.orbax_store import open_orbax
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.streaming import orbax_sink
from orbax_safetensors.streaming.cost import Batch, ConversionCost, ConversionPlan, Traffic, traffic_of
from orbax_safetensors.streaming.file_layout import Files
from orbax_safetensors.streaming.files_sink import FilesSink
from orbax_safetensors.streaming.orbax_sink import OrbaxSink
from orbax_safetensors.streaming.orbax_source import OrbaxSource
from orbax_safetensors.streaming.safetensors_source import SafetensorsSource
from orbax_safetensors.streaming.tiles import Tile
from orbax_safetensors.transfer.plan import Gathered, TransferPlan
from tests.support.files import write
from tests.support.killed_conversions import make_source
from tests.support.roots import TESTDATA

HF = TESTDATA / "maxtext" / "qwen3" / "hf"
SMALL = 40_000  # bytes of memory with which everything takes many batches
NBYTES = 138_496

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

CALLS = {
    "to orbax": ("convert", HF, {"to": "orbax", "family": "maxtext"}),
    "to orbax, not stacked": (
        "convert",
        HF,
        {"to": "orbax", "family": "maxtext", "variant": {"scan_layers": False}, "dtype": "bfloat16"},
    ),
    "to orbax, decoded": (
        "convert",
        TESTDATA / "maxtext" / "deepseek3" / "hf",
        {"to": "orbax", "family": "maxtext", "mesh": {"x": 2}, "spec": {"embedding": (None, "x")}},
    ),
    "to safetensors": (
        "convert",
        TESTDATA / "orbax" / "qwen3_unscanned",
        {"to": "safetensors", "family": "maxtext", "config": HF},
    ),
    "to safetensors, stacked": (
        "convert",
        TESTDATA / "orbax" / "deepseek3_scanned",
        {"to": "safetensors", "family": "maxtext", "config": TESTDATA / "maxtext" / "deepseek3" / "hf"},
    ),
    "orbax anew": (
        "reshard",
        TESTDATA / "orbax" / "qwen3_unscanned",
        {"mesh": {"x": 2}, "spec": {"kernel|embedding": ("x",)}, "compression": False},
    ),
    "safetensors anew": ("reshard", HF, {"max_file_bytes": 50_000}),
    "safetensors for each device": ("reshard", HF, {"mesh": {"x": 4}, "spec": {"embed_tokens|proj": (None, "x")}}),
}


@pytest.mark.parametrize("kind", ["files", "a server"])
@pytest.mark.parametrize(
    ("call", "asked"),
    [
        ("plan_convert", {"to": "orbax"}),
        ("plan_convert", {"to": "orbax", "dtype": "bfloat16"}),
        ("plan_convert", {"to": "orbax", "dtype": "float8_e4m3fn"}),
        ("plan_reshard", {"max_file_bytes": 10**7}),
    ],
)
def test_all_that_is_held_is_within_memory(tmp_path, web, monkeypatch, kind, call, asked):
    # As on a machine with many processors.
    monkeypatch.setattr(LocalStore, "cost", replace(LocalStore.cost, requests=16))
    root = web.root if kind == "a server" else tmp_path / "from"
    root.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.standard_normal((2048, 1024), np.float32) for i in range(4)}
    save_file(tensors, root / "model.safetensors")
    source = f"{web.url}/model.safetensors" if kind == "a server" else root
    for memory_bytes in (24 * 10**6, 100 * 10**6):
        plan = getattr(ost, call)(source, tmp_path / "to", memory_bytes=memory_bytes, **asked)
        assert 0 < plan.processes[0].staging_bytes <= memory_bytes


def count_transferred(monkeypatch):
    """Bytes that sources and sinks of safetensors will really have been asked for, by their class."""
    transferred = {}

    def closing(kind, method):
        close = getattr(kind, method)

        def closed(own):
            transferred[kind] = own.counters.nbytes
            close(own)

        monkeypatch.setattr(kind, method, closed)

    closing(SafetensorsSource, "close")
    closing(FilesSink, "_flush")
    return transferred


@pytest.mark.parametrize("memory_bytes", [SMALL, 1 << 30])
@pytest.mark.parametrize("kind", list(CALLS))
def test_what_is_planned_is_what_is_done(kind, memory_bytes, tmp_path, monkeypatch):
    call, source, asked = CALLS[kind]
    plan = getattr(ost, f"plan_{call}")(source, tmp_path / "to" / "here", memory_bytes=memory_bytes, **asked)
    assert list(tmp_path.iterdir()) == []
    transferred = count_transferred(monkeypatch)
    done = getattr(ost, call)(source, tmp_path / "to" / "here", memory_bytes=memory_bytes, **asked)
    assert plan.path == done.path
    (cost,) = plan.processes
    assert (cost.nbytes, plan.total_bytes) == (done.nbytes, done.nbytes)
    assert cost.read_requests + cost.write_requests == done.requests
    assert min(cost.read_requests, cost.write_requests) > 0
    assert (len(cost.batches) > 3) == (memory_bytes == SMALL)
    assert cost.needed_bytes <= cost.read_bytes
    for side, kind_of, nbytes in (
        ([file.read_bytes for file in cost.reads], SafetensorsSource, cost.read_bytes),
        ([file.written_bytes for file in cost.writes], FilesSink, cost.written_bytes),
    ):
        assert bool(side) == (kind_of in transferred)
        if side:
            assert nbytes == transferred[kind_of] == sum(side)
    assert plan.from_orbax == (not cost.reads)
    assert plan.to_orbax == (not cost.writes)
    if plan.to_orbax:
        above = "params." * (call == "convert")  # a training state has the family's tree there
        made = {name.removeprefix(above): leaf for name, leaf in open_orbax(done.path).leaves.items()}
        assert plan.files == ()
        assert {array.name: array.chunk_shape for array in plan.arrays} == {
            name: leaf.chunk_shape for name, leaf in made.items() if leaf.shape
        }
        assert plan.num_chunks == cost.write_requests == sum(array.num_chunks for array in plan.arrays)
    else:
        files = {file.name: file.stat().st_size for file in Path(done.path).glob("*.safetensors")}
        assert {planned.file: planned.nbytes for planned in plan.files} == files
        assert {file.file for file in cost.writes} == {os.path.join(done.path, name) for name in files}
    stored = Path(open_orbax(source).path).rglob("*") if plan.from_orbax else Path(source).glob("*.safetensors")
    assert plan.source_bytes == sum(file.stat().st_size for file in stored if file.is_file())


@pytest.mark.parametrize("kind", list(CALLS))
def test_batches_are_those_that_are_moved(kind, tmp_path, monkeypatch):
    """One by one, what a source and a sink count of each."""
    call, source, asked = CALLS[kind]
    for output in (OrbaxSink, FilesSink):  # so that each request is of the batch that is being written
        monkeypatch.setattr(output, "writers", 1)
    (cost,) = getattr(ost, f"plan_{call}")(source, tmp_path / "to", memory_bytes=SMALL, **asked).processes
    read, written = [], []

    def counted(kind, name, out):
        move = getattr(kind, name)

        def moved(own, tiles, *arrays):
            before = own.counters.num_requests
            result = move(own, tiles, *arrays)
            out.append((len(tiles), own.counters.num_requests - before))
            return result

        monkeypatch.setattr(kind, name, moved)

    for kind_of in (OrbaxSource, SafetensorsSource):
        counted(kind_of, "read", read)
    for kind_of in (OrbaxSink, FilesSink):
        counted(kind_of, "write", written)
    getattr(ost, call)(source, tmp_path / "to", memory_bytes=SMALL, **asked)
    assert [(batch.num_tiles, batch.read.num_requests) for batch in cost.batches] == read
    assert [(batch.num_tiles, batch.write.num_requests) for batch in cost.batches] == written


@pytest.mark.parametrize("kind", list(CALLS))
def test_several_processes_share_the_work(kind, tmp_path):
    call, source, asked = CALLS[kind]
    one, several = (
        getattr(ost, f"plan_{call}")(source, tmp_path / "to", memory_bytes=SMALL, process_count=count, **asked)
        for count in (1, 3)
    )
    assert len(several.processes) == 3
    assert several.total_bytes == one.total_bytes
    assert (several.files, several.arrays, several.source_bytes) == (one.files, one.arrays, one.source_bytes)
    assert sum(cost.num_tiles for cost in several.processes) == one.processes[0].num_tiles
    assert sum(cost.written_bytes for cost in several.processes) == one.processes[0].written_bytes
    assert max(cost.nbytes for cost in several.processes) < 1.3 * one.total_bytes / 3


@pytest.mark.parametrize("memory_bytes", [SMALL, 1 << 30])
@pytest.mark.parametrize("dtype", [None, "float16", {"kernel|proj": "float64"}])
def test_bytes_are_those_that_are_written(dtype, memory_bytes, tmp_path):
    """With the dtypes of the destination, either way, and without the padding that a family adds."""

    def both(call, *args, **asked):
        plan = getattr(ost, f"plan_{call}")(*args, memory_bytes=memory_bytes, **asked)
        done = getattr(ost, call)(*args, memory_bytes=memory_bytes, **asked)
        assert plan.total_bytes == done.nbytes
        return done

    padded = {"family": "maxtext", "variant": {"vocab_size": 128}}
    there = both("convert", HF, tmp_path / "orbax", to="orbax", dtype=dtype, **padded)
    leaves = open_orbax(there.path).leaves.values()
    assert there.nbytes == sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in leaves if leaf.shape)
    source = ost.convert(HF, tmp_path / "from", to="orbax", memory_bytes=memory_bytes, **padded).path
    back = both("convert", source, tmp_path / "hf", to="safetensors", dtype=dtype, config=HF, **padded)
    assert back.nbytes == ost.open_checkpoint(back.path).nbytes


def test_chunks_that_are_read_in_part_are_read_whole(tmp_path):
    write(tmp_path / "model.safetensors", {"w": np.zeros((60, 64), np.float32)})
    rows = ost.convert(tmp_path / "model.safetensors", tmp_path / "to", to="orbax", mesh={"x": 4}, spec={"w": ("x",)})
    checkpoint = open_orbax(rows.path)
    source = OrbaxSource(checkpoint, {"w": (checkpoint, "w")}, 1 << 20)
    of_two = source.traffic([Tile("w", Box(((10, 20), (0, 64)))), Tile("w", Box(((20, 25), (5, 6))))])
    assert of_two.needed_bytes == (10 * 64 + 5) * 4
    assert of_two.moved_bytes == (2 + 1) * 15 * 64 * 4
    assert of_two.num_requests == 3


def test_staging_is_the_batches_under_way_and_what_is_made_of_them():
    def batch(nbytes, read, write, overlap=1):
        return Batch(1, nbytes, Traffic(nbytes, nbytes, 1, read, 1), Traffic(nbytes, nbytes, 1, write, 1), overlap)

    assert ConversionCost(0, ()).staging_bytes == 0
    assert ConversionCost(0, (batch(10, 1, 7),)).staging_bytes == 17
    # The second is read while the first is written.
    assert ConversionCost(0, (batch(10, 1, 2), batch(20, 3, 4))).staging_bytes == 10 + 2 + 20 + 3
    # Nothing is read while the last is written.
    assert ConversionCost(0, (batch(1, 0, 0), batch(20, 3, 40))).staging_bytes == 60
    # The third is read while the first and the second are written, and then written while the second is.
    three = batch(10, 1, 2, 2), batch(20, 3, 4, 2), batch(30, 5, 6, 2)
    assert ConversionCost(0, three).staging_bytes == 10 + 2 + 20 + 4 + 30 + 5
    assert ConversionCost(0, (*three[:2], batch(30, 5, 20, 2))).staging_bytes == 20 + 4 + 30 + 20
    # The third is too large for that.
    assert ConversionCost(0, (*three[:2], batch(30, 5, 6, 1))).staging_bytes == 20 + 4 + 30 + 5


def conversion(*batches):
    """A plan for each of the lists of (bytes read, bytes written)."""
    costs = [
        ConversionCost(
            number, tuple(Batch(1, r, Traffic(r, r, 1, 0, 1), Traffic(w, w, 1, 0, 1), 1) for r, w in of_process)
        )
        for number, of_process in enumerate(batches)
    ]
    return ConversionPlan("to", len(costs), tuple(costs), (), (), 0, False)


def test_an_estimate_has_a_batch_read_while_others_are_written():
    alone = conversion([(10, 20)])
    assert alone.estimate(bandwidth=10).seconds == 3
    assert alone.estimate(bandwidth=10, latency=1).seconds == 5
    assert alone.estimate(bandwidth=10, latency=1, write_bandwidth=20, write_latency=0).seconds == 3
    slow_reads = conversion([(10, 1)] * 4)
    assert slow_reads.estimate(bandwidth=1).seconds == 4 * 10 + 1
    slow_writes = conversion([(1, 10)] * 4)
    assert slow_writes.estimate(bandwidth=1).seconds == 1 + 4 * 10
    both = conversion([(10, 1)], [(20, 1)], [])
    time = both.estimate(bandwidth=1)
    assert (time.seconds, time.slowest, time.processes) == (21, 1, (11, 21, 0))
    for wrong in ({"bandwidth": 0}, {"bandwidth": 1, "latency": -1}, {"bandwidth": 1, "write_bandwidth": 0}):
        with pytest.raises(ost.SafetensorsError, match="must be a number"):
            conversion([]).estimate(**wrong)


def test_json(tmp_path):
    _, source, asked = CALLS["to orbax"]
    plan = ost.plan_convert(source, tmp_path / "to", process_count=2, **asked)
    found = json.loads(plan.to_json())
    assert found["total_bytes"] == NBYTES
    assert found["arrays"][0].keys() == {
        "name", "item", "dtype", "shape", "chunk_shape", "num_chunks", "chunk_bytes",
    }  # fmt: skip
    assert found["files"] == []
    assert [process["read_bytes"] for process in found["processes"]] == [cost.read_bytes for cost in plan.processes]
    assert found["processes"][0]["reads"][0]["file"] == str(HF / "model-00001-of-00003.safetensors")
    assert found["processes"][0]["num_batches"] == 1


@pytest.mark.parametrize("call", ["convert", "reshard"])
@pytest.mark.parametrize("there", ["destination", "unfinished", "foreign", "file", "read only"])
def test_what_is_in_the_way_is_said_by_the_plan_as_by_the_call(call, there, tmp_path):
    source = make_source("to_orbax", tmp_path / "from")
    asked = {"to": "orbax"} if call == "convert" else {}
    to = tmp_path / "to"
    if there == "file":
        (tmp_path / "file").touch()
        to = tmp_path / "file" / "below" / "to"
    elif there == "read only":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        (tmp_path / "read only").mkdir(mode=0o500)
        to = tmp_path / "read only" / "below" / "to"
    own, unfinished = (to / "0", to / "0.orbax-checkpoint-tmp") if call == "convert" else (to, tmp_path / "to.partial")
    if there == "destination":
        own.mkdir(parents=True)
    elif there == "foreign":
        unfinished.mkdir(parents=True)
        (unfinished / "notes.txt").write_text("mine")
    elif there == "unfinished":

        def stop(done, total):
            if done:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            getattr(ost, call)(source, to, progress=stop, memory_bytes=SMALL, **asked)
    before = sorted(tmp_path.rglob("*"))
    if there == "unfinished":  # which a call without resume replaces
        assert getattr(ost, f"plan_{call}")(source, to, **asked).total_bytes > 0
        assert sorted(tmp_path.rglob("*")) == before
        return
    messages = []
    for function in (getattr(ost, f"plan_{call}"), getattr(ost, call)):
        with pytest.raises(ost.StorageError) as raised:
            function(source, to, **asked)
        messages.append(str(raised.value))
        assert sorted(tmp_path.rglob("*")) == before
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "pickle"}, "to is 'pickle', must be 'orbax' or 'safetensors'"),
        ({"to": "orbax", "step": -1}, "step is -1, must be an integer of at least 0"),
        ({"to": "orbax", "memory_bytes": 4}, "is moved in tiles of at least"),
        ({"to": "orbax", "mesh": {"x": 5}, "spec": {"w": ("x",)}}, "16 does not divide by 5"),
        ({"to": "orbax", "process_count": 0}, "process_count is 0, must be an integer of at least 1"),
    ],
)
def test_mistakes_are_those_of_the_call(tmp_path, arguments, message):
    source = make_source("to_orbax", tmp_path / "from")
    with pytest.raises(ost.SafetensorsError, match=message):
        ost.plan_convert(source, tmp_path / "to", **arguments)
    assert not (tmp_path / "to").exists()


def test_every_thread_has_a_buffer_even_if_only_one_writes():
    gather = Gather((), (), needed_bytes=50, read_bytes=50, num_requests=5, window_bytes=7)
    plan = TransferPlan((), (), (), (Gathered(0, 0, gather),))
    traffic = traffic_of(plan, ["file"], 3, streams=1)
    assert (traffic.staging_bytes, traffic.streams) == (3 * 7, 1)


def test_a_plan_hashes_no_tiles(tmp_path, monkeypatch):
    """That takes long for many of them, and only a run records them."""
    monkeypatch.setattr(Files, "digest", lambda *_: 1 / 0)
    assert sum(cost.nbytes for cost in ost.plan_reshard(HF, tmp_path / "to", memory_bytes=SMALL).processes) == NBYTES
    with pytest.raises(ost.StorageError, match="ZeroDivisionError"):
        ost.reshard(HF, tmp_path / "to", memory_bytes=SMALL)


def test_figures_are_whole_however_late_callbacks_run(monkeypatch, tmp_path):
    """A future wakes those who wait for it before it calls them."""
    begin_write, late = orbax_sink.begin_write, []

    def begin(*args, **more):
        writing = begin_write(*args, **more)
        writing.add_done_callback = late.append
        return writing

    monkeypatch.setattr(orbax_sink, "begin_write", begin)
    arguments = {"to": "orbax", "family": "maxtext", "memory_bytes": SMALL}
    (cost,) = ost.plan_convert(HF, tmp_path / "to", **arguments).processes
    done = ost.convert(HF, tmp_path / "to", **arguments)
    assert late
    assert (done.nbytes, done.requests) == (cost.nbytes, cost.read_requests + cost.write_requests)
