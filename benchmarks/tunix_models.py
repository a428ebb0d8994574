"""A model of Tunix, by Tunix's own loader and by this package, with the shardings that Tunix gives it.

    python benchmarks/tunix_models.py [--quick] [--rounds 5] [--directory DIR] [--json FILE]

Llama 3.2 1B in bf16 onto eight CPU devices. Each load is a fresh process, in turn; all have to give the same bits.
Needs `pip install --no-deps google-tunix einops`, and `jaxtyping`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(os.fspath(Path(__file__).parents[1]))

import checkpoints
import jax
import loaders
import numpy as np
from rich.console import Console
from rich.table import Table

LOADERS = ("this package", "Tunix")
DEVICES = 8


def config(*, quick: bool) -> dict[str, Any]:
    """The `config.json` of Llama 3.2 1B, or of a small model of this kind."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128_256}
    if quick:
        sizes = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
    heads = sizes["hidden_size"] // 64
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }


def write(directory: Path, sizes: dict[str, Any]) -> None:
    """The checkpoint with its config."""
    tensors = checkpoints.llama(
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        feed_forward=sizes["intermediate_size"],
        vocabulary=sizes["vocab_size"],
    )
    checkpoints.write(directory, tensors, files=4)
    (directory / "config.json").write_text(json.dumps(sizes))


def prepared(loader: str, directory: Path) -> Callable[[], Any]:
    """What the clock is for, with all that can be prepared: imports, devices, the abstract model."""
    from flax import nnx

    import orbax_safetensors as ost
    from tests.support.tunix_models import import_tunix, tunix_model

    sizes = json.loads((directory / "config.json").read_text())
    tunix = tunix_model("llama3", sizes)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = import_tunix("tunix.models.llama3.model")
    graph, state = nnx.get_abstract_model(lambda: model.Llama3(tunix.config, rngs=nnx.Rngs(params=0)), mesh)
    # Tunix's loader keeps the dtype of the files.
    stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.numpy.bfloat16, sharding=x.sharding), state)
    if loader == "Tunix":
        return lambda: tunix.load(directory, mesh)
    return lambda: nnx.merge(graph, ost.load(directory, stored, family="tunix"))


def measure(loader: str, directory: Path, pretouch_bytes: int) -> dict[str, Any]:
    """One load in this process: seconds, processor seconds, the peak of memory, and a checksum of all bits."""
    from flax import nnx

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    warnings.simplefilter("ignore")  # Tunix uses what JAX and Flax are about to remove
    load = prepared(loader, directory)
    checkpoints.warm(directory)
    loaders.fresh(pretouch_bytes)
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, began = loaders.memory(), time.process_time(), time.monotonic()
    model = load()
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    jax.block_until_ready(leaves)
    for _, leaf in leaves:
        loaders.touch(leaf)
    ended, cpu_ended, after = time.monotonic(), time.process_time(), loaders.memory()
    bits = 0
    for path, leaf in sorted(leaves, key=lambda item: jax.tree_util.keystr(item[0])):
        bits = zlib.crc32(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.sharding}".encode(), bits)
        for shard in leaf.addressable_shards:
            bits = zlib.crc32(np.asarray(shard.data).view(np.uint8), bits)
    return {
        "seconds": ended - began,
        "cpu_seconds": cpu_ended - cpu,
        "peak_bytes": after["VmHWM"] - before["VmRSS"],
        "loaded_bytes": sum(leaf.nbytes for _, leaf in leaves),
        "bits": bits,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a small model: shows that everything runs")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--load", nargs=3, metavar=("LOADER", "DIRECTORY", "BYTES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(measure(args.load[0], Path(args.load[1]), int(args.load[2]))))
        return 0

    directory = args.directory / f"orbax-safetensors-bench-tunix{'-quick' if args.quick else ''}"
    write(directory, config(quick=args.quick))
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    runs: dict[str, list[dict[str, Any]]] = {loader: [] for loader in LOADERS}
    for _ in range(1 if args.quick else args.rounds):
        for loader, measured in runs.items():
            command = [sys.executable, __file__, "--load", loader, os.fspath(directory), str(2 * nbytes)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            measured.append(json.loads(done.stdout.splitlines()[-1]))
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))
    table = Table("loader", "s", "CPU s", "peak / bytes", title=f"{nbytes / 1e9:.2f} GB onto {DEVICES} devices")
    for loader, measured in runs.items():
        medians = {key: statistics.median(run[key] for run in measured) for key in ("seconds", "cpu_seconds")}
        peak = max(run["peak_bytes"] / run["loaded_bytes"] for run in measured)
        table.add_row(loader, *(f"{value:.2f}" for value in medians.values()), f"{peak:.2f}")
    Console().print(table)
    if len({run["bits"] for measured in runs.values() for run in measured}) > 1:
        print("the loaders do not agree")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
