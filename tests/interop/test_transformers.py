"""Models of `transformers`: what is saved here they load to the same logits, what they save is restored here as it was.

The models are tiny and random. Nothing is downloaded.
"""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support import examples  # noqa: E402
from tests.support.torch_bits import to_numpy  # noqa: E402

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama, tied embeddings": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rope_parameters=ROPE
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES),
}
TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param](), dtype=torch.bfloat16).eval()


def stored_tensors(model):
    """The tensors of a model by name, each once: without the second name of a tied one."""
    tied = set(model.all_tied_weights_keys)
    return {name: to_numpy(tensor) for name, tensor in model.state_dict().items() if name not in tied}


def on_devices(arrays):
    """The same arrays, sharded by their first or last dimension over eight devices where it divides by eight."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return {name: jax.device_put(array, NamedSharding(mesh, spec(array.shape))) for name, array in arrays.items()}


def spec(shape):
    dimensions = [axis for axis in (len(shape) - 1, 0) if axis >= 0 and shape[axis] % 8 == 0]
    if not dimensions:
        return P()
    # Half of them by either, so that both ways of writing a file occur.
    axis = dimensions[sum(shape) // 32 % len(dimensions)]
    return P(*(None for _ in range(axis)), "x")


def save(directory, model, arrays, max_file_bytes):
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(directory, args=ost.SafetensorsSave(arrays, max_file_bytes=max_file_bytes))
    model.config.save_pretrained(directory)


def load(directory, dtype="auto"):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=dtype).eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def assert_same_model(found, model):
    expected = model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert to_numpy(tensor).tobytes() == to_numpy(expected[name]).tobytes(), name
    assert to_numpy(logits(found)).tobytes() == to_numpy(logits(model)).tobytes()


def test_from_pretrained_loads_what_is_saved(tmp_path, model):
    save(tmp_path / "saved", model, on_devices(stored_tensors(model)), 40_000)
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"_CHECKPOINT_METADATA", "commit_success.txt", "model.safetensors.index.json"} <= names
    assert_same_model(load(tmp_path / "saved"), model)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("model", ["llama", "llama, tied embeddings"], indirect=True)
def test_a_cast_while_saving(tmp_path, model, dtype):
    """The config names the dtype, and the model is the one that `transformers` casts while it loads."""
    model.save_pretrained(tmp_path / "source")
    arrays = on_devices(stored_tensors(model))
    for name, arguments in (("like", {"like": tmp_path / "source"}), ("config", {"config": model.config})):
        ost.save(tmp_path / name, arrays, dtype=dtype, **arguments)
    expected = load(tmp_path / "source", dtype)
    for name in ("like", "config"):
        found = load(tmp_path / name)
        assert str(found.config.dtype) == f"torch.{dtype}"
        assert_same_model(found, expected)


@pytest.mark.parametrize("model", ["llama, tied embeddings"], indirect=True)
def test_both_names_of_a_tied_tensor_may_be_saved(tmp_path, model):
    arrays = {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}
    save(tmp_path / "saved", model, arrays, 40_000)
    assert_same_model(load(tmp_path / "saved"), model)


def test_auto_model_without_a_head(tmp_path):
    config = CONFIGS["llama"]()
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    save(tmp_path / "saved", model, stored_tensors(model), 10**9)
    found = transformers.AutoModel.from_pretrained(tmp_path / "saved", local_files_only=True).eval()
    with torch.no_grad():
        assert torch.equal(found(TOKENS).last_hidden_state, model(TOKENS).last_hidden_state)


def test_what_save_pretrained_writes_is_restored(tmp_path, model):
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    expected = with_experts_apart(stored_tensors(model))
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        flat = checkpointer.restore(tmp_path)
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        args = {
            name: ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, spec(array.shape)))
            for name, array in expected.items()
        }
        sharded = checkpointer.restore(tmp_path, restore_args=args)
    for restored in (flat, sharded):
        assert restored.keys() == expected.keys()
        for name, array in expected.items():
            assert (restored[name].shape, restored[name].dtype) == (array.shape, array.dtype), name
            assert np.asarray(restored[name]).tobytes() == array.tobytes(), name
    assert all(len(array.sharding.device_set) == 8 for array in sharded.values())
    assert any(not array.sharding.is_fully_replicated for array in sharded.values())


def with_experts_apart(arrays):
    """Tensors as they are stored: those of Qwen3's experts one by one, which the model has stacked."""
    out = {}
    for name, array in arrays.items():
        prefix, found, part = name.partition(".mlp.experts.")
        if not found or part not in ("gate_up_proj", "down_proj") or f"{name}_bias" in arrays:
            out[name] = array
            continue
        for number, expert in enumerate(array):
            halves = np.split(expert, 2) if part == "gate_up_proj" else [expert]
            for half, kind in zip(halves, part.removesuffix("_proj").split("_"), strict=True):
                out[f"{prefix}.mlp.experts.{number}.{kind}_proj.weight"] = half
    return out


def test_the_small_models_of_the_guides(tmp_path, mesh):
    examples.make_models(tmp_path)
    for name, architecture in (("llama", "LlamaForCausalLM"), ("gemma3", "Gemma3ForCausalLM")):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert (type(model).__name__, found["missing_keys"], found["mismatched_keys"]) == (architecture, set(), set())
    checkpoint = ost.open_checkpoint(tmp_path / "qwen3")
    assert len(checkpoint.files) > 1
    params = ost.load(tmp_path / "qwen3", NamedSharding(mesh, P()), family="maxtext")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3")
    down = np.asarray(params["params"]["decoder"]["layers"]["mlp"]["wo"]["kernel"])
    for number, layer in enumerate(model.model.layers):
        assert down[:, number].tobytes() == to_numpy(layer.mlp.down_proj.weight).T.tobytes()


def test_a_fresh_config_is_saved_as_save_pretrained_would(tmp_path):
    """Its dtype and architectures are None until a model is made of it."""
    fresh = transformers.Qwen3Config(**SIZES)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    params = ost.load(tmp_path / "theirs", family="maxtext", dtype="float32")
    ost.save(tmp_path / "ours", params, family="maxtext", config=fresh, dtype="bfloat16")
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    assert (ours["dtype"], ours["architectures"]) == (theirs["dtype"], theirs["architectures"])
    assert ours["dtype"] == "bfloat16"
    assert_same_model(load(tmp_path / "ours"), model.eval())
