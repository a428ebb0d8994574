"""Saves that are like another checkpoint: its names, dtypes, order, files and config, from any tree."""

import json
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, Tree, stack, tensor
from tests.multiprocess.workers_families import sharded, stored_directory
from tests.support.conversions import COMPUTED, unused
from tests.support.family_samples import CHOSEN
from tests.support.files import random_bits, write, write_indexed
from tests.support.maxtext_trees import stored as stored_in
from tests.support.quantized_layers import FAMILY as QUANTIZED
from tests.support.quantized_layers import GRIDS, config_of, in_tree, quantized, same
from tests.support.roots import TESTDATA
from tests.support.sharded_files import write_pieces

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
# The reference writer aligns data to 8 bytes.
AS_REFERENCE = ost.SafetensorsOptions(alignment=8)
MAXTEXT = TESTDATA / "maxtext"
TOKENIZER = {"tokenizer.json": b"{}\n", "generation_config.json": b'{"a": 1}', "tokenizer.model": b"\xff\0"}


def save(directory, tree, like, options=None, **arguments):
    with ocp.Checkpointer(ost.SafetensorsHandler(options=options)) as checkpointer:
        checkpointer.save(directory, args=ost.SafetensorsSave(tree, like=like, **arguments))


def saved_tensors(directory, *args, **arguments):
    save(directory, *args, **arguments)
    return stored_in(directory)


def restore(directory, **arguments):
    return ost.SafetensorsHandler().restore(epath.Path(directory), ost.SafetensorsRestore(**arguments))


@pytest.fixture
def source(tmp_path):
    """A small Qwen3 that `transformers` saved in three files, with files of a tokenizer."""
    shutil.copytree(stored_directory("qwen3"), tmp_path / "source")
    for name, content in TOKENIZER.items():
        (tmp_path / "source" / name).write_bytes(content)
    (tmp_path / "source" / "pytorch_model.bin").write_bytes(b"the same in another format")
    return tmp_path / "source"


@pytest.mark.parametrize("family", [None, "maxtext"])
def test_the_files_are_those_of_the_source_byte_for_byte(tmp_path, source, mesh, family):
    tree = restore(source, family=family)
    save(tmp_path / "saved", sharded(tree, mesh, ("x", None, "y")), source, AS_REFERENCE, family=family)
    names = {path.name for path in source.iterdir()}
    assert {name for name in names if not (tmp_path / "saved" / name).exists()} == {"pytorch_model.bin"}
    for name in names - {"pytorch_model.bin", "model.safetensors.index.json"}:
        assert (tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes(), name
    indexes = [json.loads((at / "model.safetensors.index.json").read_text()) for at in (source, tmp_path / "saved")]
    assert indexes[0]["weight_map"] == indexes[1]["weight_map"]


@pytest.mark.parametrize("model", [name for name, _ in CHOSEN])
def test_models_of_maxtext(tmp_path, model, caplog):
    source = stored_directory(model)
    tree = restore(source, family="maxtext", variant={"scan_layers": False})
    saved, expected = saved_tensors(tmp_path / "saved", tree, source, family="maxtext"), stored_in(source)
    left_out = {name for name in unused(model, expected) if re.search(r"(embed_tokens|head)\.weight", name)}
    assert saved.keys() == expected.keys() - left_out
    assert bool(left_out) == ("these tensors, which are not saved" in caplog.text)
    for name, array in saved.items():
        assert array.dtype == expected[name].dtype
        if model in COMPUTED:
            np.testing.assert_allclose(array, expected[name], rtol=2**-20, atol=2**-22)
        else:
            assert array.tobytes() == expected[name].tobytes(), name
    assert (tmp_path / "saved" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_the_variant_follows_from_the_tree(tmp_path, source):
    tree = restore(source, family="maxtext", variant={"scan_layers": False})
    saved = saved_tensors(tmp_path / "saved", tree["params"], source, family="maxtext")
    expected = stored_in(source)
    assert saved.keys() == expected.keys()
    assert all(saved[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_what_was_trained_in_float32_gets_the_stored_dtypes(tmp_path, source):
    stored = stored_in(source)
    narrow = {name: array.astype(BF16 if "proj" in name else F16) for name, array in stored.items()}
    (tmp_path / "narrow").mkdir()
    write(tmp_path / "narrow" / "model.safetensors", narrow)
    shutil.copy(source / "config.json", tmp_path / "narrow")
    trained = restore(source, family="maxtext")
    for directory, tree, family in (("a", trained, "maxtext"), ("b", stored, None)):
        saved = saved_tensors(tmp_path / directory, tree, tmp_path / "narrow", family=family)
        assert saved.keys() == stored.keys()
        for name, array in saved.items():
            assert array.dtype == narrow[name].dtype
            assert array.tobytes() == narrow[name].tobytes(), name  # NumPy rounds as well
        # The index says what is stored, so Orbax itself restores the tree, and so does a restore without arguments.
        by_orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(tmp_path / directory)
        again = restore(tmp_path / directory)
        wanted = narrow if family is None else restore(tmp_path / "narrow", family="maxtext")
        for found in (by_orbax, again):
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
            for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                assert (leaf.dtype, np.asarray(leaf).tobytes()) == (other.dtype, other.tobytes())


def test_what_exceeds_the_range_of_the_stored_dtype_is_infinite(tmp_path):
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "model.safetensors", {"a": np.ones(3, F16)})
    saved = saved_tensors(tmp_path / "saved", {"a": np.array([1e30, -1e30, 1], F32)}, tmp_path / "source")
    assert saved["a"].tolist() == [np.inf, -np.inf, 1]


def test_a_dtype_of_the_caller_goes_before_the_stored_one(tmp_path):
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "model.safetensors", {"a": np.ones(3, BF16), "b": np.ones(3, BF16)})
    tree = {"a": np.ones(3, F32), "b": np.ones(3, F32)}
    save_args = {"a": ocp.SaveArgs(dtype=np.float32), "b": ocp.SaveArgs()}
    saved = saved_tensors(tmp_path / "saved", tree, tmp_path / "source", save_args=save_args)
    assert [saved[name].dtype for name in "ab"] == [F32, BF16]


@pytest.mark.parametrize(
    ("stored", "saved", "fits"),
    [
        (np.int64, np.int32, True),
        (np.int32, np.int64, False),
        (np.uint8, np.int8, False),
        (np.int32, np.float32, False),
        (np.float32, np.int32, False),
        (np.bool_, np.int32, False),
        (ml_dtypes.float8_e4m3fn, np.float32, False),
        (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, True),
        (np.float64, np.float16, True),
    ],
)
def test_which_dtypes_take_which(tmp_path, stored, saved, fits):
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "model.safetensors", {"a": np.ones(8, stored)}, {"format": "pt"})
    tree = {"a": np.ones(8, saved)}
    if not fits:
        with pytest.raises(ost.TensorMismatchError, match=r"'a' is .*, and 'a' of .*source is .*SaveArgs"):
            save(tmp_path / "saved", tree, tmp_path / "source")
        return
    save(tmp_path / "saved", tree, tmp_path / "source", AS_REFERENCE)
    file = "model.safetensors"
    assert (tmp_path / "saved" / file).read_bytes()[8:] == (tmp_path / "source" / file).read_bytes()[8:]


def test_scalars_and_tensors_without_elements(tmp_path):
    tree = {
        "s": np.float32(3),
        "e": np.zeros((0, 4), BF16),
        "b": np.array([True, False]),
        "c": np.ones(3, np.complex64),
    }
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "model.safetensors", tree, {"format": "pt"})
    save(tmp_path / "saved", tree, tmp_path / "source", AS_REFERENCE)
    file = "model.safetensors"
    assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "source" / file).read_bytes()


def test_leaves_that_the_source_lacks(tmp_path, mesh):
    (tmp_path / "source").mkdir()
    w = random_bits(np.random.default_rng(0), (8, 8), BF16)
    write(tmp_path / "source" / "model.safetensors", {"layer.w": w})
    lora = jax.device_put(np.ones((8, 2), F32), NamedSharding(mesh, P("x")))
    state = {"layer": {"w": w, "lora": {"a": lora}}, "head": [lora]}
    with pytest.raises(
        ost.MappingError, match=r"like .*source: head.0 is not in the checkpoint; layer.lora.a is not .*ocp.PLACEHOLDER"
    ):
        save(tmp_path / "refused", state, tmp_path / "source")
    assert not (tmp_path / "refused").exists()

    def base(path, leaf):
        return leaf if path[-1] == jax.tree_util.DictKey("w") else ocp.PLACEHOLDER

    kept = jax.tree_util.tree_map_with_path(base, state)
    assert saved_tensors(tmp_path / "saved", kept, tmp_path / "source").keys() == {"layer.w"}
    # Orbax itself reads the base, and the places of the others are empty.
    restored = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(tmp_path / "saved")
    assert restored["layer"]["w"].tobytes() == w.tobytes()
    assert restored["layer"]["lora"]["a"] is None
    assert ost.plan_save(tmp_path / "x", kept, like=tmp_path / "source").processes[0].written_bytes == w.nbytes


def test_a_restore_keeps_adapters(tmp_path, mesh):
    w = random_bits(np.random.default_rng(0), (8, 8), BF16)
    write(tmp_path / "model.safetensors", {"layer.w": w})
    (tmp_path / "config.json").write_text("{}")
    state = {"layer": {"w": jax.device_put(np.zeros((8, 8), BF16), NamedSharding(mesh, P("x"))), "lora_a": np.ones(3)}}

    def base(path, leaf):
        return ocp.PLACEHOLDER if "lora" in jax.tree_util.keystr(path) else leaf

    for family in (None, Family("mine.w", (), lambda config: {"layer.w": tensor("layer.w", (8, 8))})):
        restored = restore(tmp_path, item=jax.tree_util.tree_map_with_path(base, state), family=family)
        assert restored["layer"]["lora_a"] is ocp.PLACEHOLDER
        assert np.asarray(restored["layer"]["w"]).tobytes() == w.tobytes()
        merged = jax.tree.map(lambda new, old: old if new is ocp.PLACEHOLDER else new, restored, state)
        assert merged["layer"]["lora_a"] is state["layer"]["lora_a"]
        assert merged["layer"]["w"] is restored["layer"]["w"]


def test_tensors_without_a_leaf_are_refused(tmp_path, source):
    stored = stored_in(source)
    del stored["model.norm.weight"]
    with pytest.raises(ost.MappingError, match=r"like .*source: model.norm.weight is missing"):
        save(tmp_path / "saved", stored, source)
    stored["model.norm.weight"] = np.ones(3, F32)
    with pytest.raises(ost.MappingError, match=r"model.norm.weight, of .*: expected \(32,\), found \(3,\)"):
        save(tmp_path / "saved", stored, source)


def test_paths_of_an_nnx_state_are_those_of_the_source(tmp_path):
    (tmp_path / "source").mkdir()
    kernel = np.arange(6, dtype=F32).reshape(2, 3)
    write(tmp_path / "source" / "model.safetensors", {"linear.kernel": kernel})
    state = {"linear": {"kernel": {"value": kernel}}}
    assert saved_tensors(tmp_path / "saved", state, tmp_path / "source").keys() == {"linear.kernel"}
    assert ost.verify(tmp_path / "saved") == []
    restored = restore(tmp_path / "saved")
    assert restored["linear"]["kernel"]["value"].tobytes() == kernel.tobytes()


def model(config):
    layers = [tensor(f"model.layers.{i}.w", (4, 6)).T for i in range(config["num_hidden_layers"])]
    return Tree({"w": stack(layers)}, unused=[r".*\.inv_freq", r"lm_head\.weight"])


SPELLED = Family("mine.m", ("MineForCausalLM",), model, renames=((r"^language_model\.", ""),))
W = {f"language_model.model.layers.{i}.w": np.arange(24, dtype=F32).reshape(4, 6) + i for i in range(11)}


@pytest.fixture
def spelled(tmp_path):
    """Names in another spelling, in an order of their own, and tensors that the family does not use."""
    directory = tmp_path / "spelled"
    directory.mkdir()
    unused = {"language_model.model.layers.0.inv_freq": np.ones(2, F32), "lm_head.weight": np.ones((2, 2), F32)}
    write_indexed(
        directory, [{name: W[name] for name in list(W)[5:]}, {name: W[name] for name in list(W)[:5]} | unused]
    )
    config = {"architectures": ["MineForCausalLM"], "num_hidden_layers": 11}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_names_are_spelled_as_in_the_source_and_tensors_that_follow_are_left_out(tmp_path, spelled):
    tree = restore(spelled, family=SPELLED)
    saved = saved_tensors(tmp_path / "saved", tree, spelled, family=SPELLED)
    assert saved.keys() == W.keys()
    assert all(saved[name].tobytes() == W[name].tobytes() for name in W)
    files = [ost.open_checkpoint(at, family="identity").tensors for at in (spelled, tmp_path / "saved")]
    assert {name: files[0][name].file for name in W} == {name: files[1][name].file for name in W}
    again = restore(tmp_path / "saved", family=SPELLED)
    assert again["w"].tobytes() == tree["w"].tobytes()
    # Without `like`, the save has the spelling of the family.
    alone = tmp_path / "alone"
    with ocp.Checkpointer(ost.SafetensorsHandler(family=SPELLED)) as checkpointer:
        checkpointer.save(alone, args=ost.SafetensorsSave(tree, config=spelled))
    assert stored_in(alone).keys() == {name.removeprefix("language_model.") for name in W}
    assert json.loads((alone / "config.json").read_text()) == json.loads((spelled / "config.json").read_text())


def test_files_that_are_too_long_are_laid_out_anew_in_the_same_order(tmp_path, spelled):
    tree = restore(spelled, family=SPELLED)
    save(tmp_path / "saved", tree, spelled, family=SPELLED, max_file_bytes=300)
    checkpoint = ost.open_checkpoint(tmp_path / "saved")
    assert len(checkpoint.files) == 4
    stored = ost.open_checkpoint(spelled).tensors
    assert list(checkpoint.tensors) == [name for name in stored if name in W]


def test_another_config_goes_before_that_of_the_source(tmp_path, source):
    config = json.loads((source / "config.json").read_text()) | {"rope_theta": 5.0}
    save(tmp_path / "saved", restore(source, family="maxtext"), source, family="maxtext", config=config)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == TOKENIZER["tokenizer.json"]


def test_the_config_may_be_a_path_with_a_tokenizer_beside_it(tmp_path, source):
    tree = restore(source, family="maxtext")
    for number, config in enumerate((source, source / "config.json")):
        saved = tmp_path / f"{number}"
        with ocp.Checkpointer(ost.SafetensorsHandler(family="maxtext")) as checkpointer:
            checkpointer.save(saved, args=ost.SafetensorsSave(tree, config=config))
        assert json.loads((saved / "config.json").read_text()) == json.loads((source / "config.json").read_text())
        assert (saved / "tokenizer.model").exists() == (config == source)


def test_a_single_file_brings_its_config_alone(tmp_path, source):
    (tmp_path / "whole").mkdir()
    stored = stored_in(source)
    write(tmp_path / "whole" / "any.safetensors", stored)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, tmp_path / "whole")
    saved = saved_tensors(
        tmp_path / "saved", restore(source, family="maxtext"), tmp_path / "whole" / "any.safetensors", family="maxtext"
    )
    assert saved.keys() == stored.keys()
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert (tmp_path / "saved" / "config.json").exists()
    assert not (tmp_path / "saved" / "tokenizer.json").exists()


def test_pieces_are_saved_as_whole_tensors(tmp_path):
    whole = np.arange(24, dtype=F32).reshape(4, 6)
    (tmp_path / "source").mkdir()
    write_pieces(tmp_path / "source", [[("a", (0, 0), whole[:2])], [("a", (2, 0), whole[2:])]])
    saved = saved_tensors(tmp_path / "saved", {"a": whole}, tmp_path / "source")
    assert saved["a"].tobytes() == whole.tobytes()
    assert ost.open_checkpoint(tmp_path / "saved").metadata == {"format": "pt"}


def quantised_source(directory, grid):
    stored, plain = quantized(np.random.default_rng(0), *GRIDS[grid])
    directory.mkdir()
    write(directory / "model.safetensors", stored, {"format": "pt"})
    config = {"quantization_config": config_of(grid), "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    return plain


def test_a_quantised_source_is_saved_plainly(tmp_path):
    plain = quantised_source(tmp_path / "source", "blocks")
    tree = restore(tmp_path / "source", family=QUANTIZED)
    saved = saved_tensors(tmp_path / "plain", tree, tmp_path / "source", family=QUANTIZED)
    assert saved.keys() == plain.keys()
    for name, array in plain.items():
        assert saved[name].dtype == BF16
        assert saved[name].tobytes() == array.astype(BF16).tobytes()
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    narrow = {name: array.astype(BF16) for name, array in plain.items()}
    jax.tree.map(same, restore(tmp_path / "plain", family=QUANTIZED), in_tree(narrow))


def test_codes_and_scales_that_are_kept_go_back_as_they_are_stored(tmp_path):
    quantised_source(tmp_path / "source", "rows")
    split = ost.SafetensorsOptions(dequantize="split", alignment=8)
    for number, (family, options) in enumerate(((None, AS_REFERENCE), (QUANTIZED, split))):  # by name, or in a tree
        codes = ost.load(tmp_path / "source", family=family, options=options)
        save(tmp_path / f"{number}", codes, tmp_path / "source", options, family=family)
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / f"{number}" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
    # The scale of a block that the family cuts stands in several places, which may differ.
    quantised_source(tmp_path / "blocks", "blocks")
    cut = ost.load(tmp_path / "blocks", family=QUANTIZED, options=split)
    with pytest.raises(ost.MappingError, match="each element of a tensor has to be used once.*_scale_inv"):
        save(tmp_path / "refused", cut, tmp_path / "blocks", split, family=QUANTIZED)


@pytest.mark.parametrize("arguments", [{"like": True}, {}], ids=["like", "config alone"])
def test_a_config_says_how_codes_are_quantised(tmp_path, arguments):
    quantised_source(tmp_path / "source", "rows")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    split = ost.SafetensorsOptions(dequantize="split")
    for number, (family, options) in enumerate(((None, None), (QUANTIZED, split), (QUANTIZED, None))):
        tree = ost.load(tmp_path / "source", family=family, options=options)
        like = tmp_path / "source" if arguments else None
        if options and not like:
            continue  # only a source says which leaves have scales
        save(tmp_path / f"{number}", tree, like, options, family=family, config=config)
        expected = config if family is None or options else {"torch_dtype": "bfloat16"}
        assert json.loads((tmp_path / f"{number}" / "config.json").read_text()) == expected


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_config_of_another_method_stays_beside_codes(tmp_path, method):
    config = {"quantization_config": {"quant_method": method}}
    codes = {"a.qweight": np.ones((4, 4), np.int32), "a.scales": np.ones(4, F16)}
    ost.save(tmp_path / "codes", codes, config=config)
    assert json.loads((tmp_path / "codes" / "config.json").read_text()) == config
    ost.save(tmp_path / "plain", {"a.weight": np.ones((4, 4), BF16)}, config=config)
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {}


def test_what_is_not_a_checkpoint(tmp_path):
    with pytest.raises(ost.MissingError, match="none"):
        save(tmp_path / "saved", {"a": np.ones(3)}, tmp_path / "none")
    options = ost.SafetensorsOptions(storage_options={"token": "secret"})
    with pytest.raises(ost.SafetensorsError, match="storage_options are for one store") as error:
        ost.plan_save("gs://b/x", {"a": np.ones(3)}, like="s3://c/y", options=options)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("argument", ["like", "config"])
def test_a_forced_save_does_not_delete_what_it_reads(tmp_path, source, argument):
    tree = restore(source, family="maxtext")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    same = f"source: {argument}= is the checkpoint that this save replaces; save elsewhere$"
    for directory, message in ((source, same), (tmp_path, r"source: is in .*, which the save would delete")):
        with pytest.raises(ost.StorageError, match=message):
            ost.save(directory, tree, family="maxtext", force=True, **{argument: source})
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    (tmp_path / "saved").mkdir()
    ost.save(tmp_path / "saved", tree, family="maxtext", force=True, **{argument: source})
    assert stored_in(tmp_path / "saved").keys() == stored_in(source).keys()


def test_the_plan_is_that_of_the_save(tmp_path, source, mesh):
    tree = sharded(restore(source, family="maxtext"), mesh, ("x", None, "y"))
    plan = ost.plan_save(tmp_path / "saved", tree, family="maxtext", like=source)
    save(tmp_path / "saved", tree, source, family="maxtext")
    assert {file.file: file.nbytes for file in plan.files} == {
        path.name: path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors")
    }


@pytest.mark.parametrize("name", ["s3", "gcs", "azure"])
def test_from_object_store_to_object_store(request, tmp_path, source, mesh, name):
    place = request.getfixturevalue(name)
    for path in source.iterdir():
        obstore.put(place.store(), f"source/{path.name}", path.read_bytes())
    options = ost.SafetensorsOptions(storage_options=place.options, alignment=8)
    at = f"{place.url}/source"
    tree = sharded(ost.load(at, family="maxtext", options=options), mesh, ("x", None, "y"))
    ost.save(f"{place.url}/saved", tree, family="maxtext", like=at, options=options)
    listed = [one["path"] for one in obstore.list(place.store(), "saved").collect()]
    found = {path.removeprefix("saved/"): bytes(obstore.get(place.store(), path).bytes()) for path in listed}
    for path in source.iterdir():
        if path.name not in ("pytorch_model.bin", "model.safetensors.index.json"):
            assert found[path.name] == path.read_bytes(), path.name
    assert "pytorch_model.bin" not in found
    with pytest.raises(ost.StorageError, match="source: is in .*, which the save would delete"):
        ost.save(place.url, tree, family="maxtext", like=at, force=True, options=options)


def test_like_a_model_of_the_hub(tmp_path, source, hub, monkeypatch):
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    files = {path.name: path.read_bytes() for path in source.iterdir()} | {"1_Pooling/config.json": b"{}"}
    hub.hub.commit("somebody/qwen", files)
    ost.save(tmp_path / "saved", restore(source, family="maxtext"), family="maxtext", like="hf://somebody/qwen")
    assert (tmp_path / "saved" / "1_Pooling" / "config.json").read_bytes() == b"{}"
    for path in source.glob("*.json"):
        if "index" not in path.name:
            assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
    assert stored_in(tmp_path / "saved").keys() == stored_in(source).keys()


def test_a_save_in_the_background(tmp_path, source):
    tree = restore(source, family="maxtext")
    with ocp.AsyncCheckpointer(ost.SafetensorsHandler(family="maxtext")) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree, like=source))
    assert (tmp_path / "saved" / "tokenizer.model").read_bytes() == TOKENIZER["tokenizer.model"]
    assert all(
        stored_in(tmp_path / "saved")[name].tobytes() == array.tobytes() for name, array in stored_in(source).items()
    )
