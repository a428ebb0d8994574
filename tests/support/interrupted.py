"""Conversions that kill or stop themselves, each a fork of this process, which imports all that they need once.

    python interrupted.py

Each line on stdin is JSON. `[ERRORS, KIND, SOURCE, DESTINATION, WHERE, SIGNAL, LOCKS]` begins a conversion: `ERRORS` is
the file for its stderr, `KIND` a key of `CALLS`, `WHERE` the number of the batch after which it gets `SIGNAL`, or the
name of a step at the end, and `LOCKS` is `none` where the file system is to have no locks, else `locks`. A number waits
for the end of that conversion. The answer is a line on stdout: the number and the status of what has stopped or ended.
"""

import errno
import fcntl
import json
import os
import signal
import sys
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"

import orbax_safetensors as ost
from orbax_safetensors.orbax_store import item_writer
from orbax_safetensors.streaming import orbax_sink, partial_directory

# Each takes about a dozen batches.
_FOR_FOUR = {"mesh": {"x": 4}, "spec": {"w": (None, "x")}}
CALLS = {
    "to_orbax": partial(ost.convert, to="orbax", memory_bytes=40_000),
    "to_safetensors": partial(ost.convert, to="safetensors", memory_bytes=40_000),
    "reshard_orbax": partial(ost.reshard, **_FOR_FOUR, memory_bytes=40_000),
    "reshard_safetensors": partial(ost.reshard, **_FOR_FOUR, memory_bytes=20_000),
}


def no_locks(*_):
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def convert(kind, source, destination, where, name, locks):
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
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # to tear the interpreter down takes longer than the conversion


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        number, options = (asked, 0) if isinstance(asked, int) else (os.fork(), os.WUNTRACED)
        if not number:
            errors, *arguments = asked
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
            return convert(*arguments)
        print(json.dumps(os.waitpid(number, options)), flush=True)


if __name__ == "__main__":
    main()
