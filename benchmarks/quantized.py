"""Restoring quantised tensors to bfloat16 on one core, beside the same values stored as bfloat16, and beside NumPy.

    python benchmarks/quantized.py [--quick] [--rounds 5] [--directory DIR] [--json FILE] [--only FORMAT ...]

Each format has a file of random codes with parameters as they are published, for the same three matrices of 268 MB in
bfloat16. This package restores it whole, and transposed, as Flax has the kernels of linear layers; each beside the same
restore of a file of bfloat16. *NumPy* computes the formula of the format on arrays of `safetensors`. *Transformers* are
the functions with which it decodes fp8 and MXFP4 on CPUs, if it is installed. Everything runs in one process on one
core, in turn, NumPy and Transformers once; every result is compared, bit by bit, with what the formula gives.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

CORE = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORE})  # before libraries count cores

import checkpoints  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from loaders import fresh, memory  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from safetensors import deserialize  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

import orbax_safetensors as ost  # noqa: E402
from orbax_safetensors.mapping import Family, Tree, tensor  # noqa: E402

SHAPES = ((14_336, 4096), (4096, 14_336), (4096, 4096))  # outputs and inputs of linear layers
QUICK_SHAPES = ((512, 1024), (1024, 512))
WHOLE, TRANSPOSED = "whole", "transposed"
TARGETS = {4: 0.5, 8: 0.25}  # by the bits of a code: written bytes in a second over those of the bfloat16 restore
SLOW = ("numpy", "torch")  # these run once
MOST_STAGING_BYTES = 24e6  # what a restore may take above the arrays: buffers, tables, code pages

BF16, FP8, E8M0 = map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu))
DTYPES = {"BF16": BF16, "F8_E4M3": FP8, "F8_E8M0": E8M0, "F16": np.dtype("f2"), "F32": np.dtype("f4")}
DTYPES |= {"I64": np.dtype("i8"), "I32": np.dtype("i4"), "I8": np.dtype("i1"), "U8": np.dtype("u1")}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]  # the field of a word that has each of eight columns
NESTED = 256
OFFSET = 0.03125

Arrays = dict[str, np.ndarray]  # by the ending of their names
Random = np.random.Generator


class Format(NamedTuple):
    """How a module's tensors are made, and what they mean: float32, as [outputs, inputs]."""

    bits: int
    make: Callable[[Random, int, int], Arrays]
    formula: Callable[[Arrays, int, int], np.ndarray]
    config: Mapping[str, Any] | None
    torch: Callable[[dict[str, Any]], Any] | None = None


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of int32 words along the last axis."""
    at = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words.view(np.uint32)[..., None] >> at) & (2**bits - 1)).reshape(*words.shape[:-1], -1).astype(np.int32)


def nibbles(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)


def spread(scales: np.ndarray, count: int, axis: int = 1) -> np.ndarray:
    return np.repeat(scales.astype(np.float32), count // scales.shape[axis], axis)


def words(random: Random, *shape: int) -> np.ndarray:
    return random.integers(-(2**31), 2**31, shape, np.int32)


def small(random: Random, dtype: Any, *shape: int) -> np.ndarray:
    """Scales."""
    return random.uniform(0.001, 0.01, shape).astype(dtype)


def exponents(random: Random, *shape: int) -> np.ndarray:
    return random.integers(115, 130, shape, np.uint8)


def fp8(random: Random, *shape: int) -> np.ndarray:
    """Finite codes."""
    return (random.integers(0, 256, shape, np.uint8) & 0xBF).view(FP8)


def int4(group: int, *, zeros: bool = False, index: bool = False) -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Arrays:
        made = {
            ".weight_packed": words(random, outputs, inputs // 8),
            ".weight_scale": small(random, BF16, outputs, inputs // group),
            ".weight_shape": np.array([outputs, inputs]),
        }
        if zeros:
            made[".weight_zero_point"] = words(random, outputs // 8, inputs // group)
        if index:
            made[".weight_g_idx"] = random.permutation(np.arange(inputs, dtype=np.int32) // group)
        return made

    def formula(of: Arrays, outputs: int, inputs: int) -> np.ndarray:
        columns = of[".weight_g_idx"] if index else np.arange(inputs) // group
        zero = 8
        if zeros:
            zero = fields(np.ascontiguousarray(of[".weight_zero_point"].T), 4).T[:, columns]
        values = (fields(of[".weight_packed"], 4) - zero).astype(np.float32)
        return values * of[".weight_scale"].astype(np.float32)[:, columns]

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": not zeros}
    return Format(
        4, make, formula, {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": weights}}}
    )


def nvfp4(codes: str, second: str, modelopt: bool) -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Arrays:
        return {
            codes: random.integers(0, 256, (outputs, inputs // 2), np.uint8),
            ".weight_scale": fp8(random, outputs, inputs // 16),
            second: np.array(0.0001 if modelopt else [10_000], np.float32),
        }

    def formula(of: Arrays, outputs: int, inputs: int) -> np.ndarray:
        scales = of[".weight_scale"].astype(np.float32)
        scales = scales * of[second] if modelopt else scales / of[second]
        return E2M1[nibbles(of[codes])] * spread(scales, inputs)

    plain = {"quant_method": "compressed-tensors", "config_groups": {}}
    return Format(4, make, formula, {"quant_method": "modelopt", "quant_algo": "NVFP4"} if modelopt else plain)


def mx(
    codes: str, scale: str, bits: int, config: Mapping[str, Any] | None, torch: Any = None, dtype: Any = "u1"
) -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Arrays:
        stored = fp8(random, outputs, inputs)
        if bits == 4:
            stored = random.integers(0, 256, (outputs, inputs // 2), np.uint8).view(
                np.int8 if codes == ".weight" else np.uint8
            )
        return {codes: stored, scale: exponents(random, outputs, inputs // 32).view(dtype)}

    def formula(of: Arrays, outputs: int, inputs: int) -> np.ndarray:
        values = E2M1[nibbles(of[codes].view(np.uint8))] if bits == 4 else of[codes].astype(np.float32)
        powers = np.ldexp(np.float32(1), of[scale].view(np.uint8).astype(np.int32) - 127)
        return values * spread(powers, inputs)

    return Format(bits, make, formula, config, torch)


def scaled(scale: str, block: tuple[int, int] | None, config: Mapping[str, Any], torch: Any = None) -> Format:
    """fp8 with a scale for each block, or for each output."""

    def make(random: Random, outputs: int, inputs: int) -> Arrays:
        grid = (outputs // block[0], inputs // block[1]) if block else (outputs, 1)
        return {".weight": fp8(random, outputs, inputs), scale: small(random, np.float32 if block else BF16, *grid)}

    def formula(of: Arrays, outputs: int, inputs: int) -> np.ndarray:
        return of[".weight"].astype(np.float32) * spread(spread(of[scale], inputs), outputs, 0)

    return Format(8, make, formula, config, torch)


def awq_make(random: Random, outputs: int, inputs: int) -> Arrays:
    return {
        ".qweight": words(random, inputs, outputs // 8),
        ".qzeros": words(random, inputs // 128, outputs // 8),
        ".scales": small(random, np.float16, inputs // 128, outputs),
    }


def awq_formula(of: Arrays, outputs: int, inputs: int) -> np.ndarray:
    def unpacked(stored: np.ndarray) -> np.ndarray:
        return fields(stored, 4).reshape(len(stored), -1, 8)[..., AWQ_FIELDS].reshape(len(stored), -1)

    zeros = np.repeat(unpacked(of[".qzeros"]), 128, 0)
    return ((unpacked(of[".qweight"]) - zeros).astype(np.float32) * spread(of[".scales"], inputs, 0)).T


def gptq(*, act_order: bool) -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Arrays:
        groups = np.arange(inputs, dtype=np.int32) // 128
        return {
            ".qweight": words(random, inputs // 8, outputs),
            ".qzeros": np.full((inputs // 128, outputs // 8), 0x77777777, np.int32),
            ".scales": small(random, np.float16, inputs // 128, outputs),
            ".g_idx": random.permutation(groups) if act_order else groups,
        }

    def formula(of: Arrays, outputs: int, inputs: int) -> np.ndarray:
        codes = fields(np.ascontiguousarray(of[".qweight"].T), 4)
        zeros = fields(of[".qzeros"].view(np.uint32) + np.uint32(0x11111111), 4)
        index = of[".g_idx"]
        return (codes - zeros[index].T).astype(np.float32) * of[".scales"].astype(np.float32)[index].T

    return Format(4, make, formula, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": act_order})


def nf4_make(random: Random, outputs: int, inputs: int) -> Arrays:
    count = outputs * inputs
    state = {"shape": [outputs, inputs], "blocksize": 64, "nested_blocksize": NESTED, "nested_offset": OFFSET}
    text = json.dumps(state | {"quant_type": "nf4", "dtype": "bfloat16"}).encode()
    return {
        ".weight": random.integers(0, 256, (count // 2, 1), np.uint8),
        ".weight.absmax": random.integers(0, 256, count // 64, np.uint8),
        ".weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
        ".weight.nested_quant_map": np.linspace(-1, 1, 256, dtype=np.float32),
        ".weight.nested_absmax": small(random, np.float32, count // 64 // NESTED),
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8),
    }


def nf4_formula(of: Arrays, outputs: int, inputs: int) -> np.ndarray:
    largest = of[".weight.nested_quant_map"][of[".weight.absmax"]] * np.repeat(of[".weight.nested_absmax"], NESTED)
    codes = of[".weight"].reshape(-1)
    values = of[".weight.quant_map"][np.stack([codes >> 4, codes & 15], -1).reshape(-1)]
    return (values * np.repeat(largest + np.float32(OFFSET), 64)).reshape(outputs, inputs)


def int8_make(random: Random, outputs: int, inputs: int) -> Arrays:
    codes = random.integers(-127, 128, (outputs, inputs), np.int8)
    return {".weight": codes, ".SCB": small(random, np.float32, outputs), ".weight_format": np.array(0, np.uint8)}


def int8_formula(of: Arrays, outputs: int, inputs: int) -> np.ndarray:
    return of[".weight"].astype(np.float32) * of[".SCB"][:, None] * np.float32(1 / 127)


def torch_blocks(of: dict[str, Any]) -> Any:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scales = next(stored for ending, stored in of.items() if ending != ".weight")
    return Fp8Dequantize(None)._dequantize_one(of[".weight"], scales, torch.bfloat16)


BITSANDBYTES = {"quant_method": "bitsandbytes"}
TENSORS = {"quant_method": "compressed-tensors", "config_groups": {}}
FORMATS = {
    "int4, group 32": int4(32),
    "int4, group 128": int4(128),
    "int4, group 128, zero points": int4(128, zeros=True),
    "int4, group 32, group index": int4(32, index=True),
    "NVFP4, compressed-tensors": nvfp4(".weight_packed", ".weight_global_scale", modelopt=False),
    "NVFP4, ModelOpt": nvfp4(".weight", ".weight_scale_2", modelopt=True),
    "MXFP4, compressed-tensors": mx(".weight_packed", ".weight_scale", 4, TENSORS),
    "MXFP4, DeepSeek-V4": mx(".weight", ".scale", 4, {"quant_method": "fp8"}, torch_blocks, E8M0),
    "MXFP8": mx(".weight", ".weight_scale_inv", 8, {"quant_method": "mxfp8"}, torch_blocks),
    "fp8, blocks of 128 x 128": scaled(
        ".weight_scale_inv", (128, 128), {"quant_method": "fp8", "weight_block_size": [128, 128]}, torch_blocks
    ),
    "fp8, channels": scaled(".weight_scale", None, TENSORS),
    "AWQ, group 128": Format(4, awq_make, awq_formula, {"quant_method": "awq", "bits": 4, "group_size": 128}),
    "GPTQ, group 128": gptq(act_order=False),
    "GPTQ, group 128, act-order": gptq(act_order=True),
    "bitsandbytes NF4, nested": Format(4, nf4_make, nf4_formula, BITSANDBYTES),
    "bitsandbytes int8": Format(8, int8_make, int8_formula, BITSANDBYTES),
}


def family(shapes: tuple[tuple[int, int], ...], *, transposed: bool) -> Family:
    def tree(config: Mapping[str, Any]) -> Tree:
        views = {f"layers.{n}.weight": tensor(f"layers.{n}.weight", shape) for n, shape in enumerate(shapes)}
        return Tree({name: view.T if transposed else view for name, view in views.items()})

    return Family("bench.linear", ("Linear",), tree)


def write(directory: Path, arrays: Arrays, config: Mapping[str, Any] | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    more = {"quantization_config": config} if config else {}
    config = {"architectures": ["Linear"], "model_type": "linear", "dtype": "bfloat16", **more}
    (directory / "config.json").write_text(json.dumps(config))


def load(path: Path) -> Arrays:
    """All tensors of a file; `safetensors.numpy` knows no dtypes of 8 bits."""
    entries = dict(deserialize(path.read_bytes()))
    return {name: np.frombuffer(e["data"], DTYPES[e["dtype"]]).reshape(e["shape"]) for name, e in entries.items()}


def modules(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tensors of each module, by the ending of their names."""
    found: dict[str, dict[str, Any]] = {}
    for name, array in sorted(arrays.items()):
        number = name.split(".")[1]
        found.setdefault(number, {})[name.removeprefix(f"layers.{number}")] = array
    return list(found.values())


def measure(name: str, directory: Path, shapes: tuple[tuple[int, int], ...], rounds: int) -> dict[str, Any]:
    """Median seconds of each loader, and the memory of this package's above its arrays."""
    chosen, random = FORMATS[name], np.random.default_rng(27)
    quantised: Arrays = {}
    plain: Arrays = {}
    for number, (outputs, inputs) in enumerate(shapes):
        made = chosen.make(random, outputs, inputs)
        quantised |= {f"layers.{number}{ending}": array for ending, array in made.items()}
        plain[f"layers.{number}.weight"] = np.ascontiguousarray(chosen.formula(made, outputs, inputs).astype(BF16))
    write(directory / "quantised", quantised, chosen.config)
    write(directory / "plain", plain, None)
    options = ost.SafetensorsOptions(threads=1)
    stored = directory / "quantised" / "model.safetensors"

    def numpy() -> list[Any]:
        return [
            chosen.formula(of, *shape).astype(BF16) for of, shape in zip(modules(load(stored)), shapes, strict=True)
        ]

    def torch() -> list[Any]:
        import torch
        from safetensors.torch import load_file

        assert chosen.torch is not None
        torch.set_num_threads(1)
        results = [chosen.torch(of) for of in modules(load_file(stored))]
        return [result.view(torch.uint16).numpy().view(BF16) for result in results]

    def restore(kind: str, layout: str) -> Callable[[], list[Any]]:
        linear = family(shapes, transposed=layout == TRANSPOSED)

        def run() -> list[Any]:
            tree = ost.load(directory / kind, family=linear, options=options)
            return [tree["layers"][str(number)]["weight"] for number in range(len(shapes))]

        return run

    kinds = [(kind, layout) for layout in (WHOLE, TRANSPOSED) for kind in ("quantised", "plain")]
    loaders = {f"{kind}, {layout}": restore(kind, layout) for kind, layout in kinds} | {"numpy": numpy}
    if chosen.torch and _has("transformers"):
        loaders["torch"] = torch
    took: dict[str, list[float]] = {loader: [] for loader in loaders}
    above: dict[str, int] = {}
    nbytes = sum(array.nbytes for array in plain.values())
    for directory_name in ("quantised", "plain"):
        checkpoints.warm(directory / directory_name)
    for number in range(rounds + 1):  # the first is not counted
        for loader, run in loaders.items():
            if loader in SLOW and number != 1:
                continue
            gc.collect()
            fresh(2 * nbytes)
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
            before, began = memory()["VmRSS"], time.perf_counter()
            arrays = run()
            seconds = time.perf_counter() - began
            if number:
                took[loader].append(seconds)
                above[loader] = memory()["VmHWM"] - before - nbytes
            for got, wanted in zip(arrays, plain.values(), strict=True):
                expected = wanted.T if TRANSPOSED in loader else wanted
                assert got.dtype == BF16, (name, loader)
                assert np.array_equal(got.view(np.uint16), expected.view(np.uint16)), (name, loader)
            del arrays
    return {"nbytes": nbytes, "seconds": took, "staging_bytes": above}


def _has(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checkpoints.add_directory(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of small tensors")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--only", nargs="+", choices=list(FORMATS), default=list(FORMATS), help="only these")
    args = parser.parse_args()
    directory = args.directory / "orbax-safetensors-bench" / "quantized"
    runs = {
        name: measure(name, directory, QUICK_SHAPES if args.quick else SHAPES, 1 if args.quick else args.rounds)
        for name in args.only
    }
    table = Table(title="Quantised tensors to bfloat16, one core: written bytes in a second over those of bfloat16")
    for column in ("format", "ns/element", "whole", "transposed", "times NumPy", "times transformers", "staging MB"):
        table.add_column(column, justify="left" if column == "format" else "right")
    missed = []
    for name, run in runs.items():
        seconds = {loader: statistics.median(each) for loader, each in run["seconds"].items()}
        ratios = [seconds[f"plain, {layout}"] / seconds[f"quantised, {layout}"] for layout in (WHOLE, TRANSPOSED)]
        ours = seconds[f"quantised, {WHOLE}"]
        staging = max(run["staging_bytes"][f"quantised, {layout}"] for layout in (WHOLE, TRANSPOSED))
        torch = f"{seconds['torch'] / ours:.1f}" if "torch" in seconds else ""
        numbers = [f"{ours / run['nbytes'] * 2e9:.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
        table.add_row(name, *numbers, f"{seconds['numpy'] / ours:.1f}", torch, f"{staging / 1e6:.0f}")
        target = TARGETS[FORMATS[name].bits]
        for layout, ratio in zip((WHOLE, TRANSPOSED), ratios, strict=True):
            if ratio < target:
                missed.append(f"{name}, {layout}: {ratio:.2f} of the bfloat16 restore, target {target}")
        if staging > MOST_STAGING_BYTES:
            missed.append(f"{name}: {staging / 1e6:.0f} MB above the arrays, target {MOST_STAGING_BYTES / 1e6:.0f}")
    console = Console(width=120)
    console.print(table)
    for line in missed:
        console.print(f"missed: {line}", highlight=False)
    if args.json:
        args.json.write_text(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
