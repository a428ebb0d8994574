"""One process of the demo: restores its shards, compares each with the `safetensors` package, says what it read.

Run as a module by `demo`, which gives the environment in which JAX has CPU devices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors import Checkpoint
from orbax_safetensors.cli.demo import PROGRESS_SUFFIX
from orbax_safetensors.cli.partition import spread
from orbax_safetensors.cli.picture import amounts, stretches
from orbax_safetensors.format.dtypes import DTYPES, in_memory_type
from orbax_safetensors.restore.match import match
from orbax_safetensors.restore.pipeline import EVENT_BYTES_READ
from orbax_safetensors.transfer.plan import TransferPlan, transfer_plan

# Shards that differ, of which a message tells.
_LISTED = 5


def main() -> None:
    """Take part in the restore, and write what came of it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("result")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    args = parser.parse_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Without it JAX holds 64-bit types in 32 bits, which are not the stored ones.
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    result = Path(args.result)

    def tell(share: float) -> None:
        part = result.with_suffix(".part")
        part.write_text(str(share))
        part.replace(result.with_suffix(PROGRESS_SUFFIX))

    result.write_text(json.dumps(_work(args.path, tell)))


def _work(path: str, tell: Callable[[float], None]) -> dict[str, Any]:
    """Return the report of this process; `tell` is called with the share of its work that is done."""
    checkpoint = ost.open_checkpoint(path)
    restore_args = shardings(checkpoint)
    measured: list[float] = []

    def listen(event: str, value: float | int, **_: Any) -> None:
        if event == EVENT_BYTES_READ:
            measured.append(value)

    jax.monitoring.register_scalar_listener(listen)
    options = ost.SafetensorsOptions(progress=lambda done, total: tell(done / max(total, 1) / 2))
    arrays = ost.SafetensorsCheckpointer(options=options).restore(path, restore_args=restore_args)
    files = [file.path for file in checkpoint.files]
    expected = sum(len(array.addressable_shards) for array in arrays.values())
    shards, differing = compare(
        arrays,
        {name: files[checkpoint[name].file] for name in arrays},
        lambda compared: tell(0.5 + compared / expected / 2),
    )
    cost = ost.plan_restore(path, restore_args).processes[jax.process_index()]
    drawn = stretches(checkpoint)
    needed, read = amounts(executed_plan(checkpoint, restore_args), drawn)
    return {
        "process": jax.process_index(),
        "devices": jax.local_device_count(),
        "arrays": len(arrays),
        "shards": shards,
        "differing": len(differing),
        "differences": differing[:_LISTED],
        "needed_bytes": cost.needed_bytes,
        "planned_bytes": cost.read_bytes,
        "measured_bytes": int(sum(measured)),
        "drawn_bytes": int(read.sum()),
        "drawn": [needed.tolist(), read.tolist()],
    }


def shardings(checkpoint: Checkpoint) -> dict[str, ocp.ArrayRestoreArgs]:
    """Return a tree for all of `checkpoint`: each array sharded over all devices, as far as it divides."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    sizes = {"process": jax.process_count(), "device": jax.local_device_count()}
    mesh = Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))
    names = {name: spread(tensor.shape, sizes) for name, tensor in checkpoint.tensors.items()}
    return {
        name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, PartitionSpec(*spec))) for name, spec in names.items()
    }


def executed_plan(checkpoint: Checkpoint, restore_args: Mapping[str, ocp.ArrayRestoreArgs]) -> TransferPlan:
    """Return the plan that a restore with these arguments executes in this process, made again."""
    matched = match(checkpoint, None, restore_args, partial=False)
    wanted = [target.block(box) for target in matched.targets for box in target.local_boxes()]
    return transfer_plan(wanted, checkpoint.location, checkpoint.store.cost.max_gap_bytes)


def compare(
    arrays: Mapping[str, jax.Array], file_of: Mapping[str, str], report: Callable[[int], object] = lambda compared: None
) -> tuple[int, list[str]]:
    """Compare all shards on this process's devices with what the `safetensors` package reads from the files.

    Returns how many shards there are, and a line for each that differs in shape, dtype or any bit. `report` is called
    with the number of shards so far.
    """
    count, differing = 0, []
    for file in sorted(set(file_of.values())):
        with ReferenceFile(file) as reference:
            for name in (name for name in arrays if file_of[name] == file):
                for shard in arrays[name].addressable_shards:
                    count += 1
                    found, expected = np.asarray(shard.data), reference.read(name, shard.index, arrays[name].shape)
                    if difference := _difference(found, expected):
                        differing.append(f"{file}: {name!r} {shard.index} on {shard.device}: {difference}")
                report(count)
    return count, differing


def _difference(found: np.ndarray, expected: np.ndarray) -> str:
    """Return what distinguishes two arrays, empty if nothing does."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"expected {expected.dtype}{list(expected.shape)}, found {found.dtype}{list(found.shape)}"
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (found, expected))
    unequal = int(np.count_nonzero(a != b))
    return f"{unequal} of {a.size} bytes differ" if unequal else ""


class ReferenceFile:
    """One file as the `safetensors` package reads it."""

    def __init__(self, file: str) -> None:
        """Opens `file`."""
        self._file = file
        self._open = safetensors.safe_open(file, framework="np")
        self._raw: dict[str, Any] = {}

    def __enter__(self) -> ReferenceFile:
        self._open.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(*error)

    def read(self, name: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
        """Return the part `index` of a tensor, whose shape as it is held in memory is `shape`."""
        try:
            whole = all(taken.indices(size)[:2] == (0, size) for taken, size in zip(index, shape, strict=True))
            # It does not slice dimensions of size 0, nor scalars.
            part: np.ndarray = self._open.get_tensor(name) if whole else self._open.get_slice(name)[index]
            return part
        except (AttributeError, safetensors.SafetensorError):
            # It gives NumPy no element type that NumPy lacks (8 bits and less), but it does give the bytes.
            if not self._raw:
                self._raw = dict(safetensors.deserialize(Path(self._file).read_bytes()))
            return _array(self._raw[name])[index]


def _array(raw: Mapping[str, Any]) -> np.ndarray:
    shape, dtype = in_memory_type(DTYPES[raw["dtype"]], tuple(raw["shape"]))
    return np.frombuffer(raw["data"], dtype).reshape(shape)


if __name__ == "__main__":
    main()
