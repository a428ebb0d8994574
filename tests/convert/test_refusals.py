"""Conversions that are refused before anything is written: arguments, paths, sources, targets and configs."""

import os
import shutil
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.convert.conversion import prepare
from orbax_safetensors.convert.convert_request import ConvertRequest, ReshardRequest
from orbax_safetensors.orbax_store import open_orbax
from orbax_safetensors.streaming import cutting
from tests.support.conversions import checkpoint
from tests.support.roots import TESTDATA

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "pickle"}, "to is 'pickle', must be 'orbax' or 'safetensors'"),
        ({"to": "safetensors"}, r"from: is safetensors already: use reshard, or .*\(--family dequantized\)"),
        ({"to": "orbax", "dtype": "int5"}, "dtype: expected a floating-point dtype, as bfloat16, found 'int5'"),
        ({"to": "orbax", "dtype": "int8"}, "dtype: expected a floating-point dtype, as bfloat16, found 'int8'"),
        ({"to": "orbax", "dtype": {"n": "float16"}}, "'n' is found in none of the . names of floating-point arrays"),
        ({"to": "orbax", "dtype": {"(": "float16"}}, "not a regular expression"),
        ({"to": "orbax", "memory_bytes": 0}, "memory_bytes is 0"),
        ({"to": "orbax", "memory_bytes": True}, "memory_bytes is True"),
        ({"to": "orbax", "like": {"w": np.zeros(3)}}, "like: expected a tree with shardings"),
        ({"to": "orbax", "mesh": {"x": 2}, "like": {"w": np.zeros(3)}}, "pass like alone"),
        ({"to": "orbax", "config": {"a": 1}}, "config is not for to='orbax'"),
        ({"to": "safetensors", "step": 1}, "step is not for to='safetensors'"),
        ({"to": "safetensors", "mesh": {"x": 2}}, "mesh is not for to='safetensors'"),
        ({"to": "safetensors", "compression": False}, "compression is not for to='safetensors'"),
        ({"to": "orbax", "step": -1}, "step is -1, must be an integer of at least 0"),
        ({"to": "orbax", "step": "0"}, "step is '0', must be an integer"),
        ({"to": "orbax", "spec": {"w": ("x",)}}, "pass mesh"),
        ({"to": "orbax", "mesh": {"x": 5}, "spec": {"w": ("x",)}}, "24 does not divide by 5"),
        ({"to": "orbax", "mesh": {"x": 2}, "spec": {"kernle": ("x",)}}, "spec: 'kernle' is found in none of the"),
        ({"to": "orbax", "mesh": {"x": 2}, "spec": {"w": (1,)}}, "expected a tuple of axes and None, found"),
        ({"to": "orbax", "dtype": {"kernle": "float16"}}, "dtype: 'kernle' is found in none of the"),
        ({"to": "orbax", "family": "maxtext"}, "no family is for"),
        ({"to": "orbax", "variant": {"scan_layers": True}}, "for a family"),
        ({"to": "orbax", "memory_bytes": 4}, "is moved in tiles of at least"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, arguments, message):
    checkpoint(tmp_path / "from")
    with pytest.raises(ost.SafetensorsError, match=message):
        ost.convert(tmp_path / "from", tmp_path / "to", **arguments)
    assert not (tmp_path / "to" / "0").exists()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("safetensors", {"compression": False}, "compression is not for safetensors"),
        ("safetensors", {"mesh": {"x": 2}, "max_file_bytes": 100}, "max_file_bytes is not for a mesh"),
        ("orbax", {"max_file_bytes": 100}, "max_file_bytes is not for checkpoints of Orbax"),
    ],
)
def test_arguments_of_a_reshard_that_do_not_fit(tmp_path, kind, arguments, message):
    checkpoint(tmp_path / "safetensors")
    source = tmp_path / "safetensors" if kind == "safetensors" else TESTDATA / "orbax" / "qwen3_unscanned"
    with pytest.raises(ost.SafetensorsError, match=message):
        ost.reshard(source, tmp_path / "to", **arguments)


def test_targets_that_do_not_fit(tmp_path):
    checkpoint(tmp_path / "from")
    one, other = (NamedSharding(AbstractMesh((size,), ("x",)), P("x")) for size in (2, 4))
    third = NamedSharding(AbstractMesh((3,), ("x",)), P(None, "x"))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((24, 40), np.float32, sharding=one)
    for like, message in (
        ({"v": leaf, "w": leaf.update(sharding=other)}, "like: 'w': is over the mesh {'x': 4}, others are over"),
        ({"w": leaf.update(sharding=device)}, "like: 'w': expected a sharding over a mesh"),
        ({"other": leaf}, r"^like: 'other' is none of the 4 names of arrays, such as 'layers.0.b'$"),
        ({"layers.0.w": leaf.update(sharding=third)}, r"^like: 'layers.0.w' of shape .*: 16 does not divide by 3$"),
    ):
        with pytest.raises(ost.TensorMismatchError, match=message):
            ost.reshard(tmp_path / "from", tmp_path / "to", like=like)


def test_what_safetensors_have_no_dtype_for(tmp_path):
    tree = {"w": np.ones((2, 2), ml_dtypes.int4)}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "0" / "items", tree, force=True)
    with pytest.raises(ost.TensorMismatchError, match="'w': dtype: expected a type that safetensors can store"):
        ost.convert(tmp_path, tmp_path / "to", to="safetensors")


@pytest.mark.parametrize("arguments", [(None, "to"), ("from", ""), (b"from", "to"), ("from", 3)])
def test_paths_that_are_none(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "from")
    with pytest.raises(ost.SafetensorsError, match="must be a path or a URL"):
        ost.reshard(*arguments)


@pytest.mark.parametrize("url", ["gs://", "gs:///", "s3:///key", "hf://", "https://"])
def test_urls_of_nothing(url, tmp_path):
    checkpoint(tmp_path / "from")
    for to in ("orbax", "safetensors"):
        for arguments in ((url, tmp_path / "to"), (tmp_path / "from", url)):
            with pytest.raises(ost.StorageError, match=f"^{url}: expected a name after {url.partition('/')[0]}//$"):
                ost.convert(*arguments, to=to)


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    checkpoint(tmp_path / "from")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ost.StorageError, match="^to: is in the working directory, which was deleted$"):
        ost.reshard(tmp_path / "from", "to")


CALLS = {
    "to orbax": partial(ost.convert, to="orbax"),
    "to safetensors": partial(ost.convert, to="safetensors"),
    "anew": ost.reshard,
}


@pytest.mark.parametrize("call", list(CALLS))
def test_a_source_that_is_not_there(call, tmp_path):
    with pytest.raises(ost.StorageError, match="nowhere: no such file or directory"):
        CALLS[call](tmp_path / "nowhere", tmp_path / "to")


@pytest.mark.parametrize("call", ["to orbax", "anew"])
def test_more_dimensions_than_numpy_has(call, tmp_path):
    header = b'{"w": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 4]}}' % b",".join([b"1"] * 65)
    (tmp_path / "from.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ost.TensorMismatchError, match="'w': NumPy cannot have an array of shape"):
        CALLS[call](tmp_path / "from.safetensors", tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("content", [b"", b"short", b"# A page\nof text\n", b"PK\3\4\x14\0\0\0\0\0", b"GGUF\3\0\0\0\0"])
def test_a_source_that_is_another_file(content, tmp_path):
    (tmp_path / "from").write_bytes(content)
    for call in CALLS.values():
        with pytest.raises(ost.HeaderError, match="from: is not a safetensors file: expected (the length|at least)"):
            call(tmp_path / "from", tmp_path / "to")


def test_memory_that_makes_too_many_tiles(tmp_path, monkeypatch):
    checkpoint(tmp_path / "from")
    monkeypatch.setattr(cutting, "_MAX_BUNDLES", 10)
    with pytest.raises(ost.SafetensorsError, match="memory_bytes is 1000, too little: .* more than [0-9]+ are needed"):
        ost.reshard(tmp_path / "from", tmp_path / "to", memory_bytes=1000)


SHORT_OF_MEMORY = {
    "convert": (ost.convert, ConvertRequest, {"to": "orbax"}),
    "reshard": (ost.reshard, ReshardRequest, {}),
    "reshard for a mesh": (ost.reshard, ReshardRequest, {"mesh": {"x": 2}, "spec": {"array": (None, "x")}}),
}


@pytest.mark.parametrize("call", SHORT_OF_MEMORY)
def test_memory_for_less_than_a_tile(call, tmp_path):
    """The error has the number that would do: for rows of `narrow`, pages of `wide`, and a thousandth of `small`."""
    run, request, arguments = SHORT_OF_MEMORY[call]
    shapes = {"narrow": (1100, 4), "wide": (2, 600_000), "small": (20, 250)}
    for name, needed in (("narrow", 8 * 16), ("wide", 8 * 4096), ("small", 8 * 20)):
        source, to = tmp_path / name, tmp_path / f"from {name}"
        ost.save(source, {"array": np.zeros(shapes[name], np.float32), "scalar": np.float32(0)}, index=False)
        with pytest.raises(ost.SafetensorsError, match=f"memory_bytes is {needed - 1}: 'array' .* {needed} are"):
            run(source, to, memory_bytes=needed - 1, **arguments)
        prepare(request.of(source, to, memory_bytes=needed, **arguments)).source.close()


def test_patterns_that_nothing_is_called_like(tmp_path):
    checkpoint(tmp_path / "from")
    for source in (tmp_path / "from", TESTDATA / "orbax" / "qwen3_unscanned"):
        with pytest.raises(ost.TensorMismatchError, match="spec: 'kernle' is found in none of the"):
            ost.reshard(source, tmp_path / "to", mesh={"x": 2}, spec={"kernle": ("x",)})


def test_patterns_that_come_too_late(tmp_path):
    checkpoint(tmp_path / "from")
    too_late = {"mesh": {"x": 2}, "spec": {"w|embedding": ("x",), "kernel|b$": (), "w$|embedding$": (None, "x")}}
    message = r"spec: 'w\$\|embedding\$' is not used: earlier patterns apply to all \d arrays that it is found in"
    for call, source, asked in (
        (ost.convert, tmp_path / "from", {"to": "orbax", **too_late}),
        (ost.reshard, tmp_path / "from", too_late),
        (ost.reshard, TESTDATA / "orbax" / "qwen3_unscanned", too_late),
    ):
        with pytest.raises(ost.TensorMismatchError, match=message):
            call(source, tmp_path / "to", **asked)
    message = r"dtype: 'w' is not used: earlier patterns apply to all \d floating-point arrays that it is found in"
    with pytest.raises(ost.TensorMismatchError, match=message):
        ost.convert(tmp_path / "from", tmp_path / "to", to="orbax", dtype={"": "float16", "w": "bfloat16"})
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("source", ["elsewhere", "new.partial", "new.partial/files"])
def test_what_is_no_draft_is_never_deleted(tmp_path, source):
    """Not even a source that is called like one."""
    checkpoint(tmp_path / source)
    (tmp_path / "new.partial").mkdir(exist_ok=True)
    (tmp_path / "new.partial" / "mine").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    message = "is not an unfinished conversion" if source == "elsewhere" else "which is what becomes"
    for resume in (False, True):
        with pytest.raises(ost.StorageError, match=message):
            ost.reshard(tmp_path / source, tmp_path / "new", resume=resume)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_destination_that_is_read_only(tmp_path):
    checkpoint(tmp_path / "from")
    (tmp_path / "to").mkdir(mode=0o500)
    for call in (ost.reshard, partial(ost.convert, to="orbax")):
        with pytest.raises(ost.StorageError, match="cannot be made: .*Permission denied"):
            call(tmp_path / "from", tmp_path / "to" / "below" / "new")
        assert list((tmp_path / "to").iterdir()) == []


def test_a_destination_in_its_source(tmp_path):
    shutil.copytree(TESTDATA / "orbax" / "qwen3_unscanned", tmp_path / "from")
    inside = Path(open_orbax(tmp_path / "from").path) / "to"
    with pytest.raises(ost.StorageError, match="is in the source"):
        ost.convert(tmp_path / "from", inside, to="safetensors")
    with pytest.raises(ost.StorageError, match="is in the source"):
        ost.reshard(tmp_path / "from", inside)
    assert not inside.exists()


def test_a_family_needs_a_config(tmp_path):
    with pytest.raises(ost.MappingError, match="pass config"):
        ost.convert(TESTDATA / "orbax" / "qwen3_unscanned", tmp_path / "to", to="safetensors", family="maxtext")


def test_the_tree_of_a_family_is_not_written_beside_a_config_of_other_names(tmp_path):
    """`transformers` would find none of its tensors there, and take random ones."""
    hf = TESTDATA / "maxtext" / "qwen3" / "hf"
    ost.convert(hf, tmp_path / "ours", to="orbax", family="maxtext")
    ost.convert(hf, tmp_path / "plain", to="orbax")
    for source, message in (
        (tmp_path / "ours", "ours: was converted with maxtext.qwen3: pass family='maxtext.qwen3' .*; family="),
        (
            TESTDATA / "orbax" / "qwen3_unscanned",
            "no tensor of architecture Qwen3ForCausalLM under its stored name: ",
        ),
    ):
        with pytest.raises(ost.MappingError, match=message):
            ost.convert(source, tmp_path / "to", to="safetensors", config=hf)
        assert not (tmp_path / "to").exists()
    for source, family in (("ours", "identity"), ("plain", None)):
        ost.convert(tmp_path / source, tmp_path / f"{source}_to", to="safetensors", config=hf, family=family)
    assert ost.open_checkpoint(tmp_path / "plain_to").tensors.keys() == ost.open_checkpoint(hf).tensors.keys()


def test_a_family_that_is_forgotten_is_told(tmp_path, caplog):
    hf = TESTDATA / "maxtext" / "qwen3" / "hf"
    for family in ("maxtext", "identity", None):
        ost.convert(hf, tmp_path / f"{family}", to="orbax", family=family)
        with caplog.at_level("WARNING", "orbax_safetensors.convert.into_files"):
            ost.convert(tmp_path / f"{family}", tmp_path / f"{family}_to", to="safetensors")
    ost.convert(tmp_path / "maxtext", tmp_path / "own", to="safetensors", family="identity", config=hf)
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/maxtext: was converted with maxtext.qwen3; without family and config")


def test_configs_that_cannot_be_read(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    for name, error, message in (
        ("none.json", ost.MissingError, "none.json: no such file or directory \\(nearest: .*broken.json\\)$"),
        ("nowhere", ost.MissingError, "nowhere: no such file or directory$"),
        ("broken.json", ost.MappingError, "broken.json: is not JSON: "),
    ):
        with pytest.raises(error, match=f"^{tmp_path}/{message}"):
            ost.convert(
                TESTDATA / "orbax" / "qwen3_unscanned", tmp_path / "to", to="safetensors", config=tmp_path / name
            )


def test_orbax_to_orbax_is_a_reshard(tmp_path):
    with pytest.raises(ost.SafetensorsError, match="qwen3_unscanned: is a checkpoint of Orbax already: use reshard"):
        ost.convert(TESTDATA / "orbax" / "qwen3_unscanned", tmp_path, to="orbax")
    with pytest.raises(ost.SafetensorsError, match="max_file_bytes is 0"):
        checkpoint(tmp_path / "from")
        ost.reshard(tmp_path / "from", tmp_path / "to", max_file_bytes=0)
    with pytest.raises(ost.StorageError):
        ost.reshard(tmp_path / "nothing", tmp_path / "to")
