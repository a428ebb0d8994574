"""`register("maxtext")`: Orbax's own handlers restore plain Hugging Face directories into a model's tree."""

import json
import shutil
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import Mesh

import orbax_safetensors as ost
from orbax_safetensors.mapping import registry
from tests.multiprocess.workers_families import config_of, made_by_maxtext, stored_directory, target
from tests.support.family_samples import FAMILY
from tests.support.files import write
from tests.support.maxtext_trees import EACH_TREE, assert_restored, assert_same_bits

MODES = ("scanned", "unscanned")


@pytest.fixture(autouse=True)
def _unregistered():
    yield
    ost.unregister()


@pytest.fixture
def line():
    """Eight devices as a mesh of one axis."""
    return Mesh(np.array(jax.devices()), ("d",))


def stock(directory, item, **kwargs):
    """A restore with Orbax's own handler, as MaxText has it."""
    args = ocp.checkpoint_utils.construct_restore_args(item)
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(directory), item=item, restore_args=args, **kwargs)


def edited(tree, path, leaf):
    """`tree` with another leaf at `path`, which is left out if it is None."""
    first, *rest = path
    out = {**tree, first: edited(tree.get(first, {}), rest, leaf) if rest else leaf}
    return {key: value for key, value in out.items() if value is not None}


EMBEDDING = ("params", "token_embedder", "embedding")
SCALE = ("params", "decoder", "decoder_norm", "scale")


# --- trees ---


@EACH_TREE
def test_the_tree_that_maxtexts_converter_made(sample, mode, line):
    """Whole on each device, and eight ways."""
    ost.register("maxtext")
    expected = made_by_maxtext(sample, mode)
    for axes in ((), ("d",)):
        item = target(expected, line, axes)
        assert_restored(stock(stored_directory(sample), item, transforms={}), item, expected, f"{axes}")


@pytest.mark.parametrize("of_nnx", [False, True])
def test_a_leading_params_more_or_less(of_nnx, line):
    """MaxText's loaders have the tree below `params`, once or twice, or alone; paths of NNX's states have `value`."""
    ost.register("maxtext")
    expected = made_by_maxtext("qwen3", "unscanned")["params"]
    if of_nnx:
        expected = jax.tree.map(lambda leaf: {"value": leaf}, expected)
    for above in range(3):
        item = target(expected, line, ("d",))
        assert_restored(stock(stored_directory("qwen3"), item), item, expected, f"{above}")
        expected = {"params": expected}


# --- ways to ask for them ---


def with_arguments(directory, item):
    args = ocp.args.PyTreeRestore(item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item))
    return ocp.PyTreeCheckpointHandler().restore(directory, args=args)


def with_a_checkpointer(directory, item):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.checkpoint_utils.construct_restore_args(item)
        return checkpointer.restore(directory, item=item, restore_args=args, transforms={})


def with_the_standard_checkpointer(directory, item):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory, item)


def without_shapes(directory, item):
    args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), item)
    return ocp.PyTreeCheckpointHandler().restore(directory, item=item, restore_args=args)


WAYS = [with_arguments, with_a_checkpointer, with_the_standard_checkpointer, without_shapes]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_ask(way, line):
    ost.register("maxtext")
    expected = made_by_maxtext("qwen3", "unscanned")
    item = target(expected, line, ("d",))
    assert_restored(way(epath.Path(stored_directory("qwen3")), item), item, expected, way.__name__)


def test_without_arguments_for_leaves_they_are_numpy(line):
    ost.register("maxtext")
    expected = made_by_maxtext("qwen3", "unscanned")
    item = target(expected, line, ())
    restored = ocp.PyTreeCheckpointHandler().restore(epath.Path(stored_directory("qwen3")), item=item)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored))
    assert_same_bits(restored, expected)


def test_names_of_stored_tensors_stay_names(line):
    ost.register("maxtext")
    with ost.SafetensorsCheckpointer(family="identity") as checkpointer:
        expected = checkpointer.restore(stored_directory("qwen3"))
    item = target(expected, line, ("d",))
    assert_restored(stock(stored_directory("qwen3"), item), item, expected, "all")
    part = {name: item[name] for name in list(item)[:3]}
    assert_restored(
        stock(stored_directory("qwen3"), part), part, {name: expected[name] for name in part}, "some of them"
    )
    part["model.norm.weights"] = item["model.norm.weight"]
    with pytest.raises(ost.TensorMismatchError, match=r"'model.norm.weights' \(nearest: 'model.norm.weight'\)"):
        stock(stored_directory("qwen3"), part)
    # Our own functions take the registered family by default.
    with pytest.raises(ost.TensorMismatchError, match="names of stored tensors, .*: family='identity' restores these"):
        ost.load(stored_directory("qwen3"), item)


def test_tensors_that_are_not_there(tmp_path, line):
    """With no family registered, leaves of a plain directory are stored tensors."""
    write(tmp_path / "model.safetensors", {"a": np.ones((8, 2), np.float32)})
    ost.register()
    with pytest.raises(ost.TensorMismatchError, match=r"not in the checkpoint: 'b'"):
        stock(tmp_path, target({"b": np.ones((8, 2), np.float32)}, line, ()))


# --- what is registered ---


def test_a_family_by_its_name(line):
    ost.register("maxtext.qwen3")
    expected = made_by_maxtext("qwen3", "scanned")
    item = target(expected, line, ("d",))
    assert_restored(stock(stored_directory("qwen3"), item), item, expected, "by name")
    llama = target(made_by_maxtext("llama3.1", "scanned"), line, ())
    with pytest.raises(ost.MappingError, match="no registered family is for architecture LlamaForCausalLM"):
        stock(stored_directory("llama3.1"), llama)


def test_a_variant_that_was_given(line):
    ost.register("maxtext", variant={"scan_layers": False})
    expected = made_by_maxtext("qwen3", "unscanned")
    item = target(expected, line, ("d",))
    assert_restored(stock(stored_directory("qwen3"), item), item, expected, "unscanned")
    scanned = target(made_by_maxtext("qwen3", "scanned"), line, ())
    with pytest.raises(ost.MappingError, match=r"maxtext.qwen3: .*'scan_layers': False.*layers_0.* is missing"):
        stock(stored_directory("qwen3"), scanned)


def test_our_handlers_have_the_variant(tmp_path):
    """A family that is asked for by name has its own defaults, and a variant that is asked for comes first."""
    ost.register("maxtext", variant={"scan_layers": False})
    trees = {mode: made_by_maxtext("qwen3", mode) for mode in MODES}
    directory = stored_directory("qwen3")
    assert_same_bits(ost.SafetensorsHandler().restore(directory), trees["unscanned"])
    assert_same_bits(ost.SafetensorsHandler(variant={"scan_layers": True}).restore(directory), trees["scanned"])
    assert_same_bits(ost.SafetensorsHandler(family="maxtext").restore(directory), trees["scanned"])
    with ost.SafetensorsCheckpointer() as checkpointer:
        args = ost.SafetensorsSave(trees["unscanned"], config=config_of("qwen3"))
        checkpointer.save(tmp_path / "saved", args=args)
        ost.unregister()
        assert_same_bits(checkpointer.restore(tmp_path / "saved"), trees["unscanned"])


def test_what_is_registered_last_counts(line):
    ost.register("maxtext", variant={"scan_layers": True})
    expected = made_by_maxtext("qwen3", "unscanned")
    item = target(expected, line, ("d",))
    for _ in range(2):
        ost.register("maxtext")
        assert_restored(stock(stored_directory("qwen3"), item), item, expected, "again")


@pytest.mark.parametrize(
    ("families", "variant", "message"),
    [
        (["maxtex"], None, "there is no family 'maxtex' \\(nearest: 'maxtext'\\)$"),
        (["maxtext", "maxtext.qwen"], None, "there is no family 'maxtext.qwen'"),
        (["maxtext", 3], None, "expected a family or the name of one, found 3"),
        (["maxtext"], {"scan_layer": False}, r"has no switch 'scan_layer' \(nearest: 'scan_layers'\)"),
        (["maxtext"], {"scan_layers": 1}, "expected a bool for scan_layers, found 1"),
        (["maxtext.qwen3"], {"mtp": False}, r"maxtext.qwen3 has no switch 'mtp'; it has scan_layers"),
    ],
)
def test_what_cannot_be_registered(families, variant, message):
    """The error comes at once, and nothing is registered: neither families nor handlers."""
    before = ocp.type_handlers.get_type_handler(jax.Array)
    with pytest.raises(ost.MappingError, match=message):
        ost.register(*families, variant=variant)
    assert not registry.any_registered()
    assert ocp.type_handlers.get_type_handler(jax.Array) is before


def test_unregister_takes_all_back(line):
    item = target(made_by_maxtext("qwen3", "scanned"), line, ())
    ost.register("maxtext", variant={"scan_layers": False})
    ost.unregister()
    with pytest.raises(FileNotFoundError, match="parameter subdirectory not found"):
        stock(stored_directory("qwen3"), item)
    assert "model.norm.weight" in ost.SafetensorsHandler().restore(stored_directory("qwen3"))
    ost.register("maxtext")
    stock(stored_directory("qwen3"), item)


def test_from_many_threads(line):
    samples = ("qwen3", "gpt-oss", "deepseek3", "gemma3")
    # Read here, as Python 3.11 cannot parse NumPy's headers in several threads.
    trees = {(sample, mode): made_by_maxtext(sample, mode) for sample in samples for mode in MODES}
    start, errors = threading.Barrier(len(samples)), []

    def work(sample):
        try:
            start.wait()
            ost.register("maxtext")
            for mode in MODES:
                expected = trees[sample, mode]
                item = target(expected, line, ("d",))
                assert_restored(stock(stored_directory(sample), item), item, expected, sample)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(sample,)) for sample in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# --- errors ---


@pytest.mark.parametrize(
    ("path", "shape", "message"),
    [
        (SCALE, (33,), r"params.decoder.decoder_norm.scale, of 'model.norm.weight': expected \(32,\), found \(33,\)"),
        (EMBEDDING, (64, 33), r"embedding, of 'model.embed_tokens.weight': expected \(64, 32\), found \(64, 33\)"),
        (EMBEDDING, (63, 32), "vocab_size 63 would cut off the vocabulary, which config.json says has 64 entries"),
        (SCALE, None, "params.decoder.decoder_norm.scale is missing"),
        (("params", "head"), (2, 3), "params.head is not in the family's tree"),
        (("step",), (), "step is not in the family's tree"),
    ],
    ids=["shape", "width", "vocabulary", "missing", "extra", "state"],
)
def test_a_tree_that_does_not_fit(path, shape, message, line):
    ost.register("maxtext")
    item = target(made_by_maxtext("qwen3", "scanned"), line, ())
    leaf = (
        None if shape is None else jax.ShapeDtypeStruct(shape, np.float32, sharding=jax.tree.leaves(item)[0].sharding)
    )
    with pytest.raises(ost.MappingError, match=message) as raised:
        stock(stored_directory("qwen3"), edited(item, path, leaf))
    assert str(raised.value).startswith(f"{stored_directory('qwen3')}: maxtext.qwen3: ")


def test_several_families_fit(line):
    """If only one of those that are registered for an architecture has the tree, it is that one."""
    same = ost.mapping.Family("mine.qwen3", ("Qwen3ForCausalLM",), FAMILY["maxtext.qwen3"].tree)
    other = ost.mapping.Family(
        "other.qwen3", ("Qwen3ForCausalLM",), lambda config: {"w": ost.mapping.tensor("lm_head.weight", (64, 32))}
    )
    expected = made_by_maxtext("qwen3", "scanned")
    item = target(expected, line, ("d",))
    ost.register("maxtext", other)
    assert_restored(stock(stored_directory("qwen3"), item), item, expected, "one fits")
    ost.register(same)
    with pytest.raises(ost.MappingError, match="several registered families .*: maxtext.qwen3, mine.qwen3; register"):
        stock(stored_directory("qwen3"), item)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["BertModel"]}, r"no registered family is for architecture BertModel"),
        ({}, "no registered family is for a checkpoint without config.json"),
        (None, "no registered family is for a checkpoint without config.json"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "maxtext.qwen3: config.json has no 'num_hidden_layers'"),
    ],
    ids=["unknown", "empty", "absent", "incomplete"],
)
def test_a_config_without_a_family(tmp_path, config, message, line):
    ost.register("maxtext")
    directory = shutil.copytree(stored_directory("qwen3"), tmp_path / "copy")
    (directory / "config.json").unlink()
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ost.MappingError, match=message):
        stock(directory, target(made_by_maxtext("qwen3", "scanned"), line, ()))


def test_what_reads_metadata_first_needs_a_link():
    """Orbax looks for its own file there, and asks no type handler; `link` and saves write that file."""
    ost.register("maxtext")
    with pytest.raises(FileNotFoundError, match="_METADATA"):
        ocp.PyTreeCheckpointHandler().metadata(epath.Path(stored_directory("qwen3")))
    with pytest.raises(FileNotFoundError, match="_METADATA"):
        ocp.StandardCheckpointer().restore(stored_directory("qwen3"))


def test_what_a_tree_does_not_ask_for_is_logged_and_transforms_are_not_applied(tmp_path, line, caplog):
    stored = {name: np.ones((8, 2), np.float32) for name in ("emb", "w.0", "w.1")}
    write(tmp_path / "model.safetensors", stored)
    ost.register()
    item = target({"emb": stored["emb"]}, line, ())
    assert_restored(stock(tmp_path, item), item, {"emb": stored["emb"]}, "fewer")
    assert "the tree has no leaf for these, which are not restored: w.0, w.1" in caplog.text
    transforms = {"emb2": ocp.Transform(original_key="emb")}
    with pytest.raises(ost.TensorMismatchError, match=r"'emb2' \(nearest: 'emb'\); transforms do not rename tensors"):
        stock(tmp_path, {"emb2": item["emb"]}, transforms=transforms)
    assert caplog.text.count("no leaf for these") == 1
