"""LoRA adapters of `flax.nnx`, under the names of PEFT; `tests/interop/test_peft.py` compares with PEFT itself."""

import json

import flax.nnx
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import lora
from tests.support.files import write

IN, OUT, RANK = 8, 12, 2
CONFIG = {"peft_type": "LORA", "r": RANK, "target_modules": ["up"]}
BASE = {f"model.layers.{n}.mlp.up.weight": (OUT, IN) for n in range(11)} | {"model.norm.weight": (IN,)}
MODULES = {"layers.{}.up.lora": "model.layers.{}.mlp.up"}


class Model(flax.nnx.Module):
    def __init__(self, layers, rngs):
        linears = [flax.nnx.LoRALinear(IN, OUT, lora_rank=RANK, rngs=rngs) for _ in range(layers)]
        self.layers = flax.nnx.List([flax.nnx.Dict(up=linear) for linear in linears])


def names(layer, part):
    return f"base_model.model.model.layers.{layer}.mlp.up.lora_{part}.weight"


def is_adapter(path):
    return "lora" in jax.tree_util.keystr(path)


def only(state, kept):
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if kept(path) else ocp.PLACEHOLDER, state)


def test_the_adapters_of_an_nnx_model(tmp_path):
    model = Model(11, flax.nnx.Rngs(0))
    for layer in model.layers:  # of zeros in the beginning
        layer.up.lora.lora_b[...] = jax.random.normal(jax.random.key(1), (RANK, OUT))
    state = flax.nnx.state(model)
    family = lora(MODULES, BASE)
    ost.save(tmp_path / "adapter", only(state, is_adapter), family=family, config=CONFIG)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored.keys() == {names(layer, part) for layer in range(11) for part in "AB"}
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == CONFIG
    x = np.linspace(-1, 1, IN, dtype=np.float32)
    for number, layer in enumerate(model.layers):
        a, b = (stored[names(number, part)] for part in "AB")
        by_hand = x @ np.asarray(layer.up.kernel[...]) + (b @ (a @ x))
        np.testing.assert_allclose(layer.up(x), by_hand, rtol=1e-5, atol=1e-5)

    fresh = flax.nnx.state(Model(11, flax.nnx.Rngs(2)))
    restored = ost.load(tmp_path / "adapter", only(fresh, is_adapter), family=family)
    both = jax.tree.map(lambda new, old: old if new is ocp.PLACEHOLDER else new, restored, fresh)
    for (path, leaf), old, saved in zip(
        jax.tree_util.tree_leaves_with_path(both), jax.tree.leaves(fresh), jax.tree.leaves(state), strict=True
    ):
        np.testing.assert_array_equal(leaf, saved if is_adapter(path) else old)


def test_stacked_layers_are_in_the_order_of_their_numbers(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((11, IN, RANK), np.float32), rng.standard_normal((11, RANK, OUT), np.float32)
    family = lora({"layers.up": "model.layers.{}.mlp.up"}, BASE)
    ost.save(tmp_path / "adapter", {"layers": {"up": {"lora_a": a, "lora_b": b}}}, family=family, config=CONFIG)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for layer in range(11):
        np.testing.assert_array_equal(stored[names(layer, "A")], a[layer].T)
        np.testing.assert_array_equal(stored[names(layer, "B")], b[layer].T)


def test_an_adapter_is_one_file_whatever_its_size(tmp_path):
    family = lora({"up": "model.layers.0.mlp.up"}, BASE)
    tree = {"up": {"lora_a": np.ones((IN, RANK)), "lora_b": np.ones((RANK, OUT))}}
    ost.save(tmp_path / "adapter", tree, family=family, config=CONFIG, max_file_bytes=1)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["adapter_model.safetensors"]
    plan = ost.plan_save(tmp_path / "x", tree, family=family, config=CONFIG, max_file_bytes=1)
    assert [file.file for file in plan.files] == ["adapter_model.safetensors"]
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
    plan = ost.plan_save("gs://bucket/x", item, family=family, config=CONFIG, process_count=2)
    assert [[file.file for file in process.files] for process in plan.processes] == [["adapter_model.safetensors"], []]


def test_conversions_keep_an_adapter(tmp_path):
    tree = {"up": {"lora_a": np.ones((IN, RANK), np.float32), "lora_b": np.ones((RANK, OUT), np.float32)}}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "orbax", tree)
    family = lora({"up": "model.layers.0.mlp.up"}, BASE)
    ost.convert(tmp_path / "orbax", tmp_path / "to", to="safetensors", family=family, config=CONFIG)
    ost.reshard(tmp_path / "to", tmp_path / "again", max_file_bytes=1)
    for directory, record in (("to", {"safetensors.family.json"}), ("again", set())):
        names_there = {path.name for path in (tmp_path / directory).iterdir()}
        assert names_there == {"adapter_config.json", "adapter_model.safetensors"} | record
        assert load_file(tmp_path / directory / "adapter_model.safetensors").keys() == {names(0, "A"), names(0, "B")}
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text()) == CONFIG


def test_an_adapter_on_a_server_that_does_not_list(web):
    family = lora({"up": "model.layers.0.mlp.up"}, BASE)
    arrays = {names(0, "A"): np.ones((RANK, IN), np.float32), names(0, "B"): np.ones((OUT, RANK), np.float32)}
    write(web.root / "adapter_model.safetensors", arrays)
    (web.root / "adapter_config.json").write_text(json.dumps(CONFIG))
    restored = ost.load(web.url, family=family)
    assert restored["up"]["lora_b"].shape == (RANK, OUT)


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ({"down": "model.layers.{}.mlp.down"}, CONFIG, r"no matrix 'model.layers.{}.mlp.down.weight'"),
        ({"norm": "model.norm"}, CONFIG, "no matrix 'model.norm.weight'"),
        (
            MODULES,
            CONFIG | {"target_modules": ["q"]},
            r"'model.layers.0.mlp.up' is not one of .*: {'target_modules': \['q'\]}",
        ),
        (MODULES, CONFIG | {"target_modules": r".*\.5\..*"}, "'model.layers.0.mlp.up' is not one of"),
        (MODULES, CONFIG | {"exclude_modules": ["up"]}, "'model.layers.0.mlp.up' is not one of"),
        (MODULES, CONFIG | {"layers_to_transform": [0]}, "'model.layers.1.mlp.up' is not one of"),
        (MODULES, CONFIG | {"peft_type": "LOHA"}, "expected peft_type 'LORA', found 'LOHA'"),
        (MODULES, CONFIG | {"use_dora": True}, "use_dora is True"),
        (MODULES, CONFIG | {"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"layers.{}.up": "model.layers.0.mlp.up"}, CONFIG, r"path 'layers.{}.up' has {} for the number of a layer"),
        (MODULES, {"r": RANK}, "the config has no 'peft_type', which is 'LORA' .*, and a save .* config= or like="),
        (MODULES, {"peft_type": "LORA"}, "no 'r', .* adapter_config.json, and a save .* config= or like="),
        (MODULES, CONFIG | {"r": 3}, r"expected \(8, 3\), found \(8, 2\)"),
    ],
    ids=str,
)
def test_what_does_not_fit(tmp_path, modules, config, message):
    state = flax.nnx.state(Model(11, flax.nnx.Rngs(0)))
    with pytest.raises(ost.MappingError, match=message):
        ost.save(tmp_path / "adapter", only(state, is_adapter), family=lora(modules, BASE), config=config)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("model.layers.{}.mlp.up.weight", r"'model.layers.{}.mlp.up.weight': name the module, without .weight$"),
        (
            "model.layers.{}.mlp.upp",
            r"no matrix 'model.layers.{}.mlp.upp.weight' \(nearest: 'model.layers.0.mlp.up'\)$",
        ),
        ("model.norm", r"the base model has no matrix 'model.norm.weight'"),
    ],
)
def test_a_module_that_the_base_model_does_not_have(module, message):
    with pytest.raises(ost.MappingError, match=message):
        lora({"up": module}, BASE)


def test_what_lora_does_not_have_is_refused(tmp_path):
    arrays = {names(0, "A"): np.ones((RANK, IN), np.float32), names(0, "B"): np.ones((OUT, RANK), np.float32)}
    arrays["base_model.model.model.layers.0.mlp.up.lora_magnitude_vector"] = np.ones(OUT, np.float32)
    write(tmp_path / "adapter_model.safetensors", arrays)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ost.MappingError, match="no leaf of the tree uses these stored tensors: .*magnitude"):
        ost.load(tmp_path, family=lora({"up": "model.layers.0.mlp.up"}, BASE))


def test_the_saved_tree_of_a_family_that_nobody_registered(tmp_path, caplog):
    family, of_other_modules = lora(MODULES, BASE), lora({"up": "model.layers.{}.mlp.up"}, BASE)
    shapes = {name: view.shape for name, view in family.tree(CONFIG).items()}
    nested: dict = {"layers": [{"up": {"lora": {}}} for _ in range(11)]}
    for name, shape in shapes.items():
        nested["layers"][int(name.split(".")[1])]["up"]["lora"][name.rpartition(".")[2]] = np.ones(shape, np.float32)
    ost.save(tmp_path / "adapter", nested, family=family, config=CONFIG)
    loaded = ost.load(tmp_path / "adapter", family=family)
    assert jax.tree.structure(loaded) == jax.tree.structure(nested)
    assert ost.load(tmp_path / "adapter", family=of_other_modules)["up"]["lora_a"].shape == (11, IN, RANK)
    assert not caplog.records
    ost.load(tmp_path / "adapter")
    (record,) = caplog.records
    assert "was saved with the family 'peft.lora', which is not known here; pass family=" in record.getMessage()
    assert record.getMessage().endswith(
        "; there are dequantized, flax, maxtext, tunix; `orbax-safetensors families` lists all"
    )
