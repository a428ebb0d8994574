"""What restores of MaxText's trees read: what their shards are made of, and the gaps that are read over."""

import json
import shutil

import jax
import numpy as np
import pytest

import orbax_safetensors as ost
from tests.multiprocess.workers_families import (
    config_of,
    laid_out,
    stored_directory,
    target,
    variant,
)
from tests.support.files import write_indexed
from tests.support.maxtext_trees import (
    DIMENSIONS,
    EACH_MOVED_TREE,
    ON_TWO_AXES,
    assert_restored,
    checkpointer,
    named,
    on_one_axis,
    stored,
)
from tests.support.measure import MAX_GAP_BYTES, measured


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
        return ost.plan_restore(
            self.directory, item, family="maxtext", variant=variant(mode), process_count=processes, all_processes=True
        )


def shards_of_processes(tree, item, processes=8):
    """For each process what its devices hold of NumPy arrays that are sharded as `item`."""
    out = [[] for _ in range(processes)]
    for whole, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(item), strict=True):
        indices = leaf.sharding.devices_indices_map(whole.shape)
        for number, device in enumerate(leaf.sharding.mesh.devices.flat):
            out[number * processes // 8].append(whole[indices[device]])
    return out


def positions_of(sample, directory):
    shapes = {name: tensor.shape for name, tensor in stored(stored_directory(sample)).items()}
    return Positions(directory, config_of(sample), shapes)


@EACH_MOVED_TREE
def test_every_process_needs_what_its_shards_are_made_of(tmp_path, sample, mode, line, mesh):
    processes = 4
    positions = positions_of(sample, tmp_path / "model")
    tree = positions.restored(mode)
    layouts = [(line, on_one_axis(dimension)) for dimension in DIMENSIONS]
    layouts += [(mesh, axes) for axes in ON_TWO_AXES[::3]]
    for devices, axes in layouts:
        item = target(tree, devices, axes)
        plan = positions.plan(mode, item, processes)
        for shards, cost in zip(shards_of_processes(tree, item, processes), plan.processes, strict=True):
            needed, spanned = positions.cost(shards)
            assert cost.needed_bytes == needed, axes
            assert needed <= cost.read_bytes <= spanned, axes


@EACH_MOVED_TREE
def test_a_leaf_alone_costs_its_runs_and_the_short_gaps_between_them(tmp_path, sample, mode, line):
    positions = positions_of(sample, tmp_path / "model")
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
    positions = positions_of("gpt-oss", tmp_path / "model")
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


@pytest.mark.parametrize("rows", ["short rows"], indirect=True)
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
