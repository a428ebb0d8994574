"""Transfers of which storage fails: the first error is raised, nothing goes on after it, and all files are closed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from orbax_safetensors.errors import StorageError, TensorMismatchError
from orbax_safetensors.geometry.view import View
from orbax_safetensors.storage.store import Stamp
from orbax_safetensors.transfer.engine import Lazy
from orbax_safetensors.transfer.plan import Block, Location, transfer_plan
from orbax_safetensors.transfer.reader import Reader
from orbax_safetensors.transfer.writer import WholeFileWriter, Writer
from tests.support import hang

F4 = np.dtype(np.float32)
ROWS, REQUEST_BYTES = 6, 16
FIRST = Stamp(0, "first")


@dataclass
class FakeFile:
    """A file in memory that records what it is asked for; what it `does` at a request may raise."""

    path: str
    content: bytearray
    does: object = lambda file, offset: None
    stamp: Stamp = FIRST
    now: Stamp = FIRST
    requests: list = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    closed: int = 0
    answers: bool = False  # whether bytes come in memory of the file's

    def fetch(self, offset, nbytes):
        if not self.answers:
            return None
        self._ask(offset)
        return memoryview(bytes(self.content[offset : offset + nbytes]))

    def read(self, ranges):
        for offset, buffers in ranges:
            self._ask(offset)
            for buffer in buffers:
                buffer[:] = self.content[offset : offset + buffer.nbytes]
                offset += buffer.nbytes

    def write(self, offset, buffers):
        self._ask(offset)
        for buffer in buffers:
            self.content[offset : offset + buffer.nbytes] = buffer
            offset += buffer.nbytes

    def sync(self):
        self._ask("sync")

    def check(self, stamp):
        if stamp != self.now:
            raise StorageError(f"{self.path}: changed while it was in use")

    def _ask(self, what):
        self.requests.append(what)
        self.does(self, what)

    def cancel(self):
        self.cancelled.set()

    def close(self):
        self.closed += 1


def until_cancelled(file, what):
    """A request that takes for ever unless it is cancelled."""
    assert file.cancelled.wait(hang.SECONDS)
    raise StorageError(f"{file.path}: cancelled")


def fails_at(*requests, error=StorageError):
    def does(file, what):
        if what in requests:
            raise error(f"{file.path}: failed at {what}")

    return does


class Case:
    """Two files of a matrix each, of which every row is a request, and memory for both."""

    def __init__(self, *does, dtype=F4):
        self.arrays = [np.arange(ROWS * 4, dtype=F4).reshape(ROWS, 4) + 120.5 * number for number in range(2)]
        self.files = [
            FakeFile(f"file{number}", bytearray(array.tobytes()), *does[number : number + 1])
            for number, array in enumerate(self.arrays)
        ]
        self.blocks = [
            Block(View.tensor(f"t{number}", (ROWS, 4), F4), ((0, ROWS), (0, 4)), (ROWS, 4), np.dtype(dtype))
            for number in range(2)
        ]
        self.memory = [np.zeros(block.nbytes, np.uint8) for block in self.blocks]
        self.plan = transfer_plan(
            self.blocks, lambda name: Location(int(name[1]), 0, F4), max_gap_bytes=0, max_request_bytes=REQUEST_BYTES
        )

    def open(self, number):
        return self.files[number]

    def read(self, reader, lossless=False):
        blocks = [block._replace(lossless=lossless) for block in self.blocks]
        reader.run(self.plan, blocks, self.memory)

    def write(self, writer):
        for memory, array in zip(self.memory, self.arrays, strict=True):
            memory[:] = array.reshape(-1).view(np.uint8)
        for file in self.files:
            file.content[:] = bytes(len(file.content))
        writer.run(self.plan, self.blocks, self.memory)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())  # threads that other tests have left, and which may end meanwhile
    yield
    assert before.issuperset(threading.enumerate())


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_counters_are_what_storage_was_asked_for(threads):
    case = Case()
    with Reader(case.open, threads) as reader:
        case.read(reader)
    assert [memory.tobytes() for memory in case.memory] == [array.tobytes() for array in case.arrays]
    assert sorted(case.files[0].requests) == list(range(0, ROWS * 16, 16))
    assert (reader.counters.num_requests, reader.counters.nbytes) == (2 * ROWS, 2 * ROWS * 16)
    assert [file.closed for file in case.files] == [1, 1]


def test_the_thread_that_waits_reports_what_has_moved():
    half, shares, threads = threading.Event(), [], set()

    def waits(file, what):
        if what == ROWS // 2 * REQUEST_BYTES:
            assert half.wait(hang.SECONDS)

    def report(share):
        shares.append(share)
        threads.add(threading.current_thread())
        if share >= 0.25:
            half.set()

    case = Case(waits, waits)
    with Reader(case.open, 1) as reader:
        reader.run(case.plan, case.blocks, case.memory, report)
    assert [memory.tobytes() for memory in case.memory] == [array.tobytes() for array in case.arrays]
    assert shares == sorted(shares)
    assert 0.25 in shares
    assert threads == {threading.current_thread()}


def test_a_report_that_fails_ends_the_plan():
    def fail(share):
        raise RuntimeError("enough")

    case = Case(until_cancelled, until_cancelled)
    with pytest.raises(RuntimeError, match="^enough$"), Reader(case.open, 2) as reader:
        reader.run(case.plan, case.blocks, case.memory, fail)
    assert len(case.files[0].requests + case.files[1].requests) == 2


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("gap", [0, 64])
def test_bytes_that_a_store_holds_are_not_staged(gap, answers, monkeypatch):
    """If they are those of one request; others are joined in a buffer."""
    stored = np.arange(8 * 4, dtype=F4).reshape(8, 4)
    file = FakeFile("file", bytearray(stored.tobytes()), answers=answers)
    view = View.tensor("t", (8, 4), F4)
    f8 = np.dtype(np.float64)
    blocks = [Block(view, ((0, 8), half), (8, 2), f8) for half in (((0, 2), (2, 4)) if gap else ((0, 2),))]
    plan = transfer_plan(blocks, lambda name: Location(0, 0, F4), max_gap_bytes=gap)
    memory = [np.zeros(block.nbytes, np.uint8) for block in blocks]
    staged = []
    with Reader(lambda number: file, 1) as reader:
        staging = reader._staging
        monkeypatch.setattr(reader, "_staging", lambda nbytes, offset: staged.append(nbytes) or staging(nbytes, offset))
        reader.run(plan, blocks, memory)
    for block, out in zip(blocks, memory, strict=True):
        np.testing.assert_array_equal(out.view(f8).reshape(8, 2), stored[:, slice(*block.box[1])])
    assert staged == ([] if gap and answers else [sum(file.moved_bytes for file in plan.files)])
    assert reader.counters.num_requests == len(file.requests) == plan.num_requests


@pytest.mark.parametrize(("begin", "aligned"), [(72, True), (75, False)])
def test_a_window_is_staged_where_its_bytes_are_in_their_page(begin, aligned):
    """So that direct reads fill it; a file's data may begin anywhere, but elements in memory are aligned."""
    stored = np.arange(8 * 4, dtype=F4).reshape(8, 4)
    places = []

    class File(FakeFile):
        def read(self, ranges):
            for offset, buffers in ranges:
                places.append((np.frombuffer(buffers[0], np.uint8).ctypes.data, offset))
                super().read([(offset, buffers)])

    file = File("file", bytearray(begin) + stored.tobytes())
    block = Block(View.tensor("t", (8, 4), F4).transpose((1, 0)), ((0, 4), (2, 8)), (4, 6), F4)
    memory = np.zeros(block.nbytes, np.uint8)
    plan = transfer_plan([block], lambda name: Location(0, begin, F4), max_gap_bytes=0)
    with Reader(lambda number: file, 1) as reader:
        reader.run(plan, [block], [memory])
    np.testing.assert_array_equal(memory.view(F4).reshape(4, 6), stored[2:].T)
    assert all(address % 8 == 0 and ((address - offset) % 4096 == 0) == aligned for address, offset in places)
    assert places


def test_nothing_is_asked_for_after_a_failure():
    case = Case(fails_at(32))
    with pytest.raises(StorageError, match="file0: failed at 32"), Reader(case.open, 1) as reader:
        case.read(reader)
    assert (case.files[0].requests, case.files[1].requests) == ([0, 16, 32], [])
    assert case.files[0].cancelled.is_set()
    assert case.files[0].closed == 1


def test_a_failure_ends_requests_of_other_threads_and_is_the_one_that_is_raised():
    stalled = threading.Event()

    def stall(file, what):
        stalled.set()
        until_cancelled(file, what)

    def fail(file, what):
        assert stalled.wait(hang.SECONDS)
        raise MemoryError("no memory")

    case = Case(fail, stall)
    case.plan = replace(case.plan, extents=case.plan.extents[::ROWS])  # a request of each file
    with pytest.raises(MemoryError, match="no memory"), Reader(case.open, 2) as reader:
        case.read(reader)
    assert [file.closed for file in case.files] == [1, 1]


def test_an_interrupt_ends_requests_and_is_raised_when_they_have_ended(monkeypatch):
    asked = threading.Event()
    case = Case(lambda file, what: asked.set() or until_cancelled(file, what))

    def interrupted(futures, timeout):
        assert asked.wait(hang.SECONDS)
        raise KeyboardInterrupt

    monkeypatch.setattr("orbax_safetensors.transfer.threads.wait", interrupted)
    with pytest.raises(KeyboardInterrupt), Reader(case.open, 1) as reader:
        case.read(reader)
    assert (case.files[0].requests, case.files[1].requests) == ([0], [])


def test_a_file_that_cannot_be_opened_fails_the_transfer():
    case = Case()

    def open_file(number):
        if number:
            raise StorageError("file1: cannot be opened")
        return case.files[0]

    with pytest.raises(StorageError, match="file1: cannot be opened"), Reader(open_file, 1) as reader:
        case.read(reader)
    assert case.files[0].closed == 1


def test_a_file_that_cannot_be_closed_keeps_no_other_open():
    case = Case()
    reader = Reader(case.open, 2)
    case.read(reader)
    closed = []
    for file in case.files:
        file.close = lambda file=file: closed.append(file) or fails_at("close")(file, "close")
    with pytest.raises(StorageError, match="failed at close"):
        reader.close()
    assert len(closed) == 2
    reader.close()
    assert len(closed) == 2


def test_files_that_changed_are_noticed_afterwards():
    case = Case()
    with Reader(case.open, 2) as reader:
        case.read(reader)
        reader.check()
        case.files[1].now = Stamp(0, "second")
        with pytest.raises(StorageError, match="file1: changed"):
            reader.check()


def test_a_value_that_a_cast_would_lose_names_file_and_tensor():
    case = Case(dtype=np.int8)  # which ends at 127
    with pytest.raises(TensorMismatchError, match="^file1: 't1': "), Reader(case.open, 1) as reader:
        case.read(reader, lossless=True)


def test_threads_write_into_the_file_at_which_fewest_are():
    together = threading.Barrier(2, timeout=hang.SECONDS)

    def wait_for_the_other_file(file, what):
        together.wait()

    case = Case(wait_for_the_other_file, wait_for_the_other_file)
    with Writer(case.open, 2) as writer:
        case.write(writer)
    assert [bytes(file.content) for file in case.files] == [array.tobytes() for array in case.arrays]


def test_several_threads_prepare_what_one_file_is_to_hold():
    together = threading.Barrier(3, timeout=hang.SECONDS)
    case = Case(lambda file, what: together.wait())
    with Writer(case.open, 8) as writer:
        case.write(writer)
    assert bytes(case.files[0].content) == case.arrays[0].tobytes()


def test_a_write_that_fails_is_the_last():
    case = Case(fails_at(16, error=OSError))
    with pytest.raises(OSError, match="failed at 16"), Writer(case.open, 1) as writer:
        case.write(writer)
    assert case.files[0].requests == [0, 16]
    assert case.files[1].requests == [0]  # files are written in turn
    assert [file.cancelled.is_set() for file in case.files] == [True, True]


def test_a_flush_that_fails_is_made_again():
    case = Case(fails_at("sync"))
    with Writer(case.open, 2) as writer:
        case.write(writer)
        with pytest.raises(StorageError, match="file0: failed at sync"):
            writer.sync()
        assert [file.cancelled.is_set() for file in case.files] == [True, True]
        case.files[0].does = lambda file, what: None
        writer.sync()
        assert case.files[0].requests.count("sync") == 2
        writer.sync([1])
    assert case.files[0].requests.count("sync") == 2
    assert case.files[1].requests[-1] == "sync"


def test_whole_files_are_written_in_order_and_finished_if_they_are_empty():
    case = Case()
    empty = FakeFile("empty", bytearray())
    with WholeFileWriter(lambda number: [*case.files, empty][number], 4) as writer:
        case.write(writer)
        writer.finish(range(3))
    for file in case.files:
        assert file.requests == [*range(0, ROWS * 16, 16), "sync"]
    assert (empty.requests, empty.closed) == (["sync"], 1)


def test_a_whole_file_that_fails_is_given_up_with_all_others():
    case = Case(fails_at(48))
    with pytest.raises(StorageError, match="failed at 48"), WholeFileWriter(case.open, 1) as writer:
        case.write(writer)
    assert case.files[0].requests == [0, 16, 32, 48]
    assert case.files[1].requests == []
    assert case.files[0].closed == 1


def test_threads_share_what_the_first_of_them_makes():
    made, lazy = [], Lazy()
    come, lock = threading.Semaphore(0), lazy._lock

    class Lock:
        def __enter__(self):
            come.release()
            return lock.__enter__()

        def __exit__(self, *error):
            return lock.__exit__(*error)

    def make():
        assert all(come.acquire(timeout=hang.SECONDS) for _ in range(8))  # all others wait for this one
        made.append(object())
        return made[-1]

    lazy._lock = Lock()
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda _: lazy.get(make), range(8)))
    assert len(made) == 1
    assert got == made * 8


def test_threads_try_again_what_the_first_of_them_failed_to_make():
    lazy = Lazy()

    def fail():
        raise StorageError("no")

    with pytest.raises(StorageError):
        lazy.get(fail)
    assert lazy.get(lambda: 1) == 1
