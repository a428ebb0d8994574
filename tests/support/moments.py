"""An interrupt at any moment of some work: wherever Python looks for signals in this thread, in code of the package.

Python looks for them when a function begins, and when one of C has returned. `threading` is left out: an interrupt
between two statements of a `Condition` leaves its lock taken, which only Python can change. Only the wait itself
counts, in which a thread spends its time. What interrupts a `__del__` is ignored by Python.
"""

import contextlib
import inspect
import sys
import threading
from collections import Counter
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import orbax_safetensors

_FOLDERS = tuple(str(Path(module.__file__).parent) for module in (orbax_safetensors, futures))
_FILES = {contextlib.__file__}
_WAIT = threading.Condition.wait.__code__


class Moment(NamedTuple):
    """The `occurrence`-th time that an event happens in a line; `stack` has the functions that are running."""

    file: str
    function: str
    line: int
    event: str
    occurrence: int
    stack: tuple[str, ...]


@contextlib.contextmanager
def _profiled(see):
    """Call `see` with the file, function, line and event of each moment, and the frame."""

    def profile(frame, event, function):
        code = frame.f_code
        if event == "call":
            if code.co_flags & inspect.CO_GENERATOR:  # none is looked for when an exception is thrown into it
                return
        elif event != "c_return" or (code is _WAIT and function.__name__ != "acquire"):
            return
        if code.co_filename.startswith(_FOLDERS) or code.co_filename in _FILES or (code is _WAIT and event != "call"):
            see((code.co_filename, code.co_qualname, frame.f_lineno, event), frame)

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(previous)


def _stack(frame):
    """The functions that are running; nothing if Python would ignore an interrupt, or a thread is being started."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return () if any(name.endswith((".__del__", "Thread.start")) for name in names) else tuple(names)


@contextlib.contextmanager
def recorded(most=3):
    """Yield a list of the moments of the block, in order: of each event in a line, the first `most`."""
    moments, counts = [], Counter()

    def see(key, frame):
        if counts[key] < most and (stack := _stack(frame)):
            counts[key] += 1
            moments.append(Moment(*key, counts[key], stack))

    with _profiled(see):
        yield moments


@contextlib.contextmanager
def interrupted(moment):
    """Raise a `KeyboardInterrupt` at a moment of the block, if it comes; yield a list that then has it."""
    reached, seen = [], 0

    def see(key, frame):
        nonlocal seen
        if key != moment[:4] or not _stack(frame):
            return
        seen += 1
        if seen == moment.occurrence:
            sys.setprofile(None)
            reached.append(moment)
            raise KeyboardInterrupt

    with _profiled(see):
        yield reached
