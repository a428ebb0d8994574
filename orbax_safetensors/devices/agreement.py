"""Agreement between the processes of a program: they go on together, or fail together with one error."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, TypeVar

import jax

# The key-value store and barriers of `jax.distributed`, which Orbax also uses to agree. They work from any thread and
# involve no device.
# Waits for: a client that `jax.distributed` exports, or `ocp.multihost.get_jax_distributed_client`, which disappears
# when a program imports the package `orbax.checkpoint.multihost`.
from jax._src.distributed import global_state

from orbax_safetensors.devices.active import ActiveProcesses
from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError
from orbax_safetensors.format.names import some
from orbax_safetensors.storage.interrupts import plain_interrupts
from orbax_safetensors.storage.threads import start

logger = logging.getLogger(__name__)

# After this many seconds, a process that waits for others to begin says for which.
_SAID_AFTER_SECONDS = 15

# How long the slowest process may take after the fastest, in seconds. A disk that is much slower than the others must
# not fail a save, and jax.distributed itself notices a process that has died.
_TIMEOUT_SECONDS = 3600

# What JAX says of a process that has died, of the service that connects them, and of anything of the kind.
_GONE = re.compile(r"(?:\btask:|\bTask )([0-9]+)\b")
_SERVICE_IS_GONE = re.compile(r"UNAVAILABLE(?s:.*)coordination.service")
_OF_OTHERS = re.compile(r"UNAVAILABLE|ABORTED|heartbeat|[Bb]arrier|[Cc]onnection|\bpeer\b|[Gg]loo|NCCL")

_ALL_CALL = (
    "all processes have to make the same call with the same path, or a save those in active_processes of the handler's "
    "multiprocessing_options"
)

_T = TypeVar("_T")

_counts: collections.Counter[str] = collections.Counter()
_alone: dict[str, str] = {}  # what the only process has posted
_lock = threading.Lock()


def new_key(purpose: str, path: str = "", active: ActiveProcesses | None = None) -> str:
    """Return a new key for agreements. All processes make keys of the same arguments in the same order."""
    if path or active:  # hashed, as a path may have any length, and bytes that are not text
        purpose = f"{purpose}/{hashlib.sha256(os.fsencode(f'{path}{active}')).hexdigest()}"
    with _lock:
        _counts[purpose] += 1
        return f"orbax_safetensors/{purpose}/{_counts[purpose]}"


# The error for a process whose facts differ from those of the first.
_OTHER_FACTS = (
    "does not do the same as process {first}: other names or another order of them, other shapes, dtypes, shardings or "
    "metadata, or arrays that only it has (make those global arrays, or NumPy arrays that all processes have), or it "
    "does not see the same files"
)


def same(facts: Mapping[int, str], otherwise: str = _OTHER_FACTS) -> None:
    """Raise `TensorMismatchError` if processes have other facts than the first.

    It names the first of these processes, and goes on with `otherwise`, where `{first}` is the first process.
    """
    first = min(facts)
    for process, text in facts.items():
        if text != facts[first]:
            raise TensorMismatchError(f"process {process} {otherwise.format(first=first)}")


def same_arguments(facts: Mapping[int, str]) -> None:
    """Raise `TensorMismatchError` if processes were called with other arguments than the first, or see other files."""
    same(facts, "was called with other arguments than process {first}, or does not see the same files")


def together(
    key: str,
    do: Callable[[], _T],
    facts: str | Callable[[_T], str] = "",
    *,
    check: Callable[[Mapping[int, str]], None] = same,
    active: ActiveProcesses | None = None,
    timeout_secs: float | None = None,
) -> _T:
    """Call `do` in every process and return its result; if it fails in one process, raise in all, as `agree` does.

    `active` are the processes that call this, by default all. `timeout_secs` is how long each of them waits for the
    others. An interrupt counts as a failure: this process informs the others first. A second interrupt does not wait.

    `facts` are for `agree`, or a function that returns them for the result.
    """
    failure: BaseException | None = None
    facts_here = ""
    try:
        result = do()
        facts_here = facts(result) if callable(facts) else facts
    except BaseException as error:  # also an interrupt: the others would wait for this process
        failure = error
    agree(key, failure, facts_here, check=check, active=active, timeout_secs=timeout_secs)
    return result


def agree(
    key: str,
    failure: BaseException | None,
    facts: str = "",
    *,
    check: Callable[[Mapping[int, str]], None] = same,
    active: ActiveProcesses | None = None,
    timeout_secs: float | None = None,
) -> None:
    """Wait until every process has called this with `key`; raise in all processes if any has a failure.

    A failed process raises its error, the others a `StorageError` that names the process and quotes the error. If none
    has failed, `check` is called with the `facts` of all processes, which are a line of text, and raises if they do not
    go together.
    """
    active = active or ActiveProcesses.all()
    text = f"{facts}\n" if failure is None else f"{facts}\n{type(failure).__name__}: {failure}"
    try:
        texts = all_gather(key, text, active, timeout_secs)
    except StorageError as error:
        raise error from (failure or error.__cause__)
    if failure is None:
        parts = {process: text.split("\n", 1) for process, text in zip(active.indices, texts, strict=True)}
        for process, (_, failed) in parts.items():
            if failed:
                raise StorageError(f"process {process} failed: {failed}")
        check({process: facts for process, (facts, _) in parts.items()})
    elif isinstance(failure, SafetensorsError) or not isinstance(failure, Exception):
        raise failure
    else:
        raise StorageError(f"{type(failure).__name__}: {failure}") from failure


def all_gather(
    key: str, text: str, active: ActiveProcesses | None = None, timeout_secs: float | None = None
) -> list[str]:
    """Return the `text` of every process, in order of the processes. The last to have them deletes them.

    Raises `StorageError` if they cannot be reached, or do not come within `timeout_secs`, by default an hour. Processes
    with `timeout_secs` wait for others to begin, and log a warning for which ones if these do not come at once.
    """
    active, seconds = active or ActiveProcesses.all(), timeout_secs or _TIMEOUT_SECONDS
    if active.count == 1:
        return [text]
    post(key, text, active)
    missing: Collection[int] | None = None
    with _reaching():
        ids = None if active.count == jax.process_count() else list(active.indices)
        barrier = partial(_client().wait_at_barrier, f"{key}/reached", round(seconds * 1000), ids)
        try:
            _interruptibly(barrier, None if timeout_secs is None else partial(_say_missing, key, active))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            missing = set(active.indices) - _posted(key).keys()
    if missing is not None:
        raise _late(missing, seconds)
    texts = posted(key, active)
    with contextlib.suppress(Exception):  # nothing depends on it
        if _client().key_value_increment(f"{key}/left", 1) == active.count:
            withdraw(key)
    return texts


def _late(missing: Collection[int], timeout_secs: float) -> StorageError:
    """Return the error for processes that have not come in time; if none is missing, this one came too late."""
    if not missing:
        return StorageError("this process came too late: the others no longer waited for it")
    return StorageError(f"process {some(sorted(missing))} did not come within {timeout_secs:g} s: {_ALL_CALL}")


def _say_missing(key: str, active: ActiveProcesses) -> None:
    with contextlib.suppress(Exception):  # the wait itself raises what is wrong
        if missing := set(active.indices) - _posted(key).keys():
            logger.warning("waiting for process %s: %s", some(sorted(missing)), _ALL_CALL)


def post(key: str, text: str, active: ActiveProcesses | None = None) -> None:
    """Leave a text for `posted`, in another process or this, until `withdraw`.

    Raises `StorageError` if the processes cannot be reached.
    """
    if (active or ActiveProcesses.all()).count == 1:
        _alone[key] = text
        return
    with _reaching():
        # A path may hold bytes that are not text, as surrogates.
        _client().key_value_set(f"{key}/texts/{jax.process_index()}", text.encode("utf-8", "backslashreplace").decode())


def posted(key: str, active: ActiveProcesses | None = None) -> list[str]:
    """Return what every process has posted, in their order, once all have; `StorageError` as for `post`."""
    if (active or ActiveProcesses.all()).count == 1:
        return [_alone[key]]
    with _reaching():
        return [text for _, text in sorted(_posted(key).items())]


def _posted(key: str) -> dict[int, str]:
    """Return what processes have posted so far."""
    return {int(name.rsplit("/", 1)[1]): text for name, text in _client().key_value_dir_get(f"{key}/texts")}


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> StorageError:
    """Return the error for processes that are gone, which it names as far as JAX does."""
    text = str(error)
    gone = set(map(int, _GONE.findall(text)))
    if not gone and _SERVICE_IS_GONE.search(text) and jax.process_index() != 0:
        gone = {0}  # which has the service
    named = f"process {some(sorted(gone))} is gone: " if gone else ""
    return StorageError(f"{named}the other processes cannot be reached: {text}")


@contextlib.contextmanager
def reaching_others(active: ActiveProcesses) -> Iterator[None]:
    """Raise a `StorageError` for what JAX raises because others of the `active` processes are gone.

    For programs of their devices, and for barriers of Orbax.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if active.count == 1 or not _OF_OTHERS.search(str(error)):
            raise
        raise _unreachable(error) from error


def _interruptibly(wait: Callable[[], None], say: Callable[[], None] | None) -> None:
    """Wait in another thread: an interrupt cannot end a wait in C++, but it ends the wait for this thread.

    If the wait is long, `say` is called once.
    """
    ended: Future[None] = Future()

    def work() -> None:
        try:
            wait()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    start(work, "other_processes")
    with plain_interrupts():
        if say is not None and not wait_for([ended], _SAID_AFTER_SECONDS).done:
            say()
        ended.result()


def first(key: str, text: str) -> str:
    """Return the `text` of the first process to call this with `key`, which stays until `withdraw`; does not wait."""
    if jax.process_count() == 1:
        return text
    try:
        client = _client()
        with contextlib.suppress(Exception):  # another process was first, or the next line raises the error
            client.key_value_set_bytes(key, text.encode("utf-8", "surrogatepass"))
        return str(client.key_value_try_get_bytes(key), "utf-8", "surrogatepass")
    except Exception as error:
        raise _unreachable(error) from error


def announce(key: str, text: str) -> None:
    """Send the other processes a text that they see with `announced` until `withdraw`; the first of a key stays."""
    with contextlib.suppress(Exception):
        _client().key_value_set(key, text.encode("utf-8", "backslashreplace").decode())


def announced(key: str) -> str | None:
    """Return the text that a process has announced with `key`, or None; does not wait."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is no such key
        return str(_client().key_value_try_get(key))
    return None


def withdraw(key: str) -> None:
    """Delete what processes have posted or announced, which would otherwise stay until the program ends."""
    if _alone.pop(key, None) is not None:
        return
    with contextlib.suppress(Exception):  # nothing depends on it
        _client().key_value_delete(key)


def _client() -> Any:
    """Return the client of the service that connects the processes.

    Raises `StorageError` if `jax.distributed` is not initialised.
    """
    if global_state.client is None:
        raise StorageError("jax.distributed is not initialised")
    return global_state.client
