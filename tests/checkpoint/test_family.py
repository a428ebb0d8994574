"""A model's own tree, restored and saved through a family that somebody wrote."""

import json
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, Tree, concatenate, full, stack, tensor
from orbax_safetensors.mapping.registry import IDENTITY
from tests.support.compare import assert_same_arrays
from tests.support.files import random_bits, write, write_indexed
from tests.support.sharded_files import write_pieces

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYERS, WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY = 3, 16, 4, 8, 24, 40
CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "head_dim": HEAD,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCABULARY,
}


def toy_tree(config, *, scan_layers=True, vocab_size=None):
    width, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    layers = range(config["num_hidden_layers"])
    embedding = tensor("embed.weight", (config["vocab_size"], width))
    query = [tensor(f"layers.{n}.q.weight", (heads * head, width)).T.reshape((width, heads, head)) for n in layers]
    both = [tensor(f"layers.{n}.gate_up", (width, 2 * config["intermediate_size"])) for n in layers]
    parts = {
        "query.kernel": query,
        "gate": [view.slice(slice(None), slice(0, None, 2)) for view in both],
        "up": [view.slice(slice(None), slice(1, None, 2)) for view in both],
        "norm.scale": [tensor(f"layers.{n}.norm.weight", (width,)) for n in layers],
    }
    leaves = {"params.embedding": embedding.pad((vocab_size or config["vocab_size"], width))}
    for name, views in parts.items():
        if scan_layers:
            leaves[f"params.layers.{name}"] = stack(views, axis=1)
        else:
            leaves |= {f"params.layers_{n}.{name}": view for n, view in enumerate(views)}
    return Tree(leaves, unused=[r".*\.inv_freq"])


TOY = Family("toy.model", ("ToyForCausalLM",), toy_tree)


def expected(tensors, vocab_size=VOCABULARY):
    """What `toy_tree` means, in NumPy."""
    each = [f"layers.{n}." for n in range(LAYERS)]
    layers = {
        "query": {
            "kernel": np.stack([tensors[f"{at}q.weight"].T.reshape(WIDTH, HEADS, HEAD) for at in each], axis=1),
        },
        "gate": np.stack([tensors[f"{at}gate_up"][:, ::2] for at in each], axis=1),
        "up": np.stack([tensors[f"{at}gate_up"][:, 1::2] for at in each], axis=1),
        "norm": {"scale": np.stack([tensors[f"{at}norm.weight"] for at in each], axis=1)},
    }
    embedding = np.zeros((vocab_size, WIDTH), tensors["embed.weight"].dtype)
    embedding[:VOCABULARY] = tensors["embed.weight"]
    return {"params": {"embedding": embedding, "layers": layers}}


@pytest.fixture
def tensors(rng):
    made = {"embed.weight": random_bits(rng, (VOCABULARY, WIDTH), BF16)}
    for n in range(LAYERS):
        made[f"layers.{n}.q.weight"] = random_bits(rng, (HEADS * HEAD, WIDTH), BF16)
        made[f"layers.{n}.gate_up"] = random_bits(rng, (WIDTH, 2 * HIDDEN), BF16)
        made[f"layers.{n}.norm.weight"] = random_bits(rng, (WIDTH,), BF16)
    return made


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def model(tmp_path, tensors):
    directory = tmp_path / "model"
    directory.mkdir()
    names = list(tensors)
    write_indexed(directory, [{name: tensors[name] for name in names[at::3]} for at in range(3)])
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture
def registered():
    ost.register(TOY)
    yield
    ost.unregister()


def checkpointer(**kwargs):
    return ocp.Checkpointer(ost.SafetensorsHandler(**kwargs))


def edit(model, **changes):
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


class TestRestore:
    def test_a_config_that_is_something_else(self, model):
        with (model / "config.json").open("wb") as file:
            file.truncate(2**30)
        with pytest.raises(ost.StorageError, match="config.json: expected at most 4194304 bytes, found 1073741824"):
            checkpointer(family=TOY).restore(model)

    def test_without_a_target_the_tree_comes_back_as_numpy(self, model, tensors):
        assert_same_arrays(checkpointer(family=TOY).restore(model), expected(tensors))

    def test_the_arguments_come_before_the_handlers(self, model, tensors):
        args = ost.SafetensorsRestore(family=TOY, variant={"vocab_size": 64})
        assert_same_arrays(checkpointer(family="maxtext").restore(model, args=args), expected(tensors, 64))

    def test_a_registered_family_is_found_by_the_architecture(self, model, tensors, registered):
        assert_same_arrays(checkpointer().restore(model), expected(tensors))
        assert "params.layers.gate" in ost.open_checkpoint(model).leaves

    def test_a_registered_family_leaves_other_architectures_alone(self, model, tensors, registered):
        edit(model, architectures=["OtherForCausalLM"])
        assert set(checkpointer().restore(model)) == set(tensors)

    @pytest.mark.parametrize("identity", ["identity", IDENTITY])
    def test_a_registered_family_can_be_declined(self, model, tensors, tmp_path, registered, identity):
        assert set(checkpointer(family=identity).restore(model)) == set(tensors)
        args = ost.SafetensorsSave(tensors, family=identity, config=CONFIG)
        checkpointer().save(tmp_path / "saved", args=args)
        assert set(checkpointer(family=identity).restore(tmp_path / "saved")) == set(tensors)

    def test_a_registered_family_leaves_trees_of_orbax_alone(self, tmp_path, registered):
        tree_checkpointer = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (jax.Array, ost.SafetensorsTypeHandler())
                )
            )
        )
        tree_checkpointer.save(tmp_path / "tree", {"a": jax.numpy.arange(4)})
        (tmp_path / "tree" / "config.json").write_text(json.dumps(CONFIG))
        args = {"a": ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
        np.testing.assert_array_equal(tree_checkpointer.restore(tmp_path / "tree", restore_args=args)["a"], range(4))

    def test_the_convention_alone_finds_the_family(self, model, tensors, registered):
        assert_same_arrays(checkpointer(family="toy").restore(model), expected(tensors))
        assert_same_arrays(checkpointer(family="toy.model").restore(model), expected(tensors))

    @pytest.mark.parametrize("axis", range(4))
    @pytest.mark.both_devices
    def test_sharded_over_any_dimension(self, model, tensors, axis):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        wanted = expected(tensors)

        def abstract(array):
            sharded = axis < array.ndim and array.shape[axis] % 8 == 0
            spec = PartitionSpec(*[None] * axis, "x") if sharded else PartitionSpec()
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

        item = jax.tree.map(abstract, wanted)
        restored = checkpointer(family=TOY).restore(model, args=ost.SafetensorsRestore(item=item))
        assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, item)
        assert_same_arrays(restored, wanted)

    @pytest.mark.both_devices
    def test_a_part_of_the_tree(self, model, tensors):
        item = {"params": {"layers": {"gate": jax.ShapeDtypeStruct((WIDTH, LAYERS, HIDDEN), np.float32)}}}
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        gate = checkpointer(family=TOY).restore(model, args=args)["params"]["layers"]["gate"]
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(gate, expected(tensors)["params"]["layers"]["gate"].astype(np.float32))

    def test_a_part_of_a_checkpoint_that_lacks_the_rest(self, model, tensors):
        del tensors["embed.weight"]
        write(model / "model.safetensors", tensors)
        (model / "model.safetensors.index.json").unlink()
        for file in model.glob("model-*"):
            file.unlink()
        item = {"params": {"layers": {"gate": jax.ShapeDtypeStruct((WIDTH, LAYERS, HIDDEN), BF16)}}}
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        assert checkpointer(family=TOY).restore(model, args=args)["params"]["layers"]["gate"].dtype == BF16
        with pytest.raises(ost.MappingError, match=r"params\.embedding is made of 'embed.weight'.*not stored"):
            checkpointer(family=TOY).restore(model)

    def test_one_file_finds_the_config_beside_it(self, tmp_path, tensors):
        write(tmp_path / "all.safetensors", tensors)
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        with ost.SafetensorsCheckpointer(family=TOY) as one:
            assert_same_arrays(one.restore(tmp_path / "all.safetensors"), expected(tensors))

    def test_other_spellings_of_stored_names(self, model, tensors):
        renamed = Family("toy.renamed", (), toy_tree, renames=((r"^model\.", ""),))
        write(model / "model.safetensors", {f"model.{name}": array for name, array in tensors.items()})
        (model / "model.safetensors.index.json").unlink()
        for file in model.glob("model-*"):
            file.unlink()
        assert_same_arrays(checkpointer(family=renamed).restore(model), expected(tensors))

    def test_pytorchs_pieces_are_whole_to_a_family(self, tensors, tmp_path):
        def halves(name, array):
            cut = array.shape[-1] // 2
            start = (0,) * (array.ndim - 1)
            return (name, (*start, 0), array[..., :cut]), (name, (*start, cut), array[..., cut:])

        pairs = [halves(name, array) for name, array in tensors.items()]
        write_pieces(tmp_path, [[first for first, _ in pairs], [second for _, second in pairs]])
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        assert_same_arrays(checkpointer(family=TOY).restore(tmp_path), expected(tensors))

    @pytest.mark.both_devices
    def test_constants_and_arithmetic(self, tmp_path):
        stored = np.array([[1.5, -2], [3, 4]], np.float32)
        write(tmp_path / "model.safetensors", {"w": stored})

        def tree(config):
            half = tensor("w", (2, 2)).scale(2).offset(1)
            return {"a.b": concatenate([half.T, full((1, 2), 7)]), "c": full((3,), -1, np.dtype(np.int32))}

        restored = checkpointer(family=Family("f", (), tree)).restore(tmp_path)
        np.testing.assert_array_equal(restored["a"]["b"], [[4, 7], [-3, 9], [7, 7]])
        np.testing.assert_array_equal(restored["c"], np.full(3, -1, np.int32))
        assert restored["a"]["b"].dtype == np.float32

    @pytest.mark.both_devices
    def test_arithmetic_rounds_once(self, tmp_path, rng):
        stored = rng.standard_normal((64, 64)).astype(BF16)
        write(tmp_path / "model.safetensors", {"w": stored})
        family = Family("f", (), lambda config: {"w": tensor("w", (64, 64)).T.scale(1.1).offset(1)})
        exact = stored.T.astype(np.float32) * np.float32(1.1) + np.float32(1)
        np.testing.assert_array_equal(checkpointer(family=family).restore(tmp_path)["w"], exact.astype(BF16))
        item = {"w": jax.ShapeDtypeStruct((64, 64), np.float32)}
        restored = checkpointer(family=family).restore(tmp_path, args=ost.SafetensorsRestore(item=item))
        np.testing.assert_array_equal(restored["w"], exact)
        rounding = Family("f", (), lambda config: {"w": tensor("w", (64, 64)).T.scale(1.1).cast(BF16).offset(1)})
        restored = checkpointer(family=rounding).restore(tmp_path, args=ost.SafetensorsRestore(item=item))
        between = (stored.T.astype(np.float32) * np.float32(1.1)).astype(BF16).astype(np.float32)
        np.testing.assert_array_equal(restored["w"], between + np.float32(1))

    def test_what_the_family_leaves_unused_may_be_used_in_part(self, tmp_path):
        stored = np.arange(8, dtype=np.float32)
        write(tmp_path / "model.safetensors", {"w": stored, "other": stored})

        def tree(config):
            return Tree({"w": tensor("w", (8,)).slice(slice(6))}, unused=["w", "other"])

        ckptr = checkpointer(family=Family("f", (), tree))
        restored = ckptr.restore(tmp_path)
        np.testing.assert_array_equal(restored["w"], stored[:6])
        with pytest.raises(ost.MappingError, match=r"6 of the 8 elements of 'w', by w"):
            ckptr.save(tmp_path / "saved", restored)

    def test_optional_leaves_are_there_all_or_none(self, tmp_path):
        def tree(config):
            return Tree({name: tensor(name, (2,)) for name in ("a", "b", "c")}, optional=["b", "c"])

        stored = {name: np.arange(2, dtype=np.float32) for name in ("a", "b", "c")}
        ckptr = checkpointer(family=Family("f", (), tree))
        for number, names in enumerate((("a",), ("a", "b", "c"))):
            write(tmp_path / "model.safetensors", {name: stored[name] for name in names})
            assert set(ckptr.restore(tmp_path)) == set(names)
            ckptr.save(tmp_path / f"saved{number}", {name: stored[name] for name in names})
        write(tmp_path / "model.safetensors", {name: stored[name] for name in ("a", "b")})
        with pytest.raises(ost.MappingError, match=r"c is made of 'c' of shape \(2,\), which is not stored"):
            ckptr.restore(tmp_path)
        with pytest.raises(ost.MappingError, match=r"f: c is missing"):
            ckptr.save(tmp_path / "saved", {name: stored[name] for name in ("a", "b")})

    def test_how_a_model_is_stored_sets_a_switch(self, tmp_path):
        """Unless the caller or the registration sets it; a save has the default."""

        def tree(config, *, turned=False):
            return {"w": tensor("w", (3, 2)).T if turned else tensor("w", (2, 3))}

        def turned(shapes):
            return {"turned": shapes["w"] == (3, 2)}

        family = Family("f", (), tree, stored_as=turned)
        stored = np.arange(6, dtype=np.float32).reshape(3, 2)
        write(tmp_path / "model.safetensors", {"w": stored})
        restored = checkpointer(family=family).restore(tmp_path)
        np.testing.assert_array_equal(restored["w"], stored.T)
        for wrong in (
            {"family": family, "variant": {"turned": False}},
            {"family": replace(family, variant={"turned": False})},
        ):
            with pytest.raises(ost.MappingError, match=r"'w' of shape \(2, 3\), found \(3, 2\)"):
                checkpointer(**wrong).restore(tmp_path)
        checkpointer(family=family).save(tmp_path / "saved", restored)
        np.testing.assert_array_equal(load_file(tmp_path / "saved" / "model.safetensors")["w"], stored.T)
        with pytest.raises(ost.MappingError, match=r"f: no switches follow from the stored tensors: KeyError\('v'\)"):
            checkpointer(family=replace(family, stored_as=lambda shapes: {"turned": shapes["v"]})).restore(tmp_path)

    def test_metadata_is_that_of_the_tree(self, model, tensors):
        tree = checkpointer(family=TOY).metadata(model).item_metadata.tree
        found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
        assert found == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), expected(tensors))

    def test_the_plan_is_what_is_read(self, model, tensors):
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), expected(tensors))
        plan = ost.plan_restore(model, target, family=TOY)
        stored = sum(array.nbytes for array in tensors.values())
        assert plan.total_bytes == plan.processes[0].needed_bytes == plan.processes[0].read_bytes == stored


class TestSave:
    @pytest.mark.parametrize("variant", [{}, {"scan_layers": False}, {"vocab_size": 64}])
    def test_round_trip(self, model, tensors, tmp_path, variant):
        ckptr = checkpointer(family=TOY, variant=variant)
        ckptr.save(tmp_path / "saved", args=ost.SafetensorsSave(ckptr.restore(model), config=CONFIG))
        assert_same_arrays(checkpointer().restore(tmp_path / "saved"), tensors)
        assert json.loads((tmp_path / "saved" / "config.json").read_text()) == CONFIG

    @pytest.mark.parametrize("axis", range(4))
    def test_from_shards_of_any_dimension(self, tensors, tmp_path, axis):
        mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

        def sharded(array):
            spec = [None] * array.ndim
            if axis < array.ndim and array.shape[axis] % 4 == 0:
                spec[axis] = "x"
            return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

        tree = jax.tree.map(sharded, expected(tensors))
        args = ost.SafetensorsSave(tree, family=TOY, config=CONFIG, max_file_bytes=3000)
        checkpointer().save(tmp_path / "saved", args=args)
        assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
        assert_same_arrays(checkpointer().restore(tmp_path / "saved"), tensors)

    def test_async(self, tensors, tmp_path):
        with ocp.AsyncCheckpointer(ost.SafetensorsHandler(family=TOY)) as ckptr:
            ckptr.save(tmp_path / "saved", args=ost.SafetensorsSave(expected(tensors), config=CONFIG))
        assert_same_arrays(checkpointer().restore(tmp_path / "saved"), tensors)

    def test_a_registered_family_is_found_by_the_config(self, tensors, tmp_path, registered):
        checkpointer().save(tmp_path / "saved", args=ost.SafetensorsSave(expected(tensors), config=CONFIG))
        assert_same_arrays(checkpointer(family=TOY).restore(tmp_path / "saved"), expected(tensors))
        checkpointer().save(tmp_path / "plain", expected(tensors))
        assert "params.layers.gate" in ost.open_checkpoint(tmp_path / "plain").tensors

    def test_arithmetic_is_undone(self, tmp_path, rng):
        def tree(config):
            return {"w": concatenate([tensor("w", (8, 6)).T.scale(4).offset(1), full((2, 8), 7)])}

        stored = rng.integers(-100, 100, (8, 6)).astype(np.float32)
        value = np.concatenate([stored.T * 4 + 1, np.full((2, 8), 7, np.float32)])
        checkpointer(family=Family("f", (), tree)).save(tmp_path / "saved", {"w": value})
        np.testing.assert_array_equal(checkpointer().restore(tmp_path / "saved")["w"], stored)

    @pytest.mark.parametrize(("config", "dtype"), [({"dtype": "bfloat16"}, BF16), ({}, np.dtype(np.float32))])
    def test_a_cast_is_undone_to_the_configs_dtype(self, tmp_path, rng, config, dtype):
        family = Family("f", (), lambda config: {"w": tensor("w", (8, 6)).T.cast(np.float32)})
        stored = rng.standard_normal((8, 6)).astype(dtype)
        value = {"w": stored.T.astype(np.float32)}
        checkpointer(family=family).save(tmp_path / "saved", args=ost.SafetensorsSave(value, config=config))
        assert_same_arrays(checkpointer().restore(tmp_path / "saved"), {"w": stored})

    def test_a_dtype_that_is_asked_for_comes_before_the_configs(self, tmp_path):
        family = Family("f", (), lambda config: {"w": tensor("w", (2,)).cast(np.float32)})
        args = ost.SafetensorsSave(
            {"w": np.ones(2, np.float32)},
            save_args={"w": ocp.SaveArgs(dtype=np.float64)},
            config={"dtype": "bfloat16"},
            family=family,
        )
        checkpointer().save(tmp_path / "saved", args=args)
        assert checkpointer().restore(tmp_path / "saved")["w"].dtype == np.float64

    def test_a_config_that_says_how_tensors_were_quantised_says_so_no_more(self, tensors, tmp_path):
        class Config:
            def to_dict(self):
                how = {"quant_method": "fp8"}
                return CONFIG | {"quantization_config": how, "text_config": {"quantization_config": how}}

        args = ost.SafetensorsSave(expected(tensors), family=TOY, config=Config())
        checkpointer().save(tmp_path / "saved", args=args)
        assert json.loads((tmp_path / "saved" / "config.json").read_text()) == CONFIG | {"text_config": {}}


class TestErrors:
    @pytest.mark.parametrize(
        ("family", "message"),
        [
            ("nobody", r"no family 'nobody'; there are dequantized, .*; `orbax-safetensors families` lists all$"),
            ("toy", r"no family 'toy'"),
            (
                "maxtext",
                r"no family is for architecture ToyForCausalLM; there are families for (\S+, ){3}\S+ and more; `",
            ),
            (7, r"expected a family or the name of one, found 7"),
            (lambda config: {}, r"found <function .*; wrap the function: ost.mapping.Family\('mine.model', "),
        ],
    )
    def test_no_such_family(self, model, family, message):
        with pytest.raises(ost.MappingError, match=message):
            checkpointer(family=family).restore(model)

    def test_a_config_that_says_nothing(self, model):
        (model / "config.json").write_text("{}")
        with pytest.raises(ost.MappingError, match=r"maxtext: no family is for a checkpoint without config.json"):
            checkpointer(family="maxtext").restore(model)
        (model / "config.json").unlink()
        with pytest.raises(ost.MappingError, match=r"toy.model: config.json has no 'hidden_size'"):
            checkpointer(family=TOY).restore(model)

    @pytest.mark.parametrize("text", ["{", "[1]", "\0", '{"a": ' * 5000])
    def test_a_config_that_is_no_json_object(self, model, text):
        (model / "config.json").write_text(text)
        with pytest.raises(ost.MappingError, match=r"config\.json: (is not JSON|expected a JSON object)"):
            checkpointer(family=TOY).restore(model)

    def test_several_families_for_one_architecture(self, model, registered):
        ost.register(Family("other.model", ("ToyForCausalLM",), toy_tree))
        with pytest.raises(ost.MappingError, match=r"several families are for .*: other.model, toy.model"):
            checkpointer().restore(model)
        assert "params" in checkpointer(family="other").restore(model)

    def test_several_families_for_other_models_of_one_architecture(self, model, registered):
        wide = Family(
            "wide.model", ("ToyForCausalLM",), toy_tree, applies_to=lambda config: config["hidden_size"] > 1000
        )
        ost.register(wide)
        assert "params" in checkpointer().restore(model)
        with pytest.raises(ost.MappingError, match=r"wide: no family is for architecture ToyForCausalLM"):
            checkpointer(family="wide").restore(model)
        edit(model, hidden_size="many")
        with pytest.raises(
            ost.MappingError, match=r"wide.model: cannot tell from this config.json if it applies: Type"
        ):
            checkpointer().restore(model)

    def test_registering_what_is_no_family(self):
        with pytest.raises(ost.MappingError, match=r"there is no family 'toy'"):
            ost.register("toy")

    @pytest.mark.parametrize("architectures", [5, True, "ToyForCausalLM", {"ToyForCausalLM": 1}, []])
    def test_architectures_that_are_none(self, model, registered, architectures):
        edit(model, architectures=architectures)
        assert "embed.weight" in checkpointer().restore(model)

    @pytest.mark.parametrize(
        "fields", [{"architectures": "ToyForCausalLM"}, {"architectures": (1,)}, {"renames": (("(", ""),)}]
    )
    def test_a_family_that_cannot_be(self, fields):
        with pytest.raises(ost.MappingError, match=r"toy"):
            Family(**{"name": "toy", "architectures": (), "tree": toy_tree} | fields)

    @pytest.mark.parametrize("value", ["false", 1, None])
    def test_a_switch_of_another_type(self, model, value):
        with pytest.raises(ost.MappingError, match=r"expected a bool for scan_layers, found"):
            checkpointer(family=TOY, variant={"scan_layers": value}).restore(model)

    def test_a_variant_without_a_family(self, model, tensors, tmp_path):
        with pytest.raises(
            ost.MappingError, match=r"variant \{'scan_layers': True\} is for a family, and there is none"
        ):
            checkpointer(variant={"scan_layers": True}).restore(model)
        with pytest.raises(ost.MappingError, match=r"is for a family, and there is none"):
            checkpointer(variant={"scan_layers": True}).save(tmp_path / "saved", tensors)

    @pytest.mark.parametrize(
        ("family", "variant"), [(None, ["scan_layers"]), (TOY, "scan_layers"), (None, 3), (TOY, {3: True})]
    )
    def test_a_variant_that_is_not_a_dict(self, model, tensors, tmp_path, family, variant):
        with pytest.raises(ost.MappingError, match="variant: expected a dict, as .*, found"):
            ost.load(model, family=family, variant=variant)
        with pytest.raises(ost.MappingError, match="variant: expected a dict"):
            ost.open_checkpoint(model, family=family, variant=variant)
        with pytest.raises(ost.SafetensorsError, match="variant: expected a dict"):
            ost.save(tmp_path / "saved", tensors, family=family, variant=variant, config=CONFIG)
        with pytest.raises(ost.SafetensorsError, match="variant: expected a dict"):
            ost.convert(model, tmp_path / "to", to="orbax", family=family, variant=variant)
        with pytest.raises(ost.MappingError, match="variant: expected a dict"):
            ost.register(TOY, variant=variant)

    def test_messages_name_the_checkpoint(self, model):
        for family in ("nobody", "maxtext", Family("f", (), lambda c: {"a": tensor("w", c["x"])})):
            with pytest.raises(ost.MappingError, match=str(model)):
                checkpointer(family=family).restore(model)

    def test_metadata_that_orbax_would_keep_silent_about(self, model, caplog):
        with ost.SafetensorsCheckpointer(family="maxtext") as one, pytest.raises(ost.MappingError, match="maxtext"):
            one.metadata(model)
        assert checkpointer(family="maxtext").metadata(model).item_metadata is None
        assert "no family is for architecture ToyForCausalLM" in caplog.text

    def test_an_unknown_switch(self, model):
        with pytest.raises(ost.MappingError, match="no switch 'scan'.*; it has scan_layers, vocab_size"):
            checkpointer(family=TOY, variant={"scan": True}).restore(model)

    def test_a_shape_that_contradicts_the_config(self, model):
        edit(model, head_dim=HEAD // 2)
        message = (
            r"toy\.model: config.json does not fit the files \(it may be of another model\): "
            r"params\.layers\.query\.kernel is made of 'layers\.0\.q\.weight' of shape \(16, 16\), "
            r"found \(32, 16\); .*layers\.1"
        )
        with pytest.raises(ost.MappingError, match=message):
            checkpointer(family=TOY).restore(model)
        with pytest.raises(ost.MappingError, match=message):
            ost.plan_restore(model, {}, family=TOY)

    def test_a_missing_layer(self, model):
        edit(model, num_hidden_layers=LAYERS + 1)
        message = (
            r"params\.layers\.query\.kernel is made of 'layers\.3\.q\.weight' of shape \(32, 16\), which is not stored"
        )
        with pytest.raises(ost.MappingError, match=message):
            checkpointer(family=TOY).restore(model)

    def test_tensors_that_nothing_uses(self, model, tensors, tmp_path):
        edit(model, num_hidden_layers=LAYERS - 1)
        with pytest.raises(ost.MappingError, match=r"config.json does not fit the .*: no leaf .*'layers\.2\.gate_up'"):
            checkpointer(family=TOY).restore(model)
        write(tmp_path / "more.safetensors", tensors | {"layers.0.inv_freq": np.zeros(4, np.float32)})
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        with ost.SafetensorsCheckpointer(family=TOY) as one:
            assert_same_arrays(one.restore(tmp_path / "more.safetensors"), expected(tensors))

    @pytest.mark.parametrize(
        ("tree", "message"),
        [
            (lambda c: {"a": tensor("w", (4, 4)), "b": tensor("w", (4, 4))}, r"32 of the 16 elements of 'w'"),
            (lambda c: {"a": tensor("w", (4, 4)).slice(slice(2))}, r"8 of the 16 elements of 'w', by a"),
            (lambda c: {"a": tensor("w", (4, 4)), "a.b": full((1,), 1)}, r"'a' cannot be a leaf and have 'a.b' below"),
            (lambda c: {"a": 1}, r"expected a dict of views by dotted path, found 'a': 1"),
            (
                lambda c: {"a": tensor("w", (4, 4)).reshape((3, 5))},
                r"f: view \(4, 4\) of \['w'\].*reshaped to \(3, 5\)",
            ),
            (
                lambda c: {"a": tensor("w", (4, 4)).swapaxes(0, 1)},
                r"f: its function raised AttributeError: .*'swapaxes'; views have \.T, \.transpose, ",
            ),
            (lambda c: {"a": tensor("w", (4, 4)) + 1}, r"f: its function raised TypeError: .*; views have \.T, "),
            (lambda c: 1 / 0, r"f: no tree follows from this config.json: ZeroDivisionError"),
            (
                lambda c: {n: tensor("w", (4, 4)).slice(slice(2)) for n in ("a", "b")},
                r"16 of the 16 elements of 'w', by a and others",
            ),
            (
                lambda c: {"a": tensor("w", (4, 4)), "b": tensor("none", (0, 7))},
                r"'none' of shape \(0, 7\) has no elem",
            ),
            (lambda c: {"a": tensor("w", (4, 4)), "b": full((2,), 1)}, r"'b' is a constant without a dtype"),
            (lambda c: None, r"f: expected a dict of views by dotted path, found None"),
            (lambda c: Tree({"a": tensor("w", (4, 4))}, unused="w"), r"unused: expected a list of regular expressions"),
            (lambda c: Tree({"a": tensor("w", (4, 4))}, optional=["("]), r"optional: '\(' is not a regular expression"),
            (lambda c: {"a": tensor("w", (4, 4)).scale(0)}, r"a factor must be finite and not 0"),
            (lambda c: {"a": tensor("w", (4, 4)).offset(np.inf)}, r"a term must be finite"),
        ],
    )
    def test_a_family_that_is_wrong(self, tmp_path, tree, message):
        write(tmp_path / "model.safetensors", {"w": np.zeros((4, 4), np.float32)})
        with pytest.raises(ost.MappingError, match=message):
            checkpointer(family=Family("f", (), tree)).restore(tmp_path)

    def test_tensors_of_different_dtypes_in_one_leaf(self, model, tensors):
        tensors["layers.1.norm.weight"] = tensors["layers.1.norm.weight"].astype(np.float32)
        for file in model.glob("model*"):
            file.unlink()
        write(model / "model.safetensors", tensors)
        with pytest.raises(ost.MappingError, match=r"stack: .*layers\.1\.norm.*float32 does not fit .*bfloat16"):
            checkpointer(family=TOY).restore(model)

    def test_a_tree_to_save_that_is_not_the_familys(self, tensors, tmp_path):
        tree = expected(tensors)
        del tree["params"]["layers"]["gate"]
        tree["params"]["layers"]["extra"] = tree["params"]["layers"]["norm"]["scale"]
        tree["params"]["layers"]["norm"]["scale"] = tree["params"]["layers"]["norm"]["scale"].T
        message = (
            r"toy\.model: params\.layers\.gate is missing; params\.layers\.extra is not in the family's tree.*; "
            r"params\.layers\.norm\.scale, of 'layers\.0\.norm.*: expected \(16, 3\), found \(3, 16\)"
        )
        with pytest.raises(ost.MappingError, match=message):
            checkpointer(family=TOY).save(tmp_path / "saved", args=ost.SafetensorsSave(tree, config=CONFIG))
        assert not (tmp_path / "saved").exists()

    def test_halves_of_a_tensor_with_different_dtypes(self, tensors, tmp_path):
        tree = expected(tensors)
        tree["params"]["layers"]["up"] = np.zeros_like(tree["params"]["layers"]["up"], np.float32)
        with pytest.raises(
            ost.MappingError, match=r"params.layers.up of float32 and another leaf of bfloat16 .*gate_up"
        ):
            checkpointer(family=TOY).save(tmp_path / "saved", args=ost.SafetensorsSave(tree, config=CONFIG))

    @pytest.mark.parametrize("config", [7, [1], {"a": object()}])
    def test_a_config_that_cannot_be_saved(self, tensors, tmp_path, config):
        with pytest.raises(ost.MappingError, match=r"config: "):
            checkpointer().save(tmp_path / "saved", args=ost.SafetensorsSave(tensors, config=config))
