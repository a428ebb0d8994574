"""Families made of loaders' tables, against what those loaders do with the same table in NumPy."""

import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Family, Tree, from_table, stored_shapes, tensor
from tests.support.compare import assert_same_arrays
from tests.support.evaluate import binder
from tests.support.files import random_bits, write
from tests.support.loaders import by_the_table, nested_leaves
from tests.support.quantized_layers import FP8, GRIDS, in_tree, quantized, same

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYERS, EXPERTS, WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY = 3, 4, 16, 2, 8, 24, 40
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, WIDTH),
    "model.norm.weight": (WIDTH,),
    "model.patches.weight": (WIDTH, 3, 5, 7),
    **{
        f"model.layers.{i}.self_attn.{part}_proj.weight": (HEADS * HEAD, WIDTH) for i in range(LAYERS) for part in "qkv"
    },
    **{f"model.layers.{i}.self_attn.q_proj.bias": (HEADS * HEAD,) for i in range(LAYERS)},
    **{
        f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight": (HIDDEN, WIDTH)
        for i in range(LAYERS)
        for e in range(EXPERTS)
        for part in ("gate", "up")
    },
}


class Transform(Enum):
    """As Bonsai has them: (permute, reshape, reshape_first)."""

    EMBED = None
    BIAS = (None, (HEADS, HEAD), False)
    LINEAR = ((1, 0), None, False)
    QUERY = ((2, 0, 1), (HEADS, HEAD, WIDTH), True)
    VALUE = ((1, 0), (WIDTH, HEADS, HEAD), False)
    CONVOLUTION = ((2, 3, 1, 0), None, False)


# With `\.` between keys, as half of Bonsai's tables have it, and anchors.
BONSAI = {
    r"^model\.embed_tokens\.weight$": (r"embedder\.embedding", Transform.EMBED),
    r"model\.norm\.weight": ("final_norm.scale", Transform.EMBED),
    r"^model\.patches\.weight$": (r"patches\.kernel", Transform.CONVOLUTION),
    r"model\.layers\.([0-9]+)\.self_attn\.q_proj\.weight": (r"layers.\1.attn.q_proj.kernel", Transform.QUERY),
    r"model\.layers\.([0-9]+)\.self_attn\.(k|v)_proj\.weight": (r"layers.\1.attn.\2_proj.kernel", Transform.VALUE),
    r"model\.layers\.(\d+)\.self_attn\.q_proj\.bias": (r"layers\.\1\.attn\.q_proj\.bias", Transform.BIAS),
    r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj": (r"layers.\1.experts.\2.\3", Transform.LINEAR),
    r"model\.layers\.([0-9]+)\.mlp\.up_proj\.weight": (r"layers.\1.mlp.up_proj.kernel", Transform.LINEAR),
}
# As Tunix has them: (permute, reshape).
TUNIX = {
    r"model\.embed_tokens\.weight": ("embedder.input_embedding", None),
    r"model\.norm\.weight": ("final_norm.w", None),
    r"model\.patches\.weight": ("patches.w", ((-2, -1, 1, 0), None)),
    r"model\.layers\.([0-9]+)\.self_attn\.q_proj\.weight": (
        r"layers.\1.attn.q_proj.w",
        ((1, 0), (WIDTH, HEADS, HEAD)),
    ),
    r"model\.layers\.([0-9]+)\.self_attn\.k_proj\.weight": (
        r"tmp.layers.\1.attn.k",
        ((1, 0), (WIDTH, -1, HEAD)),
    ),
    r"model\.layers\.([0-9]+)\.self_attn\.v_proj\.weight": (r"tmp.layers.\1.attn.v", ((1, 0), (WIDTH, HEADS, -1))),
    r"model\.layers\.([0-9]+)\.self_attn\.q_proj\.bias": (r"layers.\1.attn.q_bias", (None, [HEADS, HEAD])),
    r"model\.layers\.([0-9]+)\.mlp\.experts\.([0-9]+)\.(gate|up)_proj\.weight": (
        r"layers.\1.mlp.experts.\2.\3_proj.kernel",
        ((1, 0), None),
    ),
    r"lm_head\.weight": ("lm_head.w", ((1, 0), None)),
}
# Experts, keys and values, and then layers.
STACK = {
    r"(.*)\.experts\.[0-9]+\.(\w+)\.kernel": r"\1.\2",
    r"tmp\.layers\.([0-9]+)\.attn\.[kv]": (r"layers.\1.attn.kv_einsum.w", ((0, 2, 1, 3), None)),
    r"layers\.\d+\.mlp\.(.*)": r"blocks.\1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory, and its tensors."""
    rng = np.random.default_rng(0)
    stored = {name: random_bits(rng, shape, BF16) for name, shape in SHAPES.items()}
    directory = tmp_path_factory.mktemp("model")
    write(directory / "model.safetensors", stored)
    (directory / "config.json").write_text(json.dumps({"architectures": ["TableForCausalLM"]}))
    return directory, stored


def restored(directory, family):
    """All leaves of a family's tree, on eight devices if their first dimension can be divided, by path."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    checkpointer = ocp.Checkpointer(ost.SafetensorsHandler(family=family))
    tree = checkpointer.metadata(directory).item_metadata.tree

    def target(leaf):
        sharding = NamedSharding(mesh, P("x") if leaf.shape[0] % 8 == 0 else P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    item = jax.tree.map(target, tree)
    leaves = nested_leaves(checkpointer.restore(directory, args=ost.SafetensorsRestore(item=item)))
    assert all(len(leaf.addressable_shards) == 8 for leaf in leaves.values())
    return leaves


@pytest.mark.parametrize("table", [BONSAI, TUNIX], ids=["bonsai", "tunix"])
def test_what_the_loader_makes_of_its_table(model, table):
    directory, stored = model
    assert_same_arrays(restored(directory, from_table(table)), by_the_table(stored, table))


def test_other_forms_of_rows(model):
    directory, stored = model
    query = r"model\.layers\.(\d+)\.self_attn\.q_proj\.weight"
    others = {
        re.compile(r"model\.(embed_tokens|norm)\.weight"): r"\1",
        r"model\.patches\.weight": ("patches", lambda view: view.T.reshape((7, 15, WIDTH))),
        query: [r"q.\1", ((HEADS, HEAD, WIDTH), (2, 0, 1))],
        r"model\.layers\.(\d+)\.self_attn\.([kv])_proj\.weight": (r"\2.\1", ((1, 0),)),
        r"model\.layers\.(\d+)\.self_attn\.q_proj\.bias": (r"bias.\1", (None, None)),
        r"model\.layers\.(\d+)\.mlp\.experts": (r"experts.\1", (None, (-1,))),
    }
    expected = {
        "embed_tokens": stored["model.embed_tokens.weight"],
        "norm": stored["model.norm.weight"],
        "patches": stored["model.patches.weight"].T.reshape(7, 15, WIDTH),
    }
    for i in range(LAYERS):
        h = f"model.layers.{i}."
        expected[f"q.{i}"] = stored[h + "self_attn.q_proj.weight"].reshape(HEADS, HEAD, WIDTH).transpose(2, 0, 1)
        expected |= {f"{part}.{i}": stored[h + f"self_attn.{part}_proj.weight"].T for part in "kv"}
        expected[f"bias.{i}"] = stored[h + "self_attn.q_proj.bias"]
        for name in stored:
            if name.startswith(h + "mlp.experts."):
                rest = name.removeprefix(h + "mlp.experts")  # what the pattern does not match stays, as with `re.sub`
                expected[f"experts.{i}{rest}"] = stored[name].reshape(-1)
    assert_same_arrays(restored(directory, from_table(others)), expected)


def test_stacks_of_layers_of_experts_and_of_rows(model):
    directory, stored = model
    one_by_one = by_the_table(stored, TUNIX)
    expected = {path: leaf for path, leaf in one_by_one.items() if not path.startswith(("tmp", "layers"))}
    for i in range(LAYERS):
        both = [one_by_one[f"tmp.layers.{i}.attn.{part}"].transpose(1, 0, 2) for part in "kv"]
        expected[f"layers.{i}.attn.kv_einsum.w"] = np.stack(both)
        expected |= {path: one_by_one[path] for path in (f"layers.{i}.attn.q_proj.w", f"layers.{i}.attn.q_bias")}
    for part in ("gate", "up"):
        rows = [
            [one_by_one[f"layers.{i}.mlp.experts.{e}.{part}_proj.kernel"] for e in range(EXPERTS)]
            for i in range(LAYERS)
        ]
        expected[f"blocks.{part}_proj"] = np.stack([np.stack(row) for row in rows])
    assert_same_arrays(restored(directory, from_table(TUNIX, stack=STACK)), expected)


def test_stacks_are_in_the_order_of_numbers(tmp_path):
    stored = {f"w.{i}": np.full((2,), i, np.float32) for i in range(3, 15)}
    write(tmp_path / "model.safetensors", stored)
    leaves = restored(tmp_path, from_table({r"w\.": "layers."}, stack={r"layers\.\d+": "layers"}))
    assert_same_arrays(leaves, {"layers": np.stack(list(stored.values()))})


def test_unused_tensors_are_in_no_leaf(model):
    directory, stored = model
    expected = {path: leaf for path, leaf in by_the_table(stored, TUNIX).items() if "patches" not in path}
    assert_same_arrays(restored(directory, from_table(TUNIX, unused=[r"model\.patches\..*"])), expected)


def test_a_partial_restore_needs_no_row_for_other_tensors(model):
    directory, stored = model
    handler = ost.SafetensorsHandler(family=from_table({r"model\.norm\.weight": "norm"}))
    item = {"norm": jax.ShapeDtypeStruct((WIDTH,), BF16)}
    tree = ocp.Checkpointer(handler).restore(directory, args=ost.SafetensorsRestore(item=item, partial_restore=True))
    assert np.asarray(tree["norm"]).tobytes() == stored["model.norm.weight"].tobytes()


def test_a_registered_table_serves_orbaxs_own_handlers(model):
    directory, stored = model
    family = from_table(TUNIX)
    ost.register(Family("mine.table", ("TableForCausalLM",), family.tree))
    try:
        expected = by_the_table(stored, TUNIX)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
        item = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one) for path, leaf in expected.items()}
        nested = ocp.tree.from_flat_dict(item, sep=".")
        with ocp.StandardCheckpointer() as checkpointer:
            assert_same_arrays(nested_leaves(checkpointer.restore(directory, nested)), expected)
    finally:
        ost.unregister()


def test_a_save_without_a_checkpoint_to_resemble(model, tmp_path):
    directory, _ = model
    leaves = restored(directory, from_table(TUNIX))
    tree = ocp.tree.from_flat_dict(leaves, sep=".")
    with pytest.raises(
        MappingError, match="table: the tree follows from the names and shapes of stored tensors.*like="
    ):
        ocp.Checkpointer(ost.SafetensorsHandler(family=from_table(TUNIX))).save(tmp_path / "saved", tree)


@pytest.mark.parametrize("stack", [None, STACK], ids=["as they are", "stacked"])
def test_a_save_like_the_source(model, stack, tmp_path):
    directory, stored = model
    family = from_table(TUNIX, stack=stack)
    tree = ocp.tree.from_flat_dict(restored(directory, family), sep=".")
    args = ost.SafetensorsSave(tree, like=directory)
    ocp.Checkpointer(ost.SafetensorsHandler(family=family)).save(tmp_path / "saved", args=args)
    again = load_file(tmp_path / "saved" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(again[name].tobytes() == array.tobytes() for name, array in stored.items())
    assert_same_arrays(restored(tmp_path / "saved", from_table(TUNIX)), by_the_table(stored, TUNIX))


def test_shapes_that_a_family_sees(tmp_path):
    """Names are renamed, and the tree can follow from them."""
    write(tmp_path / "model.safetensors", {"old.w": np.ones((2, 3), np.float32)})
    family = Family(
        "mine.w",
        (),
        lambda config: {name.removesuffix(".w"): tensor(name, shape) for name, shape in stored_shapes().items()},
        renames=((r"^old\.", "new."),),
    )
    assert restored(tmp_path, family)["new"].shape == (2, 3)
    with pytest.raises(MappingError, match="there are none yet"):
        stored_shapes()


@pytest.mark.parametrize(
    ("table", "stack", "message"),
    [
        ({"b": "path"}, {}, r"no leaf of the tree uses these stored tensors: 'a\.0\.w', 'a\.1\.w'"),
        ({r"a\.\d+\.w": "path"}, {}, r"'path' has two tensors, 'a\.0\.w' and 'a\.1\.w'; `stack` makes one leaf"),
        ({r"a\.": "b.", r"a\.0": "c.0"}, {}, r"several rows of the table are for 'a\.0\.w': 'a\\\\\.', 'a\\\\\.0'"),
        ({r"a\.": r"\1"}, {}, r"'a\\\\\.': '\\\\1' is not a template: invalid group reference"),
        ({r"a\.": ("b.", ((1, 0, 2), None))}, {}, r"'a\\\\\.': view \(2, 3\) of .* transpose\(1, 0, 2\) is not a perm"),
        ({r"a\.": ("b.", (None, (4,)))}, {}, r"'a\\\\\.': view .*: 6 elements cannot be reshaped to \(4,\)"),
        ({r"a\.": ("b.", lambda view: view.mT)}, {}, r"'a\\\\\.': the transform of view .* failed: AttributeError"),
        ({r"a\.": ("b.", lambda view: 3)}, {}, r"'a\\\\\.': expected a transform to a View, found 3"),
        ({r"a\.": "b."}, {r"c\.": "d"}, r"stack: 'c\\\\\.' is for none of the paths 'b\.0\.w', 'b\.1\.w'"),
        ({r"a\.(\d)\.w": r"\1.\1"}, {".+": "d"}, r"stack: 'd' is of paths that differ in more than one number: '0\.0'"),
        ({r"a\.0\.w": "b", r"a\.1\.w": "c.0"}, {r"c\.0": "b"}, r"stack: 'b' is a leaf already, of 'a\.0\.w'"),
        ({r"a\.(\d)": r"\g<1>9"}, {r"\d+\.w": "w"}, r"stack: 'w' lacks number 10 between '09\.w' and '19\.w'"),
        ({r"a\.(\d)": rf"\g<1>{'9' * 18}"}, {r"\d+\.w": "w"}, "stack: 'w' lacks number 1000000000000000000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tables_that_do_not_fit(tmp_path, table, stack, message):
    write(tmp_path / "model.safetensors", {f"a.{i}.w": np.ones((2, 3), np.float32) for i in range(2)})
    with pytest.raises(MappingError, match=message):
        ocp.Checkpointer(ost.SafetensorsHandler(family=from_table(table, stack=stack))).restore(tmp_path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([("a", "b")], "table: expected a dict of paths by regular expression"),
        ({"(": "b"}, r"table: '\(' is not a regular expression"),
        ({3: "b"}, "table: 3 is not a regular expression"),
        ({"a": None}, "'a': expected a path, or a path and a transform, found None"),
        ({"a": ("b", None, None)}, "expected a path, or a path and a transform"),
        ({"a": [("b", None), "c"]}, "'a': expected a path, or a path and a transform, found"),
    ],
)
def test_rows_of_other_forms(table, message):
    with pytest.raises(MappingError, match=message):
        from_table(table)
    with pytest.raises(MappingError, match=message.replace("table", "stack")):
        from_table({}, stack=table)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ((1, 0), "expected axes or sizes, found 1"),
        ((2, 0, 1), r"expected None, .* or a function as transform, found \(2, 0, 1\)"),
        ("T", r"expected None, .* or a function as transform, found 'T'"),
        (((1.0, 0), None), r"expected axes or sizes, found \(1\.0, 0\)"),
        ((None, (None, (2, None, 3))), r"expected axes or sizes, found \(None, \(2, None, 3\)\)"),
    ],
)
def test_transforms_of_other_forms_are_errors_of_the_tensors_they_are_for(transform, message):
    """A table has rows for other models of its kind, with sizes that this model's config lacks."""

    def tree(table, stack):
        return from_table(table, stack=stack).describe({}, {}, binder({"a": np.ones((2, 3))}), {"a": (2, 3)})

    assert list(tree({"a": "b", "z": ("c", transform)}, {"z": ("d", transform, "optional")})) == ["b"]
    with pytest.raises(MappingError, match=f"'a': {message}"):
        tree({"a": ("b", transform)}, {})
    with pytest.raises(MappingError, match=f"'b': {message}"):
        tree({"a": "b"}, {"b": ("c", transform)})


def test_one_table_serves_models_with_experts_and_without(model):
    directory, _ = model
    dense = {r"(.*)\.mlp\.dense\.\d+": (r"\1.mlp.dense", None, "optional")}
    expected = restored(directory, from_table(TUNIX, stack=STACK))
    leaves = restored(directory, from_table(TUNIX, stack=dense | STACK))
    assert_same_arrays(leaves, {path: np.asarray(leaf) for path, leaf in expected.items()})


TIED = TUNIX | {
    r"model\.embed_tokens\.weight": [("embedder.input_embedding", None), ("lm_head.w", ((1, 0), None))],
    # All of its leaves together are the tensor.
    r"model\.patches\.weight": [
        ("patches.first", lambda view: view.slice(slice(4))),
        ("patches.others", lambda view: view.slice(slice(4, None))),
    ],
}


def test_several_leaves_of_one_tensor(model, tmp_path, caplog):
    directory, stored = model
    embedding, patches = stored["model.embed_tokens.weight"], stored["model.patches.weight"]
    expected = {path: leaf for path, leaf in by_the_table(stored, TUNIX).items() if not path.startswith("patches")}
    expected |= {"lm_head.w": embedding.T, "patches.first": patches[:4], "patches.others": patches[4:]}
    family = from_table(TIED)
    leaves = restored(directory, family)
    assert_same_arrays(leaves, expected)

    tree = ocp.tree.from_flat_dict(leaves, sep=".")
    ost.save(tmp_path / "saved", tree, family=family, like=directory)
    assert_same_arrays(load_file(tmp_path / "saved" / "model.safetensors"), stored)
    assert "not saved, as other leaves are made of the same tensors: lm_head.w" in caplog.text
    ost.convert(directory, tmp_path / "orbax", to="orbax", family=family)
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same_arrays(nested_leaves(checkpointer.restore(tmp_path / "orbax" / "0" / "items")), expected)
    link = ost.link(directory, tmp_path / "link", family=family)
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same_arrays(nested_leaves(checkpointer.restore(link.path)), expected)


def test_several_leaves_of_one_tensor_that_a_family_renames(tmp_path):
    stored = {"old.w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    write(tmp_path / "model.safetensors", stored)

    def tree(config):
        return Tree({"a": tensor("new.w", (2, 3)), "b": tensor("new.w", (2, 3)).T}, shared=["new.w"])

    family = Family("mine.tied", (), tree, renames=((r"^old\.", "new."),))
    params = ost.load(tmp_path, family=family)
    assert np.array_equal(params["b"], stored["old.w"].T)
    ost.save(tmp_path / "like", params, family=family, like=tmp_path)
    assert_same_arrays(load_file(tmp_path / "like" / "model.safetensors"), stored)
    ost.save(tmp_path / "alone", params, family=family, config={"model_type": "mine"})
    assert_same_arrays(load_file(tmp_path / "alone" / "model.safetensors"), {"new.w": stored["old.w"]})


def rows(**slices):
    """A list of leaves that are slices, by the path of each its begins and its ends."""
    return [(path, lambda view, at=at: view.slice(*map(slice, *at))) for path, at in slices.items()]


WHOLE, LOW = ((0,), (6,)), ((0,), (3,))


@pytest.mark.parametrize(
    ("table", "saved"),
    [
        ([("a", None), ("b", ((1, 0), None))], "a"),
        ([("b", ((1, 0), None)), ("a", None)], "b"),
        (rows(a=WHOLE, b=LOW), "a"),
        (rows(b=LOW, a=WHOLE), "a"),
        (rows(b=LOW, c=((2,), (6,))), "bc"),
        (rows(b=LOW, c=LOW, d=((3,), (6,))), "bd"),
        (rows(b=LOW, c=((2,), (5,)), a=WHOLE), "a"),
        (rows(b=((0, 0), (6, 3)), c=((0, 1), (6, 4)), d=((2, 1), (4, 3))), "bc"),
    ],
)
def test_leaves_that_share_elements_come_in_any_order(tmp_path, caplog, table, saved):
    stored = {"emb": np.arange(24, dtype=np.float32).reshape(6, 4)}
    write(tmp_path / "model.safetensors", stored)
    family = from_table({"emb": table})
    tree = ost.load(tmp_path, family=family)
    ost.save(tmp_path / "saved", tree, family=family, like=tmp_path)
    assert_same_arrays(load_file(tmp_path / "saved" / "model.safetensors"), stored)
    left_out = ", ".join(path for path in tree if path not in saved)
    assert (f"other leaves are made of the same tensors: {left_out}" in caplog.text) == (left_out != "")
    for path in (tmp_path / "saved", ost.link(tmp_path, tmp_path / "link", family=family).path):
        assert ost.verify(path) == []
        if not Path(path, "_METADATA").exists():  # a save of slices of columns, which are no chunks
            continue
        with ocp.StandardCheckpointer() as checkpointer:
            assert_same_arrays(checkpointer.restore(path), {path: np.asarray(leaf) for path, leaf in tree.items()})


def test_an_element_that_no_leaf_has_or_two_have_unsaid_is_an_error(tmp_path):
    write(tmp_path / "model.safetensors", {"emb": np.zeros((6, 4), np.float32)})

    def tree(config):
        emb = tensor("emb", (6, 4))
        return Tree({"a": emb, "b": emb.slice(slice(3))})

    for family in (from_table({"emb": rows(b=LOW, c=((2,), (5,)))}), Family("mine", (), tree)):
        with pytest.raises(MappingError, match="each element of a tensor has to be used once"):
            ost.load(tmp_path, family=family)


def test_unused_is_a_list_of_patterns():
    with pytest.raises(MappingError, match="unused: expected a list"):
        from_table({}, unused="a")


@pytest.mark.parametrize("dequantize", [True, "split"])
def test_quantised_tensors(dequantize, tmp_path):
    """Patterns without an end match the names of scales as well, which are no tensors of the model."""
    stored, plain = quantized(np.random.default_rng(0), *GRIDS["blocks"])
    write(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    table = {
        r"(\d)\.experts\.(\d)\.weight": (r"layers.\1.\2.up", ((1, 0), None)),
        r"(\d)\.norm\.weight": r"layers.\1.norm",
    }
    stack = {
        r"(layers\.\d)\.\d\.up": r"\1.up",
        r"layers\.\d\.up": ("layers.up", ((1, 0, 2, 3), None)),
        r"layers\.\d\.norm": ("layers.norm", ((1, 0), None)),
    }
    handler = ost.SafetensorsHandler(
        family=from_table(table, stack=stack), options=ost.SafetensorsOptions(dequantize=dequantize)
    )
    restored = ocp.Checkpointer(handler).restore(tmp_path)["layers"]
    expected = in_tree({name: array.astype(BF16) for name, array in plain.items()})["layers"]
    assert restored.keys() == expected.keys()
    same(restored["norm"], expected["norm"])
    if dequantize == "split":
        same(restored["up"]["qvalue"], in_tree(stored)["layers"]["up"])
    else:
        same(restored["up"], expected["up"])


@dataclass
class WeightMapping:
    """A row as sglang-jax has it."""

    target_path: str | list[str]
    sharding: tuple[Any, ...] | None = None
    transpose: bool = False
    transpose_axes: tuple[int, ...] | None = None
    reshape: tuple[int, ...] | None = None
    repeat: tuple[int, int] | None = None
    head_dim_padding: bool = False
    kv_head_padding: bool = False
    physical_to_logical_map: Any = None


def weight_mappings():
    """A table for `SHAPES`, and one row for a layer that the model does not have."""
    table = {
        "model.embed_tokens.weight": WeightMapping("embed.embedding", ("tensor", None)),
        "model.norm.weight": WeightMapping("norm.scale", (None,)),
        "model.patches.weight": WeightMapping("patches.kernel", transpose_axes=(2, 3, 1, 0)),
        "model.layers.*.self_attn.q_proj.bias": WeightMapping("layers.*.q.bias", transpose=True, reshape=(HEADS, HEAD)),
        "model.layers.*.self_attn.k_proj.weight": WeightMapping("layers.*.k.weight", transpose=True),
    }
    for i in range(LAYERS + 1):
        for part in "qv":
            table[f"model.layers.{i}.self_attn.{part}_proj.weight"] = WeightMapping(
                f"layers.{i}.{part}.weight", (None, "tensor"), transpose=True, kv_head_padding=part == "v"
            )
        for part, path in (("gate", f"layers.{i}.moe.wi_0"), ("up", f"layers.{i}.moe.wi_1")):
            experts = [f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight" for e in range(EXPERTS)]
            table[f"__MOE_EXPERTS__{path}"] = WeightMapping([path, *experts], transpose=True)
    return table


def test_the_weight_mappings_of_sglang_jax(model, tmp_path):
    directory, stored = model
    expected = {
        "embed.embedding": stored["model.embed_tokens.weight"],
        "norm.scale": stored["model.norm.weight"],
        "patches.kernel": stored["model.patches.weight"].transpose(2, 3, 1, 0),
    }
    for i in range(LAYERS):
        h = f"model.layers.{i}."
        expected |= {f"layers.{i}.{part}.weight": stored[f"{h}self_attn.{part}_proj.weight"].T for part in "qkv"}
        expected[f"layers.{i}.q.bias"] = stored[f"{h}self_attn.q_proj.bias"].reshape(HEADS, HEAD)
        for part, path in (("gate", "wi_0"), ("up", "wi_1")):
            experts = [stored[f"{h}mlp.experts.{e}.{part}_proj.weight"].T for e in range(EXPERTS)]
            expected[f"layers.{i}.moe.{path}"] = np.stack(experts)
    family = from_table(weight_mappings())
    leaves = restored(directory, family)
    assert_same_arrays(leaves, expected)
    ost.save(tmp_path / "saved", ocp.tree.from_flat_dict(leaves, sep="."), family=family, like=directory)
    assert_same_arrays(load_file(tmp_path / "saved" / "model.safetensors"), stored)


def test_weight_mappings_are_of_whole_names_and_other_rows_stand_beside_them():
    stored = {
        "a.1": (2, 3),
        "a.10": (2, 3),
        "a.1.b": (2, 3),
        "old.a.1.b": (2,),
        "qkv": (6, 3),
        "e.0": (3,),
        "e.1": (3,),
    }
    table = {
        "a.1": WeightMapping("first"),
        "a.10": WeightMapping("second", transpose=True),
        "a.*.b": WeightMapping("third.*"),
        "qkv": [("q", lambda w: w[:2].T), ("kv", lambda w: np.reshape(w[2:], (2, 2, 3)))],
        "__MOE_EXPERTS__e": WeightMapping(["e", "e.0", "e.1"], transpose=True, physical_to_logical_map=[1, 0]),
    }
    arrays = {name: np.random.default_rng(0).random(shape) for name, shape in stored.items()}
    tree = from_table(table).describe({}, {}, binder(arrays), stored)
    shapes = {"first": (2, 3), "second": (3, 2), "third.1": (2, 3), "q": (3, 2), "kv": (2, 2, 3), "e": (2, 3)}
    assert {path: view.shape for path, view in tree.items()} == shapes
    assert tree["e"].tensors == ("e.1", "e.0")
    skipping = from_table(table, unused=["a.*", "e.*"]).describe({}, {}, binder(arrays), stored)
    assert set(skipping) == {"q", "kv"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": WeightMapping(["q", "k"])}, "'a': .* are parts of one tensor"),
        ({"a": WeightMapping("__FUSED_QKV_WEIGHT__0")}, "'a': .* is not a leaf"),
        ({"d2t": WeightMapping("hot_token_ids")}, "'d2t': .* is not a leaf"),
        ({"a": WeightMapping("b", repeat=(0, 2))}, "'a': a leaf that repeats its tensor"),
        ({"__MOE_EXPERTS__e": WeightMapping(["e", "a", "z"])}, "1 of 2 are not stored: 'z'"),
        ({"a": WeightMapping("b"), "d*": WeightMapping("b")}, "'b' has two tensors"),
        ({"a": WeightMapping("b", reshape=(5,))}, "cannot be reshaped"),
        ({"a*": WeightMapping("b.*.*")}, r"'a\*': 'b\.\*\.\*' has more `\*` than the name"),
    ],
)
def test_weight_mappings_that_say_too_little_are_errors_of_the_tensors_they_are_for(table, message):
    stored = {"a": (2, 3), "d2t": (2, 3)}
    arrays = {name: np.ones(shape) for name, shape in stored.items()}
    with pytest.raises(MappingError, match=message):
        from_table(table).describe({}, {}, binder(arrays), stored)
    assert from_table(table).describe({}, {}, binder({}), {"other": (2, 3)}) == {}


def test_the_scales_of_a_quantised_table_are_not_leaves(tmp_path):
    stored, _ = quantized(np.random.default_rng(0), *GRIDS["blocks"])
    write(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    table = {
        name: WeightMapping(name.replace("weight_scale_inv", "weight_scale").replace("weight", "weight_q", 1))
        for name in stored
    }
    shapes = {row.target_path: stored[name] for name, row in table.items()}
    item = ocp.tree.from_flat_dict(
        {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in shapes.items()}, sep="."
    )
    with pytest.raises(ost.SafetensorsError, match="scale"):
        ost.load(tmp_path, item, family=from_table(table))
