"""Make the small models of random numbers that the guides restore, in the places that they name.

    python examples/small_models.py /models

If you may not write to `/models`, take another directory, here and in the code of the guides. The models are a Qwen3, a
Llama, a Gemma 3, the Qwen3 in fp8, a LoRA adapter of the Qwen3, and parameters of models of Flax and Equinox, in files
that the `safetensors` package writes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

COMMON = {
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "dtype": "bfloat16",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    **COMMON,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    **COMMON,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,  # a cycle of five local layers and a global one, and one more
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
LORA = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "qwen3",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["up_proj"],
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
FILE_BYTES = 30_000
RNG = np.random.default_rng(0)

Arrays = dict[str, np.ndarray]


def random(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    """Weights of a model that was not trained."""
    return (0.1 * RNG.standard_normal(shape)).astype(dtype)


def decoder(config: dict[str, Any]) -> Arrays:
    """The tensors that both models have, as `transformers` names them."""
    width, hidden, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    tensors = {"model.embed_tokens.weight": random(vocabulary, width), "model.norm.weight": random(width)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for part, count in (("q", heads), ("k", groups), ("v", groups)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = random(count * size, width)
        tensors[f"{prefix}self_attn.o_proj.weight"] = random(width, heads * size)
        for part in ("gate", "up"):
            tensors[f"{prefix}mlp.{part}_proj.weight"] = random(hidden, width)
        tensors[f"{prefix}mlp.down_proj.weight"] = random(width, hidden)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{part}.weight"] = random(width)
    return tensors


def qwen3() -> Arrays:
    """Its attention normalises queries and keys."""
    norms = {f"model.layers.{n}.self_attn.{part}_norm.weight": random(16) for n in range(3) for part in "qk"}
    return decoder(QWEN3) | norms


def llama() -> Arrays:
    """It has the tables of RoPE that old checkpoints have, which no program reads."""
    tables = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": random(4, dtype=np.float32) for n in range(2)}
    return decoder(LLAMA) | tables | {"lm_head.weight": random(128, 64)}


def gemma3() -> Arrays:
    """It normalises what goes into the layers' two halves, and what comes out."""
    norms = {
        f"model.layers.{n}.{part}_layernorm.weight": random(32)
        for n in range(7)
        for part in ("pre_feedforward", "post_feedforward")
    }
    of_heads = {f"model.layers.{n}.self_attn.{part}_norm.weight": random(16) for n in range(7) for part in "qk"}
    return decoder(GEMMA3) | norms | of_heads


def lora() -> Arrays:
    """An adapter of the Qwen3, as PEFT writes it."""
    adapter = Arrays()
    for layer in range(QWEN3["num_hidden_layers"]):
        module = f"base_model.model.model.layers.{layer}.mlp.up_proj"
        adapter[f"{module}.lora_A.weight"] = random(4, 32, dtype=np.float32)
        adapter[f"{module}.lora_B.weight"] = random(48, 4, dtype=np.float32)
    return adapter


def in_fp8(tensors: Arrays) -> Arrays:
    """The same model with its projections in fp8, with a scale for each block of 16 x 16."""
    quantised = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            blocks = tensor.astype(np.float32).reshape(rows // 16, 16, columns // 16, 16)
            scales = np.abs(blocks).max(axis=(1, 3), keepdims=True) / 448
            quantised[name] = (blocks / scales).reshape(rows, columns).astype(ml_dtypes.float8_e4m3fn)
            quantised[f"{name}_scale_inv"] = scales[:, 0, :, 0]
    return quantised


def linear(name: str, inputs: int, outputs: int) -> Arrays:
    """A layer of Flax."""
    return {
        f"{name}.kernel": random(inputs, outputs, dtype=np.float32),
        f"{name}.bias": random(outputs, dtype=np.float32),
    }


def equinox() -> Arrays:
    """The layers of an `eqx.nn.MLP`."""
    sizes = [(32, 16), (32, 32), (4, 32)]
    weights = {f"layers.{n}.weight": random(*shape, dtype=np.float32) for n, shape in enumerate(sizes)}
    return weights | {f"layers.{n}.bias": random(shape[0], dtype=np.float32) for n, shape in enumerate(sizes)}


def write(directory: Path, tensors: Arrays, config: dict[str, Any] | None) -> None:
    """Write a model as the Hub has it: with a config in several files and an index; an adapter, or layers, in one."""
    directory.mkdir(parents=True)
    if config is LORA:
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
        save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
        return
    if config is None:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    size, files = 0, [Arrays()]
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > FILE_BYTES:
            size = tensor.nbytes
            files.append({})
        files[-1][name] = tensor
    weight_map = {}
    for number, held in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(held, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def make_models(directory: Path) -> dict[str, Arrays]:
    """Write models below `directory`, unless they are there, and return their tensors by the directories' names."""
    mlp = [("up", 16, 32), ("layers.0", 32, 32), ("layers.1", 32, 32), ("down", 32, 16)]
    qwen3_tensors = qwen3()
    models: dict[str, tuple[Arrays, dict[str, Any] | None]] = {
        "qwen3": (qwen3_tensors, QWEN3),
        "llama": (llama(), LLAMA),
        "gemma3": (gemma3(), GEMMA3),
        "qwen3-lora": (lora(), LORA),
        "qwen3-fp8": (in_fp8(qwen3_tensors), QWEN3 | FP8),
        "mlp": ({name: array for layer in mlp for name, array in linear(*layer).items()}, None),
        "dense": (linear("params.Dense_0", 16, 32), None),
        "equinox": (equinox(), None),
        "state": ({"params.w": random(64, 512)}, None),
    }
    for name, (tensors, config) in models.items():
        if not (directory / name).exists():
            write(directory / name, tensors, config)
    return {name: tensors for name, (tensors, _) in models.items()}


def main() -> None:
    """Read the command line, and say what was made."""
    parser = argparse.ArgumentParser(description="Make the small models of the guides.")
    parser.add_argument("directory", type=Path, help="/models in the guides")
    directory = parser.parse_args().directory
    there = set(directory.glob("*"))
    for name, tensors in make_models(directory).items():
        path = directory / name
        print(f"{path}: is there already" if path in there else f"{path}: {len(tensors)} tensors")


if __name__ == "__main__":
    main()
