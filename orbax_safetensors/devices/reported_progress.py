"""`reported_progress`: what a job calls for the `progress` that its caller passed: the same, or a bar."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import jax

from orbax_safetensors.errors import StorageError
from orbax_safetensors.options import Progress
from orbax_safetensors.transfer.progress_bar import Bar


@contextlib.contextmanager
def reported_progress(progress: Progress | bool | None, label: str) -> Iterator[Progress | None]:
    """Yield `progress`. What it raises leaves this context as it is, even if an agreement of processes has wrapped it.

    The other processes of the agreement raise a `StorageError`. True is a bar with a `label`, on stderr of process 0.
    """
    if progress is True:
        # A single process starts no devices.
        is_first = not jax.distributed.is_initialized() or jax.process_index() == 0
        with Bar(label, sys.stderr if is_first else None) as bar:
            yield bar
        return
    raised: list[BaseException] = []

    def report(done: int, total: int) -> None:
        try:
            if progress:
                progress(done, total)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        yield report if progress else None
    except StorageError:
        if raised:
            raise raised[0] from raised[0].__cause__
        raise
