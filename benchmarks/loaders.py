"""One loader on one piece of work, in a process of its own, which `restore.py` and `families.py` start and read.

The clock runs from the call of the loader until every page of every shard has been touched. Before it runs, imports
are done, devices are there, and memory that will be needed has been touched once and freed again, so that no loader
pays for pages that a virtual machine gave back to its host. After it has stopped, every shard is compared with what
the `safetensors` package reads, or with what NumPy makes of that.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import models
import numpy as np
from checkpoints import DTYPES, chill, read_header, read_tensors, warm
from maxtext_reference import parameters
from safetensors import deserialize
from safetensors.numpy import load_file

ARENA_BYTES = 2**27
COPY_BYTES = 2**24
PAGE_BYTES = 4096
EVENT_BYTES_READ = "/jax/orbax/read/safetensors/bytes_read"

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What to load: `directory`'s tensors (those of its first file, with `subset`), sharded over `devices` devices.

    `layout` is "leading", "inner", "both" or "replicated": which dimensions are cut, if any; or one of
    `models.LAYOUTS`. With a `family`, the arrays are those of its tree, by their paths. With several `processes`, which
    meet at `coordinator`, the devices are dealt to them evenly; where the first is `alone`, the others wait for it.
    `threads` are the package's own; 0 leaves its default. The files are in the page cache, or, where it is `cold`, not
    in it.
    """

    loader: str
    directory: str
    layout: str
    devices: int = 1
    subset: bool = False
    pretouch_bytes: int = 0
    process: int = 0
    processes: int = 1
    coordinator: str = ""
    threads: int = 0
    cold: bool = False
    family: str = ""
    alone: bool = False
    check: bool = True


def run(job: Job) -> dict[str, Any] | None:
    """Loads, measures and checks, unless this process is only there for another.

    Memory is in bytes above what the process had before, times are in seconds.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job.devices // job.processes)
    if job.processes > 1:
        jax.distributed.initialize(job.coordinator, job.processes, job.process)
    if job.alone and job.process:
        jax.devices()
        return None  # and JAX does not let this process end before the others
    wanted = abstract_arrays(job)
    load = LOADERS[job.loader](job, wanted)
    events: dict[str, float] = {}
    jax.monitoring.register_scalar_listener(lambda name, value, **_: events.update({name: value}))
    if job.cold:
        chill(Path(job.directory))
    else:
        warm(Path(job.directory))
    fresh(job.pretouch_bytes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before, reads_before, cpu_before = memory(), process_reads(), time.process_time()
    began = time.monotonic()
    arrays = load()
    jax.block_until_ready(arrays)
    loaded = time.monotonic()
    for array in arrays.values():
        touch(array)
    ended = time.monotonic()
    cpu_after, reads_after, after = time.process_time(), process_reads(), memory()
    if job.check:
        check(job, arrays, wanted)
    return {
        "seconds": ended - began,
        "load_seconds": loaded - began,
        "cpu_seconds": cpu_after - cpu_before,
        "began": began,
        "ended": ended,
        "anonymous_before": before["RssAnon"] + before["RssShmem"],
        "peak_bytes": after["VmHWM"] - before["VmRSS"],
        "needed_bytes": needed_bytes(arrays),
        "loaded_bytes": needed_bytes(arrays) or sum(array.nbytes for array in arrays.values()),
        "read_bytes": reads_after["rchar"] - reads_before["rchar"],
        "storage_bytes": reads_after["read_bytes"] - reads_before["read_bytes"],
        "event_bytes": events.get(EVENT_BYTES_READ),
    }


def abstract_arrays(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that are wanted, by name, with their shardings."""
    sizes = {"x": min(job.devices, 2), "y": max(job.devices // 2, 1)} if job.layout == "both" else {"x": job.devices}
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(auto,) * len(sizes))
    if job.family:
        import orbax_safetensors as ost

        leaves = ost.open_checkpoint(job.directory, family=job.family).leaves
        described = {path: (view.shape, view.dtype) for path, view in leaves.items()}
    else:
        files = read_tensors(Path(job.directory))
        described = {
            name: (tensor.shape, DTYPES[tensor.dtype])
            for file in ([min(files)] if job.subset else files)
            for name, tensor in files[file].items()
        }
    shapes = {name: shape for name, (shape, _) in described.items()}
    if job.layout in models.LAYOUTS:
        shardings = models.shardings(shapes, job.layout, mesh)
    else:
        shardings = {}
        for name, shape in shapes.items():
            spec = {
                "leading": ("x",),
                "inner": (*(None for _ in shape[1:]), "x"),
                "both": ("x", "y")[: len(shape)],
                "replicated": (),
            }[job.layout]
            shardings[name] = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[name]) for name, (shape, dtype) in described.items()
    }


def files_of(job: Job) -> list[Path]:
    paths = sorted(Path(job.directory).glob("*.safetensors"))
    return paths[:1] if job.subset else paths


# Each loader gets ready off the clock and returns what the clock is for.

Wanted = dict[str, jax.ShapeDtypeStruct]


def package(job: Job, wanted: Wanted, *, alias: bool = False, direct: bool = False) -> Callable[[], Arrays]:
    """This package."""
    import orbax.checkpoint as ocp

    import orbax_safetensors as ost

    threads = {"threads": job.threads} if job.threads else {}
    alone = {}
    if job.alone:
        active = ocp.options.MultiprocessingOptions(active_processes={job.process}, barrier_sync_key_prefix="alone")
        alone["multiprocessing_options"] = active
    restore_args = {name: ocp.ArrayRestoreArgs(sharding=array.sharding) for name, array in wanted.items()}

    def load() -> Arrays:
        handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(alias=alias, direct=direct, **threads))
        with ocp.Checkpointer(handler, **alone) as it:
            return it.restore(
                job.directory,
                args=ost.SafetensorsRestore(
                    restore_args=restore_args, partial_restore=job.subset, family=job.family or None
                ),
            )

    return load


def package_alias(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """This package, sharing the pages of the files."""
    return package(job, wanted, alias=True)


def package_direct(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """This package, past the page cache."""
    return package(job, wanted, direct=True)


def orbax_v1(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """Orbax's own experimental loader."""
    from orbax.checkpoint.experimental import v1

    def load() -> Arrays:
        with v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS):
            return v1.load(job.directory, wanted)

    return load


def numpy(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """`safetensors.numpy.load_file`, file by file."""

    def load() -> Arrays:
        out: Arrays = {}
        for path in files_of(job):
            arrays = load_file(path)
            for name in list(arrays):
                out[name] = jax.device_put(arrays.pop(name), wanted[name].sharding)
        return out

    return load


def materialise(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """Every array of the family's tree with NumPy, from the mapped files, and then the shards of it."""

    def load() -> Arrays:
        arrays = models.materialised(Path(job.directory), job.family)
        out: Arrays = {}
        for path in list(arrays):
            array, sharding = arrays.pop(path), wanted[path].sharding
            if job.processes > 1:  # here `device_put` would compare what all processes have
                out[path] = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
            else:
                out[path] = jax.device_put(array, sharding)
        return out

    return load


def transformers(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """`from_pretrained` of a Llama, MaxText's tree of it with NumPy, leaf by leaf, and the shards of each leaf."""
    from torch import bfloat16, int16
    from transformers import FineGrainedFP8Config, LlamaForCausalLM

    config = json.loads((Path(job.directory) / "config.json").read_text())
    decode = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if "quantization_config" in config else {}

    def load() -> Arrays:
        model = LlamaForCausalLM.from_pretrained(job.directory, dtype=bfloat16, local_files_only=True, **decode)
        stored = {name: tensor.view(int16).numpy().view(models.BF16) for name, tensor in model.state_dict().items()}
        del model
        out: Arrays = {}
        for parameter in parameters(job.family.removeprefix("maxtext."), config, stored):
            path = parameter.path.replace("-", ".")
            out[path] = jax.device_put(parameter.made(), wanted[path].sharding)
        return out

    return load


def orbax_converted(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """Orbax, from what MaxText's converter has made of the files."""
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for path, array in wanted.items():
        *above, name = path.split(".")
        reduce(lambda node, key: node.setdefault(key, {}), above, tree)[name] = array
    restore_args = {"params": ocp.checkpoint_utils.construct_restore_args(tree)}
    args = ocp.args.PyTreeRestore({"params": tree}, restore_args=restore_args, transforms={})

    def load() -> Arrays:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(converted_item(Path(job.directory)), args=args)["params"]
        leaves = jax.tree_util.tree_leaves_with_path(restored)
        return {jax.tree_util.keystr(path, simple=True, separator="."): array for path, array in leaves}

    return load


def converted_item(directory: Path) -> Path:
    """Where MaxText's converter puts the parameters of a checkpoint, two levels below its output directory."""
    return directory.with_name(f"{directory.name}-converted") / "0" / "items"


def torch(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """`safetensors.torch.load_file`, which maps the files, and NumPy views of its tensors."""
    from safetensors.torch import load_file as load_torch
    from torch import int16

    def load() -> Arrays:
        out: Arrays = {}
        for path in files_of(job):
            for name, tensor in load_torch(path).items():
                out[name] = jax.device_put(tensor.view(int16).numpy().view(ml_dtypes.bfloat16), wanted[name].sharding)
        return out

    return load


def fastsafetensors(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """`fastsafetensors` without GPUDirect, file by file."""
    from fastsafetensors import fastsafe_open
    from torch import int16

    def load() -> Arrays:
        out: Arrays = {}
        for path in files_of(job):
            with fastsafe_open([str(path)], nogds=True, device="cpu", framework="pytorch") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    values = file.get_tensor(name).view(int16).numpy().view(ml_dtypes.bfloat16)
                    # The file's memory is freed when it is closed, so nothing may share it.
                    out[name] = jax.device_put(values, wanted[name].sharding, may_alias=False)
                jax.block_until_ready(out)
        return out

    return load


def runai(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """`runai-model-streamer`, which reads past the page cache."""
    from runai_model_streamer import SafetensorsStreamer
    from torch import int16

    def load() -> Arrays:
        out: Arrays = {}
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([os.fspath(path) for path in files_of(job)])
            for name, tensor in streamer.get_tensors():
                values = tensor.view(int16).numpy().view(ml_dtypes.bfloat16)
                # The streamer's memory is freed when it ends, so nothing may share it.
                out[name] = jax.device_put(values, wanted[name].sharding, may_alias=False)
            jax.block_until_ready(out)
        return out

    return load


def copy_limit(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """Not a loader: two threads copy the files' data from memory into fresh memory. What copying can reach here."""
    sources = []
    for path in files_of(job):
        begin = read_header(path)[1]
        source = anonymous(path.stat().st_size - begin)
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            at = 0
            while count := file.readinto(source[at:]):
                at += count
        sources.append(source)

    def copy(number: int, begin: int, target: np.ndarray) -> None:
        target[:] = sources[number][begin : begin + target.nbytes]

    wanted.clear()
    return lambda: by_threads([source.nbytes for source in sources], copy)


def read_limit(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """Not a loader: two threads read the files' data into fresh memory. What reading through the kernel can reach."""
    paths = files_of(job)
    begins = [read_header(path)[1] for path in paths]
    sizes = [path.stat().st_size - begin for path, begin in zip(paths, begins, strict=True)]

    def load() -> Arrays:
        descriptors = [os.open(path, os.O_RDONLY) for path in paths]

        def read(number: int, begin: int, target: np.ndarray) -> None:
            assert os.preadv(descriptors[number], [target.data], begins[number] + begin) == target.nbytes

        out = by_threads(sizes, read)
        for descriptor in descriptors:
            os.close(descriptor)
        return out

    wanted.clear()
    return load


def direct_limit(job: Job, wanted: Wanted) -> Callable[[], Arrays]:
    """Not a loader: 8 threads read whole files past the page cache into fresh memory. What the disk can give."""
    paths = files_of(job)
    headers = [read_header(path)[1] for path in paths]
    sizes = [path.stat().st_size for path in paths]
    whole = [-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes]

    def load() -> Arrays:
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]

        def read(number: int, begin: int, target: np.ndarray) -> None:
            expected = min(target.nbytes, sizes[number] - begin)
            assert os.preadv(descriptors[number], [target.data], begin) == expected

        out = by_threads(whole, read, threads=8)
        for descriptor in descriptors:
            os.close(descriptor)
        return {name: out[name][headers[int(name)] : sizes[int(name)]] for name in out}

    wanted.clear()
    return load


def by_threads(sizes: Sequence[int], fill: Callable[[int, int, np.ndarray], None], threads: int = 2) -> Arrays:
    """Fresh memory of `sizes`, filled in pieces by `fill(number, begin, piece)`."""
    out = {str(number): anonymous(size) for number, size in enumerate(sizes)}
    pieces = [
        (number, begin, out[str(number)][begin : begin + COPY_BYTES])
        for number, size in enumerate(sizes)
        for begin in range(0, size, COPY_BYTES)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda piece: fill(*piece), pieces))
    return out


LOADERS: dict[str, Callable[[Job, Wanted], Callable[[], Arrays]]] = {
    "this package": package,
    "this package, alias": package_alias,
    "this package, direct": package_direct,
    "Orbax v1": orbax_v1,
    "safetensors.numpy": numpy,
    "safetensors.torch": torch,
    "NumPy, then shards": materialise,
    "transformers, then shards": transformers,
    "Orbax, converted": orbax_converted,
    "fastsafetensors": fastsafetensors,
    "runai-model-streamer": runai,
    "copy limit": copy_limit,
    "read limit": read_limit,
    "direct limit": direct_limit,
}


def anonymous(nbytes: int) -> np.ndarray:
    """Fresh private memory, in huge pages where the system has them."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def fresh(nbytes: int) -> None:
    """Touches `nbytes` of memory and frees them again."""
    held = []
    for _ in range(0, nbytes, ARENA_BYTES):
        arena = anonymous(ARENA_BYTES)
        arena[::PAGE_BYTES] = 1
        held.append(arena)


def touch(array: Any) -> int:
    """Reads a byte of every page of an array."""
    if isinstance(array, np.ndarray):
        return int(array[::PAGE_BYTES].sum())
    return sum(
        int(np.asarray(shard.data).reshape(-1).view(np.uint8)[::PAGE_BYTES].sum()) for shard in array.addressable_shards
    )


def check(job: Job, arrays: Arrays, wanted: Wanted) -> None:
    """Raises where one bit of one shard is not that of the files."""
    directory = Path(job.directory)
    if not wanted:  # the copies of whole files
        for array, path in zip(arrays.values(), sorted(directory.glob("*.safetensors")), strict=False):
            expected = np.fromfile(path, np.uint8, offset=read_header(path)[1])
            assert np.array_equal(array, expected), path
        return
    assert arrays.keys() == wanted.keys()
    if job.family:
        # The package rounds decoded values when all is computed, the others at once.
        decoded = np.dtype(np.float32) if job.loader == "this package" else models.BF16
        left = set(arrays)
        for path, made in models.leaves(directory, job.family, decoded):
            same(path, arrays[path], wanted[path], made.astype(wanted[path].dtype, copy=False))
            left.remove(path)
        assert not left
        return
    for file in sorted(directory.glob("*.safetensors")):
        for name, stored in deserialize(file.read_bytes()):
            if name in wanted:
                expected = np.frombuffer(stored["data"], DTYPES[stored["dtype"]]).reshape(stored["shape"])
                same(name, arrays[name], wanted[name], expected)


def same(name: str, array: Any, wanted: jax.ShapeDtypeStruct, expected: np.ndarray) -> None:
    """Raises where an array is not the one that was wanted, or one bit of it not the expected one."""
    assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype) == (expected.shape, expected.dtype), name
    assert array.sharding.is_equivalent_to(wanted.sharding, len(wanted.shape)), name
    bits = f"u{expected.dtype.itemsize}"
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data).view(bits), expected[shard.index].view(bits)), name


def memory(process: int | str = "self") -> dict[str, int]:
    """Resident memory of a process by kind, in bytes."""
    out = {}
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "VmHWM", "RssAnon", "RssShmem"):
            out[key] = int(value.split()[0]) * 1024
    return out


def process_reads() -> dict[str, int]:
    """Bytes that this process has had from read calls (`rchar`) and caused to be read from storage (`read_bytes`)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}


def needed_bytes(arrays: Arrays) -> int:
    """Bytes of the distinct shards that this process holds."""
    return sum(
        sum({str(shard.index): shard.data.nbytes for shard in array.addressable_shards}.values())
        for array in arrays.values()
        if hasattr(array, "addressable_shards")
    )


if __name__ == "__main__":
    job = Job(**json.loads(sys.argv[1]))
    result = run(job)
    print(json.dumps(result and {"job": asdict(job), **result}))
