"""The switches of a family follow from names and shapes of an item. If one is wrong, the error names the right one."""

import flax.nnx
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor
from tests.multiprocess.workers_families import config_of, made_by_maxtext, stored_directory, target
from tests.support.compare import names_of
from tests.support.files import write
from tests.support.maxtext_trees import EACH_TREE, assert_restored, assert_same_bits, content, stored

UNSCANNED = {"scan_layers": False}


@pytest.fixture(autouse=True)
def _unregistered():
    yield
    ost.unregister()


def restore(sample, item, family="maxtext", **arguments):
    with ocp.Checkpointer(ost.SafetensorsHandler(family=family)) as checkpointer:
        return checkpointer.restore(stored_directory(sample), args=ost.SafetensorsRestore(item=item, **arguments))


def inner(tree):
    """The tree without its leading `params`, as an NNX model has it."""
    return tree["params"]


def state_of(tree):
    return flax.nnx.State(jax.tree.map(flax.nnx.Param, tree))


FORMS = {
    "of Linen": lambda tree: tree,
    "below one more params": lambda tree: {"params": tree},
    "of NNX": inner,
    "an nnx.State": lambda tree: state_of(inner(tree)),
    "an nnx.State below params": lambda tree: {"params": state_of(inner(tree))},
}


@EACH_TREE
def test_trees_of_maxtexts_converter(sample, mode, line):
    """Every switch follows from the tree, or from the config."""
    expected = made_by_maxtext(sample, mode)
    item = target(expected, line, ("d",))
    assert_restored(restore(sample, item), item, expected, "named")
    ost.register("maxtext")
    expected = state_of(inner(expected))
    item = target(expected, line, ("d",))
    assert_restored(restore(sample, item, None), item, expected, "registered, of NNX")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_each_form_of_a_tree(form, line):
    expected = form(made_by_maxtext("qwen3", "unscanned"))
    item = target(expected, line, ("d",))
    assert_restored(restore("qwen3", item), item, expected, "item")
    args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape), item)
    with ocp.Checkpointer(ost.SafetensorsHandler(family="maxtext")) as checkpointer:
        restored = checkpointer.restore(stored_directory("qwen3"), restore_args=args)
    assert_restored(restored, item, expected, "restore_args")
    planned = ost.plan_restore(stored_directory("qwen3"), item, family="maxtext")
    assert planned.total_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(expected))


@pytest.mark.parametrize(
    ("sample", "switches"),
    [
        ("qwen3", {"param_scan_axis": 0}),
        ("gpt-oss", {"param_scan_axis": 0}),
        ("mixtral", {"vocab_size": 80}),
        ("mixtral", {"vocab_size": 80, **UNSCANNED}),
        ("deepseek3_mtp", {"mtp": False, **UNSCANNED}),
    ],
    ids=str,
)
def test_each_switch(sample, switches, line):
    with ost.SafetensorsCheckpointer(family="maxtext", variant=switches) as checkpointer:
        expected = checkpointer.restore(stored_directory(sample))
    item = target(expected, line, ("d",))
    assert_restored(restore(sample, item), item, expected, f"{switches}")


def test_a_part_of_a_tree(line):
    """Whatever is left out, the leaves that are there decide."""
    expected = made_by_maxtext("qwen3", "unscanned")
    item = target(expected, line, ("d",))
    layer = {"params": {"decoder": {"layers_1": item["params"]["decoder"]["layers_1"]}}}
    part = restore("qwen3", layer, partial_restore=True)
    assert_same_bits(part["params"]["decoder"]["layers_1"], expected["params"]["decoder"]["layers_1"])
    item["params"]["decoder"]["layers_0"] = jax.tree.map(
        lambda _: ocp.PLACEHOLDER, item["params"]["decoder"]["layers_0"]
    )
    restored = restore("qwen3", item)
    assert all(leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(restored["params"]["decoder"]["layers_0"]))
    assert_same_bits(restored["params"]["decoder"]["layers_1"], expected["params"]["decoder"]["layers_1"])


def test_the_state_of_an_nnx_trainer(line):
    """Variables that are not stored are placeholders, beside the parameters or among them."""
    expected = made_by_maxtext("qwen3", "unscanned")
    weights = target(inner(expected), line, ("d",))
    aux = {"decoder": {"dropout": {"rngs": {"aqt": {"count": ocp.PLACEHOLDER}}}}}
    for item in (
        {"params": weights, "nnx_aux": aux},
        {"params": state_of(weights), "nnx_aux": flax.nnx.State(aux), "step": ocp.PLACEHOLDER},
        {**weights, "nnx_aux": aux},
    ):
        restored = restore("qwen3", item)
        assert restored["nnx_aux"]["decoder"]["dropout"]["rngs"]["aqt"]["count"] is ocp.PLACEHOLDER
        params = restored.get("params", {part: restored[part] for part in weights if part in restored})
        assert_restored(
            jax.tree.unflatten(jax.tree.structure(weights), jax.tree.leaves(params)), weights, inner(expected), "nnx"
        )
    item = {"params": weights, "nnx_aux": {"count": jax.ShapeDtypeStruct((3,), np.uint32)}}
    with pytest.raises(ost.TensorMismatchError, match=r"not in the checkpoint: 'nnx_aux\.count'"):
        restore("qwen3", item)


def test_switches_that_are_passed_stay(line):
    """The others follow, and an error names the variant that fits."""
    item = target(made_by_maxtext("qwen3", "unscanned"), line, ())
    fits = r"; this tree is that of variant=\{'scan_layers': False, 'vocab_size': 64\}$"
    with pytest.raises(ost.TensorMismatchError, match=f"not in the checkpoint: 'params.decoder.layers_0.{'.*'}{fits}"):
        restore("qwen3", item, variant={"scan_layers": True})
    with pytest.raises(ost.TensorMismatchError, match=fits):
        ost.plan_restore(stored_directory("qwen3"), item, family="maxtext", variant={"scan_layers": True})
    ost.register("maxtext", variant={"scan_layers": True})
    with pytest.raises(ost.TensorMismatchError, match="not in the checkpoint: 'params.decoder.layers_0"):
        restore("qwen3", item, None)
    assert_same_bits(restore("qwen3", item, variant={"param_scan_axis": 0}), made_by_maxtext("qwen3", "unscanned"))


def test_a_switch_that_does_not_follow(line):
    switches = {"rope_type": "default", **UNSCANNED}
    with ost.SafetensorsCheckpointer(family="maxtext", variant=switches) as checkpointer:
        expected = checkpointer.restore(stored_directory("llama3.1"))
    item = target(expected, line, ("d",))
    restored = restore("llama3.1", item, variant={"rope_type": "default"})
    assert_restored(restored, item, expected, "others follow")
    with pytest.raises(ost.TensorMismatchError, match=r"variant=\{'rope_type': 'default', 'scan_layers': False"):
        restore("llama3.1", item, variant={"rope_type": "default", "scan_layers": True})


def test_errors_are_about_the_nearest_variant(line):
    item = target(made_by_maxtext("qwen3", "unscanned"), line, ())
    norms = item["params"]["decoder"]["layers_1"]
    norms["another"] = norms.pop("pre_self_attention_layer_norm")
    for switches in (None, UNSCANNED):
        with pytest.raises(
            ost.TensorMismatchError, match=r"not in the checkpoint: '\S*layers_1.another.scale'"
        ) as raised:
            restore("qwen3", item, variant=switches)
        assert "layers_0" not in str(raised.value)
        assert "variant" not in str(raised.value)


def test_errors_that_no_variant_mends(line):
    item = target(made_by_maxtext("qwen3", "scanned"), line, ())
    embedding = item["params"]["token_embedder"]["embedding"]
    item["params"]["token_embedder"]["embedding"] = jax.ShapeDtypeStruct((63, 32), embedding.dtype)
    with pytest.raises(ost.TensorMismatchError, match=r"expected shape \(63, 32\), found \(64, 32\)$"):
        restore("qwen3", item)
    with pytest.raises(ost.MappingError, match="there is no family 'maxtex'"):
        restore("qwen3", item, "maxtex")


def test_a_family_without_variants(tmp_path):
    """Its switches are the caller's, and the error is that of the tree that it has by default."""
    family = Family("toy", (), lambda config, *, right=False: {"b" if right else "a": tensor("w", (2, 3))})
    write(tmp_path / "model.safetensors", {"w": np.ones((2, 3), np.float32)})
    with ocp.Checkpointer(ost.SafetensorsHandler(family=family)) as checkpointer:
        with pytest.raises(ost.TensorMismatchError, match=r"not in the checkpoint: 'b'"):
            checkpointer.restore(tmp_path, item={"b": np.zeros((2, 3), np.float32)})
        args = ost.SafetensorsRestore(item={"b": np.zeros((2, 3), np.float32)}, variant={"right": True})
        assert checkpointer.restore(tmp_path, args=args)["b"].tobytes() == np.ones((2, 3), np.float32).tobytes()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_saves(tmp_path, form):
    """The files are those of a save with the variant, and a restore without arguments returns the saved tree."""
    tree = made_by_maxtext("qwen3", "unscanned")
    args = {"family": "maxtext", "config": config_of("qwen3"), "index": False}
    ost.save(tmp_path / "named", tree, variant=UNSCANNED, **args)
    ost.save(tmp_path / "inferred", form(tree), **args)
    assert content(tmp_path / "inferred") == content(tmp_path / "named")
    original = stored(stored_directory("qwen3"))
    assert_same_bits(stored(tmp_path / "inferred"), original)


def test_saves_like_the_source(tmp_path):
    source, tree = stored_directory("qwen3"), made_by_maxtext("qwen3", "unscanned")
    ost.save(tmp_path / "saved", state_of(inner(tree)), family="maxtext", like=source)
    assert_same_bits(stored(tmp_path / "saved"), stored(source))
    assert (tmp_path / "saved" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    with pytest.raises(ost.MappingError, match="this tree is that of variant="):
        ost.save(tmp_path / "wrong", tree, family="maxtext", like=source, variant={"scan_layers": True})


def test_a_save_records_its_variant(tmp_path):
    tree = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), made_by_maxtext("qwen3", "unscanned"))
    ost.save(tmp_path / "saved", inner(tree), family="maxtext", config=config_of("qwen3"))
    restored = ost.load(tmp_path / "saved")
    assert names_of(restored).keys() == names_of(inner(tree)).keys()
    assert_same_bits(restored, inner(tree))


def test_a_save_with_a_switch_that_does_not_fit(tmp_path):
    tree = made_by_maxtext("qwen3", "unscanned")
    with pytest.raises(
        ost.MappingError, match=r"this tree is that of variant=\{'scan_layers': False, 'vocab_size': 64\}"
    ):
        ost.save(tmp_path / "saved", tree, family="maxtext", variant={"scan_layers": True}, config=config_of("qwen3"))
    del tree["params"]["decoder"]["layers_0"]["mlp"]
    with pytest.raises(ost.MappingError, match=r"maxtext.qwen3: params.decoder.layers_0.mlp.\S+ is missing") as raised:
        ost.save(tmp_path / "saved", tree, family="maxtext", config=config_of("qwen3"))
    assert "layers_1" not in str(raised.value)
    assert not (tmp_path / "saved").exists()


def test_a_tree_of_another_family_is_told_with_its_family(tmp_path):
    directory = stored_directory("qwen3")
    tree = ost.load(directory, family="maxtext")
    of_maxtext = r"; its leaves are those of family='maxtext\.qwen3'$"
    with pytest.raises(ost.TensorMismatchError, match=of_maxtext):
        ost.load(directory, tree, family="tunix")
    for more in ({"like": directory}, {"config": directory}):
        with pytest.raises(ost.MappingError, match=of_maxtext) as refused:
            ost.save(tmp_path / "saved", tree, family="tunix", **more)
        assert str(refused.value).count(";") < 7
    with pytest.raises(ost.MappingError) as refused:
        ost.save(tmp_path / "saved", {"no": np.zeros(2)}, family="tunix", like=directory)
    assert "its leaves are those" not in str(refused.value)
