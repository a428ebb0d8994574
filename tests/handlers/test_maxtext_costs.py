"""What restores of MaxText's trees read: what their shards are made of, and the gaps that are read over."""

import json

import jax
import numpy as np

import orbax_safetensors as ost
from tests.multiprocess.workers_families import (
    config_of,
    laid_out,
    stored_directory,
    target,
    variant,
)
from tests.support.compare import names_of
from tests.support.files import write_indexed
from tests.support.maxtext_trees import (
    DIMENSIONS,
    EACH_MOVED_TREE,
    ON_TWO_AXES,
    checkpointer,
    on_one_axis,
    stored,
)
from tests.support.measure import MAX_GAP_BYTES


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
    for name, whole in names_of(positions.restored(mode)).items():
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
    whole = names_of(positions.restored("scanned"))[f"{block}.wi_0"]
    of_an_expert_of_a_layer = laid_out(whole.shape, mesh, ("y", "x"))
    leaf = jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=of_an_expert_of_a_layer)
    for names in (["wi_0"], ["wi_1"], ["wi_0", "wi_1"]):
        plan = positions.plan("scanned", {f"{block}.{name}": leaf for name in names})
        held = 4 * leaf.size // 8
        assert {cost.needed_bytes for cost in plan.processes} == {len(names) * held}
        # From the first element of one to its last is one element less than both.
        assert {cost.read_bytes for cost in plan.processes} == {2 * held - (4 if len(names) == 1 else 0)}
        assert [over.name for over in plan.over_reads] == ([f"{block}.{names[0]}"] if len(names) == 1 else [])
