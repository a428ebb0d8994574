"""Publish or apply a delta again and again, killed at one more change of the file system each time.

    python killed_deltas.py CALL FOLDER LIMIT

`CALL` is `publish` or `apply`. Each run is a fork. After each, a line of JSON on stdout says how it ended ('killed',
'limited' or 'done'), what readers see, and all names. With a `LIMIT` above 0, runs are not killed: files can grow to no
more than 0, LIMIT, 2 * LIMIT... bytes, as on a disk that is full.
"""

import hashlib
import json
import os
import resource
import signal
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import orbax_safetensors as ost

CHANGES = ("pwritev", "fsync", "rename", "mkdir", "ftruncate", "unlink", "copy_file_range", "sendfile")


def die_at(number):
    """The process is killed right before the `number`-th change."""
    left = [number]

    def dying(function):
        def call(*args, **more):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **more)

        return call

    for name in CHANGES:
        setattr(os, name, dying(getattr(os, name)))


def limit(nbytes):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def visible(root):
    """A digest of each directory that is not hidden, or None if there is none."""
    return {
        directory.name: hashlib.sha256(
            b"".join(path.name.encode() + path.read_bytes() for path in sorted(directory.glob("*safetensors*")))
        ).hexdigest()
        for directory in sorted(root.iterdir())
        if not directory.name.startswith(".")
    }


def main(call, folder, step):
    folder, step = Path(folder), int(step)
    options = ost.SafetensorsOptions(threads=1)
    for number in range(1000):
        if not (pid := os.fork()):
            limit(number * step) if step else die_at(number)
            status = 1
            try:
                if call == "publish":
                    ost.delta(folder / "old", folder / "new", folder / "made", version=1, options=options)
                else:
                    ost.apply_delta(
                        folder / "made" / "engine", folder / "delta", folder / "made" / "engine", options=options
                    )
                status = 0
            except ost.SafetensorsError as error:
                print(error, file=sys.stderr)
            finally:
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (folder / "made").mkdir(exist_ok=True)
        how = {0: "done", 1: "limited", -signal.SIGKILL: "killed"}.get(code, code)
        print(json.dumps([how, visible(folder / "made"), sorted(os.listdir(folder / "made"))]))
        if how == "done" or (how == "limited" and not step):  # the version is there already
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
