"""MaxText's trees through Orbax: restored, planned and saved, against what MaxText's own converter made."""

import itertools
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.mapping.families import FAMILIES
from tests.multiprocess.workers_families import (
    MAX_FILE_BYTES,
    SAMPLES,
    config_of,
    laid_out,
    made_by_maxtext,
    sharded,
    stored_directory,
    target,
    variant,
)
from tests.support.files import write_indexed
from tests.support.measure import MAX_GAP_BYTES, measured

MODES = ("scanned", "unscanned")
# Their parameters are moved. What the others compute, a save undoes but for a rounding.
MOVED = ("deepseek3", "deepseek3.2", "deepseek3_mtp", "gpt-oss", "qwen3")
EACH_TREE = pytest.mark.parametrize(("sample", "mode"), list(itertools.product(SAMPLES, MODES)))
DIMENSIONS = range(4)
# For every two dimensions one axis of a mesh each, and for each dimension both of them.
ON_TWO_AXES = [
    *[tuple({first: "x", second: "y"}.get(at) for at in DIMENSIONS) for first in DIMENSIONS for second in DIMENSIONS],
    *[tuple(("y", "x") if at == dimension else None for at in DIMENSIONS) for dimension in DIMENSIONS],
]


@pytest.fixture
def line():
    """Eight devices as a mesh of one axis."""
    return Mesh(np.array(jax.devices()), ("d",))


def checkpointer(mode="scanned", **more):
    return ocp.Checkpointer(ost.SafetensorsHandler(family="maxtext", variant=variant(mode) | more))


def on_one_axis(dimension):
    return tuple("d" if at == dimension else None for at in DIMENSIONS)


def named(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_same_bits(found, expected, where=""):
    assert jax.tree.structure(found) == jax.tree.structure(expected), where
    for (name, leaf), other in zip(named(found).items(), jax.tree.leaves(expected), strict=True):
        leaf = np.asarray(leaf)
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), f"{where}: {name}"
        assert leaf.tobytes() == other.tobytes(), f"{where}: {name}"


def assert_restored(found, item, expected, where):
    """The shardings that were asked for, and in every shard the bits of its part of the whole."""
    assert jax.tree.structure(found) == jax.tree.structure(expected), where
    for (name, leaf), wanted, whole in zip(
        named(found).items(), jax.tree.leaves(item), jax.tree.leaves(expected), strict=True
    ):
        assert (leaf.sharding, leaf.shape, leaf.dtype) == (wanted.sharding, whole.shape, whole.dtype), (
            f"{where}: {name}"
        )
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), f"{where}: {name}{shard.index}"


def is_sharded(item):
    return any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(item))


def stored(directory):
    tensors = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def content(directory):
    """Every file of a model, with its bytes."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if "safetensors" in path.name or path.name == "config.json"
    }


# --- what is restored ---


@EACH_TREE
def test_without_a_target_the_tree_is_what_maxtexts_converter_made(sample, mode):
    with checkpointer(mode) as ckptr:
        found = ckptr.restore(stored_directory(sample))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))
    assert_same_bits(found, made_by_maxtext(sample, mode))


@EACH_TREE
def test_metadata_is_that_of_the_tree(sample, mode):
    with checkpointer(mode) as ckptr:
        tree = ckptr.metadata(stored_directory(sample)).item_metadata.tree
    expected = made_by_maxtext(sample, mode)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
    assert {name: leaf.name for name, leaf in named(tree).items()} == {name: name for name in named(expected)}


@EACH_TREE
def test_sharded_over_each_dimension(sample, mode, line):
    directory, expected = stored_directory(sample), made_by_maxtext(sample, mode)
    with checkpointer(mode) as ckptr:
        for dimension in DIMENSIONS:
            item = target(expected, line, on_one_axis(dimension))
            restored, cost = measured(
                lambda item=item: ckptr.restore(directory, args=ost.SafetensorsRestore(item=item))
            )
            assert_restored(restored, item, expected, f"dimension {dimension}")
            (planned,) = ost.plan_restore(directory, item, family="maxtext", variant=variant(mode)).processes
            assert cost["bytes_read"] == [planned.read_bytes]
            assert cost["num_reads"] == cost["storage_reads"] == [planned.num_requests]


@EACH_TREE
def test_sharded_over_two_axes(sample, mode, mesh):
    """With `ArrayRestoreArgs` in the place of an item."""
    directory, expected = stored_directory(sample), made_by_maxtext(sample, mode)
    layouts = 0
    with checkpointer(mode) as ckptr:
        for axes in ON_TWO_AXES:
            item = target(expected, mesh, axes)
            if not is_sharded(item):
                continue
            layouts += 1
            restore_args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), item)
            restored, cost = measured(lambda args=restore_args: ckptr.restore(directory, restore_args=args))
            assert_restored(restored, item, expected, axes)
            (planned,) = ost.plan_restore(directory, restore_args, family="maxtext", variant=variant(mode)).processes
            assert (cost["bytes_read"], cost["num_reads"]) == ([planned.read_bytes], [planned.num_requests])
    assert layouts >= 12


@EACH_TREE
def test_every_stored_byte_is_read_once(sample, mode):
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made_by_maxtext(sample, mode))
    with checkpointer(mode) as ckptr:
        _, cost = measured(lambda: ckptr.restore(stored_directory(sample), args=ost.SafetensorsRestore(item=item)))
    plan = ost.plan_restore(stored_directory(sample), item, family="maxtext", variant=variant(mode))
    assert cost["bytes_read"] == [plan.total_bytes]
    assert plan.processes[0].needed_bytes == plan.total_bytes
    assert plan.over_reads == ()


@EACH_TREE
def test_a_cast_rounds_once(sample, mode, mesh):
    """What is computed is rounded to the dtype that is asked for, not to the stored one before."""
    expected = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), made_by_maxtext(sample, mode))
    item = target(expected, mesh, ("x", None, "y"))
    with checkpointer(mode) as ckptr:
        restored = ckptr.restore(stored_directory(sample), args=ost.SafetensorsRestore(item=item))
    assert_restored(restored, item, expected, "bfloat16")


@EACH_TREE
def test_what_is_not_asked_for_is_not_read(sample, mode, line):
    expected = made_by_maxtext(sample, mode)
    item = target(expected, line, ("d",))
    directory = stored_directory(sample)
    item["params"]["decoder"] = jax.tree.map(lambda _: ocp.PLACEHOLDER, item["params"]["decoder"])
    with checkpointer(mode) as ckptr:
        restored, cost = measured(lambda: ckptr.restore(directory, args=ost.SafetensorsRestore(item=item)))
        assert all(leaf is ocp.PLACEHOLDER for leaf in jax.tree.leaves(restored["params"].pop("decoder")))
        del item["params"]["decoder"], expected["params"]["decoder"]
        assert_restored(restored, item, expected, "with placeholders")
        assert cost["bytes_read"] == [sum(leaf.nbytes for leaf in jax.tree.leaves(expected))]
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        restored, alone = measured(lambda: ckptr.restore(directory, args=args))
    assert_restored(restored, item, expected, "alone")
    assert alone["bytes_read"] == cost["bytes_read"]


def test_a_registered_convention_needs_no_argument():
    ost.register(*FAMILIES)
    try:
        with ocp.Checkpointer(ost.SafetensorsHandler()) as ckptr:
            for sample in SAMPLES:
                assert_same_bits(ckptr.restore(stored_directory(sample)), made_by_maxtext(sample, "scanned"), sample)
    finally:
        ost.unregister()


# --- what each of eight processes reads ---


class Positions:
    """A checkpoint of which each element is its own place, in four bytes: what a shard is made of can be seen in it."""

    def __init__(self, directory, config, shapes):
        self.directory = directory
        self.starts, parts, end = [], [{}, {}, {}], 0
        for number, (name, shape) in enumerate(sorted(shapes.items())):
            self.starts.append(end)
            size = int(np.prod(shape))
            parts[number % 3][name] = np.arange(end, end + size, dtype=np.int32).reshape(shape)
            end += size
        directory.mkdir()
        write_indexed(directory, parts)
        (directory / "config.json").write_text(json.dumps(config))

    def restored(self, mode):
        with checkpointer(mode) as ckptr:
            return ckptr.restore(self.directory)

    def cost(self, shards):
        """The bytes of these shards, each once, and those with all gaps that are short enough to be read over."""
        elements = np.unique(np.concatenate([np.ravel(shard) for shard in shards]))
        tensor = np.searchsorted(self.starts, elements, "right")
        gaps = 4 * (np.diff(elements)[tensor[1:] == tensor[:-1]] - 1)
        needed = 4 * elements.size
        return needed, needed + int(gaps[gaps <= MAX_GAP_BYTES].sum())

    def plan(self, mode, item, processes=8):
        return ost.plan_restore(self.directory, item, family="maxtext", variant=variant(mode), process_count=processes)


def shards_of_processes(tree, item, processes=8):
    """For each process what its devices hold of NumPy arrays that are sharded as `item`."""
    out = [[] for _ in range(processes)]
    for whole, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(item), strict=True):
        indices = leaf.sharding.devices_indices_map(whole.shape)
        for number, device in enumerate(leaf.sharding.mesh.devices.flat):
            out[number * processes // 8].append(whole[indices[device]])
    return out


@pytest.fixture(scope="module", params=MOVED)
def positions(request, tmp_path_factory):
    shapes = {name: tensor.shape for name, tensor in stored(stored_directory(request.param)).items()}
    return Positions(tmp_path_factory.mktemp("positions") / "model", config_of(request.param), shapes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("processes", [8, 4])
def test_every_process_needs_what_its_shards_are_made_of(positions, mode, processes, line, mesh):
    tree = positions.restored(mode)
    layouts = [(line, on_one_axis(dimension)) for dimension in DIMENSIONS]
    layouts += [(mesh, axes) for axes in ON_TWO_AXES[processes // 4 :: 3]]
    for devices, axes in layouts:
        item = target(tree, devices, axes)
        plan = positions.plan(mode, item, processes)
        for shards, cost in zip(shards_of_processes(tree, item, processes), plan.processes, strict=True):
            needed, spanned = positions.cost(shards)
            assert cost.needed_bytes == needed, axes
            assert needed <= cost.read_bytes <= spanned, axes


@pytest.mark.parametrize("mode", MODES)
def test_a_leaf_alone_costs_its_runs_and_the_short_gaps_between_them(positions, mode, line):
    for name, whole in named(positions.restored(mode)).items():
        for dimension in DIMENSIONS:
            sharding = laid_out(whole.shape, line, on_one_axis(dimension))
            if sharding.is_fully_replicated:
                continue
            leaf = {name: jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)}
            plan = positions.plan(mode, leaf)
            costs = [positions.cost(shards) for shards in shards_of_processes({name: whole}, leaf)]
            assert [(cost.needed_bytes, cost.read_bytes) for cost in plan.processes] == costs, (name, dimension)
            needed, spanned = np.sum(costs, axis=0)
            assert [over.name for over in plan.over_reads] == ([name] if spanned > 1.1 * needed else [])


def test_gates_and_ups_that_are_stored_in_turn_are_read_together(tmp_path, mesh):
    """Either alone is every other element; both at once are all of them."""
    shapes = {name: tensor.shape for name, tensor in stored(stored_directory("gpt-oss")).items()}
    positions = Positions(tmp_path / "model", config_of("gpt-oss"), shapes)
    block = "params.decoder.layers.layers_0.GptOssMlp"
    whole = named(positions.restored("scanned"))[f"{block}.wi_0"]
    of_an_expert_of_a_layer = laid_out(whole.shape, mesh, ("y", "x"))
    leaf = jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=of_an_expert_of_a_layer)
    for names in (["wi_0"], ["wi_1"], ["wi_0", "wi_1"]):
        plan = positions.plan("scanned", {f"{block}.{name}": leaf for name in names})
        held = 4 * leaf.size // 8
        assert {cost.needed_bytes for cost in plan.processes} == {len(names) * held}
        # From the first element of one to its last is one element less than both.
        assert {cost.read_bytes for cost in plan.processes} == {2 * held - (4 if len(names) == 1 else 0)}
        assert [over.name for over in plan.over_reads] == ([f"{block}.{names[0]}"] if len(names) == 1 else [])


# Models whose dimensions are all multiples of eight. In one rows of the hidden size are short; in the other they are so
# long that what seven processes have of eight is longer than any gap that is read over.
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "num_experts": 8,
    "moe_intermediate_size": 8,
    "vocab_size": 16,
}
HIDDEN_SIZES = {"short rows": 64, "long rows": 5120}
# For each leaf its dimensions. Upper case are those of which a shard is whole rows of stored matrices, or whole
# matrices; `d` is a part of every row of the hidden size, `s` of every row of another, which are short.
ROWS = {
    "token_embedder.embedding": "Vd",
    "decoder.logits_dense.kernel": "dV",
    "decoder.decoder_norm.scale": "D",
    "decoder.layers.pre_self_attention_layer_norm.scale": "DL",
    "decoder.layers.post_self_attention_layer_norm.scale": "DL",
    "decoder.layers.self_attention.query.kernel": "dLHd",
    "decoder.layers.self_attention.key.kernel": "dLHd",
    "decoder.layers.self_attention.value.kernel": "dLHd",
    "decoder.layers.self_attention.out.kernel": "sLsD",
    "decoder.layers.self_attention.query_norm.scale": "SL",
    "decoder.layers.self_attention.key_norm.scale": "SL",
    "decoder.layers.moe_block.gate.kernel": "dLE",
    "decoder.layers.moe_block.wi_0": "ELdF",
    "decoder.layers.moe_block.wi_1": "ELdF",
    "decoder.layers.moe_block.wo": "ELsD",
}


@pytest.fixture(scope="module", params=HIDDEN_SIZES)
def rows(request, tmp_path_factory):
    hidden = HIDDEN_SIZES[request.param]
    shapes = {"model.embed_tokens.weight": (16, hidden), "lm_head.weight": (16, hidden), "model.norm.weight": (hidden,)}
    for h in (f"model.layers.{number}." for number in range(8)):
        shapes |= {f"{h}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{h}self_attn.{name}_proj.weight": (64, hidden) for name in "qkv"}
        shapes |= {f"{h}self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {f"{h}self_attn.o_proj.weight": (hidden, 64), f"{h}mlp.gate.weight": (8, hidden)}
        for expert in (f"{h}mlp.experts.{number}." for number in range(8)):
            shapes |= {f"{expert}{name}_proj.weight": (8, hidden) for name in ("gate", "up")}
            shapes[f"{expert}down_proj.weight"] = (hidden, 8)
    directory = tmp_path_factory.mktemp("rows") / "model"
    made = Positions(directory, QWEN3_MOE | {"hidden_size": hidden}, shapes)
    yield request.param, made
    shutil.rmtree(directory)


def leaves_of_rows(rows, line):
    """Name, letter, shape and shape of the shards over eight devices of each dimension of each leaf."""
    _, made = rows
    leaves = ost.open_checkpoint(made.directory, family="maxtext").leaves
    assert set(leaves) == {f"params.{name}" for name in ROWS}
    for name, letters in ROWS.items():
        shape = leaves[f"params.{name}"].shape
        for dimension, letter in enumerate(letters):
            sharding = laid_out(shape, line, on_one_axis(dimension))
            assert not sharding.is_fully_replicated
            yield f"params.{name}", letter, jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)


def test_shards_of_whole_rows_cost_what_they_hold(rows, line):
    for name, letter, leaf in leaves_of_rows(rows, line):
        plan = rows[1].plan("scanned", {name: leaf})
        held = 4 * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        assert {cost.needed_bytes for cost in plan.processes} == {held}
        if letter.isupper():
            assert {cost.read_bytes for cost in plan.processes} == {held}, (name, letter)
            assert plan.over_reads == ()


def test_a_part_of_every_row_costs_the_rows_where_they_are_short(rows, line):
    kind, made = rows
    for name, letter, leaf in leaves_of_rows(rows, line):
        if letter.isupper():
            continue
        plan = made.plan("scanned", {name: leaf})
        if letter == "d" and kind == "long rows":
            assert all(cost.read_bytes == cost.needed_bytes for cost in plan.processes), name
            assert plan.over_reads == ()
        else:
            (found,) = plan.over_reads
            assert found.name == name
            assert found.needed_bytes == sum(cost.needed_bytes for cost in plan.processes)
            assert found.read_bytes == sum(cost.read_bytes for cost in plan.processes)
            # What lies between the first run and the last is read. Of an inner dimension of heads, that is one head.
            assert 7 < found.over_read <= 8, name


def test_a_whole_tree_names_the_leaves_to_shard_otherwise(rows, line):
    kind, made = rows
    expected, item = set(), {}
    for name, letter, leaf in leaves_of_rows(rows, line):
        if (
            name not in item or letter.islower()
        ):  # the last dimension of which a shard is a part of every row, or the first
            item[name] = leaf
            expected -= {name}
            if letter == "s" or (letter == "d" and kind == "short rows"):
                expected |= {name}
    plan = made.plan("scanned", item)
    assert {over.name for over in plan.over_reads} == expected
    wasted = [over.read_bytes - over.needed_bytes for over in plan.over_reads]
    assert wasted == sorted(wasted, reverse=True)


def test_layers_and_experts_over_two_axes_cost_what_they_hold(rows, mesh):
    _, made = rows
    leaves = ost.open_checkpoint(made.directory, family="maxtext").leaves
    tree = {
        name: jax.ShapeDtypeStruct(view.shape, view.dtype) for name, view in leaves.items() if ".moe_block.w" in name
    }
    assert len(tree) == 3
    for axes in (("x", "y"), ("y", "x"), (None, ("x", "y")), ("x", None, None, "y")):
        item = target(tree, mesh, axes)
        for cost in made.plan("scanned", item).processes:
            held = sum(4 * leaf.size // 8 for leaf in item.values())
            assert cost.read_bytes == cost.needed_bytes == held, axes


def test_what_is_read_over_is_not_restored(rows, line):
    _, made = rows
    tree = made.restored("scanned")
    with checkpointer() as ckptr:
        for dimension in DIMENSIONS:
            item = target(tree, line, on_one_axis(dimension))
            args = ost.SafetensorsRestore(item=item)
            restored, cost = measured(lambda args=args: ckptr.restore(made.directory, args=args))
            assert_restored(restored, item, tree, f"dimension {dimension}")
            (planned,) = ost.plan_restore(made.directory, item, family="maxtext").processes
            assert (cost["bytes_read"], cost["num_reads"]) == ([planned.read_bytes], [planned.num_requests])


# --- what is saved ---


def saved_names(sample):
    """The stored tensors that a tree is made of: MaxText has no place for copies of what the model has elsewhere."""
    tensors = stored(stored_directory(sample))
    copies = {f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head", "shared_head.norm")}
    if sample != "deepseek3_mtp":
        assert not copies & tensors.keys()
    return tensors.keys() - copies


def save(ckptr, directory, sample, tree, **changes):
    args = {"config": config_of(sample), "max_file_bytes": MAX_FILE_BYTES} | changes
    ckptr.save(directory, args=ost.SafetensorsSave(tree, **args))


@pytest.mark.parametrize(("sample", "mode"), list(itertools.product(MOVED, MODES)))
def test_there_and_back_bit_for_bit(tmp_path, sample, mode):
    with checkpointer(mode) as ckptr:
        save(ckptr, tmp_path / "saved", sample, ckptr.restore(stored_directory(sample)))
    expected = stored(stored_directory(sample))
    assert_same_bits(stored(tmp_path / "saved"), {name: expected[name] for name in saved_names(sample)})
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config_of(sample)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    assert ost.verify(tmp_path / "saved") == []


# What their families compute: a factor for queries; the 1 in the scale of norms, and a factor for the embedding.
ROUNDED = {"llama3.1": ("q_proj.weight",), "gemma3": ("norm.weight", "embed_tokens.weight")}


@pytest.mark.parametrize(("sample", "mode"), list(itertools.product(ROUNDED, MODES)))
def test_there_and_back_within_a_rounding(tmp_path, sample, mode):
    with checkpointer(mode) as ckptr:
        save(ckptr, tmp_path / "saved", sample, ckptr.restore(stored_directory(sample)))
        again = ckptr.restore(tmp_path / "saved")
    found, expected = stored(tmp_path / "saved"), stored(stored_directory(sample))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.endswith(ROUNDED[sample]):
            assert found[name].tobytes() == tensor.tobytes(), name
        elif name.endswith("norm.weight"):  # x + 1 was rounded
            np.testing.assert_allclose(found[name], tensor, rtol=0, atol=2**-23)
        else:  # a product and a quotient were
            np.testing.assert_allclose(found[name], tensor, rtol=2**-22, atol=0)
    for leaf, was in zip(jax.tree.leaves(again), jax.tree.leaves(made_by_maxtext(sample, mode)), strict=True):
        np.testing.assert_allclose(leaf, was, rtol=2**-21, atol=2**-23)


@pytest.mark.parametrize("sample", MOVED)
def test_there_and_back_in_bfloat16(tmp_path, sample):
    """Saved with another dtype than it has in memory, too."""
    tree = made_by_maxtext(sample, "scanned")
    narrow = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), tree)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=ml_dtypes.bfloat16), tree)
    with checkpointer() as ckptr:
        save(ckptr, tmp_path / "narrow", sample, narrow)
        save(ckptr, tmp_path / "cast", sample, tree, save_args=save_args)
        assert_same_bits(ckptr.restore(tmp_path / "narrow"), narrow)
    assert content(tmp_path / "cast") == content(tmp_path / "narrow")


@EACH_TREE
def test_the_bytes_do_not_depend_on_how_the_tree_is_sharded(tmp_path, sample, mode, line, mesh):
    tree = made_by_maxtext(sample, mode)
    layouts = [(line, on_one_axis(dimension)) for dimension in DIMENSIONS]
    layouts += [(mesh, ("x", "y")), (mesh, ("y", None, "x")), (mesh, (None, "x", None, "y")), (mesh, ())]
    with checkpointer(mode) as ckptr:
        save(ckptr, tmp_path / "numpy", sample, tree)
        expected = content(tmp_path / "numpy")
        assert len(expected) > 3
        for number, (devices, axes) in enumerate(layouts):
            save(ckptr, tmp_path / str(number), sample, sharded(tree, devices, axes))
            assert content(tmp_path / str(number)) == expected, axes


@EACH_TREE
def test_both_trees_are_saved_as_the_same_files(tmp_path, sample, mode):
    """Scanned or not, and with layers in another dimension."""
    with checkpointer("scanned", param_scan_axis=0) as ckptr:
        save(ckptr, tmp_path / "one", sample, ckptr.restore(stored_directory(sample)))
    with checkpointer(mode) as ckptr:
        save(ckptr, tmp_path / "other", sample, made_by_maxtext(sample, mode))
    assert content(tmp_path / "one") == content(tmp_path / "other")


def test_a_tree_that_does_not_fit_leaves_no_file(tmp_path):
    tree = made_by_maxtext("qwen3", "scanned")
    other = made_by_maxtext("qwen3", "unscanned")
    wider = config_of("qwen3") | {"intermediate_size": 56}
    for number, (given, config, message) in enumerate(
        [
            (other, config_of("qwen3"), r"params\.decoder\.layers\..* is missing"),
            (tree, wider, r"mlp\.wi_0\.kernel, of .*expected \(32, 3, 56\), found \(32, 3, 48\)"),
            (tree, {**config_of("qwen3"), "tie_word_embeddings": False}, r"logits_dense\.kernel is missing"),
            (tree, None, r"no family is for a checkpoint without config\.json"),
            (tree, config_of("llama3.1"), r"query_norm\.scale is not in the family's tree"),
        ]
    ):
        with checkpointer() as ckptr, pytest.raises(ost.MappingError, match=message):
            save(ckptr, tmp_path / str(number), "qwen3", given, config=config)
        assert not (tmp_path / str(number)).exists()
    assert not list(tmp_path.rglob("*.safetensors"))


# --- Orbax's other ways in ---

HANDLED = pytest.mark.parametrize("sample", ["deepseek3_mtp", "gemma3", "llama3.1"])


def handler(mode="scanned"):
    return ost.SafetensorsHandler(family="maxtext", variant=variant(mode))


@HANDLED
def test_async_checkpointer(tmp_path, sample, mesh):
    tree = made_by_maxtext(sample, "unscanned")
    with checkpointer("unscanned") as ckptr:
        save(ckptr, tmp_path / "expected", sample, tree)
    with ocp.AsyncCheckpointer(handler("unscanned")) as ckptr:
        given = sharded(tree, mesh, (None, "y", "x"))
        given["params"]["token_embedder"]["embedding"] = tree["params"]["token_embedder"]["embedding"].copy()
        save(ckptr, tmp_path / "saved", sample, given)
        given["params"]["token_embedder"]["embedding"][...] = 0  # once the call returns, the leaves may be changed
        jax.tree.map(lambda leaf: leaf.delete(), given["params"]["decoder"])
        ckptr.wait_until_finished()
        item = target(tree, mesh, ("x", None, "y"))
        restored = ckptr.restore(stored_directory(sample), args=ost.SafetensorsRestore(item=item))
    assert content(tmp_path / "saved") == content(tmp_path / "expected")
    assert_restored(restored, item, tree, "with the same checkpointer")


@HANDLED
def test_checkpoint_manager(tmp_path, sample, mesh):
    tree = made_by_maxtext(sample, "scanned")
    item = target(tree, mesh, ("y", "x"))
    with ocp.CheckpointManager(tmp_path, item_handlers=handler()) as manager:
        for step in (1, 2):
            assert manager.save(step, args=ost.SafetensorsSave(sharded(tree, mesh, ("x",)), config=config_of(sample)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        restored = manager.restore(2, args=ost.SafetensorsRestore(item=item))
        metadata = manager.item_metadata(2)
    # Not what was given: what the families compute is rounded on its way to the file.
    with checkpointer() as ckptr:
        assert_restored(restored, item, ckptr.restore(tmp_path / "1" / "default"), "step 2")
    assert jax.tree.map(lambda leaf: leaf.shape, metadata.tree) == jax.tree.map(lambda leaf: leaf.shape, tree)


@HANDLED
def test_items_of_a_manager(tmp_path, sample, mesh):
    tree = made_by_maxtext(sample, "scanned")
    handlers = {"params": handler(), "extra": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        args = ost.SafetensorsSave(tree, config=config_of(sample))
        manager.save(7, args=ocp.args.Composite(params=args, extra=ocp.args.JsonSave({"step": 7})))
        manager.wait_until_finished()
        item = target(tree, mesh, ("x", "y"))
        args = ost.SafetensorsRestore(item=item)
        found = manager.restore(7, args=ocp.args.Composite(params=args, extra=ocp.args.JsonRestore()))
    assert found["extra"] == {"step": 7}
    with checkpointer() as ckptr:
        assert_restored(found["params"], item, ckptr.restore(tmp_path / "7" / "params"), "step 7")


@HANDLED
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_composite_handler(tmp_path, sample, background, mesh):
    """Two items of one step, and each its own tree of the same model."""
    trees = {mode: made_by_maxtext(sample, mode) for mode in MODES}
    kind = ocp.AsyncCheckpointer if background else ocp.Checkpointer
    with kind(ocp.CompositeCheckpointHandler(**{mode: handler(mode) for mode in MODES})) as ckptr:
        args = {mode: ost.SafetensorsSave(tree, config=config_of(sample)) for mode, tree in trees.items()}
        ckptr.save(tmp_path / "saved", args=ocp.args.Composite(**args))
        if background:
            ckptr.wait_until_finished()
        items = {mode: target(tree, mesh, ("x", None, "y")) for mode, tree in trees.items()}
        args = {mode: ost.SafetensorsRestore(item=item) for mode, item in items.items()}
        found = ckptr.restore(tmp_path / "saved", args=ocp.args.Composite(**args))
    assert content(tmp_path / "saved" / "scanned") == content(tmp_path / "saved" / "unscanned")
    for mode, item in items.items():
        with checkpointer(mode) as ckptr:
            assert_restored(found[mode], item, ckptr.restore(tmp_path / "saved" / mode), mode)
