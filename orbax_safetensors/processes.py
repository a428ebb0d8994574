"""Agreement between the processes of a program: they go on together, or fail together with one error."""

from __future__ import annotations

import itertools

import jax

# The key-value store and barriers of jax.distributed; Orbax's own barriers are these. They work from any thread and
# involve no device.
from orbax.checkpoint._src.multihost import multihost

from orbax_safetensors.errors import SafetensorsError, StorageError, TensorMismatchError

# The longest that the slowest process may take after the fastest, in seconds. A disk that is much slower than the
# others must not fail a save, and jax.distributed itself notices a process that has died.
_TIMEOUT_SECONDS = 3600

_numbers = itertools.count()


def new_key(purpose: str) -> str:
    """A key for one agreement. Every process asks for its keys in the same order."""
    return f"orbax_safetensors/{purpose}/{next(_numbers)}"


def agree(key: str, failure: Exception | None, facts: str = "") -> None:
    """Waits until every process has called this with `key`, and raises in all of them where any has a failure.

    A process that failed raises its own error, the others a `StorageError` that names the process and quotes it. Where
    none has failed, all must have the same `facts`, else a `TensorMismatchError` says which process has others than
    the first.
    """
    if jax.process_count() > 1:
        client = multihost.get_jax_distributed_client()
        own = f"{facts}\n" if failure is None else f"{facts}\n{type(failure).__name__}: {failure}"
        try:
            client.key_value_set(f"{key}/{jax.process_index()}", own)
            client.wait_at_barrier(f"{key}/reached", _TIMEOUT_SECONDS * 1000)
            told = {int(name.rsplit("/", 1)[1]): text for name, text in client.key_value_dir_get(key)}
        except jax.errors.JaxRuntimeError as error:
            raise StorageError(f"the other processes cannot be reached: {error}") from (failure or error)
        if failure is None:
            _check(told)
    if failure is not None:
        if isinstance(failure, SafetensorsError):
            raise failure
        raise StorageError(str(failure)) from failure


def _check(told: dict[int, str]) -> None:
    split = {process: text.partition("\n") for process, text in sorted(told.items())}
    for process, (_, _, error) in split.items():
        if error:
            raise StorageError(f"process {process} failed: {error}")
    for process, (facts, _, _) in split.items():
        if facts != split[0][0]:
            raise TensorMismatchError(
                f"process {process} does not save the same as process 0: other names, shapes, dtypes or metadata, or "
                "arrays that only it has; make those global arrays, or NumPy arrays that all processes have"
            )
