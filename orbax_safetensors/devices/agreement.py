"""Agreement between the processes of a program: they go on together, or fail together with one error."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

# The key-value store and barriers of `jax.distributed`, which Orbax also uses to agree. They work from any thread and
# involve no device.
# Waits for: a client that `jax.distributed` exports, or `ocp.multihost.get_jax_distributed_client`, which disappears
# when a program imports the package `orbax.checkpoint.multihost`.
from jax._src.distributed import global_state

from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError

# How long the slowest process may take after the fastest, in seconds. A disk that is much slower than the others must
# not fail a save, and jax.distributed itself notices a process that has died.
_TIMEOUT_SECONDS = 3600

_T = TypeVar("_T")

_counts: collections.Counter[str] = collections.Counter()
_alone: dict[str, str] = {}  # what the only process has posted
_lock = threading.Lock()


def new_key(purpose: str, path: str = "") -> str:
    """Return a new key for agreements. All processes make the keys of a purpose and path in the same order."""
    if path:  # hashed, as a path may have any length, and bytes that are not text
        purpose = f"{purpose}/{hashlib.sha256(os.fsencode(path)).hexdigest()}"
    with _lock:
        _counts[purpose] += 1
        return f"orbax_safetensors/{purpose}/{_counts[purpose]}"


def forget(key: str) -> None:
    """Delete an agreement that every process has left behind, which would otherwise stay until the program ends."""
    if jax.process_count() > 1 and jax.process_index() == 0:
        with contextlib.suppress(Exception):  # nothing depends on it
            _client().key_value_delete(key)


# The error for a process whose facts differ from those of the first.
_OTHER_FACTS = (
    "does not do the same as process 0: other names or another order of them, other shapes, dtypes, shardings or "
    "metadata, or arrays that only it has (make those global arrays, or NumPy arrays that all processes have), or it "
    "does not see the same files"
)


def together(
    key: str, do: Callable[[], _T], facts: str | Callable[[_T], str] = "", *, otherwise: str = _OTHER_FACTS
) -> _T:
    """Call `do` in every process and return its result; if it fails in one process, raise in all, as `agree` does.

    An interrupt is a failure, of which this process first informs the others; a second interrupt does not wait.

    `facts` are for `agree`, or a function that returns them for the result.
    """
    failure: BaseException | None = None
    facts_here = ""
    try:
        result = do()
        facts_here = facts(result) if callable(facts) else facts
    except BaseException as error:  # also an interrupt: the others would wait for this process
        failure = error
    agree(key, failure, facts_here, otherwise=otherwise)
    return result


def agree(key: str, failure: BaseException | None, facts: str = "", *, otherwise: str = _OTHER_FACTS) -> None:
    """Wait until every process has called this with `key`; raise in all processes if any has a failure.

    A failed process raises its error, the others a `StorageError` that names the process and quotes the error. If none
    has failed, all must have the same `facts`: otherwise, a `TensorMismatchError` names the process whose facts differ
    from those of the first, and goes on with `otherwise`.
    """
    text = f"{facts}\n" if failure is None else f"{facts}\n{type(failure).__name__}: {failure}"
    try:
        texts = all_gather(key, text)
    except StorageError as error:
        raise error from (failure or error.__cause__)
    if failure is None:
        _check(texts, otherwise)
    elif isinstance(failure, SafetensorsError) or not isinstance(failure, Exception):
        raise failure
    else:
        raise StorageError(f"{type(failure).__name__}: {failure}") from failure


def all_gather(key: str, text: str) -> list[str]:
    """Return the `text` of every process, in order of the processes; `StorageError` if they cannot be reached."""
    if jax.process_count() == 1:
        return [text]
    post(key, text)
    with _reaching():
        client = _client()
        _interruptibly(lambda: client.wait_at_barrier(f"{key}/reached", _TIMEOUT_SECONDS * 1000))
    return posted(key)


def post(key: str, text: str) -> None:
    """Leave a text for `posted`, in another process or this; `StorageError` if the processes cannot be reached."""
    if jax.process_count() == 1:
        _alone[key] = text
        return
    with _reaching():
        # A path may hold bytes that are not text, as surrogates.
        _client().key_value_set(f"{key}/{jax.process_index()}", text.encode("utf-8", "backslashreplace").decode())


def posted(key: str) -> list[str]:
    """Return what every process has posted, in their order, once all have; `StorageError` as for `post`."""
    if jax.process_count() == 1:
        return [_alone.pop(key)]
    with _reaching():
        texts = {int(name.rsplit("/", 1)[1]): value for name, value in _client().key_value_dir_get(key)}
    return [value for _, value in sorted(texts.items())]


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StorageError(f"the other processes cannot be reached: {error}") from error


def _interruptibly(wait: Callable[[], None]) -> None:
    """Wait in another thread: an interrupt cannot end a wait in C++, but it ends the wait for this thread."""
    ended: Future[None] = Future()

    def work() -> None:
        try:
            wait()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=work, name="other_processes", daemon=True).start()
    ended.result()


def first(key: str, text: str) -> str:
    """Return the `text` of the first process to call this with `key`. No process waits for another."""
    if jax.process_count() == 1:
        return text
    try:
        client = _client()
        with contextlib.suppress(Exception):  # another process was first, or the next line raises the error
            client.key_value_set(key, text)
        return str(client.key_value_try_get(key))
    except Exception as error:
        raise StorageError(f"the other processes cannot be reached: {error}") from error


def announce(key: str, text: str) -> None:
    """Send the other processes a text that they see with `announced`; the first text of a key stays."""
    with contextlib.suppress(Exception):
        _client().key_value_set(key, text.encode("utf-8", "backslashreplace").decode())


def announced(key: str) -> str | None:
    """Return the text that a process has announced with `key`, or None; does not wait."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is no such key
        return str(_client().key_value_try_get(key))
    return None


def _client() -> Any:
    """Return the client of the service that connects the processes.

    Raises `StorageError` if `jax.distributed` is not initialised.
    """
    if global_state.client is None:
        raise StorageError("jax.distributed is not initialised")
    return global_state.client


def _check(texts: Sequence[str], otherwise: str) -> None:
    split = [text.partition("\n") for text in texts]
    for process, (_, _, error) in enumerate(split):
        if error:
            raise StorageError(f"process {process} failed: {error}")
    for process, (facts, _, _) in enumerate(split):
        if facts != split[0][0]:
            raise TensorMismatchError(f"process {process} {otherwise}")
