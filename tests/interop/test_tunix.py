"""Models that Tunix's own loaders make of Hugging Face files, against its tables and our families of the same trees.

The models of `transformers` are tiny and random. Tunix's loaders put them on eight devices with Tunix's shardings. Its
tables, as they are, and the `tunix` families restore the same trees with these shardings, bit for bit.
"""

import json
import re
from importlib import metadata
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from packaging.requirements import Requirement
from safetensors.numpy import load_file, save_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import from_table

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("einops", reason="einops is not installed: pip install --no-deps google-tunix einops")
pytest.importorskip("jaxtyping", reason="jaxtyping is not installed")

from tests.support import examples  # noqa: E402
from tests.support.roots import ROOT  # noqa: E402
from tests.support.tiers import cross  # noqa: E402
from tests.support.tunix_models import flax_as_it_was, import_tunix, tunix_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Tunix uses what JAX and Flax are about to remove


@pytest.fixture(autouse=True)
def settings_of_tunix():
    """What Tunix sets when it is imported, for its tests alone."""
    with flax_as_it_was():
        if hasattr(flax.config, "flax_always_shard_variable"):
            flax.config.update("flax_always_shard_variable", False)
        yield


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
TIED = {"tie_word_embeddings": True}
WIDER = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = SIZES | TIED | WIDER | {"sliding_window": 16, "query_pre_attn_scalar": 32}
GEMMA4 = GEMMA | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 48,
    "pad_token_id": 0,
    "attention_k_eq_v": True,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
}
GEMMA4_EXPERTS = GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
GEMMA4_SMALL = GEMMA4 | {
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# What Tunix's loaders do after they have applied the table.
EXPERTS_IN_ONE = {r"(.*)\.experts\.[0-9]+\.(\w+)\.kernel": r"\1.\2"}
KEYS_AND_VALUES_IN_ONE = {
    r"tmp\.(layers\.\d+\.attn)\.q": (r"\1.q_einsum.w", ((0, 2, 1, 3), (4, 64, 32))),
    r"tmp\.(layers\.\d+\.attn)\.[kv]": (r"\1.kv_einsum.w", ((0, 2, 1, 3), None)),
}
ALL_THREE_IN_ONE = {r"tmp\.(layers\.\d+\.attn)\.[qkv]": (r"\1.qkv_einsum.w", ((0, 2, 1, 3), None))}
# The keys of every other layer of a large Gemma 4 are its values. The table has rows for experts, with sizes that the
# config of a dense model does not have.
GEMMA4_STACK = {
    r"tmp\.(layers\.[024]\.attn)\.q": (r"\1.q_einsum.w", ((0, 2, 1, 3), (4, 64, 32))),
    r"tmp\.(layers\.[135]\.attn)\.q": (r"\1.q_einsum.w", ((0, 2, 1, 3), (4, 64, 48))),
    r"tmp\.(layers\.[135]\.attn)\.k": (r"\1.k_einsum.w", ((0, 2, 1, 3), (2, 64, 48))),
    r"tmp\.(layers\.\d+\.attn)\.[kv]": (r"\1.kv_einsum.w", ((0, 2, 1, 3), None)),
    r"(layers\.\d+\.moe)\.\d+": (r"\1", None, "optional"),
}
GEMMA4_SMALL_STACK = {pattern: row for pattern, row in GEMMA4_STACK.items() if "k_einsum" not in row[0]}


class Case(NamedTuple):
    """A model: Tunix's name of its kind, the class of `transformers`, sizes, and the number of leaves."""

    kind: str
    model: str
    sizes: dict[str, Any]
    leaves: int
    stack: dict[str, Any] | None = None


CASES = {
    "qwen2": Case("qwen2", "Qwen2ForCausalLM", SIZES, 27),
    "qwen3": Case("qwen3", "Qwen3ForCausalLM", SIZES | WIDER, 25),
    "qwen3, tied": Case("qwen3", "Qwen3ForCausalLM", SIZES | WIDER | TIED, 24),
    "qwen3, experts": Case("qwen3", "Qwen3MoeForCausalLM", SIZES | WIDER | EXPERTS, 27, EXPERTS_IN_ONE),
    "llama3": Case("llama3", "LlamaForCausalLM", SIZES, 21),
    "gemma": Case("gemma", "GemmaForCausalLM", GEMMA | {"num_key_value_heads": 1}, 18, KEYS_AND_VALUES_IN_ONE),
    "gemma, as many heads": Case("gemma", "GemmaForCausalLM", GEMMA | {"num_key_value_heads": 4}, 16, ALL_THREE_IN_ONE),
    "gemma2": Case("gemma2", "Gemma2ForCausalLM", GEMMA, 22, KEYS_AND_VALUES_IN_ONE),
    "gemma2, as many heads": Case(
        "gemma2", "Gemma2ForCausalLM", GEMMA | {"num_key_value_heads": 4}, 20, ALL_THREE_IN_ONE
    ),
    "gemma3": Case("gemma3", "Gemma3ForCausalLM", GEMMA, 26, KEYS_AND_VALUES_IN_ONE),
    "gemma3, as many heads": Case(
        "gemma3", "Gemma3ForCausalLM", GEMMA | {"num_key_value_heads": 4}, 24, ALL_THREE_IN_ONE
    ),
    "gemma3, with images": Case("gemma3", "Gemma3ForConditionalGeneration", GEMMA, 26, KEYS_AND_VALUES_IN_ONE),
    "gemma4": Case("gemma4", "Gemma4ForConditionalGeneration", GEMMA4, 80, GEMMA4_STACK),
    "gemma4, experts": Case("gemma4", "Gemma4ForConditionalGeneration", GEMMA4_EXPERTS, 128, GEMMA4_STACK),
    "gemma4, small": Case("gemma4", "Gemma4ForConditionalGeneration", GEMMA4_SMALL, 101, GEMMA4_SMALL_STACK),
}
UNREAD = [r"(vision_tower|multi_modal_projector)\..*"]


def required(package):
    """Return what a package requires without extras."""
    requirements = [Requirement(text) for text in metadata.requires(package)]
    return {one.name.replace("_", "-"): one.specifier for one in requirements if "extra" not in str(one.marker)}


def test_pip_installs_it_beside_this_package():
    """What both require are releases that are here, except an older safetensors, which Tunix alone requires."""
    ours, theirs = required("orbax-safetensors"), required("google-tunix")
    releases = {name: metadata.version(name) for name in ("orbax-checkpoint", "fsspec")} | {"safetensors": "0.7.0"}
    assert ours.keys() & theirs.keys() == releases.keys()
    for name, release in releases.items():
        assert (ours[name] & theirs[name]).contains(release), name


def saved(case, directory):
    """Save a random model of `transformers`."""
    config_class = getattr(transformers, case.model).config_class
    if "Conditional" in case.model:
        images = {"vision_config": IMAGES, "mm_tokens_per_image": 4, "image_token_index": 92}
        towers = images if case.kind == "gemma3" else {"vision_config": None, "audio_config": None}
        config = config_class(text_config=case.sizes, **towers)
    else:
        config = config_class(**case.sizes)
    torch.manual_seed(0)
    model = getattr(transformers, case.model)._from_config(config, dtype=torch.bfloat16)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.1)
    for name, tensor in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(tensor)
    for name, tensor in model.named_parameters():
        # Tunix's router reads what this norm gives, and that of `transformers` what the norm is given.
        if name.endswith("pre_feedforward_layernorm_2.weight"):
            torch.nn.init.ones_(tensor)
    model.save_pretrained(directory)
    shared = case.sizes.get("num_kv_shared_layers", 0)
    if shared:  # published files also have the keys and values that these layers do not read; Tunix needs them
        path = directory / "model.safetensors"
        tensors = load_file(path)
        for name, array in list(tensors.items()):
            found = re.fullmatch(r"(.*layers\.)([0-9])(\.self_attn\.(?:k_proj|v_proj|k_norm)\.weight)", name)
            if found and int(found[2]) < shared:
                unread = f"{found[1]}{case.sizes['num_hidden_layers'] - shared + int(found[2])}{found[3]}"
                assert unread not in tensors
                tensors[unread] = array[::-1].copy()
        save_file(tensors, path, metadata={"format": "pt"})


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def restored(directory, item, family):
    args = ost.SafetensorsRestore(item=item)
    return ocp.Checkpointer(ost.SafetensorsHandler(family=family)).restore(directory, args=args)


@pytest.mark.parametrize("name", cross(CASES, ["qwen3, experts", "gemma3"]))
def test_what_tunix_loads_and_a_save_gives_back(name, tmp_path):
    """A save with a family gives all tensors back."""
    case = CASES[name]
    saved(case, tmp_path / "hf")
    tunix = tunix_model(case.kind, case.sizes)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    loaded = nnx.to_pure_dict(nnx.state(tunix.load(tmp_path / "hf", mesh)))
    expected = jax.tree_util.tree_leaves_with_path(loaded)
    assert len(expected) == case.leaves
    assert any(len(leaf.sharding.device_set) == 8 and not leaf.is_fully_replicated for _, leaf in expected)

    table = from_table(tunix.table, stack=case.stack, unused=UNREAD)
    for family in (table, f"tunix.{case.kind}", "tunix"):
        leaves = jax.tree_util.tree_leaves_with_path(restored(tmp_path / "hf", abstract(loaded), family))
        assert [path for path, _ in leaves] == [path for path, _ in expected]
        for (path, leaf), (_, other) in zip(leaves, expected, strict=True):
            assert leaf.dtype == other.dtype, path
            assert leaf.sharding == other.sharding, path
            assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes(), path

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    checkpointer = ocp.Checkpointer(ost.SafetensorsHandler(family=f"tunix.{case.kind}"))
    params = checkpointer.restore(tmp_path / "hf")
    checkpointer.save(tmp_path / "again", args=ost.SafetensorsSave(params, config=config))
    again, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "hf"))
    kept = {name: array for name, array in stored.items() if not name.startswith(("vision_tower", "multi_modal"))}
    assert again.keys() == kept.keys()
    assert all(again[name].tobytes() == array.tobytes() for name, array in kept.items())


GEMMAS = {name: case for name, case in CASES.items() if case.kind.startswith("gemma")}


@pytest.mark.parametrize("name", cross(GEMMAS, ["gemma", "gemma4, small"]))
def test_tunix_computes_what_transformers_does_also_after_a_training_step(name, tmp_path):
    """Of Gemma 1, for which Tunix has no loader, this shows that norms are where they belong."""
    case = GEMMAS[name]
    saved(case, tmp_path / "hf")
    graph, state = tunix_model(case.kind, case.sizes).abstract()
    item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), state)
    params = ost.load(tmp_path / "hf", item, family="tunix")
    tokens = np.array([[3, 14, 15, 92, 65, 35, 89, 79]])
    positions, mask = np.arange(8)[None], np.tril(np.ones((1, 8, 8), bool))

    @jax.jit
    def logits(params):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return nnx.merge(graph, params)(tokens, positions, None, mask)[0]

    def expected(directory):
        model = getattr(transformers, case.model).from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.numpy()

    before = expected(tmp_path / "hf")
    np.testing.assert_allclose(logits(params), before, atol=1e-4)

    gradients = jax.jit(jax.grad(lambda params: logits(params)[0, :, 0].sum()))(params)
    trained = jax.tree.map(lambda x, gradient: x - np.float32(0.01) * gradient, params, gradients)
    ost.save(tmp_path / "trained", trained, family="tunix", like=tmp_path / "hf")  # rounded to bfloat16
    after = expected(tmp_path / "trained")
    assert not np.allclose(after, before, atol=0.1)
    np.testing.assert_allclose(logits(trained), after, atol=0.02)
    np.testing.assert_allclose(logits(ost.load(tmp_path / "trained", item, family="tunix")), after, atol=1e-4)


def test_the_example_of_the_page(tmp_path, monkeypatch):
    case = CASES["qwen3, tied"]
    saved(case, tmp_path / "qwen3-0.6b")
    config = tunix_model(case.kind, case.sizes).config
    model = import_tunix("tunix.models.qwen3.model")
    monkeypatch.setattr(model.ModelConfig, "qwen3_0p6b", lambda: config)
    (block,) = (block for block in examples.python(ROOT / "docs" / "tables.md") if "from tunix" in block)
    names = {"jax": jax, "ocp": ocp, "ost": ost, "from_table": from_table}
    exec(block.replace("/models/", f"{tmp_path}/"), names)
    leaves = nnx.to_pure_dict(nnx.state(names["qwen3"]))
    stored = load_file(tmp_path / "qwen3-0.6b" / "model.safetensors")
    query = stored["model.layers.1.self_attn.q_proj.weight"].T.reshape(64, 4, 32)
    assert np.asarray(leaves["layers"][1]["attn"]["q_proj"]["w"]).tobytes() == query.astype(np.float32).tobytes()

    tokens = np.array([[3, 14, 15, 92, 65, 35, 89, 79]])
    positions, mask = np.arange(8)[None], np.tril(np.ones((1, 8, 8), bool))
    with jax.numpy_dtype_promotion("standard"):
        logits, _ = names["qwen3"](tokens, positions, None, mask)
    torch_model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "qwen3-0.6b", dtype=torch.float32)
    with torch.no_grad():
        expected = torch_model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-3)
