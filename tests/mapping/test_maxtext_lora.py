"""MaxText's LoRA adapters, against what MaxText's own converter made of PEFT's (`testdata/maxtext/*/adapter`)."""

import json
import math

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import View
from orbax_safetensors.mapping.families.maxtext import LORA
from tests.support.compare import names_of
from tests.support.family_samples import TREES, Sample
from tests.support.files import write
from tests.support.roots import TESTDATA

FAMILY = "maxtext.lora"
MODELS = ["gemma2", "gemma3", "llama3.1", "qwen3"]
DATA = TESTDATA / "maxtext"
ADAPTER = "adapter_model.safetensors"
QUERY = "self_attn.q_proj.lora_B.weight"


def base_of(model):
    return json.loads((DATA / model / "hf" / "config.json").read_text())


def config_of(model):
    return json.loads((DATA / model / "adapter" / "adapter_config.json").read_text())


def adapter_of(model):
    return load_file(DATA / model / "adapter" / ADAPTER)


def made_by_maxtext(model, mode):
    """MaxText's tree by dotted path.

    Queries of Gemma 2 are scaled as those of the kernel are. MaxText forgets that, and computes something else.
    """
    with np.load(DATA / model / "adapter" / f"mt_{mode}.npz") as arrays:
        tree = {name.replace("-", "."): arrays[name] for name in arrays}
    if model == "gemma2":
        factor = np.float32(1 / math.sqrt(base_of(model)["head_dim"]))
        tree |= {path: array * factor for path, array in tree.items() if path.endswith("query.kernel_lora_b.value")}
    return tree


def assert_is(found, expected, scaled=""):
    """Compare bits, and those of `scaled` queries to the last one: MaxText multiplies in float64, a save divides."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        if scaled and scaled in name:
            np.testing.assert_array_max_ulp(np.asarray(found[name]), array, maxulp=1)
        else:
            assert found[name].shape == array.shape
            assert np.asarray(found[name]).tobytes() == array.tobytes(), name


def nested(tree):
    out = {}
    for path, array in tree.items():
        *above, last = path.split(".")
        node = out
        for part in above:
            node = node.setdefault(part, {})
        node[last] = array
    return out


each_tree = pytest.mark.parametrize(("model", "mode"), [(m, mode) for m in MODELS for mode in ("scanned", "unscanned")])


def scaled(model, name):
    return name if model == "llama3.1" else ""


@each_tree
def test_the_tree_is_maxtexts(model, mode):
    variant = {"base": base_of(model), "scan_layers": mode == "scanned"}
    found = ost.load(DATA / model / "adapter", family=FAMILY, variant=variant)
    assert_is(names_of(found), made_by_maxtext(model, mode), scaled(model, "query.kernel_lora_b"))


@each_tree
def test_on_eight_devices_and_back(tmp_path, model, mode, mesh):
    expected = made_by_maxtext(model, mode)

    def place(array):
        axes = [axis if array.shape[at] % mesh.shape[axis] == 0 else None for at, axis in ((0, "x"), (-1, "y"))]
        spec = PartitionSpec(axes[0], *[None] * (array.ndim - 2), axes[1])
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    # Whether layers are stacked follows from the leaves.
    item = nested({name.removesuffix(".value"): place(array) for name, array in expected.items()})
    found = ost.load(DATA / model / "adapter", item, family=FAMILY, variant={"base": base_of(model)})
    assert all(leaf.sharding == item.sharding for leaf, item in zip(*map(jax.tree.leaves, (found, item)), strict=True))
    by_path = {f"{name}.value": leaf for name, leaf in names_of(found).items()}
    assert_is(by_path, expected, scaled(model, "query.kernel_lora_b"))
    config = config_of(model)
    ost.save(tmp_path / "peft", found, family=FAMILY, variant={"base": base_of(model)}, config=config)
    assert_is(
        load_file(tmp_path / "peft" / ADAPTER), adapter_of(model), QUERY if model in ("gemma2", "llama3.1") else ""
    )
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text()) == config
    # The save has recorded the base model and the switches.
    again = names_of(ost.load(tmp_path / "peft", family=FAMILY))
    by_path = {f"{name.removesuffix('.value')}.value": leaf for name, leaf in again.items()}
    assert_is(by_path, expected, scaled(model, "query.kernel_lora_b"))


@pytest.mark.parametrize(("name", "mode"), TREES)
def test_the_product_is_what_the_base_makes_of_pefts_product(tmp_path, name, mode):
    """So the adapters add to each kernel what PEFT adds to its matrix."""
    base, scan = Sample(name), {"scan_layers": mode == "scanned"}
    variant = {"base": base.config} | scan
    config = {"peft_type": "LORA", "r": 2, "target_modules": r".*(?<!wo_a)"}
    if base.model == "gemma4" and mode == "scanned":
        config["target_modules"] = ".*layers.(5|11).*"  # the others are stacked in two dimensions
    shapes = {}

    def bind(name, shape):
        shapes[name] = shape
        return View.tensor(name, shape, np.dtype(np.float32))

    LORA.describe(config, variant, bind, leaves=1)
    rng = np.random.default_rng(0)
    adapter = {name: rng.integers(-3, 4, shape).astype(np.float32) for name, shape in shapes.items()}
    for name_a, a in adapter.items():
        if ".lora_A." in name_a:
            module = name_a.removeprefix("base_model.model.").replace(".lora_A", "")
            product = adapter[name_a.replace(".lora_A.", ".lora_B.")] @ a
            stored = base.family.renamed([module], base.config)[module]
            base.stored[stored] = product.astype(base.stored[stored].dtype)
    (tmp_path / "base").mkdir()
    write(tmp_path / "base" / "model.safetensors", base.stored)
    (tmp_path / "base" / "config.json").write_text(json.dumps(base.config))
    write(tmp_path / ADAPTER, adapter)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    kernels = names_of(ost.load(tmp_path / "base", family=base.family, variant=scan))
    found = names_of(ost.load(tmp_path, family=FAMILY, variant=variant))
    assert found
    for path, a in found.items():
        if path.endswith("lora_a.value"):
            kernel, b = kernels[f"params.{path.removesuffix('_lora_a.value')}"], found[path.replace("lora_a", "lora_b")]
            product = np.einsum("ilr,rlo->ilo" if a.ndim == 3 else "ir,ro->io", a, b)
            layers = [product[:, at].reshape(kernel[:, at].shape) for at in range(a.shape[1])] if a.ndim == 3 else None
            whole = product.reshape(kernel.shape) if layers is None else np.stack(layers, axis=1)
            np.testing.assert_allclose(whole, kernel, rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("model", MODELS)
def test_conversions_and_links(tmp_path, model):
    source, variant = DATA / model / "adapter", {"base": base_of(model)}
    ost.convert(source, tmp_path / "orbax", to="orbax", family=FAMILY, variant=variant)
    ost.link(source, tmp_path / "link", family=FAMILY, variant=variant)
    # MaxText's trainer looks for `decoder` at the top of `lora_restore_path`.
    for directory in (tmp_path / "orbax" / "0" / "items", tmp_path / "link"):
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.restore(directory)
        assert list(found) == ["decoder"]
        assert_is(names_of(found), made_by_maxtext(model, "scanned"), scaled(model, "query.kernel_lora_b"))
    ost.convert(tmp_path / "orbax", tmp_path / "peft", to="safetensors", family=FAMILY, config=config_of(model))
    assert_is(
        load_file(tmp_path / "peft" / ADAPTER), adapter_of(model), QUERY if model in ("gemma2", "llama3.1") else ""
    )


def test_a_directory_as_the_config_of_an_adapter(tmp_path):
    adapter, variant = DATA / "qwen3" / "adapter", {"base": base_of("qwen3")}
    tree = ost.load(adapter, family=FAMILY, variant=variant)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ost.MissingError, match="empty/config.json: cannot be opened"):
        ost.save(tmp_path / "none", tree, family=FAMILY, variant=variant, config=tmp_path / "empty")
    ost.save(tmp_path / "peft", tree, family=FAMILY, variant=variant, config=adapter)
    assert_is(load_file(tmp_path / "peft" / ADAPTER), adapter_of("qwen3"))
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text()) == config_of("qwen3")


def test_what_maxtexts_converter_writes_becomes_an_adapter(tmp_path):
    """It puts the tree below `params.params`."""
    state = {"params": {"params": nested(made_by_maxtext("qwen3", "unscanned"))}, "step": 0, "opt_state": {}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "maxtext", state)
    variant = {"base": base_of("qwen3")}
    ost.convert(
        tmp_path / "maxtext",
        tmp_path / "peft",
        to="safetensors",
        family=FAMILY,
        variant=variant,
        config=config_of("qwen3"),
    )
    assert_is(load_file(tmp_path / "peft" / ADAPTER), adapter_of("qwen3"))


def test_older_names_of_a_language_model_inside_another(tmp_path):
    """Those of `transformers` before 4.52."""
    new, old = "base_model.model.model.language_model.", "base_model.model.language_model.model."
    write(tmp_path / ADAPTER, {name.replace(new, old): array for name, array in adapter_of("gemma3").items()})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config_of("gemma3")))
    found = ost.load(tmp_path, family=FAMILY, variant={"base": base_of("gemma3")})
    assert_is(names_of(found), made_by_maxtext("gemma3", "scanned"))


@pytest.mark.parametrize(
    ("config", "variant", "added", "message"),
    [
        ({"rank_pattern": {"q_proj": 2}}, {}, {}, "rank_pattern is {'q_proj': 2}: MaxText has one rank"),
        ({"alpha_pattern": {"q_proj": 2}}, {}, {}, "alpha_pattern is {'q_proj': 2}: MaxText has one rank"),
        ({"use_rslora": True}, {}, {}, "use_rslora is True: MaxText has one rank"),
        ({"use_dora": True}, {}, {}, "use_dora is True"),
        (
            {},
            {"base": None},
            {},
            "expected the content of the base model's config.json, a dict, as .*'base', found None",
        ),
        (
            {},
            {"base": {"architectures": ["T5"]}},
            {},
            "no family of MaxText is for the base model, of architecture T5$",
        ),
        ({}, {"base": {"model_type": "bert"}}, {}, "no family of MaxText is for the base model, of model_type bert$"),
        ({}, {}, {"mlp.experts.0.up_proj.lora_A.weight": (2, 32)}, "no leaf of the tree uses .*experts.0.up_proj"),
        ({}, {}, {"embed_tokens.lora_embedding_A": (2, 64)}, "no leaf of the tree uses .*lora_embedding_A"),
        ({}, {"base": base_of("gemma4")}, {}, "has layers in two dimensions, and its adapters need scan_layers False"),
        ({"layers_to_transform": [0, 1, 2]}, {}, {}, "layers.1.mlp.down_proj.lora_A.weight' .* which is not stored"),
    ],
    ids=str,
)
def test_what_maxtext_does_not_take(tmp_path, config, variant, added, message):
    more = {f"base_model.model.model.{name}": np.ones(shape, np.float32) for name, shape in added.items()}
    write(tmp_path / ADAPTER, adapter_of("qwen3") | more)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config_of("qwen3") | config))
    with pytest.raises(ost.MappingError, match=message):
        ost.load(tmp_path, family=FAMILY, variant={"base": base_of("qwen3")} | variant)
