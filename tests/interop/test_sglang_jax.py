"""What sglang-jax's own loader makes of Hugging Face files, against `from_table` with the table that it uses.

The models of `transformers` are tiny and random, and lie on two devices. Runs where `sgl_jax` can be imported.
"""

import importlib
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.mapping import from_table
from tests.support import examples
from tests.support.roots import ROOT
from tests.support.tiers import cross

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
ABSENT = "sglang-jax is not installed"
weight_utils = pytest.importorskip("sgl_jax.srt.utils.weight_utils", reason=ABSENT, exc_type=ImportError)
model_config = pytest.importorskip("sgl_jax.srt.configs.model_config", reason=ABSENT, exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")

(EXAMPLE,) = (block for block in examples.python(ROOT / "docs" / "tables.md") if "sgl_jax" in block)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}


class Case(NamedTuple):
    """A model: sglang-jax's module, the class in both libraries, sizes, and the number of leaves."""

    module: str
    model: str
    sizes: dict
    leaves: int


CASES = {
    "qwen3": Case("qwen3", "Qwen3ForCausalLM", SIZES | {"head_dim": 32}, 25),
    "llama": Case("llama", "LlamaForCausalLM", SIZES, 21),
    "qwen2": Case("qwen2", "Qwen2ForCausalLM", SIZES, 27),
    "gemma2": Case("gemma2", "Gemma2ForCausalLM", SIZES | {"head_dim": 32, "tie_word_embeddings": True}, 24),
    "qwen3, experts": Case("qwen3_moe", "Qwen3MoeForCausalLM", SIZES | EXPERTS | {"head_dim": 32}, 27),
    "glm4, experts": Case("glm4_moe", "Glm4MoeForCausalLM", SIZES | ROUTED | {"head_dim": 32, "use_qk_norm": True}, 30),
}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def mesh_of(devices):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    return jax.make_mesh((1, devices), ("data", "tensor"), axis_types=explicit, devices=jax.devices()[:devices])


def saved(case, directory):
    """Save a random model of `transformers`, and return sglang-jax's config of it."""
    torch.manual_seed(0)
    model_class = getattr(transformers, case.model)
    model = model_class._from_config(model_class.config_class(**case.sizes), dtype=torch.bfloat16)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.1)
    model.save_pretrained(directory)
    config = model_config.ModelConfig(str(directory))
    # What its server adds, and what transformers 5 has renamed.
    config.hf_config.update({"ep_size": 1, "rope_theta": 10_000.0})
    return config


def abstract_model(case, config, mesh):
    model_class = getattr(importlib.import_module(f"sgl_jax.srt.models.{case.module}"), case.model)
    return nnx.eval_shape(lambda: model_class(config.hf_config, mesh, jnp.bfloat16))


@pytest.mark.parametrize("name", cross(CASES, ["llama", "gemma2", "qwen3, experts"]))
def test_what_sglang_jax_loads_and_a_save_gives_back(name, tmp_path):
    case = CASES[name]
    config = saved(case, tmp_path / "hf")
    loader = weight_utils.WeightLoader
    with (
        jax.set_mesh(mesh_of(2)),
        mock.patch.object(
            loader, "load_weights_from_safetensors", autospec=True, side_effect=loader.load_weights_from_safetensors
        ) as load,
    ):
        model = abstract_model(case, config, mesh_of(2))
        item = nnx.state(model)
        model.load_weights(config)
        ((_, table), _) = load.call_args
        family = from_table(table)
        params = ost.load(tmp_path / "hf", item, family=family)

    expected = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert len(leaves) == case.leaves
    assert [path for path, _ in leaves] == [path for path, _ in expected]
    assert any(not leaf.is_fully_replicated for _, leaf in leaves)
    for (path, leaf), (_, other) in zip(leaves, expected, strict=True):
        assert leaf.dtype == other.dtype, path
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes(), path

    ost.save(tmp_path / "again", params, like=tmp_path / "hf", family=family)
    again, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "hf"))
    assert again.keys() == stored.keys()
    assert all(again[name].tobytes() == array.tobytes() for name, array in stored.items())


def test_the_example_of_the_page(tmp_path):
    config = saved(CASES["qwen3"], tmp_path / "qwen3-0.6b")
    names = {"jax": jax, "ost": ost, "from_table": from_table, "mesh": mesh_of(2), "config": config.hf_config}
    exec(EXAMPLE.replace("/models/", f"{tmp_path}/"), names)
    stored = load_file(tmp_path / "qwen3-0.6b" / "model.safetensors")
    query = names["model"].model.layers[1].self_attn.q_proj.weight[...]
    assert query.sharding.spec == jax.P(None, "tensor")
    assert np.asarray(query).tobytes() == stored["model.layers.1.self_attn.q_proj.weight"].T.tobytes()


def test_heads_that_are_replicated_are_refused(tmp_path):
    """On more devices than there are heads of keys, sglang-jax has each head several times."""
    case = CASES["llama"]
    config = saved(case, tmp_path)
    config.configure_for_tensor_parallel(4)
    with jax.set_mesh(mesh_of(4)):
        model = abstract_model(case, config, mesh_of(4))
        table = from_table(model._create_llama_weight_mappings())
        with pytest.raises(SafetensorsError, match=r"k_proj"):
            ost.load(tmp_path, nnx.state(model), family=table)
