"""A command that is one of several processes: it begins with the others, and ends if one of them does."""

from __future__ import annotations

import argparse
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

import jax

from orbax_safetensors import SafetensorsError, TensorMismatchError
from orbax_safetensors.devices.agreement import new_key, together
from orbax_safetensors.storage.paths import place

# The longest that a process which has failed waits for the others, in seconds, if they do not know of it. Then JAX
# ends all of them. What ends well ends at about the same time in all.
_LEAVE_SECONDS = 30


def begin(args: argparse.Namespace) -> None:
    """Make this process one of several if `args.distributed` is set, and see that all are to do the same.

    Raises `SafetensorsError` in every process if they are not, or cannot find each other.
    """
    if not os.environ.get("JAX_PLATFORMS"):
        # No array goes to an accelerator, which another program may be using.
        jax.config.update("jax_platforms", "cpu")
    if not args.distributed:
        return
    pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if pythons:
        # Python's own handler would wait until the others are there, or for minutes.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(shutdown_timeout_seconds=_LEAVE_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise SafetensorsError(f"jax.distributed cannot be started: {error}") from error
    finally:
        if pythons:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    # Agreements have the names of paths, so that processes with others would wait for each other in vain.
    paths: dict[str, str] = {}

    def placed() -> None:
        paths.update(source=place(args.source), destination=place(args.destination))

    def arguments(_: None) -> str:
        return repr(sorted((vars(args) | paths).items()))

    try:
        together(new_key("command"), placed, arguments)
    except TensorMismatchError as error:
        raise SafetensorsError(
            "the processes were started with different paths or options; process "
            f"{jax.process_index()} has the source {paths['source']} and the destination {paths['destination']}"
        ) from error


class Stopped(SafetensorsError):
    """A signal told this process to end.

    It is an error like those of storage, and no `KeyboardInterrupt`, so that the other processes come to know of it
    where they wait for this one.
    """


class Stops:
    """While it is entered, Ctrl-C and SIGTERM end what runs with `Stopped`, or what that has become on its way.

    `jax.distributed` would have SIGTERM ignored, in favour of programs that ask it whether there was one.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            # What a shell starts in the background ignores interrupts.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            # None is a handler that is not Python's, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        raise Stopped(f"ended by {self.signal.name}")
