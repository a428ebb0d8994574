"""From the files of Llama 3.1 8B to MaxText's tree on eight CPU devices: this package, and what one does without it.

    python benchmarks/llama_8b.py [--quick] [--rounds 3] [--layers 4] [--directory DIR] [--json FILE] [--only bf16 fp8]
                                  [--maxtext CHECKOUT --maxtext-python PYTHON]

Measured as in `restore.py`: fresh processes in turn, every result compared bit by bit with what NumPy makes of the
files. The model has `--layers` of its 32 layers. With a checkout of MaxText and a Python that has what it needs,
MaxText's converter runs once, and Orbax restores what it made in each round. `README.md` says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
from families import LLAMA
from loaders import converted_item
from restore import PACKAGE, Runs, Scenario, measure, seconds, versions
from rich.console import Console
from rich.table import Table

TRANSFORMERS, CONVERTER, ORBAX = "transformers, then shards", "MaxText's converter", "Orbax, converted"
CONFIG = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUICK = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 1}
QUICK |= {"num_hidden_layers": 2, "vocab_size": 4096}
DEVICES = 8
JOB = {"family": "maxtext.llama3", "layout": "width", "devices": DEVICES}
SCENARIOS = {
    "bf16": Scenario("Llama 3.1 8B, bf16", "llama-8b", JOB, (PACKAGE, TRANSFORMERS, ORBAX), slow_check=True),
    # MaxText's converter does not decode.
    "fp8": Scenario(
        "Llama 3.1 8B, fp8 in blocks of 128 x 128, decoded to bf16",
        "llama-8b-fp8",
        JOB,
        (PACKAGE, TRANSFORMERS),
        memory=3.0,
        slow_check=True,
    ),
}
# Runs MaxText's converter in a Python of its own; imports and JAX's start are off the clock.
CONVERT = """
import json, os, pathlib, sys, time
source, destination, devices, config = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_prng_impl", "unsafe_rbg")
from maxtext.checkpoint_conversion import to_maxtext
name = "llama3.1-8b"
names = {
    "num_hidden_layers": "base_num_decoder_layers", "hidden_size": "base_emb_dim", "intermediate_size": "base_mlp_dim",
    "num_attention_heads": "base_num_query_heads", "num_key_value_heads": "base_num_kv_heads",
    "vocab_size": "vocab_size",
}
for key in names:
    setattr(to_maxtext.HF_MODEL_CONFIGS[name], key, config[key])
base = pathlib.Path(to_maxtext.__file__).parents[1] / "configs" / "base.yml"
settings = {
    "model_name": name, "base_output_directory": destination, "hf_access_token": "none", "hardware": "cpu",
    "skip_jax_distributed_system": True, "scan_layers": True, "override_model_config": True,
    "attention": "dot_product", **{names[key]: config[key] for key in names},
}
arguments = ["", str(base), *(f"{key}={value}" for key, value in settings.items())]
jax.devices()
def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, cpu, began = status("VmRSS"), time.process_time(), time.monotonic()
to_maxtext.main(arguments, hf_model_path=source, simulated_cpu_devices_count=devices)
seconds, cpu_seconds, peak = time.monotonic() - began, time.process_time() - cpu, status("VmHWM") - before
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak}))
"""


def make_checkpoint(directory: Path, scenario: str, config: dict[str, Any]) -> None:
    tensors = checkpoints.llama_of(config)
    if scenario == "fp8":
        config, tensors = config | {"quantization_config": FP8}, checkpoints.llama_fp8(config)
    path = directory / SCENARIOS[scenario].checkpoint
    checkpoints.write(path, tensors, files=4)
    (path / "config.json").write_text(json.dumps(config, indent=1))


def convert(directory: Path, config: dict[str, Any], maxtext: Path, python: Path) -> dict[str, Any]:
    """One run of MaxText's converter, and what it measured."""
    checkpoints.warm(directory)
    destination = converted_item(directory).parents[1]
    shutil.rmtree(destination, ignore_errors=True)
    command = [python, "-c", CONVERT, directory, destination, str(DEVICES), json.dumps(config)]
    env = {**os.environ, "PYTHONPATH": os.fspath(maxtext / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(scenario: Scenario, directory: Path, rounds: int, converted: dict[str, Any] | None, console: Console) -> Runs:
    """All runs of a scenario, by loader; a loader that fails has none."""
    loaders = [loader for loader in scenario.loaders if loader != ORBAX or converted]
    runs: Runs = {loader: [] for loader in loaders}
    for number in range(rounds):
        for loader in loaders:
            if len(runs[loader]) < number:
                continue
            try:
                runs[loader] += measure(scenario, loader, directory, first=number == 0)
                console.print(f"{loader}: {runs[loader][-1]['seconds']:.2f} s")
            except RuntimeError as error:
                console.print(f"{scenario.title}: {loader} {error}", style="red", markup=False)
    if converted:
        runs[CONVERTER] = [converted]
    return runs


def show(scenario: Scenario, runs: Runs, console: Console) -> None:
    """The table of a scenario: medians of times, and the highest peaks of resident memory, mapped files included."""
    figures = {
        loader: {
            "seconds": seconds(runs, loader),
            "cpu_seconds": statistics.median(run["cpu_seconds"] for run in own),
            "peak_bytes": max(run["peak_bytes"] for run in own),
        }
        for loader, own in runs.items()
        if own
    }
    if CONVERTER in figures and ORBAX in figures:  # one after the other
        made, restored = figures.pop(CONVERTER), figures.pop(ORBAX)
        both = {key: made[key] + restored[key] for key in ("seconds", "cpu_seconds")}
        both["peak_bytes"] = max(made["peak_bytes"], restored["peak_bytes"])
        figures |= {f"{CONVERTER}, then Orbax": both, "  the converter": made, "  Orbax": restored}
    table = Table("loader", "s", "times this package", "CPU s", "peak GB", title=scenario.title)
    for loader, figure in figures.items():
        table.add_row(
            loader,
            f"{figure['seconds']:.2f}",
            f"{figure['seconds'] / figures[PACKAGE]['seconds']:.1f}",
            f"{figure['cpu_seconds']:.2f}",
            f"{figure['peak_bytes'] / 1e9:.2f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4, help="of 32 (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of a small model: shows that everything runs")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--maxtext", type=Path, help="a checkout of MaxText, whose converter then runs, too")
    parser.add_argument("--maxtext-python", type=Path, default=Path(sys.executable), help="a Python for it")
    args = parser.parse_args()
    console = Console(width=140)
    directory = args.directory / f"orbax-safetensors-bench-llama-8b{'-quick' if args.quick else ''}"
    config = CONFIG | {"num_hidden_layers": args.layers} | (QUICK if args.quick else {})
    report: dict[str, Any] = {"versions": versions(), "config": config, "scenarios": {}}
    console.print(report["versions"])
    broken = False
    for name in args.only:
        scenario = SCENARIOS[name]
        make_checkpoint(directory, name, config)
        converted = None
        if args.maxtext and ORBAX in scenario.loaders:
            converted = convert(directory / scenario.checkpoint, config, args.maxtext, args.maxtext_python)
        runs = run(scenario, directory, 1 if args.quick else args.rounds, converted, console)
        report["scenarios"][name] = runs
        broken = broken or not runs[PACKAGE]
        nbytes = sum(path.stat().st_size for path in (directory / scenario.checkpoint).glob("*.safetensors"))
        size = "a small model" if args.quick else f"{args.layers} of 32 layers"
        console.print(f"{size}, {nbytes / 1e9:.2f} GB of files, page cache warm")
        if runs[PACKAGE]:
            show(scenario, runs, console)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
