"""Restores onto an emulated accelerator in a process of its own, while another process changes the files.

    python attacked.py DIRECTORY WITH_LEASES

Each line of standard input, `ARRIVAL SEED PAUSE`, begins a restore, with transfers that arrive as `accelerator` says.
Before it hands over leaf number `PAUSE` of `LEAVES`, it writes `now`, and waits until there is another line, or a
program waits for a file. If the number is 0, it writes `now` once it has read headers, and goes on. In the end it takes
the other line and says what was restored.
"""

import fcntl
import os
import select
import sys
import types

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.restore.leases import Leases
from orbax_safetensors.storage import leased_mapping
from orbax_safetensors.transfer.reader import Reader
from tests.support.accelerator import Accelerator, accelerator

# How leaves are restored in turn: as they lie in the file, as rows of it, through memory, and to every device.
KINDS = ((P("x"), np.float32), (P(None, "x"), np.float32), (P("x"), np.float64), (P(), np.float32))
FILES = 3
LEAVES = len(KINDS) * FILES
# A batch is one leaf of 1 MiB, or two shorter ones.
OPTIONS = ost.SafetensorsOptions(in_flight_bytes=2**21, threads=2)


def tensors():
    """Those of each file."""
    rng = np.random.default_rng(0)
    return [{f"w{file}.{kind}": rng.standard_normal((256, 512), np.float32) for kind in range(4)} for file in range(3)]


def restore(directory, arrival, seed):
    mesh = jax.sharding.Mesh(jax.devices(), "x")
    expected = {
        name: (array, *kind) for file in tensors() for (name, array), kind in zip(file.items(), KINDS, strict=True)
    }
    args = {
        name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec), dtype=dtype)
        for name, (_, spec, dtype) in expected.items()
    }
    try:
        with accelerator(arrival, seed=int(seed)):
            found = ost.SafetensorsHandler(options=OPTIONS).restore(
                epath.Path(directory), ost.SafetensorsRestore(restore_args=args)
            )
    except ost.StorageError as error:
        return f"StorageError: {error}"
    return "the old bits" if all(np.array_equal(found[name], expected[name][0]) for name in expected) else "other bits"


def main(directory, with_leases):
    leases, to_come = [], 0
    make, begin, hand_over = Reader.__init__, Leases.__init__, Accelerator.hand_over

    def made(reader, *args):
        if not to_come:
            print("now", flush=True)
        make(reader, *args)

    def begun(new):
        leases[:] = [new]
        begin(new)

    def handed_over(device, make):
        nonlocal to_come
        to_come -= 1
        if not to_come:
            print("now", flush=True)
            while not leases[0].wanted and not select.select([sys.stdin], [], [], 0.002)[0]:
                pass
        return hand_over(device, make)

    def without_leases(descriptor, command, *_):
        return fcntl.F_RDLCK if command == fcntl.F_GETLEASE else 0

    Reader.__init__, Leases.__init__, Accelerator.hand_over = made, begun, handed_over
    if with_leases == "no":
        leased_mapping.fcntl = types.SimpleNamespace(**vars(fcntl) | {"fcntl": without_leases})
    for line in sys.stdin:
        arrival, seed, number = line.split()
        to_come = int(number)
        outcome = restore(directory, arrival, seed)
        sys.stdin.readline()
        print(outcome, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
