"""What KerasHub's own loader makes of Hugging Face files, against its converters on views, as in the page on tables.

The models of `transformers` are tiny and random. Runs where KerasHub is installed:
`pip install --no-deps keras-hub keras namex h5py optree absl-py`.
"""

import importlib
import json
import os
import runpy
from typing import NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import orbax_safetensors as ost
from orbax_safetensors.errors import MappingError
from tests.support import examples
from tests.support.roots import ROOT
from tests.support.tiers import cross

os.environ.setdefault("KERAS_BACKEND", "jax")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
keras = pytest.importorskip("keras", reason="Keras is not installed: pip install --no-deps keras-hub keras namex ...")
pytest.importorskip("keras_hub", reason="KerasHub is not installed: pip install --no-deps keras-hub keras namex ...")
if keras.backend.backend() != "jax":
    pytest.skip("KERAS_BACKEND is not jax", allow_module_level=True)

from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

(EXAMPLE,) = (block for block in examples.python(ROOT / "docs" / "tables.md") if "keras_hub" in block)

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
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0}


class Case(NamedTuple):
    """A model: KerasHub's name of its converter, the class of `transformers`, sizes, and the number of variables."""

    converter: str
    model: str
    sizes: dict
    variables: int


CASES = {
    "qwen3": Case("qwen3", "Qwen3ForCausalLM", SIZES | {"head_dim": 32}, 25),
    "llama3": Case("llama3", "LlamaForCausalLM", SIZES, 21),
    "mixtral": Case("mixtral", "MixtralForCausalLM", SIZES | {"num_local_experts": 4}, 23),  # experts in one array
    "gpt2": Case("gpt2", "GPT2LMHeadModel", GPT2 | {"eos_token_id": 0}, 36),  # queries, keys and values of one tensor
    "gemma": Case("gemma", "GemmaForCausalLM", SIZES | {"head_dim": 32, "tie_word_embeddings": True}, 20),
    "bert": Case("bert", "BertModel", {key: at for key, at in SIZES.items() if "key_value" not in key}, 39),
}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def keras_family():
    return runpy.run_path(str(ROOT / "examples" / "keras_hub_family.py"))["keras_family"]


def saved(case, directory):
    """Save a random model of `transformers`, and return it."""
    torch.manual_seed(0)
    model_class = getattr(transformers, case.model)
    model = model_class._from_config(model_class.config_class(**case.sizes), dtype=torch.float32).eval()
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.1)
    model.save_pretrained(directory)
    return model


def random_backbone(case, directory):
    converter = importlib.import_module(f"keras_hub.src.utils.transformers.convert_{case.converter}")
    config = json.loads((directory / "config.json").read_text())
    return converter, config, converter.backbone_cls(**converter.convert_backbone_config(config))


@pytest.mark.parametrize("name", cross(CASES, ["qwen3", "mixtral", "gpt2"]))
def test_what_keras_hub_loads_and_a_save_gives_back(name, tmp_path, keras_family):
    case = CASES[name]
    saved(case, tmp_path / "hf")
    converter, config, backbone = random_backbone(case, tmp_path / "hf")
    family = keras_family(converter, backbone)
    item = {v.path: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.value.sharding) for v in backbone.weights}
    assert len(item) == len(backbone.weights) == case.variables
    params = ost.load(tmp_path / "hf", item, family=family)

    with SafetensorLoader(str(tmp_path / "hf")) as loader:
        converter.convert_weights(backbone, loader, config)
    for variable in backbone.weights:
        assert np.asarray(params[variable.path]).tobytes() == np.asarray(variable.value).tobytes(), variable.path

    ost.save(tmp_path / "again", params, like=tmp_path / "hf", family=family)
    again, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "hf"))
    assert again.keys() == stored.keys()
    assert all(again[name].tobytes() == array.tobytes() for name, array in stored.items())


@pytest.fixture
def over_eight_devices():
    """A distribution of Keras that divides the embedding and the queries over the devices."""
    mesh = keras.distribution.DeviceMesh((8,), ("model",), jax.devices())
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["token_embedding/embeddings"] = ("model", None)
    layouts[".*query/kernel"] = ("model", None, None)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="model"))
    yield
    keras.distribution.set_distribution(None)


@pytest.mark.usefixtures("over_eight_devices")
def test_the_example_of_the_page(tmp_path, keras_family):
    """KerasHub's model computes what that of `transformers` does."""
    model = saved(CASES["qwen3"], tmp_path / "qwen3-0.6b")
    names = {"jax": jax, "ost": ost, "keras_family": keras_family}
    exec(EXAMPLE.replace("/models/", f"{tmp_path}/"), names)
    params = names["params"]
    queries = [path for path in params if path.endswith("query/kernel")]
    assert len(queries) == 2
    for path in ("token_embedding/embeddings", *queries):
        assert params[path].addressable_shards[0].data.shape[0] * 8 == params[path].shape[0]

    tokens = np.array([[3, 14, 15, 92, 65, 35, 89, 79]] * 8)
    backbone = names["backbone"]
    hidden = backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    logits = backbone.token_embedding(hidden, reverse=True)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-3)


def test_a_converter_that_computes_is_refused(tmp_path, keras_family):
    """Mistral's casts to float16."""
    case = Case("mistral", "MistralForCausalLM", SIZES | {"sliding_window": 16}, 0)
    saved(case, tmp_path)
    converter, _, backbone = random_backbone(case, tmp_path)
    with pytest.raises(MappingError, match="astype"):
        ost.load(tmp_path, family=keras_family(converter, backbone))


def test_a_tensor_that_the_converter_misses_is_an_error(tmp_path, keras_family):
    saved(CASES["llama3"], tmp_path)
    converter, _, backbone = random_backbone(CASES["llama3"], tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: array for name, array in load_file(file).items() if name != "model.norm.weight"}, file)
    with pytest.raises(MappingError, match=r"'model.norm.weight' is not stored"):
        ost.load(tmp_path, family=keras_family(converter, backbone))
