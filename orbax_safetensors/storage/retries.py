"""Which requests are retried, for how long, and how messages describe their failures, without secrets."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from obstore import exceptions

from orbax_safetensors.errors import MissingError, SafetensorsError, StorageError
from orbax_safetensors.storage import credentials

if TYPE_CHECKING:  # obstore has it for type checkers only
    from obstore.store import RetryConfig

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# The waits between attempts, in seconds. They double from the first to the longest, and each is shortened by a random
# part of up to a half, so that a thousand hosts that failed together do not come back together.
FIRST_WAIT = 0.2
LONGEST_WAIT = 10.0
# A server that sends a wrong answer sends it again; a proxy in between may not.
_WRONG_ANSWERS = 3
# The metadata service of a machine with a role answers in milliseconds: after these seconds, the machine has no role.
_METADATA_SECONDS = 3.0

# Names of options that are secrets. Their case is the caller's.
_SECRETS = re.compile("key|pass|sas|secret|token", re.IGNORECASE)

_RETRYABLE_STATUSES = frozenset({408, 425, 429})  # and all from 500 on, except the fatal ones
_FATAL_STATUSES = frozenset({501, 505, 506, 508, 510, 511})
_FATAL_ERRORS = (
    FileNotFoundError,
    exceptions.AlreadyExistsError,
    exceptions.InvalidPathError,
    exceptions.NotModifiedError,
    exceptions.PermissionDeniedError,
    exceptions.PreconditionError,
    exceptions.UnauthenticatedError,
)


class WrongAnswerError(Exception):
    """An answer that does not fit the request; the message says how."""


class RefusedError(Exception):
    """A request that the server refused or did not answer; the message says why.

    `status` is the HTTP status, or None if no answer came. `wait` is the number of seconds that the server asks to wait
    before a retry.
    """

    def __init__(self, message: str, status: int | None = None, wait: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.wait = wait


class ChangedError(Exception):
    """An answer from another state of the object than when it was opened; the message says which."""


class _Failure:
    """The facts of a failed attempt, without the error itself, which may hold the query of a URL."""

    def __init__(self, path: str, error: Exception) -> None:
        self.fault = explain(path, error)
        self.wrong = _is_wrong(error)
        self.fatal = not _is_retryable(error)
        self.kind = MissingError if isinstance(error, RefusedError) and error.status == 404 else StorageError
        self.forbidden = status_of(error) == 403
        self.wait = error.wait if isinstance(error, RefusedError) else 0.0
        self.is_metadata = status_of(error) is None and credentials.asks_metadata(str(error))


@dataclass(frozen=True)
class Retries:
    """How many attempts a request has, and for how many seconds after the first attempt an attempt may begin."""

    attempts: int
    seconds: float

    def of_obstore(self) -> RetryConfig:
        """Return the same limits for obstore, which retries the parts of an upload: only obstore holds their bytes."""
        return {
            "max_retries": self.attempts - 1,
            "retry_timeout": timedelta(seconds=self.seconds),
            "backoff": {
                "init_backoff": timedelta(seconds=FIRST_WAIT),
                "max_backoff": timedelta(seconds=LONGEST_WAIT),
                "base": 2,
            },
        }

    async def run(self, path: str, verb: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of the first attempt that succeeds.

        Raises `StorageError`, `FileNotFoundError` or `ChangedError`, never with an error of obstore as its context. The
        `errno` of a `StorageError` is EACCES if the server answered 403. `path` and `verb` are for messages.
        """
        began, wait, number, wrong, warned = time.monotonic(), FIRST_WAIT, 1, 0, ""
        while True:
            ended: Exception | None = None
            try:
                return await attempt()
            except SafetensorsError:  # before FileNotFoundError, because a `MissingError` is both
                raise
            except ChangedError as error:
                ended = ChangedError(str(error))
            except FileNotFoundError:
                ended = FileNotFoundError(path)
            except (exceptions.BaseError, WrongAnswerError, RefusedError) as error:
                failure = _Failure(path, error)
            except (ValueError, OverflowError) as error:  # such as a date after the year 9999, which obstore has not
                said = f"the answer cannot be read ({type(error).__name__}: {safe_reason(error)})"
                failure = _Failure(path, WrongAnswerError(said))
            if ended is not None:
                raise ended
            wrong += failure.wrong
            pause = wait * random.uniform(0.5, 1.0) + failure.wait
            seconds = min(self.seconds, _METADATA_SECONDS) if failure.is_metadata else self.seconds
            fatal = failure.fatal or wrong >= _WRONG_ANSWERS
            if fatal or number >= self.attempts or time.monotonic() - began + pause > seconds:
                tries = f" ({number} attempts)" if number > 1 else ""
                fault = failure.kind(f"{path}: {verb} failed: {failure.fault}{tries}")
                if failure.forbidden:
                    fault.errno = errno.EACCES
                raise fault
            level = logging.DEBUG if failure.fault == warned else logging.WARNING  # once for each reason
            logger.log(level, "%s: %s failed, trying again: %s", path, verb, failure.fault)
            warned = failure.fault
            await asyncio.sleep(pause)
            wait, number = min(2 * wait, LONGEST_WAIT), number + 1


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error, or None."""
    if isinstance(error, RefusedError):
        return error.status
    status = re.search(r"status code: (\d{3})", str(error))
    return int(status[1]) if status else None


def _is_retryable(error: BaseException) -> bool:
    if isinstance(error, _FATAL_ERRORS):
        return False
    status = status_of(error)
    return status is None or status in _RETRYABLE_STATUSES or (status >= 500 and status not in _FATAL_STATUSES)


def _is_wrong(error: BaseException) -> bool:
    return isinstance(error, WrongAnswerError) or any(
        kind in str(error) for kind in ("NotPartial", "RangeNotSupported", "UnexpectedRange", "ContentRange")
    )


def explain(path: str, error: BaseException) -> str:
    """Return why a request for `path` failed, and what the user can do."""
    scheme, said, status = path.partition("://")[0], safe_reason(error), status_of(error)
    if credentials.asks_metadata(str(error)) and (status is None or not _is_retryable(error)):
        return f"{credentials.not_found(scheme)} ({said})"
    hint = credentials.hint(scheme) if status in (401, 403) else None
    return f"{said}: {hint}" if hint else said


def code_of(body: str) -> str:
    """Return the error code in the body of an answer, in parentheses; empty text if there is none."""
    code = re.search(r"<Code>(\w{1,60})</Code>", body)
    return f" ({code[1]})" if code else ""


def secrets_of(options: Mapping[str, Any]) -> list[str]:
    """Return the values of options that are secrets by their names."""
    return [value for name, value in options.items() if isinstance(value, str) and value and _SECRETS.search(name)]


def safe_reason(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Return an error's reason in one line, without `secrets`, the bodies of answers, queries of URLs, or paths.

    A server that refuses a signature repeats the signed text and the user; a signed URL has its signature in its query.
    """
    if isinstance(error, WrongAnswerError | RefusedError):
        return str(error)
    whole = str(error)
    for secret in secrets:
        whole = whole.replace(secret, "***")
    text, _, debug = whole.partition("\n\nDebug source:\n")
    status = re.search(r"status code: (\d{3}(?: [A-Z][\w-]*)*)", text)
    if status:
        return f"the server answered {status[1]}{code_of(text + debug)}"
    if "NotPartial" in debug or "RangeNotSupported" in debug:
        return "the server ignores the requested range"
    if "HttpError" in debug:
        kind = re.search(r"HttpError \{\s*kind: (\w+)", debug)
        words = {"Timeout": "no answer in time", "Connect": "no connection", "Interrupted": "the connection broke"}
        detail = re.search(r"kind: (ConnectionRefused|ConnectionReset|UnexpectedEof)|error: \"([^\"]{1,80})\"", debug)
        said = words.get(kind[1] if kind else "", "the request failed")
        return f"{said} ({detail[1] or detail[2]})" if detail else said
    line = re.sub(r"^Generic \w+ error: ", "", text.splitlines()[0] if text else type(error).__name__)
    return re.sub(r"\?\S+", "?...", re.sub(r"//[^/@\s]*@", "//", line))[:300]
