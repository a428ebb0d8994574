"""LoRA adapters of PEFT: what is saved here PEFT loads and computes with, what it saves is restored here as it was.

The models are tiny and random. Nothing is downloaded.
"""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.mapping import lora
from tests.support.roots import TESTDATA

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

# PEFT asks models of `transformers` by a name that these give up.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LAYERS, WIDTH, HIDDEN, RANK, ALPHA = 3, 32, 64, 4, 8
SIZES = {
    "vocab_size": 96,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(24).reshape(2, 12)
# By the path of a tree whose layers are stacked, and of one whose layers are not.
MODULES = {"v": "self_attn.v_proj", "down": "mlp.down_proj"}
TREES = {
    "stacked": {f"layers.{path}": f"model.layers.{{}}.{module}" for path, module in MODULES.items()},
    "unstacked": {f"layers.{{}}.{path}": f"model.layers.{{}}.{module}" for path, module in MODULES.items()},
}


def lora_config(**more):
    targets = [module.rpartition(".")[2] for module in MODULES.values()]
    return peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM", **more)


def new_model(config, directory=None):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if directory is not None:
        model.save_pretrained(directory)
    return model


@pytest.fixture
def base(tmp_path):
    """A model's config, and the shapes of its tensors as stored."""
    config = transformers.Qwen3Config(**SIZES)
    new_model(config, tmp_path / "base")
    return config, ost.open_checkpoint(tmp_path / "base").shapes


@pytest.fixture(params=TREES)
def family(request, base):
    return lora(TREES[request.param], base[1])


def pairs(shapes, ranks=lambda module: RANK):
    """Random adapters in PEFT's form, by module."""
    rng = np.random.default_rng(0)
    made = {}
    for layer in range(LAYERS):
        for module in MODULES.values():
            name = f"model.layers.{layer}.{module}"
            outputs, inputs = shapes[f"{name}.weight"]
            shape_a, shape_b = (ranks(name), inputs), (outputs, ranks(name))
            made[name] = tuple(rng.standard_normal(shape, np.float32) for shape in (shape_a, shape_b))
    return made


def in_tree(adapters, family):
    """The tree of `family`, made of PEFT's arrays in NumPy."""
    tree = {"layers": {}}
    for path, module in MODULES.items():
        of_layers = [adapters[f"model.layers.{layer}.{module}"] for layer in range(LAYERS)]
        transposed = [{"lora_a": a.T, "lora_b": b.T} for a, b in of_layers]
        if "layers.0.v.lora_a" in family.tree({"peft_type": "LORA", "r": RANK}):
            for layer, pair in enumerate(transposed):
                tree["layers"].setdefault(str(layer), {})[path] = pair
        else:
            tree["layers"][path] = jax.tree.map(lambda *each: np.stack(each), *transposed)
    return tree


def on_devices(tree, mesh):
    def place(leaf):
        axes = [axis if leaf.shape[at] % mesh.shape[axis] == 0 else None for at, axis in ((-2, "y"), (-1, "x"))]
        return jax.device_put(leaf, NamedSharding(mesh, P(*[None] * (leaf.ndim - 2), *axes)))

    return jax.tree.map(place, tree)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.numpy()


def test_peft_computes_with_what_is_saved(tmp_path, base, family, mesh):
    config, shapes = base
    adapters = pairs(shapes)
    tree = on_devices(in_tree(adapters, family), mesh)
    ost.save(tmp_path / "adapter", tree, family=family, config=lora_config(), index=False)
    files = {path.name for path in (tmp_path / "adapter").glob("*.*")}
    assert files >= {"adapter_config.json", "adapter_model.safetensors"}
    assert files.isdisjoint({"config.json", "model.safetensors"})

    wanted = new_model(config)
    with torch.no_grad():
        for name, (a, b) in adapters.items():
            wanted.get_submodule(name).weight += torch.from_numpy(ALPHA / RANK * (b @ a))
    loaded = peft.PeftModel.from_pretrained(new_model(config), tmp_path / "adapter").eval()
    np.testing.assert_allclose(logits(loaded), logits(wanted), rtol=1e-4, atol=1e-4)
    assert np.abs(logits(loaded) - logits(new_model(config))).max() > 0.1
    for name, (a, b) in adapters.items():
        module = loaded.base_model.model.get_submodule(name)
        assert module.lora_A["default"].weight.detach().numpy().tobytes() == a.tobytes()
        assert module.lora_B["default"].weight.detach().numpy().tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "ranks", [{}, {"self_attn.v_proj": 2, "v_proj": 3}, {r"layers\.\d+\.mlp.down_proj": 6}], ids=str
)
def test_what_peft_saves_is_restored_bit_for_bit(tmp_path, base, family, mesh, ranks):
    model = peft.get_peft_model(new_model(base[0]), lora_config(init_lora_weights=False, rank_pattern=ranks))
    model.save_pretrained(tmp_path / "adapter")
    adapters = {
        f"model.layers.{layer}.{module}": tuple(
            getattr(model.base_model.model.get_submodule(f"model.layers.{layer}.{module}"), part)["default"]
            .weight.detach()
            .numpy()
            for part in ("lora_A", "lora_B")
        )
        for layer in range(LAYERS)
        for module in MODULES.values()
    }
    wanted = in_tree(adapters, family)
    item = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), on_devices(wanted, mesh)
    )
    restored = ost.load(tmp_path / "adapter", item, family=family)
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(leaf).tobytes() == np.ascontiguousarray(other).tobytes(), path
    # And back: the same files, byte for byte.
    options = ost.SafetensorsOptions(alignment=8)
    ost.save(tmp_path / "again", restored, family=family, like=tmp_path / "adapter", options=options)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


def test_the_config_is_that_of_peft(tmp_path, base, family):
    tree = in_tree(pairs(base[1]), family)
    config = lora_config(base_model_name_or_path="somebody/llama")
    ost.save(tmp_path / "adapter", tree, family=family, config=config)
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config.save_pretrained(tmp_path / "peft")
    wanted = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert saved | {"target_modules": None} == wanted | {"target_modules": None}
    assert sorted(saved["target_modules"]) == sorted(wanted["target_modules"])
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").target_modules == config.target_modules


@pytest.mark.parametrize(
    "more",
    [
        {"target_modules": ["v_proj", "model.layers.1.self_attn.q_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["v_proj", "down_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": r".*\.[01]\..*v_proj"},
        {"target_modules": ["v_proj", "down_proj"], "exclude_modules": ["down_proj", "layers.1.self_attn.v_proj"]},
        {"target_modules": ["v_proj", "down_proj"], "exclude_modules": r"model\.layers\.2\..*"},
    ],
    ids=str,
)
def test_the_modules_are_those_to_which_peft_gives_adapters(base, more):
    config = peft.LoraConfig(r=RANK, task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(new_model(base[0]), config).base_model.model
    stored = json.loads(json.dumps(config.to_dict(), default=sorted))
    for name, module in new_model(base[0]).named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            of_module = lora({"x": name}, base[1])
            if hasattr(model.get_submodule(name), "lora_A"):
                assert sorted(of_module.tree(stored)) == ["x.lora_a", "x.lora_b"]
            else:
                with pytest.raises(ost.MappingError, match=f"'{name}' is not one of the modules"):
                    of_module.tree(stored)


@pytest.mark.parametrize("model", ["llama3.1", "qwen3"])
def test_peft_computes_the_same_after_maxtexts_tree(tmp_path, model):
    directory = TESTDATA / "maxtext" / model
    config, base = (
        json.loads((directory / name).read_text()) for name in ("adapter/adapter_config.json", "hf/config.json")
    )
    tree = ost.load(directory / "adapter", family="maxtext.lora", variant={"base": base})
    ost.save(tmp_path / "adapter", tree, family="maxtext.lora", variant={"base": base}, config=config)

    def logits_with(adapter):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32).eval()
        return logits(peft.PeftModel.from_pretrained(loaded, adapter).eval())

    np.testing.assert_allclose(logits_with(tmp_path / "adapter"), logits_with(directory / "adapter"), atol=1e-5)
