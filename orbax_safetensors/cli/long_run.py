"""A command that takes long: it says on stderr how far it is, may be one of several processes, and ends on signals."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import jax

from orbax_safetensors import Conversion, Link, SafetensorsError
from orbax_safetensors.cli.reporter import Reporter
from orbax_safetensors.cli.tables import Facts, Printer

# The longest that a process which has failed waits for the others, in seconds, if they do not know of it. Then JAX
# ends all of them. What ends well ends at about the same time in all.
_LEAVE_SECONDS = 30

_Done = TypeVar("_Done", Conversion, Link)


def begin(args: argparse.Namespace) -> None:
    """Make this process one of several if `args.distributed` is set.

    Raises `SafetensorsError` if processes cannot find each other.
    """
    if not os.environ.get("JAX_PLATFORMS"):
        # No array goes to an accelerator, which another program may be using.
        jax.config.update("jax_platforms", "cpu")
    if not args.distributed:
        return
    default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default_handler:
        # Python's handler would run only once the other processes are there, or after minutes.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(shutdown_timeout_seconds=_LEAVE_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise SafetensorsError(f"jax.distributed cannot be started: {error}") from error
    finally:
        if default_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def report(
    args: argparse.Namespace, output: Printer, call: Callable[[Reporter], _Done], facts: Callable[[_Done], Facts]
) -> int:
    """Run `call`, say on stderr how far it is, and print what was done; process 0 alone says and prints."""
    first, processes = jax.process_index() == 0, jax.process_count()
    label = args.command if processes == 1 else f"{args.command}, process 0 of {processes}"
    reporter = Reporter(label, sys.stderr if first else None)
    received: list[signal.Signals] = []
    try:
        with _ended_by_signals(received), reporter:
            done: _Done = call(reporter)
    except Exception:
        if not received:
            raise
        if first and reporter.begun:
            print("interrupted: the same command with --resume goes on from here", file=sys.stderr)
        return 128 + received[-1]  # what a shell says of a program that a signal has ended
    if not first:
        return 0
    if args.json:
        output.json(done.to_json() | {"processes": processes})
        return 0
    shared: Facts = [("processes", processes)] if processes > 1 else []
    output.facts([*facts(done), *shared])
    return 0


class _SignalError(SafetensorsError):
    """A signal told this process to end.

    It is a `SafetensorsError`, not a `KeyboardInterrupt`, because the job passes these on to the processes that wait
    for this one.
    """


@contextmanager
def _ended_by_signals(received: list[signal.Signals]) -> Iterator[None]:
    """Raise an error in the main thread on Ctrl-C and SIGTERM, and add the signal to `received`.

    `jax.distributed` would ignore SIGTERM, in favour of programs that ask it for one. The error may arrive as another
    one that was raised from it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        raise _SignalError(f"ended by {received[-1].name}")

    handlers: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            # What a shell starts in the background ignores interrupts.
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, end)
        yield
    finally:
        for number, handler in handlers.items():
            # None is a handler that is not Python's, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
