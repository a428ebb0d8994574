"""Agreement in one process, and between threads that take themselves for processes."""

import threading

import jax
import pytest

from orbax_safetensors.devices import agreement
from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.devices.agreement import (
    agree,
    all_gather,
    announce,
    announced,
    first,
    new_key,
    post,
    posted,
    same_arguments,
    together,
    withdraw,
)
from orbax_safetensors.errors import HeaderError, StorageError, TensorMismatchError
from tests.support import hang
from tests.support.processes import Processes


@pytest.fixture
def processes(monkeypatch):
    return Processes(3, monkeypatch)


def test_keys_are_never_the_same():
    keys = [new_key(purpose) for purpose in ("save", "save", "plan")]
    assert len(set(keys)) == 3


def test_nothing_failed():
    agree(new_key("test"), None)


def test_errors_of_the_package_are_raised_as_they_are():
    failure = HeaderError("no")
    with pytest.raises(HeaderError) as caught:
        agree(new_key("test"), failure)
    assert caught.value is failure


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError("too much"), ZeroDivisionError()])
def test_other_errors_become_storage_errors(failure):
    with pytest.raises(StorageError) as caught:
        agree(new_key("test"), failure)
    assert caught.value.__cause__ is failure
    assert str(failure) in str(caught.value)


def test_facts_may_be_told_of_the_result(monkeypatch):
    told = []
    monkeypatch.setattr(agreement, "all_gather", lambda key, own, *_: told.append(own) or [own])
    assert together("key", lambda: 3, lambda result: f"made {result}") == 3
    with pytest.raises(StorageError):
        together("key", lambda: 1 // 0, lambda result: f"made {result}")
    assert told == ["made 3\n", "\nZeroDivisionError: integer division or modulo by zero"]


def kinds(outcomes):
    return [type(outcome) for outcome in outcomes]


def test_every_process_is_told_what_all_have_said(processes):
    assert (
        processes.run(lambda index: all_gather("key", f"process {index}")) == [[f"process {n}" for n in range(3)]] * 3
    )


def test_bytes_of_a_path_that_are_no_text_are_told(processes):
    assert processes.run(lambda index: all_gather("key", "\udcff"))[0] == ["\\udcff"] * 3


def test_the_failure_of_one_process_is_raised_in_all(processes):
    failure = HeaderError("x: is not a header")

    def do(index):
        if index == 1:
            raise failure

    outcomes = processes.run(lambda index: together("key", lambda: do(index)))
    assert outcomes[1] is failure
    assert kinds(outcomes) == [StorageError, HeaderError, StorageError]
    assert str(outcomes[0]) == str(outcomes[2]) == "process 1 failed: HeaderError: x: is not a header"


def test_a_failure_that_is_not_of_the_package_is_quoted_too(processes):
    outcomes = processes.run(lambda index: agree("key", OSError(28, "No space left") if index == 2 else None))
    assert kinds(outcomes) == [StorageError] * 3
    assert str(outcomes[0]) == "process 2 failed: OSError: [Errno 28] No space left"
    assert isinstance(outcomes[2].__cause__, OSError)


def test_each_process_that_fails_raises_its_failure(processes):
    failures = [ValueError("first"), None, StorageError("third")]
    outcomes = processes.run(lambda index: agree("key", failures[index]))
    assert outcomes[0].__cause__ is failures[0]
    assert str(outcomes[1]) == "process 0 failed: ValueError: first"
    assert outcomes[2] is failures[2]


def test_an_interrupt_is_told_to_the_others_and_stays_one(processes):
    def do(index):
        if index == 0:
            raise KeyboardInterrupt

    outcomes = processes.run(lambda index: together("key", lambda: do(index)))
    assert kinds(outcomes) == [KeyboardInterrupt, StorageError, StorageError]
    assert str(outcomes[1]) == "process 0 failed: KeyboardInterrupt: "


def test_other_facts_than_those_of_the_first_process_are_an_error_in_all(processes):
    outcomes = processes.run(lambda index: agree("key", None, "two" if index == 2 else "one"))
    assert kinds(outcomes) == [TensorMismatchError] * 3
    assert {str(outcome).split(" does")[0] for outcome in outcomes} == {"process 2"}
    outcomes = processes.run(lambda index: agree("again", None, str(index), check=same_arguments))
    message = "process 1 was called with other arguments than process 0, or does not see the same files"
    assert [str(outcome) for outcome in outcomes] == [message] * 3


def test_processes_that_do_not_come_are_named(processes):
    outcomes = processes.run(lambda index: agree("key", None, timeout_secs=0.2) if index == 1 else None)
    assert isinstance(outcomes[1], StorageError)
    assert str(outcomes[1]).startswith("process 0, 2 did not come within 0.2 s")
    late = processes.run(lambda index: agree("key", None) if index != 1 else None)
    assert kinds(late) == [StorageError, type(None), StorageError]
    assert "came too late" in str(late[2])


def test_a_process_that_waits_for_others_to_begin_says_for_which(processes, monkeypatch):
    said, lines = threading.Event(), []
    monkeypatch.setattr(agreement, "_SAID_AFTER_SECONDS", 0)
    monkeypatch.setattr(agreement.logger, "warning", lambda text, *args: (lines.append(text % args), said.set()))

    def begin(index):
        if index != 1:
            assert said.wait(hang.SECONDS)
        agree("key", None, timeout_secs=hang.SECONDS if index == 1 else None)

    assert processes.run(begin) == [None] * 3
    (line,) = lines
    assert line.startswith("waiting for process 0, 2: all processes have to make the same call with the same path")


def test_some_processes_agree_without_the_others(processes):
    some = ActiveProcesses((1, 2), primary=2)
    texts = processes.run(lambda index: all_gather("key", str(index), some) if index else None)
    assert texts == [None, ["1", "2"], ["1", "2"]]
    facts = processes.run(lambda index: agree("facts", None, str(index), active=some) if index else None)
    assert kinds(facts) == [type(None), TensorMismatchError, TensorMismatchError]
    assert "process 2 does not do the same as process 1" in str(facts[1])
    failed = processes.run(
        lambda index: agree("failed", OSError("gone") if index == 2 else None, active=some) if index else None
    )
    assert str(failed[1]) == "process 2 failed: OSError: gone"
    assert processes.service.values == {}


def test_one_active_process_agrees_with_itself(processes):
    def alone(index):
        own = ActiveProcesses((index,), primary=index)
        post("key", f"of {index}", own)
        found = posted("key", own), all_gather("key", "text", own)
        withdraw("key")
        return found

    assert alone_in_turn(processes, alone) == [([f"of {index}"], ["text"]) for index in range(3)]
    assert processes.service.values == {}


def alone_in_turn(processes, function):
    """What each process returned, one after the other."""
    return [
        processes.run(lambda index, turn=turn: function(index) if index == turn else None)[turn] for turn in range(3)
    ]


def test_keys_of_other_processes_are_other_keys():
    """A save of some processes does not put all of them out of step."""
    some, others = ActiveProcesses((0, 1), 0), ActiveProcesses((0, 1), 0, prefix="other")
    keys = [new_key("test", "path", active) for active in (None, some, others)]
    assert len({key.rpartition("/")[0] for key in keys}) == 3


def test_a_failure_counts_more_than_facts_that_differ(processes):
    outcomes = processes.run(lambda index: agree("key", OSError("gone") if index == 2 else None, str(index)))
    assert [str(outcome) for outcome in outcomes[:2]] == ["process 2 failed: OSError: gone"] * 2


def test_processes_that_cannot_be_reached_are_an_error(processes):
    processes.service.dead = True
    outcomes = processes.run(lambda index: agree("key", None))
    assert kinds(outcomes) == [StorageError] * 3
    assert "the other processes cannot be reached: UNAVAILABLE" in str(outcomes[0])


# As jaxlib has them, cut.
HEARTBEAT = "INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1 heartbeat timeout. This"
UNHEALTHY = "UNAVAILABLE: The following tasks are unhealthy:\n/job:worker/task:1\n/job:worker/task:2"
SERVICE = "UNAVAILABLE: Socket closed\nAdditional GRPC error information from remote target coordination_service while"
GLOO = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:1234"
MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"


def unreached(text, process=0):
    raise jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [(HEARTBEAT, "process 1 is gone: "), (UNHEALTHY, "process 1, 2 is gone: "), (SERVICE, "process 0 is gone: ")],
)
def test_processes_that_are_gone_are_named(processes, monkeypatch, text, named):
    def here(index):
        with agreement.reaching_others(ActiveProcesses.all()):
            unreached(text)

    for barrier, call in ((lambda *_: unreached(text), lambda _: all_gather("key", "x")), (None, here)):
        if barrier:
            monkeypatch.setattr(processes.service, "wait_at_barrier", barrier)
        outcome = processes.run(call)[2]
        assert type(outcome) is StorageError
        assert str(outcome).startswith(f"{named}the other processes cannot be reached: {text[:8]}")


def test_a_closed_connection_names_nobody(processes):
    """A program of several devices fails in all survivors, and says only that a connection was closed."""

    def work(index):
        with agreement.reaching_others(ActiveProcesses.all()):
            unreached(GLOO)

    for outcome in processes.run(work):
        assert type(outcome) is StorageError
        assert str(outcome) == f"the other processes cannot be reached: {GLOO}"


def test_what_has_nothing_to_do_with_others_stays(processes):
    def work(index):
        with agreement.reaching_others(ActiveProcesses.all() if index else ActiveProcesses((0,), 0)):
            unreached(MEMORY if index else GLOO)

    assert kinds(processes.run(work)) == [jax.errors.JaxRuntimeError] * 3


def test_a_failure_is_the_cause_if_nobody_can_be_told(processes):
    processes.service.dead = True
    failure = ValueError("mine")
    assert all(outcome.__cause__ is failure for outcome in processes.run(lambda index: agree("key", failure)))


def test_a_program_that_is_not_initialised_is_an_error(processes, monkeypatch):
    monkeypatch.setattr(agreement.global_state, "client", None)
    for outcome in processes.run(lambda index: first("key", "x")) + processes.run(lambda index: all_gather("key", "x")):
        assert str(outcome) == "the other processes cannot be reached: jax.distributed is not initialised"


def test_the_first_to_say_something_is_believed_by_all(processes):
    said = processes.run(lambda index: first("key", f"process {index}"))
    assert len(set(said)) == 1
    assert said[0] in {f"process {index}" for index in range(3)}


def test_the_first_may_say_what_is_no_text(processes):
    assert processes.run(lambda index: first("key", "\udcff")) == ["\udcff"] * 3


def test_what_is_announced_is_seen_by_all_and_stays_as_it_is(processes):
    assert processes.run(lambda index: announced("key")) == [None] * 3
    processes.run(lambda index: announce("key", "stopped") if index == 1 else None)
    processes.run(lambda index: announce("key", "too late"))
    assert processes.run(lambda index: announced("key")) == ["stopped"] * 3


def test_agreements_leave_nothing_behind(processes):
    """Also those that fail: a program may save for weeks to a full disk."""
    processes.run(lambda index: agree("key", None))
    assert processes.service.values == {}
    processes.run(lambda index: agree("failed", OSError("full") if index == 1 else None))
    processes.run(lambda index: agree("differs", None, str(index)))
    assert processes.service.values == {}


def test_an_agreement_stays_for_slower_processes(processes, monkeypatch):
    """They read what the others have posted after all have come, when the others may have gone on."""
    gone = threading.Semaphore(0)
    read = processes.service.key_value_dir_get

    def slowly(directory):
        if jax.process_index() == 2:
            assert gone.acquire(timeout=hang.SECONDS)
            assert gone.acquire(timeout=hang.SECONDS)
        return read(directory)

    monkeypatch.setattr(processes.service, "key_value_dir_get", slowly)

    def work(index):
        texts = all_gather("key", str(index))
        gone.release()
        return texts

    assert processes.run(work) == [["0", "1", "2"]] * 3
    assert processes.service.values == {}


def test_nothing_depends_on_what_is_left_behind(processes):
    processes.service.key_value_increment = processes.service.key_value_delete = None
    assert processes.run(lambda index: agree("key", None)) == [None] * 3
    assert processes.run(lambda index: withdraw("key")) == [None] * 3


def test_what_is_posted_or_announced_stays_until_it_is_withdrawn(processes):
    processes.run(lambda index: [post("key", str(index)), announce("stop", "x"), first("first", "x")])
    assert processes.run(lambda index: posted("key")) == [["0", "1", "2"]] * 3
    for key in ("key", "stop", "first"):
        assert processes.service.values
        withdraw(key)
    assert processes.service.values == {}
