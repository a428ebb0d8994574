"""Requests that fail: which are made again, after how long, and what is said in the end. Nothing here waits or asks."""

import asyncio
import random

import pytest
from obstore import exceptions

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage import retries
from orbax_safetensors.storage.retries import ChangedError, RefusedError, Retries, WrongAnswerError

PATH = "s3://bucket/x"


class Clock:
    """Time that only sleeping takes."""

    def __init__(self):
        self.now = 0.0
        self.pauses = []

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(retries.asyncio, "sleep", clock.sleep)
    monkeypatch.setattr(retries.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(retries.random, "uniform", lambda low, high: high)
    return clock


class Request:
    """Fails with each of `errors` in turn, the last of them for ever unless there is an `answer`."""

    def __init__(self, *errors, answer=None):
        self.errors, self.answer, self.attempts = errors, answer, 0

    async def __call__(self):
        self.attempts += 1
        if self.attempts > len(self.errors) and self.answer is not None:
            return self.answer
        raise self.errors[min(self.attempts, len(self.errors)) - 1]


def run(request, attempts=10, seconds=1e6):
    return asyncio.run(Retries(attempts, seconds).run(PATH, "reading", request))


def obstore_error(status, body=""):
    return exceptions.GenericError(f"Generic S3 error: Server returned non-2xx status code: {status}: {body}")


def test_an_answer_at_once_takes_no_time(clock):
    assert run(Request(answer=3)) == 3
    assert clock.pauses == []


def test_pauses_double_up_to_the_longest(clock):
    assert run(Request(*[RefusedError("busy", 503)] * 8, answer="done")) == "done"
    doubled = [retries.FIRST_WAIT * 2**number for number in range(8)]
    assert clock.pauses == [min(pause, retries.LONGEST_WAIT) for pause in doubled]


def test_a_random_part_is_taken_off_a_pause(clock, monkeypatch):
    asked = []
    monkeypatch.setattr(retries.random, "uniform", lambda *ends: asked.append(ends) or random.Random(0).uniform(*ends))
    run(Request(RefusedError("busy", 503), answer=1))
    assert asked == [(0.5, 1.0)]
    assert retries.FIRST_WAIT / 2 <= clock.pauses[0] < retries.FIRST_WAIT


def test_a_server_that_says_when_is_given_that_time(clock):
    run(Request(RefusedError("busy", 429, wait=7.0), answer=1))
    assert clock.pauses == [7.0 + retries.FIRST_WAIT]


def test_retryable_statuses(clock):
    for status in (None, 408, 425, 429, 500, 502, 503, 504):
        assert run(Request(RefusedError("no", status), answer=1)) == 1


def test_fatal_statuses(clock):
    for status in (400, 401, 403, 404, 409, 412, 416, 501, 505, 511):
        for error in (RefusedError(f"answered {status}", status), obstore_error(f"{status} No")):
            request = Request(error)
            with pytest.raises(StorageError, match=rf"^{PATH}: reading failed: .*answered {status}") as caught:
                run(request)
            assert request.attempts == 1
            assert "attempts" not in str(caught.value)
            assert isinstance(caught.value, MissingError) == (status == 404 and isinstance(error, RefusedError))


def test_fatal_errors_of_obstore(clock):
    for kind in [exceptions.PermissionDeniedError, exceptions.PreconditionError]:
        request = Request(kind("status code: 503"))
        with pytest.raises(StorageError):
            run(request)
        assert request.attempts == 1


def test_the_last_of_all_attempts_is_told(clock):
    request = Request(RefusedError("first", 503), RefusedError("last", 503))
    with pytest.raises(StorageError, match=rf"^{PATH}: reading failed: last \(4 attempts\)$"):
        run(request, attempts=4)
    assert (request.attempts, len(clock.pauses)) == (4, 3)


def test_no_attempt_begins_after_its_time(clock):
    request = Request(RefusedError("busy", 503))
    with pytest.raises(StorageError, match="attempts"):
        run(request, attempts=1000, seconds=60)
    assert 60 - 2 * retries.LONGEST_WAIT < clock.now <= 60


def test_a_wait_that_is_too_long_is_not_begun(clock):
    with pytest.raises(StorageError, match="reading failed: busy$"):
        run(Request(RefusedError("busy", 429, wait=3600)), seconds=60)
    assert clock.pauses == []


def test_wrong_answers_are_believed_the_third_time(clock):
    request = Request(RefusedError("busy", 503), WrongAnswerError("another range"))
    with pytest.raises(StorageError, match=r"another range \(4 attempts\)"):
        run(request)
    assert request.attempts == 4


def test_a_machine_without_metadata_is_asked_for_seconds_only(clock):
    error = exceptions.GenericError("Generic S3 error: Error performing GET http://169.254.169.254/latest/api/token")
    with pytest.raises(StorageError, match="found no credentials"):
        run(Request(error), seconds=600)
    assert clock.now <= 3


def test_errors_that_no_attempt_mends(clock):
    for error, kind, message in [
        (StorageError("said already"), StorageError, "said already"),
        (MissingError("gone already"), MissingError, "gone already"),
        (ChangedError("another state"), ChangedError, "another state"),
        (FileNotFoundError("a secret query"), FileNotFoundError, PATH),
        (asyncio.CancelledError(), asyncio.CancelledError, ""),
    ]:
        request = Request(error)
        with pytest.raises(kind) as caught:
            run(request)
        assert (type(caught.value), str(caught.value), request.attempts) == (kind, message, 1)


def test_an_error_has_no_error_of_obstore_behind_it(clock):
    for error in [obstore_error(503), FileNotFoundError("?sig=1"), ChangedError("now"), RefusedError("")]:
        with pytest.raises((StorageError, FileNotFoundError, ChangedError)) as caught:
            run(Request(error), attempts=2)
        assert caught.value.__context__ is None
        assert caught.value.__cause__ is None


def test_each_reason_for_which_attempts_fail_is_one_warning(clock, caplog):
    busy, busier = RefusedError("busy", 503), RefusedError("busier", 503)
    with caplog.at_level("WARNING", retries.logger.name):
        run(Request(busy, busy, busier, busier, answer=1))
    assert [record.getMessage() for record in caplog.records] == [
        f"{PATH}: reading failed, trying again: busy",
        f"{PATH}: reading failed, trying again: busier",
    ]


def test_a_reason_is_one_short_line_without_secrets():
    for error, said in [
        (obstore_error("503 Slow Down", "<Code>SlowDown</Code> <Key>secret</Key>"), "503 Slow Down (SlowDown)"),
        (exceptions.GenericError("Generic HTTP error: of https://me:word@host/x?sig=secret"), "of https://host/x?..."),
        (exceptions.GenericError("x\n\nDebug source:\nHttpError { kind: Timeout, secret }"), "no answer in time"),
        (
            exceptions.GenericError("x\n\nDebug source:\nHttpError { kind: Connect, kind: ConnectionRefused }"),
            "no connection (ConnectionRefused)",
        ),
        (exceptions.GenericError("x\n\nDebug source:\nNotPartial secret"), "the server ignores the requested range"),
        (exceptions.GenericError(""), "GenericError"),
        (exceptions.GenericError("long " * 1000), "long long"),
    ]:
        reason = retries.safe_reason(error)
        assert said in reason
        assert "secret" not in reason
        assert "\n" not in reason
        assert len(reason) <= 300


def test_obstore_makes_as_many_attempts():
    asked = Retries(5, 30.0).of_obstore()
    assert asked["max_retries"] == 4
    assert asked["retry_timeout"].total_seconds() == 30
    assert asked["backoff"]["init_backoff"].total_seconds() == retries.FIRST_WAIT
