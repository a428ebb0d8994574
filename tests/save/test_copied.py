"""Saves that are like a checkpoint copy its tensors that the tree has no leaf for."""

import asyncio
import json
import logging

import jax
import ml_dtypes
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import deserialize

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, Tree, stack, tensor
from orbax_safetensors.save import copied, shards
from tests.support.files import random_bits, write, write_indexed
from tests.support.maxtext_trees import stored as stored_in
from tests.support.quantized_layers import GRIDS, config_of, quantized

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
LAYERS = [f"model.layers.{i}.w" for i in range(4)]
FAMILY = Family(
    "seeing.model",
    ("SeeingForCausalLM",),
    lambda config: Tree({"w": stack([tensor(name, (8, 16)) for name in LAYERS])}, unused=[r"(tower|model|lm_head).*"]),
)
TOWER = {
    "tower.wide": ((40, 30), BF16),
    "tower.scalar": ((), F32),
    "tower.empty": ((0, 3), F32),
    "tower.ids": ((7,), np.dtype(np.int64)),
    "tower.codes": ((5, 4), np.dtype(ml_dtypes.float8_e4m3fn)),
}
FOLLOWING = ["lm_head.weight", "model.layers.0.rotary_emb.inv_freq"]


@pytest.fixture
def source(tmp_path):
    """A model with a tower in two files, where its tensors stand between the others."""
    rng = np.random.default_rng(0)
    tower = {name: random_bits(rng, shape, dtype) for name, (shape, dtype) in TOWER.items()}
    layers = {name: random_bits(rng, (8, 16), BF16) for name in LAYERS}
    following = {name: random_bits(rng, (3,), F32) for name in FOLLOWING}
    first = {name: layers[name] for name in LAYERS[:2]} | {"tower.wide": tower.pop("tower.wide")} | following
    directory = tmp_path / "source"
    directory.mkdir()
    write_indexed(directory, [first, {name: layers[name] for name in LAYERS[2:]} | tower])
    (directory / "config.json").write_text(json.dumps({"architectures": ["SeeingForCausalLM"]}))
    return directory


def by_safetensors(directory):
    """Return the file, dtype, shape and bytes of all tensors, as the `safetensors` package reads them."""
    found = {}
    for path in directory.glob("*.safetensors"):
        for name, part in deserialize(path.read_bytes()):
            found[name] = (path.name, part["dtype"], part["shape"], bytes(part["data"]))
    return found


def trained(source, mesh):
    shape = ost.open_checkpoint(source, family=FAMILY).leaves["w"].shape
    array = ost.load(source, NamedSharding(mesh, P(None, "x", "y")), family=FAMILY)["w"]
    assert array.shape == shape
    return {"w": -array}


@pytest.mark.parametrize("tile_bytes", [64, 2**26])
@pytest.mark.parametrize("background", [False, True])
def test_tensors_without_a_leaf_are_those_of_the_source(
    tmp_path, source, mesh, caplog, monkeypatch, tile_bytes, background
):
    monkeypatch.setattr(copied, "_TILE_BYTES", tile_bytes)
    caplog.set_level(logging.INFO, "orbax_safetensors")
    tree = trained(source, mesh)
    with (ocp.AsyncCheckpointer if background else ocp.Checkpointer)(ost.SafetensorsHandler()) as checkpointer:
        args = ost.SafetensorsSave(tree, family=FAMILY, like=source)
        checkpointer.save(tmp_path / "saved", args=args)
    before, after = by_safetensors(source), by_safetensors(tmp_path / "saved")
    assert after.keys() == before.keys() - set(FOLLOWING)
    for name in TOWER:
        assert after[name] == before[name]
    for number, name in enumerate(LAYERS):
        assert after[name][:3] == before[name][:3]
        assert after[name][3] == np.asarray(tree["w"][number]).tobytes()
    assert "which are copied: tower.wide" in caplog.text
    assert ost.verify(tmp_path / "saved", data=True) == []
    restore_args = {"w": ocp.RestoreArgs(restore_type=np.ndarray)}
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "saved", restore_args=restore_args)
    assert restored.keys() == {"w"}
    assert restored["w"].tobytes() == np.asarray(tree["w"]).tobytes()


@pytest.mark.parametrize("background", [False, True])
def test_to_an_object_store(tmp_path, source, mesh, place, background):
    options = ost.SafetensorsOptions(storage_options=place.options)
    handler = ost.SafetensorsHandler(options=options)
    args = ost.SafetensorsSave(trained(source, mesh), family=FAMILY, like=source)
    if background:
        (future,) = asyncio.run(handler.async_save(f"{place.url}/saved", args))
        future.result()
    else:
        handler.save(f"{place.url}/saved", args)
    ost.save(tmp_path / "saved", args.item, family=FAMILY, like=source)
    for path in (tmp_path / "saved").glob("*.safetensors"):
        assert bytes(obstore.get(place.store(), f"saved/{path.name}").bytes()) == path.read_bytes()


def test_the_rest_can_be_left(tmp_path, source, mesh, caplog):
    ost.save(tmp_path / "saved", trained(source, mesh), family=FAMILY, like=source, rest="leave")
    assert by_safetensors(tmp_path / "saved").keys() == set(LAYERS)
    assert "tower.wide" in caplog.text
    with pytest.raises(ost.SafetensorsError, match="rest is 'drop', must be 'copy' or 'leave'"):
        ost.save(tmp_path / "other", trained(source, mesh), family=FAMILY, like=source, rest="drop")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("processes", [1, 3])
def test_the_plan_counts_what_is_copied(tmp_path, source, mesh, processes):
    tree = {"w": jax.ShapeDtypeStruct((4, 8, 16), BF16)}
    plan = ost.plan_save(tmp_path / "saved", tree, family=FAMILY, like=source, process_count=processes)
    ost.save(tmp_path / "saved", trained(source, mesh), family=FAMILY, like=source)
    stored = sum(len(bits) for *_, bits in by_safetensors(tmp_path / "saved").values())
    assert sum(process.written_bytes for process in plan.processes) == stored
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors")}
    assert {file.file: file.nbytes for file in plan.files} == sizes


def test_a_source_that_changes_meanwhile_fails_the_save(tmp_path, source, mesh, monkeypatch):
    read = copied.read

    def changed(parts):
        for path in source.glob("*.safetensors"):
            path.write_bytes(path.read_bytes())
        return read(parts)

    monkeypatch.setattr(shards, "read", changed)
    with pytest.raises(ost.StorageError, match="changed"):
        ost.save(tmp_path / "saved", trained(source, mesh), family=FAMILY, like=source)
    assert not (tmp_path / "saved").exists()


def test_quantised_tensors_are_decoded_and_not_copied_as_codes(tmp_path):
    stored, plain = quantized(np.random.default_rng(0), *GRIDS["rows"])
    source = tmp_path / "source"
    source.mkdir()
    write(source / "model.safetensors", stored | {"norm": np.ones(4, BF16)}, {"format": "pt"})
    (source / "config.json").write_text(
        json.dumps({"quantization_config": config_of("rows"), "torch_dtype": "bfloat16"})
    )
    family = Family("norm.only", (), lambda config: Tree({"norm": tensor("norm", (4,))}, unused=[".+"]))
    ost.save(tmp_path / "saved", ost.load(source, family=family), family=family, like=source)
    saved = stored_in(tmp_path / "saved")
    assert saved.keys() == plain.keys() | {"norm"}
    for name, array in plain.items():
        assert (saved[name].dtype, saved[name].tobytes()) == (BF16, array.astype(BF16).tobytes())
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
