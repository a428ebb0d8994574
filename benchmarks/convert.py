"""From files to files: memory and time of conversions, beside `cp` and beside a program that loads everything.

    python benchmarks/convert.py [--quick] [--rounds 3] [--directory DIR] [--json FILE] [--only {files,maxtext}]

`files` are conversions of a model that is much larger than the memory they may use, each beside `cp -r` of its source.
`maxtext` is the way to MaxText's checkpoint, beside the same with the reference libraries: `safetensors.numpy` loads
everything, NumPy transposes and stacks, and Orbax saves, as MaxText's own converter does.

Every run is a fresh process with `memory_bytes` of 512 MiB; what is compared takes turns. Sources are in the page
cache, nothing is left to be written to the disk from before, and memory is there: all that is off the clock, as are
imports. A conversion to safetensors ends when its bytes are on the disk, and TensorStore's files do, so `cp` is timed
to its end and to that of `fsync` of all that it wrote. Peak memory is all of the process, imports included. After every
run all arrays that it made are compared bit by bit, by the reference libraries.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from checkpoints import add_directory, llama, write
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loaders import fresh, memory
from models import map_tensors
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

MEMORY_BYTES = 512 * 2**20
MORE_BYTES = 300 * 1_000_000
# What MaxText's converter simulates unless told otherwise; each holds a shard of every array.
DEVICES = 16
HEAD = 64
SMALL = {"layers": 2, "hidden": 1024, "feed_forward": 4096, "vocabulary": 16_384}
LARGE = {"layers": 26, "hidden": 4096, "feed_forward": 8192, "vocabulary": 128_256}
# Llama 3.2 1B, on which MaxText's converter was measured: 2.47 GB.
LLAMA_1B = {"layers": 16, "hidden": 2048, "feed_forward": 8192, "vocabulary": 128_256}

MESH = {"mesh": {"fsdp": 16}, "spec": {"embedding": (None, "fsdp"), "kernel": ("fsdp",)}}
# The RoPE of Llama 3.1, as `maxtext_llama` has it, whatever the config of the files says.
TO_MAXTEXT = {"to": "orbax", "family": "maxtext", "variant": {"rope_type": "llama3.1"}}
# name: (function, source, arguments), in this order; nothing is transposed in those that are compared with `cp`.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "to Orbax": ("convert", "hf", {"to": "orbax"}),
    "to safetensors": ("convert", "to Orbax", {"to": "safetensors"}),
    "to Orbax, uncompressed": ("convert", "hf", {"to": "orbax", "compression": False}),
    "other files": ("reshard", "hf", {"max_file_bytes": 10**9}),
    "to MaxText": ("convert", "hf", TO_MAXTEXT),
    "reshard": ("reshard", "to MaxText", MESH),
    "from MaxText": ("convert", "reshard", {"to": "safetensors", "family": "maxtext", "config": "hf"}),
}
COPIES = ("to Orbax", "to safetensors", "to Orbax, uncompressed", "other files")
PACKAGE, PEER = "this package", "load everything"

Run = dict[str, Any]
Runs = dict[str, list[Run]]


# Programs get ready off the clock and return what the clock is for; that returns what else it measured.


def convert(source: Path, destination: Path, **arguments: Any) -> Callable[[], Run]:
    """This package."""
    import orbax_safetensors as ost

    return lambda: ost.convert(source, destination, memory_bytes=MEMORY_BYTES, **arguments).to_json()


def reshard(source: Path, destination: Path, **arguments: Any) -> Callable[[], Run]:
    """This package."""
    import orbax_safetensors as ost

    return lambda: ost.reshard(source, destination, memory_bytes=MEMORY_BYTES, **arguments).to_json()


def copy(source: Path, destination: Path) -> Callable[[], Run]:
    """`cp -r`, and then `fsync` of every file."""

    def run() -> Run:
        began = time.monotonic()
        subprocess.run(["cp", "-r", source, destination], check=True)
        copied = time.monotonic() - began
        for path in files_below(destination):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return {"copy_seconds": copied}

    return run


def load_everything(source: Path, destination: Path) -> Callable[[], Run]:
    """What one does without the package, and MaxText does unless it loads lazily: the whole model, several times."""
    import orbax.checkpoint as ocp

    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = Mesh(np.array(jax.devices()), ("checkpoint_sharding_axis",))

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        for dimension, size in enumerate(shape[:2]):
            if size % DEVICES == 0:
                return NamedSharding(mesh, PartitionSpec(*(None,) * dimension, "checkpoint_sharding_axis"))
        return NamedSharding(mesh, PartitionSpec())

    def run() -> Run:
        config = json.loads((source / "config.json").read_text())
        tensors: dict[str, np.ndarray] = {}
        for path in sorted(source.glob("*.safetensors")):
            tensors |= load_file(path)
        arrays, structure = jax.tree.flatten(maxtext_llama(tensors, config))
        tensors.clear()
        sharded = []
        while arrays:
            array = arrays.pop(0)
            sharded.append(jax.device_put(array, sharding(array.shape)))
            del array
        params = jax.tree.unflatten(structure, sharded)
        state = {"step": 0, "params": {"params": params}, "opt_state": {}}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
            checkpointer.save(destination / "0" / "items", args=ocp.args.PyTreeSave(state))
        return {}

    return run


def maxtext_llama(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, Any]:
    """MaxText's scanned tree of a Llama 3 with tied embeddings."""
    layers, heads = range(config["num_hidden_layers"]), config["num_attention_heads"]
    groups, size = config["num_key_value_heads"], config["head_dim"]

    def stacked(name: str, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return np.stack([change(tensors[f"model.layers.{layer}.{name}.weight"]) for layer in layers], axis=1)

    def same(x: np.ndarray) -> np.ndarray:
        return x

    def kernel(x: np.ndarray) -> np.ndarray:
        return x.T

    def split(count: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: x.T.reshape(-1, count, size)

    def interleaved(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], 2, size // 2).swapaxes(2, 3).reshape(x.shape)

    def query(x: np.ndarray) -> np.ndarray:
        return (interleaved(split(heads)(x)).astype(np.float32) / np.float32(math.sqrt(size))).astype(x.dtype)

    return {
        "token_embedder": {"embedding": tensors["model.embed_tokens.weight"]},
        "decoder": {
            "decoder_norm": {"scale": tensors["model.norm.weight"]},
            "layers": {
                "pre_self_attention_layer_norm": {"scale": stacked("input_layernorm", same)},
                "post_self_attention_layer_norm": {"scale": stacked("post_attention_layernorm", same)},
                "self_attention": {
                    "query": {"kernel": stacked("self_attn.q_proj", query)},
                    "key": {"kernel": stacked("self_attn.k_proj", lambda x: interleaved(split(groups)(x)))},
                    "value": {"kernel": stacked("self_attn.v_proj", split(groups))},
                    "out": {"kernel": stacked("self_attn.o_proj", lambda x: x.T.reshape(heads, size, -1))},
                },
                "mlp": {
                    "wi_0": {"kernel": stacked("mlp.gate_proj", kernel)},
                    "wi_1": {"kernel": stacked("mlp.up_proj", kernel)},
                    "wo": {"kernel": stacked("mlp.down_proj", kernel)},
                },
            },
        },
    }


PROGRAMS = {function.__name__: function for function in (convert, reshard, copy, load_everything)}


def once(job: Mapping[str, Any]) -> Run:
    """One program, in this process. Times in seconds, memory in bytes."""
    jax.config.update("jax_platforms", "cpu")
    source = Path(job["source"])
    run = PROGRAMS[job["program"]](source, Path(job["destination"]), **job["arguments"])
    os.sync()
    fresh(job["memory"])
    cache(source)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    cpu_before, began = sum(os.times()[:4]), time.monotonic()
    more = run()
    seconds, cpu = time.monotonic() - began, sum(os.times()[:4]) - cpu_before
    return more | {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": memory()["VmHWM"]}


def measure(program: str, source: Path, destination: Path, arguments: Mapping[str, Any] | None = None) -> Run:
    """One program, in a process of its own, with as much memory ready as a program that loads everything needs."""
    nbytes = sum(path.stat().st_size for path in files_below(source))
    job = {"program": program, "source": os.fspath(source), "destination": os.fspath(destination)}
    job |= {"arguments": arguments or {}, "memory": min(3 * nbytes, 8 * 2**30)}
    done = subprocess.run([sys.executable, __file__, "--once", json.dumps(job)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def cache(directory: Path) -> None:
    """Reads all files, so that they are in the page cache."""
    buffer = bytearray(2**24)
    for path in files_below(directory):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def stored_leaves(item: Path) -> dict[str, tensorstore.TensorStore]:
    """The arrays of an item of Orbax in its default format, by name, opened by TensorStore."""
    base = {"driver": "ocdbt", "base": f"file://{item}/"}
    keys = (key.decode() for key in tensorstore.KvStore.open(base).result().list().result())
    names = [key.removesuffix("/zarr.json") for key in keys if key.endswith("/zarr.json")]
    specs = {name: {"driver": "zarr3", "kvstore": {**base, "path": f"{name}/"}} for name in names}
    return {name: tensorstore.open(spec, read=True).result() for name, spec in specs.items()}


def check(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises unless both have the same arrays, bit by bit. Of TensorStore's, one at a time is in memory."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name in expected:
        one, other = (
            np.asarray(array[name].read().result() if hasattr(array[name], "read") else array[name])
            for array in (found, expected)
        )
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert np.array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{one.itemsize}")), name


def check_case(directory: Path, case: str) -> None:
    """What was made is what is in the files. MaxText's checkpoints are checked where they have come back."""
    stored = map_tensors(directory / "hf")
    if case == "from MaxText":  # where subnormal numbers are too small for what the query was divided by
        factor = np.float32(math.sqrt(HEAD))
        for name in [name for name in stored if "q_proj" in name]:
            divided = (stored[name].astype(np.float32) / factor).astype(stored[name].dtype)
            stored[name] = (divided.astype(np.float32) * factor).astype(divided.dtype)
    if case.startswith("to Orbax"):
        check(stored_leaves(directory / case / "0" / "items"), stored)
    elif case not in ("to MaxText", "reshard"):
        check(map_tensors(directory / case), stored)


def make(directory: Path, *, layers: int, hidden: int, feed_forward: int, vocabulary: int) -> int:
    """Writes a Llama as Hugging Face does. Returns the bytes of its tensors."""
    tensors = llama(layers=layers, hidden=hidden, feed_forward=feed_forward, vocabulary=vocabulary)
    write(directory, tensors, files=4)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD // 4,
        "head_dim": HEAD,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def median(runs: list[Run], figure: Callable[[Run], float] = lambda run: run["seconds"]) -> float:
    return statistics.median(figure(run) for run in runs)


def files(directory: Path, rounds: int, sizes: dict[str, int], console: Console) -> tuple[Runs, list[str]]:
    """Measures all of `CASES`. Returns the runs, and what of them misses a target."""
    nbytes = make(directory / "hf", **sizes)
    runs: Runs = {case: [] for case in CASES}
    order = list(CASES)
    last_use = {source: case for case, (_, source, _) in CASES.items()}
    for _ in range(rounds):
        for case, (function, source, arguments) in CASES.items():
            if "config" in arguments:
                arguments = {**arguments, "config": os.fspath(directory / arguments["config"])}
            copied = measure("copy", directory / source, directory / "copy")
            shutil.rmtree(directory / "copy")
            own = measure(function, directory / source, directory / case, arguments)
            runs[case].append(own | {"copy": copied})
            check_case(directory, case)
            for done in order[: order.index(case) + 1]:
                if order.index(last_use.get(done, done)) <= order.index(case):
                    shutil.rmtree(directory / done, ignore_errors=True)
    table = Table(title=f"{nbytes / 1e9:.2f} GB, memory_bytes 512 MiB, medians")
    for column in ("conversion", "s", "CPU s", "of cp", "of cp and fsync", "peak MB"):
        table.add_column(column, justify="left" if column == "conversion" else "right")
    missed = []
    for case, own in runs.items():
        of_copy = median(own, lambda run: run["seconds"] / run["copy"]["copy_seconds"])
        of_synced = median(own, lambda run: run["seconds"] / run["copy"]["seconds"])
        peak = max(run["peak_bytes"] for run in own)
        cpu = median(own, lambda run: run["cpu_seconds"])
        table.add_row(
            case, f"{median(own):.2f}", f"{cpu:.2f}", f"{of_copy:.2f}", f"{of_synced:.2f}", f"{peak / 1e6:.0f}"
        )
        if case in COPIES and of_synced > 2:
            missed.append(f"{case}: at most twice cp and fsync")
        if peak > MEMORY_BYTES + MORE_BYTES:
            missed.append(f"{case}: at most memory_bytes + 300 MB")
    console.print(table)
    return runs, missed


def maxtext(directory: Path, rounds: int, sizes: dict[str, int], console: Console) -> tuple[Runs, list[str]]:
    """Measures the way to MaxText with the package and without. Returns the runs, and what of them misses a target."""
    nbytes = make(directory / "hf", **sizes)
    runs: Runs = {PACKAGE: [], PEER: []}
    for _ in range(rounds):
        runs[PACKAGE].append(measure("convert", directory / "hf", directory / PACKAGE, TO_MAXTEXT))
        runs[PEER].append(measure("load_everything", directory / "hf", directory / PEER))
        check(*(stored_leaves(directory / name / "0" / "items") for name in runs))
        for name in runs:
            shutil.rmtree(directory / name)
    table = Table(title=f"to MaxText: {nbytes / 1e9:.2f} GB, memory_bytes 512 MiB, medians")
    for column in ("program", "s", "CPU s", "peak GB"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for name, own in runs.items():
        cpu, peak = median(own, lambda run: run["cpu_seconds"]), max(run["peak_bytes"] for run in own)
        table.add_row(name, f"{median(own):.2f}", f"{cpu:.2f}", f"{peak / 1e9:.2f}")
    console.print(table)
    ratio = statistics.median(
        own["seconds"] / other["seconds"] for own, other in zip(runs[PACKAGE], runs[PEER], strict=True)
    )
    console.print(f"of the time of the program that loads everything: {ratio:.2f}")
    missed = []
    if ratio > 1 / 3:
        missed.append("to MaxText: at most a third of the time of loading everything")
    if max(run["peak_bytes"] for run in runs[PACKAGE]) > 0.85e9:
        missed.append("to MaxText: at most 0.85 GB of memory")
    return runs, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_directory(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a small model; only a miss of memory fails")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--only", choices=("files", "maxtext"))
    parser.add_argument("--once", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(args.once)))
        return 0
    results: dict[str, Any] = {}
    missed: list[str] = []
    for name, part, sizes in (("files", files, LARGE), ("maxtext", maxtext, LLAMA_1B)):
        if args.only in (None, name):
            with tempfile.TemporaryDirectory(dir=args.directory) as directory:
                rounds = 1 if args.quick else args.rounds
                results[name], own = part(Path(directory), rounds, SMALL if args.quick else sizes, Console(width=120))
                missed += own
    if args.json:
        args.json.write_text(json.dumps(results))
    if args.quick:  # times of a small model mean nothing
        missed = [target for target in missed if " of memory" in target or "memory_bytes" in target]
    print("missed:", missed)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
