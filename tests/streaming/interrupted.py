"""One conversion in a process of its own that kills itself: `test_resume.py` starts it.

    python interrupted.py KIND SOURCE DESTINATION WHERE

`KIND` is a key of `CALLS`; `WHERE` is the number of the batch after which it dies, or the name of a step at the end.
"""

import os
import signal
import sys
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"

import orbax_safetensors as ost
from orbax_safetensors.streaming import draft, to_orbax

# Each takes about a dozen batches.
_ASKED = {
    "to_orbax": ("convert", {"to": "orbax", "memory_bytes": 40_000}),
    "to_safetensors": ("convert", {"to": "safetensors", "memory_bytes": 40_000}),
    "reshard_orbax": ("reshard", {"mesh": {"x": 4}, "spec": {"w": (None, "x")}, "memory_bytes": 40_000}),
    "reshard_safetensors": ("reshard", {"mesh": {"x": 4}, "spec": {"w": (None, "x")}, "memory_bytes": 20_000}),
}
CALLS = {kind: partial(getattr(ost, call), **asked) for kind, (call, asked) in _ASKED.items()}
PLANS = {kind: partial(getattr(ost, f"plan_{call}"), **asked) for kind, (call, asked) in _ASKED.items()}


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind, source, destination, where):
    batches = -1

    def progress(done, total):
        nonlocal batches
        batches += 1
        if str(batches) == where:
            die()

    if where == "before_the_end":
        draft.Draft.finish = to_orbax.OrbaxSink.commit = die
    elif where == "before_the_rename":
        draft.os.rename = die
    elif where == "after_the_rename":
        draft.shutil.rmtree = die
    CALLS[kind](source, destination, progress=progress)


if __name__ == "__main__":
    main(*sys.argv[1:])
