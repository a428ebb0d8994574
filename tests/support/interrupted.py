"""One conversion in a process of its own that kills or stops itself: `killed` and `stopped` start it.

    python interrupted.py KIND SOURCE DESTINATION WHERE SIGNAL LOCKS

`KIND` is a key of `CALLS`; `WHERE` is the number of the batch after which it gets `SIGNAL`, or the name of a step at
the end. `LOCKS` is `none` where the file system is to have no locks, else `locks`.
"""

import errno
import fcntl
import os
import signal
import sys
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"

import orbax_safetensors as ost
from orbax_safetensors.orbax_store import item_writer
from orbax_safetensors.streaming import orbax_sink, partial_directory

# Each takes about a dozen batches.
_ASKED = {
    "to_orbax": ("convert", {"to": "orbax", "memory_bytes": 40_000}),
    "to_safetensors": ("convert", {"to": "safetensors", "memory_bytes": 40_000}),
    "reshard_orbax": ("reshard", {"mesh": {"x": 4}, "spec": {"w": (None, "x")}, "memory_bytes": 40_000}),
    "reshard_safetensors": ("reshard", {"mesh": {"x": 4}, "spec": {"w": (None, "x")}, "memory_bytes": 20_000}),
}
CALLS = {kind: partial(getattr(ost, call), **asked) for kind, (call, asked) in _ASKED.items()}
PLANS = {kind: partial(getattr(ost, f"plan_{call}"), **asked) for kind, (call, asked) in _ASKED.items()}


def no_locks(*_):
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def main(kind, source, destination, where, name, locks):
    batches = -1

    def interrupt():
        os.kill(os.getpid(), getattr(signal, name))

    def before(owner, attribute):
        function = getattr(owner, attribute)

        def interrupted(*args, **more):
            interrupt()
            return function(*args, **more)

        setattr(owner, attribute, interrupted)

    def progress(done, total):
        nonlocal batches
        batches += 1
        if str(batches) == where:
            interrupt()

    if locks == "none":
        fcntl.flock = no_locks
    if where == "after_it_began":
        before(partial_directory.PartialDirectory, "open")
        before(item_writer.ItemWriter, "chunks")
    elif where == "before_the_end":
        before(partial_directory.PartialDirectory, "finish")
        before(orbax_sink.OrbaxSink, "commit")
    elif where == "before_the_rename":
        before(os, "rename")
    elif where == "after_the_rename":
        before(partial_directory.shutil, "rmtree")
    try:
        CALLS[kind](source, destination, progress=progress)
    except ost.SafetensorsError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
