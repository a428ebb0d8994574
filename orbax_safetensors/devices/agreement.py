"""Agreement between the processes of a program: they go on together, or fail together with one error."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

# The key-value store and barriers of `jax.distributed`, by which Orbax's processes agree, too. They work from any
# thread and involve no device.
# Waits for: a client that `jax.distributed` exports, or `ocp.multihost.get_jax_distributed_client`, which disappears
# when a program imports the package `orbax.checkpoint.multihost`.
from jax._src.distributed import global_state

from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError

# The longest that the slowest process may take after the fastest, in seconds. A disk that is much slower than the
# others must not fail a save, and jax.distributed itself notices a process that has died.
_TIMEOUT_SECONDS = 3600

_T = TypeVar("_T")

_counts: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()


def new_key(purpose: str, path: str = "") -> str:
    """A key for agreements. Every process asks for those of one purpose, and one path, in the same order."""
    if path:  # which may be of any length, and hold bytes that are no text
        purpose = f"{purpose}/{hashlib.sha256(os.fsencode(path)).hexdigest()}"
    with _lock:
        _counts[purpose] += 1
        return f"orbax_safetensors/{purpose}/{_counts[purpose]}"


def forget(key: str) -> None:
    """Deletes an agreement that every process has left behind, which would else be kept as long as the program runs."""
    if jax.process_count() > 1 and jax.process_index() == 0:
        with contextlib.suppress(Exception):  # nothing depends on it
            _client().key_value_delete(key)


# What is told of a process that has other facts than the first.
_OTHER_FACTS = (
    "does not do the same as process 0: other names or another order of them, other shapes, dtypes, shardings or "
    "metadata, or arrays that only it has (make those global arrays, or NumPy arrays that all processes have), or it "
    "does not see the same files"
)


def together(
    key: str, do: Callable[[], _T], facts: str | Callable[[_T], str] = "", *, otherwise: str = _OTHER_FACTS
) -> _T:
    """Does something in every process; raises in all of them where it fails in one, as `agree` does.

    An interrupt is told to the others, for which this waits; one more leaves without them.

    `facts` are those of `agree`, or what tells them of the result.
    """
    failure: BaseException | None = None
    own = ""
    try:
        result = do()
        own = facts(result) if callable(facts) else facts
    except BaseException as error:  # an interrupt, too: the others would wait for this process
        failure = error
    agree(key, failure, own, otherwise=otherwise)
    return result


def agree(key: str, failure: BaseException | None, facts: str = "", *, otherwise: str = _OTHER_FACTS) -> None:
    """Waits until every process has called this with `key`, and raises in all of them where any has a failure.

    A process that failed raises its own error, the others a `StorageError` that names the process and quotes it. Where
    none has failed, all must have the same `facts`, else a `TensorMismatchError` says which process has others than
    the first, and what it does, `otherwise`.
    """
    own = f"{facts}\n" if failure is None else f"{facts}\n{type(failure).__name__}: {failure}"
    try:
        told = all_gather(key, own)
    except StorageError as error:
        raise error from (failure or error.__cause__)
    if failure is None:
        _check(told, otherwise)
    elif isinstance(failure, SafetensorsError) or not isinstance(failure, Exception):
        raise failure
    else:
        raise StorageError(f"{type(failure).__name__}: {failure}") from failure


def all_gather(key: str, own: str) -> list[str]:
    """What every process has called this with, in their order; `StorageError` where they cannot be reached."""
    if jax.process_count() == 1:
        return [own]
    try:
        client = _client()
        # A path may hold bytes that are no text, as surrogates.
        client.key_value_set(f"{key}/{jax.process_index()}", own.encode("utf-8", "backslashreplace").decode())
        _interruptibly(lambda: client.wait_at_barrier(f"{key}/reached", _TIMEOUT_SECONDS * 1000))
        told = {int(name.rsplit("/", 1)[1]): text for name, text in client.key_value_dir_get(key)}
    except Exception as error:
        raise StorageError(f"the other processes cannot be reached: {error}") from error
    return [text for _, text in sorted(told.items())]


def _interruptibly(wait: Callable[[], None]) -> None:
    """Waits in a thread of its own: no interrupt reaches one that does so in C++, and who waits for it can leave."""
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


def first(key: str, own: str) -> str:
    """What the first process to call this with `key` has called it with. Nobody waits for another."""
    if jax.process_count() == 1:
        return own
    try:
        client = _client()
        with contextlib.suppress(Exception):  # another process was first, or the next line says what is wrong
            client.key_value_set(key, own)
        return str(client.key_value_try_get(key))
    except Exception as error:
        raise StorageError(f"the other processes cannot be reached: {error}") from error


def announce(key: str, text: str) -> None:
    """Tell the other processes something that they see with `announced`, unless another has announced it before."""
    with contextlib.suppress(Exception):
        _client().key_value_set(key, text.encode("utf-8", "backslashreplace").decode())


def announced(key: str) -> str | None:
    """Return what a process has announced with `key`, or None; waits for nobody."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is no such key
        return str(_client().key_value_try_get(key))
    return None


def _client() -> Any:
    """Return the client of the service by which processes find each other.

    Raises `StorageError` if `jax.distributed` is not initialised.
    """
    if global_state.client is None:
        raise StorageError("jax.distributed is not initialised")
    return global_state.client


def _check(told: Sequence[str], otherwise: str) -> None:
    split = [text.partition("\n") for text in told]
    for process, (_, _, error) in enumerate(split):
        if error:
            raise StorageError(f"process {process} failed: {error}")
    for process, (facts, _, _) in enumerate(split):
        if facts != split[0][0]:
            raise TensorMismatchError(f"process {process} {otherwise}")
