"""Checkpoints to measure with: shapes of known models, and reproducible bytes.

Nothing here uses the package that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
PREFIX_BYTES = 8
# Where a data section has to begin for JAX to take tensors of the mapped file as they are.
ALIGNMENT = 64
# Rows and columns of a block of fp8 codes that share a scale.
BLOCK = 128
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
}
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
# Bits kept of random numbers, and bits set: every value is finite. F32 has 0.5 to 1, BF16 2**-31 to 2 in magnitude,
# so that what is computed from them is no subnormal number, which some devices take for 0.
_BITS = {
    "BF16": (0xBFFF, 0x3000),
    "F32": (0x007F_FFFF, 0x3F00_0000),
    "F8_E4M3": (0xBF, 0),
    "I32": (0xFFFF_FFFF, 0),
}
PIECE_BYTES = 2**24

_COMPLETE = "complete.json"
TEMPORARY = Path(tempfile.gettempdir())


@dataclass(frozen=True)
class Tensor:
    """Dtype as a header names it, and shape. Its values are random, unless it has `values`."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


Tensors = dict[str, Tensor]


def llama(*, layers: int = 16, hidden: int = 2048, feed_forward: int = 8192, vocabulary: int = 128_256) -> Tensors:
    """Llama 3.2 with tied embeddings and heads of 64; the defaults are the 1B model's."""
    key_value = hidden // 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "mlp.down_proj": (hidden, feed_forward),
                "mlp.gate_proj": (feed_forward, hidden),
                "mlp.up_proj": (feed_forward, hidden),
                "post_attention_layernorm": (hidden,),
                "self_attn.k_proj": (key_value, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.v_proj": (key_value, hidden),
            }.items()
        }
    shapes["model.norm.weight"] = (hidden,)
    return {name: Tensor("BF16", shape) for name, shape in shapes.items()}


def wide(*, matrices: int = 8, rows: int = 2048) -> Tensors:
    """Matrices with the rows of Llama 3.1 405B: one of eight shards of the columns has runs of 4 KiB."""
    return {f"layers.{number}.weight": Tensor("BF16", (rows, 16_384)) for number in range(matrices)}


def many(*, tensors: int = 200_000) -> Tensors:
    """As many tensors as no model has yet, of 32 bytes each: what is left is the work for each of them."""
    return {f"model.layers.{n // 100}.mlp.experts.{n % 100}.bias": Tensor("BF16", (16,)) for n in range(tensors)}


def deepseek_v3() -> Tensors:
    """DeepSeek-V3 in bf16 with its extra prediction layer: 46,183 tensors, 1.37 TB."""
    hidden, vocabulary, heads, latent, query_latent = 7168, 129_280, 128, 512, 1536
    dense_layers, layers, experts = 3, 61, 256
    tensors: Tensors = {}

    def add(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = Tensor("BF16", shape)

    def feed_forward(prefix: str, width: int) -> None:
        add(prefix, {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)})

    add("model.", {"embed_tokens": (vocabulary, hidden)})
    for layer in range(layers + 1):
        at = f"model.layers.{layer}."
        add(
            at,
            {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_a_proj": (query_latent, hidden),
                "self_attn.q_a_layernorm": (query_latent,),
                "self_attn.q_b_proj": (heads * 192, query_latent),
                "self_attn.kv_a_proj_with_mqa": (latent + 64, hidden),
                "self_attn.kv_a_layernorm": (latent,),
                "self_attn.kv_b_proj": (heads * 256, latent),
                "self_attn.o_proj": (hidden, heads * 128),
            },
        )
        if layer < dense_layers:
            feed_forward(f"{at}mlp.", 18_432)
            continue
        add(at, {"mlp.gate": (experts, hidden)})
        tensors[f"{at}mlp.gate.e_score_correction_bias"] = Tensor("F32", (experts,))
        feed_forward(f"{at}mlp.shared_experts.", 2048)
        for expert in range(experts):
            feed_forward(f"{at}mlp.experts.{expert}.", 2048)
    at = f"model.layers.{layers}."
    add(at, {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)})
    add(at, {"embed_tokens": (vocabulary, hidden), "shared_head.head": (vocabulary, hidden)})
    add("", {"model.norm": (hidden,), "lm_head": (vocabulary, hidden)})
    return tensors


def qwen3_moe(config: Mapping[str, Any]) -> Tensors:
    """A Qwen3 whose layers all have experts, as its `config.json` says."""
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    tensors = _ends(config)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (groups, hidden),
            "self_attn.v_proj": (groups, hidden),
            "self_attn.o_proj": (hidden, heads),
            "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,),
            "mlp.gate": (config["num_experts"], hidden),
        }
        for expert in range(config["num_experts"]):
            shapes |= _feed_forward(f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
        tensors |= {f"{at}{name}.weight": Tensor("BF16", shape) for name, shape in shapes.items()}
    return tensors


def deepseek_fp8(config: Mapping[str, Any]) -> Tensors:
    """A DeepSeek-V3 as its `config.json` says, in fp8 with a scale for each block of 128 x 128."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    head, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    tensors = _ends(config)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (heads * (head + rope), hidden),
            "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
            "self_attn.kv_b_proj": (heads * (head + value), latent),
            "self_attn.o_proj": (hidden, heads * value),
        }
        plain = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.kv_a_layernorm": (latent,),
        }
        if layer < config["first_k_dense_replace"]:
            shapes |= _feed_forward("mlp.", hidden, config["intermediate_size"])
        else:
            plain["mlp.gate"] = (config["n_routed_experts"], hidden)
            tensors[f"{at}mlp.gate.e_score_correction_bias"] = Tensor("F32", (config["n_routed_experts"],))
            width = config["moe_intermediate_size"]
            shapes |= _feed_forward("mlp.shared_experts.", hidden, config["n_shared_experts"] * width)
            for expert in range(config["n_routed_experts"]):
                shapes |= _feed_forward(f"mlp.experts.{expert}.", hidden, width)
        tensors |= {f"{at}{name}.weight": Tensor("BF16", shape) for name, shape in plain.items()}
        for name, shape in shapes.items():
            tensors |= _fp8(f"{at}{name}.weight", shape)
    return tensors


def kimi_int4(config: Mapping[str, Any]) -> Tensors:
    """A Kimi K2 as its `config.json` says, with routed experts as compressed-tensors stores int4 in groups of 32."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    head, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries, width = config["q_lora_rank"], config["moe_intermediate_size"]
    tensors = _ends(config)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_a_proj": (queries, hidden),
            "self_attn.q_a_layernorm": (queries,),
            "self_attn.q_b_proj": (heads * (head + rope), queries),
            "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
            "self_attn.kv_a_layernorm": (latent,),
            "self_attn.kv_b_proj": (heads * (head + value), latent),
            "self_attn.o_proj": (hidden, heads * value),
        }
        experts: dict[str, tuple[int, ...]] = {}
        if layer < config["first_k_dense_replace"]:
            shapes |= _feed_forward("mlp.", hidden, config["intermediate_size"])
        else:
            shapes["mlp.gate"] = (config["n_routed_experts"], hidden)
            tensors[f"{at}mlp.gate.e_score_correction_bias"] = Tensor("F32", (config["n_routed_experts"],))
            shapes |= _feed_forward("mlp.shared_experts.", hidden, config["n_shared_experts"] * width)
            for expert in range(config["n_routed_experts"]):
                experts |= _feed_forward(f"mlp.experts.{expert}.", hidden, width)
        tensors |= {f"{at}{name}.weight": Tensor("BF16", shape) for name, shape in shapes.items()}
        for name, shape in experts.items():
            tensors |= _int4(f"{at}{name}.weight", shape)
    return tensors


def llama_of(config: Mapping[str, Any]) -> Tensors:
    """`llama`, as its `config.json` says."""
    sizes = {"layers": "num_hidden_layers", "hidden": "hidden_size", "feed_forward": "intermediate_size"}
    tensors = llama(**{size: config[name] for size, name in sizes.items()}, vocabulary=config["vocab_size"])
    return tensors if config["tie_word_embeddings"] else tensors | _ends(config)


def llama_fp8(config: Mapping[str, Any]) -> Tensors:
    """The same, with linear layers in fp8 with a scale for each block of 128 x 128."""
    tensors: Tensors = {}
    for name, tensor in llama_of(config).items():
        tensors |= _fp8(name, tensor.shape) if name.endswith("_proj.weight") else {name: tensor}
    return tensors


def llama_int4(config: Mapping[str, Any]) -> Tensors:
    """The same, with linear layers that are int4 in groups of 32, as compressed-tensors stores them."""
    tensors: Tensors = {}
    for name, tensor in llama_of(config).items():
        is_linear = name.endswith("_proj.weight")
        tensors |= _int4(name, tensor.shape) if is_linear else {name: tensor}
    return tensors


def _fp8(name: str, shape: tuple[int, ...]) -> Tensors:
    blocks = tuple(-(-size // BLOCK) for size in shape)
    return {name: Tensor("F8_E4M3", shape), f"{name}_scale_inv": Tensor("F32", blocks)}


def _int4(name: str, shape: tuple[int, ...]) -> Tensors:
    outputs, inputs = shape
    return {
        f"{name}_packed": Tensor("I32", (outputs, inputs // 8)),
        f"{name}_scale": Tensor("BF16", (outputs, inputs // 32)),
        f"{name}_shape": Tensor("I32", (2,), shape),
    }


def _ends(config: Mapping[str, Any]) -> Tensors:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,), "lm_head": (vocabulary, hidden)}
    return {f"{name}.weight": Tensor("BF16", shape) for name, shape in shapes.items()}


def _feed_forward(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {prefix + name: shape for name, shape in shapes.items()}


def add_directory(parser: argparse.ArgumentParser, default: Path = TEMPORARY) -> None:
    """Adds `--directory`, where checkpoints go; one that is not there ends the program with one line."""

    def existing(text: str) -> Path:
        if not os.path.isdir(text):
            raise SystemExit(f"--directory {text}: is not a directory")
        return Path(text)

    parser.add_argument(
        "--directory",
        type=existing,
        default=default,
        help="where checkpoints go (default: %(default)s)",
    )


def write(directory: Path, tensors: Tensors, *, files: int) -> None:
    """A checkpoint of finite random values, the same ones every time, in `files` files with an index."""

    def fill() -> None:
        names = {
            file: sorted(own, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))  # as the reference writer
            for file, own in _split(tensors, files).items()
        }
        _write_headers(directory, tensors, names)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            pieces = [
                (number, directory / file, begin, [tensors[name] for name in own])
                for number, (file, own) in enumerate(names.items())
                for begin in range(0, sum(tensors[name].nbytes for name in own), PIECE_BYTES)
            ]
            list(pool.map(lambda piece: _write_piece(*piece), pieces))

    _once(directory, ["data", files, tensors], fill)


def _write_piece(number: int, path: Path, begin: int, tensors: list[Tensor]) -> None:
    """The bytes of a file's data section from `begin` on, at most `PIECE_BYTES`."""
    random = np.random.Generator(np.random.SFC64([number, begin]))
    piece = random.integers(0, 2**64, PIECE_BYTES // 8, np.uint64).view(np.uint8)
    end = 0
    for tensor in tensors:
        first, end = end, end + tensor.nbytes
        if begin < end and first < begin + PIECE_BYTES:
            part = piece[max(first - begin, 0) : end - begin]
            kept, added = _BITS[tensor.dtype]
            bits = part.view(f"u{ITEM_BYTES[tensor.dtype]}")
            bits &= kept
            bits |= added
            if tensor.values:
                values = np.array(tensor.values, DTYPES[tensor.dtype]).view(np.uint8)
                part[:] = values[max(begin - first, 0) :][: part.size]
    with open(path, "r+b", buffering=0) as file:
        file.seek(read_header(path)[1] + begin)
        file.write(piece[: end - begin])


def write_aligned(directory: Path, source: Path) -> None:
    """A copy of the checkpoint `source` whose data sections begin at multiples of `ALIGNMENT`."""

    def fill() -> None:
        for path in sorted(source.glob("*.safetensors")):
            text, begin = read_header(path)
            length = -(-begin // ALIGNMENT) * ALIGNMENT - PREFIX_BYTES
            with open(path, "rb") as old, open(directory / path.name, "wb") as new:
                old.seek(begin)
                new.write(length.to_bytes(PREFIX_BYTES, "little") + text.ljust(length))
                shutil.copyfileobj(old, new, 2**24)
        shutil.copy(source / INDEX, directory / INDEX)

    _once(directory, ["aligned", (source / _COMPLETE).read_text()], fill)


def write_sparse(directory: Path, tensors: Tensors, *, files: int) -> None:
    """A checkpoint with all its headers and an index, and holes where the data would be."""

    _once(
        directory,
        ["sparse", files, tensors],
        lambda: _write_headers(directory, tensors, _split(tensors, files)),
    )


def _write_headers(directory: Path, tensors: Tensors, names: dict[str, list[str]]) -> None:
    """Files of the tensors' `names` with holes where the data would be, and an index."""
    for file, own in names.items():
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in own:
            begin, end = end, end + tensors[name].nbytes
            entry = {"dtype": tensors[name].dtype, "shape": tensors[name].shape, "data_offsets": (begin, end)}
            header[name] = entry
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        with open(directory / file, "wb") as out:
            out.write(len(text).to_bytes(PREFIX_BYTES, "little") + text)
            out.truncate(PREFIX_BYTES + len(text) + end)
    _write_index(directory, names)


def read_header(path: Path) -> tuple[bytes, int]:
    """The JSON of a file's header, and where the data begins."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(PREFIX_BYTES), "little")
        return file.read(length), PREFIX_BYTES + length


def read_tensors(directory: Path) -> dict[str, Tensors]:
    """What each file of a checkpoint holds, by the file's name."""
    out: dict[str, Tensors] = {}
    for path in sorted(directory.glob("*.safetensors")):
        header = json.loads(read_header(path)[0])
        out[path.name] = {
            name: Tensor(entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    return out


def warm(directory: Path) -> None:
    """Reads all files, so that they are in the page cache."""
    buffer = bytearray(2**24)
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def chill(directory: Path) -> None:
    """Drops the files of a checkpoint, and nothing else, from the page cache."""
    for path in sorted(directory.glob("*.safetensors")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not on the disk yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _once(directory: Path, described: object, fill: Callable[[], None]) -> None:
    """Has `fill` fill `directory`, unless it was filled before with what is `described`."""
    text = json.dumps(described, default=vars)
    mark = directory / _COMPLETE
    if mark.exists() and mark.read_text() == text:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    fill()
    mark.write_text(text)


def _split(tensors: Tensors, files: int) -> dict[str, list[str]]:
    """Names of the tensors by file, in their order, with about as many bytes in each file."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    out: dict[str, list[str]] = {}
    done = 0
    for name, tensor in tensors.items():
        number = min(done * files // total, files - 1)
        out.setdefault(f"model-{number + 1:05}-of-{files:05}.safetensors", []).append(name)
        done += tensor.nbytes
    return out


def _write_index(directory: Path, names: dict[str, list[str]]) -> None:
    weight_map = {name: file for file, own in names.items() for name in own}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
