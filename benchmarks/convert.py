"""From files to files: memory and time of conversions, beside `cp` of the same bytes.

    python benchmarks/convert.py [--quick] [--rounds 3] [--directory DIR] [--json FILE]

Every conversion is a fresh process with `memory_bytes` of 512 MiB, and `cp -r` of its source runs before it, so that
both meet the same machine. Nothing waits for the disk but Orbax's own files, which do as Orbax does. Peak memory is all
of the process, with its imports. What comes back from Orbax is compared with its source, byte by byte.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoints import llama, write
from rich.console import Console
from rich.table import Table

MEMORY_BYTES = 512 * 2**20
MORE_BYTES = 300 * 1_000_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256, "tie_word_embeddings": True,
}  # fmt: skip
MESH = {"mesh": {"fsdp": 16}, "spec": {"embedding": (None, "fsdp"), "kernel": ("fsdp",)}}

# name: (function, source, arguments), in this order; nothing is transposed in those that are compared with `cp`.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "to Orbax": ("convert", "hf", {"to": "orbax"}),
    "to safetensors": ("convert", "to Orbax", {"to": "safetensors"}),
    "to Orbax, uncompressed": ("convert", "hf", {"to": "orbax", "compression": False}),
    "other files": ("reshard", "hf", {"max_file_bytes": 10**9}),
    "to MaxText": ("convert", "hf", {"to": "orbax", "family": "maxtext"}),
    "reshard": ("reshard", "to MaxText", MESH),
    "from MaxText": ("convert", "reshard", {"to": "safetensors", "family": "maxtext", "config": "hf"}),
}
COPIES = ("to Orbax", "to safetensors", "to Orbax, uncompressed", "other files")
SOURCES = {source for _, source, _ in CASES.values()}


def once(function: str, source: str, destination: str, arguments: dict[str, Any]) -> None:
    """One conversion, in this process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import orbax_safetensors as ost

    call = {"convert": ost.convert, "reshard": ost.reshard}[function]
    print(json.dumps(call(source, destination, memory_bytes=MEMORY_BYTES, **arguments).to_json()))


def measure(directory: Path, case: str) -> dict[str, Any]:
    function, source, arguments = CASES[case]
    if "config" in arguments:
        arguments = {**arguments, "config": os.fspath(directory / arguments["config"])}
    copy, destination = directory / "copy", directory / case
    started = time.perf_counter()
    subprocess.run(["cp", "-r", directory / source, copy], check=True)
    copied = time.perf_counter() - started
    shutil.rmtree(copy)
    shutil.rmtree(destination, ignore_errors=True)
    command = [sys.executable, __file__, "--once", function, directory / source, destination, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"cp_seconds": copied}


def check(directory: Path) -> None:
    """What came back from Orbax lies in other files, so it is laid out as its source first."""
    import orbax_safetensors as ost

    again = [directory / f"{case} again" for case in ("to safetensors", "hf")]
    for path in again:
        ost.reshard(directory / path.name.removesuffix(" again"), path, max_file_bytes=10**12)
    one, other = (path / "model.safetensors" for path in again)
    assert filecmp.cmp(one, other, shallow=False), "what came back is not what went there"
    for path in again:
        shutil.rmtree(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a small model")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--once", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        function, source, destination, arguments = args.once
        once(function, source, destination, json.loads(arguments))
        return 0
    layers, hidden = (2, 1024) if args.quick else (26, 4096)
    tensors = llama(layers=layers, hidden=hidden, feed_forward=4 * hidden if args.quick else 8192)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        write(directory / "hf", tensors, files=4)
        config = {**CONFIG, "hidden_size": hidden, "intermediate_size": 4 * hidden if args.quick else 8192}
        config |= {"num_hidden_layers": layers, "head_dim": hidden // 32}
        (directory / "hf" / "config.json").write_text(json.dumps(config))
        runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
        for _ in range(1 if args.quick else args.rounds):
            for case in CASES:
                runs[case].append(measure(directory, case))
                if case == "to safetensors":
                    check(directory)
                if case not in SOURCES:
                    shutil.rmtree(directory / case)
    table = Table(title=f"{next(iter(runs.values()))[0]['nbytes'] / 1e9:.2f} GB, memory_bytes 512 MiB")
    for column in ("conversion", "s", "of cp", "peak MB"):
        table.add_column(column, justify="left" if column == "conversion" else "right")
    ratios, peaks = {}, {}
    for case, own in runs.items():
        ratios[case] = statistics.median(run["seconds"] / run["cp_seconds"] for run in own)
        peaks[case] = max(run["peak_bytes"] for run in own)
        seconds = statistics.median(run["seconds"] for run in own)
        table.add_row(case, f"{seconds:.1f}", f"{ratios[case]:.2f}", f"{peaks[case] / 1e6:.0f}")
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(runs))
    slow = [case for case in COPIES if ratios[case] > 2] if not args.quick else []
    large = [case for case in CASES if peaks[case] > MEMORY_BYTES + MORE_BYTES]
    print(f"slower than twice cp: {slow}; more than memory_bytes + 300 MB: {large}")
    return int(bool(slow or large))


if __name__ == "__main__":
    sys.exit(main())
