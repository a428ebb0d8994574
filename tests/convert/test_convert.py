"""Conversions and reshards of whole checkpoints, with MaxText's own files, stock Orbax and NumPy as oracles."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.format.header import Header
from orbax_safetensors.orbax_store import open_orbax
from orbax_safetensors.orbax_store.leaf import ARRAYS
from orbax_safetensors.storage import workspace
from tests.support.conversions import (
    BF16,
    COMPUTED,
    ORBAX,
    SMALL,
    all_same,
    checkpoint,
    of_maxtext,
    restored,
    same_bits,
    tensors,
    unused,
    variant_of,
)
from tests.support.disks import file_system
from tests.support.family_samples import CHOSEN, Sample
from tests.support.files import random_bits, write
from tests.support.roots import TESTDATA
from tests.support.steps import step_of

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.mark.parametrize(
    ("model", "mode", "memory_bytes"), [*((*sample, SMALL) for sample in CHOSEN), (*CHOSEN[0], 1 << 30)]
)
def test_maxtext_there_and_back(model, mode, memory_bytes, tmp_path):
    scanned = mode == "scanned"
    hf = TESTDATA / "maxtext" / model / "hf"
    result = ost.convert(
        hf,
        tmp_path / "orbax",
        to="orbax",
        family="maxtext",
        variant=variant_of(model, scanned),
        memory_bytes=memory_bytes,
    )
    assert result.path == str(tmp_path / "orbax" / "0" / "items")
    tree, arrays = restored(tmp_path / "orbax" / "0" / "items")
    assert arrays.pop("step") == 0
    assert sorted(tree) == ["opt_state", "params", "step"]
    all_same(arrays, of_maxtext(model, scanned))
    assert result.nbytes == sum(array.nbytes for array in arrays.values())
    custom_metadata = open_orbax(tmp_path / "orbax").custom_metadata
    recorded = custom_metadata.pop("orbax_safetensors")
    assert recorded["variant"].items() >= variant_of(model, scanned).items()
    assert (result.family, result.variant) == (recorded["family"], recorded["variant"])
    assert custom_metadata == {"scan_layers": scanned}

    back = ost.convert(
        tmp_path / "orbax",
        tmp_path / "back",
        to="safetensors",
        family="maxtext",
        config=hf,
        memory_bytes=memory_bytes,
    )
    assert back.path == str(tmp_path / "back")
    assert ost.verify(tmp_path / "back") == []
    found, expected = tensors(tmp_path / "back"), Sample(model).stored
    left_out = unused(model, expected)
    assert expected.keys() - found.keys() == left_out
    if model not in COMPUTED:
        all_same(found, {name: array for name, array in expected.items() if name not in left_out})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"]


@pytest.mark.parametrize("name", list(ORBAX))
def test_what_maxtext_wrote_becomes_the_tensors_it_was_made_of(name, tmp_path):
    hf = TESTDATA / "maxtext" / ORBAX[name] / "hf"
    ost.convert(TESTDATA / "orbax" / name, tmp_path / "hf", to="safetensors", family="maxtext", config=hf)
    all_same(tensors(tmp_path / "hf"), tensors(hf))


@pytest.mark.parametrize(
    ("mesh", "spec", "memory_bytes"),
    [
        ({"fsdp": 2}, {"kernel|embedding": ("fsdp",)}, SMALL),
        ({"fsdp": 2, "tensor": 4}, {"embedding": ("fsdp", "tensor"), "mlp": (None, None, ("fsdp", "tensor"))}, SMALL),
        (None, None, SMALL),
        ({"fsdp": 2}, {"kernel|embedding": ("fsdp",)}, 1 << 30),
    ],
)
@pytest.mark.parametrize("name", list(ORBAX))
def test_reshard_of_what_maxtext_wrote(name, mesh, spec, memory_bytes, tmp_path):
    if name == "qwen3_unscanned" and spec:
        spec = {"embedding": ("fsdp",), "wi_0": (None, "fsdp")}
    source = open_orbax(TESTDATA / "orbax" / name)
    ost.reshard(TESTDATA / "orbax" / name, tmp_path, mesh=mesh, spec=spec, memory_bytes=memory_bytes)
    found = open_orbax(tmp_path)
    assert (step_of(found), found.custom_metadata) == (step_of(source), source.custom_metadata)
    arrays = restored(tmp_path / "0" / "items")[1]
    assert arrays.pop("step") == 0
    all_same(arrays, of_maxtext(ORBAX[name], name.endswith("_scanned")))
    for leaf_name in arrays:
        leaf = found.leaves[leaf_name]
        if mesh is None:
            assert leaf.sharding == source.leaves[leaf_name].sharding
        else:
            assert dict(zip(leaf.sharding.axis_names, leaf.sharding.shape, strict=True)) == mesh


def test_resharded_chunks_are_shards(tmp_path, mesh):
    arrays = {"a": random_bits(np.random.default_rng(0), (16, 8, 12), BF16), "b": np.arange(6, dtype=np.float32)}
    there = {"a": jax.device_put(arrays["a"], NamedSharding(mesh, P("x"))), "b": jax.numpy.asarray(arrays["b"])}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "from" / "7" / "default", there)
    ost.reshard(
        tmp_path / "from" / "7" / "default", tmp_path / "to", mesh={"fsdp": 4}, spec={"^a$": (None, None, "fsdp")}
    )
    found = open_orbax(tmp_path / "to")
    assert step_of(found) == 7
    assert found.path == str(tmp_path / "to" / "7" / "default")
    assert found.leaves["a"].chunk_shape == (16, 8, 3)
    target = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:4]), ("fsdp",)), P(None, None, "fsdp"))
    item = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(
        found.path,
        args=ocp.args.PyTreeRestore(
            restore_args={"a": ocp.ArrayRestoreArgs(sharding=target), "b": ocp.RestoreArgs(restore_type=np.ndarray)}
        ),
    )
    all_same(item, arrays)


@pytest.mark.parametrize("memory_bytes", [400, 1 << 30])
def test_safetensors_are_laid_out_anew(tmp_path, memory_bytes):
    arrays = checkpoint(tmp_path / "from", empty=np.zeros((0, 3), np.float32))
    ost.reshard(tmp_path / "from", tmp_path / "one", memory_bytes=memory_bytes)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    all_same(tensors(tmp_path / "one"), arrays)
    ost.reshard(tmp_path / "from", tmp_path / "many", max_file_bytes=800, memory_bytes=memory_bytes)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 3
    assert (tmp_path / "many" / "config.json").read_text() == '{"quantization_config": 1}'
    all_same(tensors(tmp_path / "many"), arrays)


@pytest.mark.parametrize("memory_bytes", [400, 1 << 30])
def test_safetensors_in_a_file_for_each_device(tmp_path, memory_bytes):
    arrays = checkpoint(tmp_path / "from", empty=np.zeros((0, 3), np.float32))
    ost.reshard(
        tmp_path / "from",
        tmp_path / "to",
        mesh={"x": 2, "y": 4},
        spec={"w": ("x", "y"), "b": ("y",)},
        memory_bytes=memory_bytes,
    )
    assert len(list((tmp_path / "to").glob("shard-0000?-model-00001-of-00001.safetensors"))) == 8
    all_same(tensors(tmp_path / "to"), arrays)
    assert ost.verify(tmp_path / "to") == []
    # Each device's shard is one range.
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    target = {"layers.0.w": jax.ShapeDtypeStruct((24, 16), BF16, sharding=NamedSharding(mesh, P("x", "y")))}
    plan = ost.plan_restore(tmp_path / "to", target, process_count=8, all_processes=True)
    assert [process.num_requests for process in plan.processes] == [1] * 8


def test_names_are_kept_without_a_family(tmp_path):
    arrays = checkpoint(tmp_path / "from")
    ost.convert(tmp_path / "from", tmp_path / "orbax", to="orbax", step=3)
    all_same(restored(tmp_path / "orbax" / "3" / "items")[0], arrays)
    ost.convert(tmp_path / "orbax", tmp_path / "back", to="safetensors")
    all_same(tensors(tmp_path / "back"), arrays)
    assert not (tmp_path / "back" / "config.json").exists()


def test_a_config_that_no_family_reads(tmp_path):
    arrays = checkpoint(tmp_path / "from")
    (tmp_path / "from" / "config.json").write_text("{")
    ost.convert(tmp_path / "from", tmp_path / "orbax", to="orbax")
    all_same(restored(tmp_path / "orbax" / "0" / "items")[0], arrays)


def test_casts(tmp_path):
    arrays = {
        "w": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
        "b": np.ones(3, np.float32),
        "n": np.arange(3),
    }
    write(tmp_path / "model.safetensors", arrays)
    ost.convert(tmp_path / "model.safetensors", tmp_path / "all", to="orbax", dtype="bfloat16")
    found = restored(tmp_path / "all" / "0" / "items")[0]
    same_bits(found["w"], arrays["w"].astype(BF16))
    same_bits(found["b"], arrays["b"].astype(BF16))
    assert open_orbax(tmp_path / "all").leaves["n"].dtype == np.int64
    ost.convert(tmp_path / "model.safetensors", tmp_path / "some", to="orbax", dtype={"^w": np.float16, "": np.float32})
    assert {name: leaf.dtype.name for name, leaf in open_orbax(tmp_path / "some").leaves.items()} == {
        "w": "float16",
        "b": "float32",
        "n": "int64",
    }
    ost.convert(tmp_path / "some", tmp_path / "back", to="safetensors", dtype={"w": np.float32})
    same_bits(tensors(tmp_path / "back")["w"], arrays["w"].astype(np.float16).astype(np.float32))


def test_what_is_beside_comes_along(tmp_path):
    shutil.copytree(TESTDATA / "maxtext" / "qwen3" / "hf", tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "weights.bin"):
        (tmp_path / "hf" / name).write_text(name)
    source = TESTDATA / "orbax" / "qwen3_unscanned"
    ost.convert(source, tmp_path / "to", to="safetensors", family="maxtext", config=tmp_path / "hf")
    assert (tmp_path / "to" / "tokenizer.model").read_text() == "tokenizer.model"
    assert not (tmp_path / "to" / "weights.bin").exists()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == config
    for number, given in enumerate((config, tmp_path / "hf" / "config.json")):
        ost.convert(source, tmp_path / str(number), to="safetensors", family="maxtext", config=given)
        assert sorted(path.name for path in (tmp_path / str(number)).iterdir()) == [
            "config.json",
            "model.safetensors",
            "safetensors.family.json",
        ]


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    """Although the file system said that there was room."""
    monkeypatch.setattr(workspace, "free_bytes", lambda path: None)
    checkpoint(tmp_path / "from", large=np.zeros((64, 1 << 14), np.uint8))
    with file_system(tmp_path / "disk", "512k") as disk:
        with pytest.raises(ost.StorageError, match="No space left"):
            ost.reshard(tmp_path / "from", disk / "to", memory_bytes=100_000)
        with pytest.raises(ost.StorageError, match=r"(?i)no space left"):
            ost.convert(tmp_path / "from", disk / "orbax", to="orbax", memory_bytes=100_000, compression=False)
        assert sorted(path.name for path in disk.iterdir()) == ["orbax", "to.partial"]
        with pytest.raises(ost.StorageError, match="finished"):
            open_orbax(disk / "orbax")


def test_a_target_says_the_chunks(tmp_path):
    """As it is given to a restore, of JAX or of Orbax, with a mesh whose devices need not be there."""
    arrays = checkpoint(tmp_path / "from")
    mesh = AbstractMesh((2, 4), ("x", "y"))
    shardings = {name: NamedSharding(mesh, P("x") if array.ndim else P()) for name, array in arrays.items()}
    target = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    target = {name: leaf.update(sharding=shardings[name]) for name, leaf in target.items()}
    args = {name: ocp.ArrayRestoreArgs(sharding=sharding) for name, sharding in shardings.items()}
    sharded = [name for name, array in arrays.items() if array.ndim]
    by_hand = {"mesh": mesh, "spec": {f"^{name}$": P("x") for name in sharded}}
    for number, asked in enumerate(({"like": target}, {"like": args}, by_hand)):
        ost.convert(tmp_path / "from", tmp_path / str(number), to="orbax", **asked)
        found = open_orbax(tmp_path / str(number)).leaves
        for name, array in arrays.items():
            assert found[name].chunk_shape == ((array.shape[0] // 2, *array.shape[1:]) if array.ndim else ())
            assert found[name].sharding.shape.tolist() == [2, 4]


def test_the_target_of_a_whole_training_state(tmp_path):
    """Of which some leaves are no arrays, and stay what they are."""
    source = TESTDATA / "orbax" / "qwen3_unscanned"
    mesh = AbstractMesh((2,), ("x",))

    def target(leaf):
        leaf = np.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*["x"] * (leaf.ndim > 1))))

    like = jax.tree.map(target, restored(open_orbax(source).path)[0])
    assert "step" in like
    ost.reshard(source, tmp_path / "to", like=like)
    for leaf in open_orbax(tmp_path / "to").leaves.values():
        if leaf.kind in ARRAYS:
            assert leaf.sharding.partition_spec == (("x",) if len(leaf.shape) > 1 else ())
    like["step"] = target(np.zeros((2, 2)))
    with pytest.raises(ost.TensorMismatchError, match="^like: 'step' is none of the 35 names of arrays"):
        ost.reshard(source, tmp_path / "wrong", like=like)


def test_names_of_maxtext_are_those_of_its_tree(tmp_path):
    """In a spec, in casts, and in a tree that says the shardings: that with which a restore is planned."""
    hf = TESTDATA / "maxtext" / "qwen3" / "hf"
    leaves = ost.open_checkpoint(hf, family="maxtext").leaves
    (name,) = (name for name in leaves if name.endswith("embedding"))
    assert name == "params.token_embedder.embedding"
    vocabulary, width = leaves[name].shape
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P("x"))
    like: dict = {}
    for path, view in leaves.items():
        own = sharding if path == name else NamedSharding(sharding.mesh, P())
        node = like
        for part in path.split(".")[:-1]:
            node = node.setdefault(part, {})
        node[path.split(".")[-1]] = jax.ShapeDtypeStruct(view.shape, view.dtype, sharding=own)
    assert ost.plan_restore(hf, like, family="maxtext").total_params > 0
    for number, asked in enumerate(({"mesh": {"x": 4}, "spec": {f"^{name}$": ("x",)}}, {"like": like})):
        asked |= {"to": "orbax", "family": "maxtext", "dtype": {f"^{name}$": "float16"}}
        ost.convert(hf, tmp_path / str(number), **asked)
        found = open_orbax(tmp_path / str(number)).leaves[f"params.{name}"]
        assert (found.chunk_shape, found.dtype) == ((vocabulary // 4, width), np.float16)
    with pytest.raises(ost.TensorMismatchError, match=r"found in none of the 13 names of arrays, such as 'params\."):
        ost.convert(hf, tmp_path / "to", to="orbax", family="maxtext", mesh={"x": 4}, spec={f"^params.{name}$": ("x",)})


def test_elements_that_share_bytes_are_not_cut(tmp_path):
    header = Header.layout([("f4", DTYPES["F4"], (4, 8)), ("w", DTYPES["F32"], (4, 2))], {}, alignment=8)
    data = bytes(range(48))
    (tmp_path / "model.safetensors").write_bytes(header.encoded + data)
    with pytest.raises(ost.TensorMismatchError, match="'f4': elements of F4 share bytes"):
        ost.reshard(tmp_path / "model.safetensors", tmp_path / "to", mesh={"x": 2}, spec={"": ("x",)})
    ost.reshard(tmp_path / "model.safetensors", tmp_path / "to", mesh={"x": 2}, spec={"w": ("x",)})
    found = ost.SafetensorsHandler().restore(epath.Path(tmp_path / "to"))
    assert found["w"].tobytes() + found["f4"].tobytes() == data  # wide elements come first


def test_what_safetensors_cannot_hold_is_told(tmp_path, caplog):
    tree = {"w": np.ones(3, np.float32), "name": "a model", "key": jax.random.key(0)}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "0" / "items", tree, force=True)
    with caplog.at_level("WARNING", "orbax_safetensors.convert.into_files"):
        ost.convert(tmp_path, tmp_path / "to", to="safetensors")
    assert "strings are left out: ['name']" in caplog.text
    assert "random keys become their data: ['key']" in caplog.text
    assert sorted(tensors(tmp_path / "to")) == ["key", "w"]


def test_a_config_says_what_all_is_cast_to(tmp_path):
    asked = {"to": "safetensors", "family": "maxtext", "config": TESTDATA / "maxtext" / "qwen3" / "hf"}
    source = TESTDATA / "orbax" / "qwen3_unscanned"
    ost.convert(source, tmp_path / "all", dtype="float16", **asked)
    ost.convert(source, tmp_path / "some", dtype={"norm": "float16"}, **asked)
    config = json.loads((TESTDATA / "maxtext" / "qwen3" / "hf" / "config.json").read_text())
    (key,) = {"dtype", "torch_dtype"} & set(config)
    assert json.loads((tmp_path / "all" / "config.json").read_text()) == config | {key: "float16"}
    assert json.loads((tmp_path / "some" / "config.json").read_text()) == config


def test_chunks_of_a_resharded_checkpoint_belong_to_one_shard_each(tmp_path):
    ost.reshard(TESTDATA / "orbax" / "deepseek3_scanned", tmp_path, mesh={"x": 8}, spec={"wi|wo": (None, None, "x")},
                memory_bytes=40_000)  # fmt: skip
    found = open_orbax(tmp_path)
    cut = 0
    for name, leaf in found.leaves.items():
        if "wi" in name or "wo" in name:
            shard = (*leaf.shape[:2], leaf.shape[2] // 8, *leaf.shape[3:])
            assert all(own % chunk == 0 for own, chunk in zip(shard, leaf.chunk_shape, strict=True))
            cut += shard != leaf.chunk_shape
    assert cut


def test_what_happens_is_told(tmp_path, caplog):
    arrays = checkpoint(tmp_path / "from")
    total = sum(array.nbytes for array in arrays.values())
    told = []
    with caplog.at_level("INFO"):
        result = ost.convert(
            tmp_path / "from", tmp_path / "to", to="orbax", memory_bytes=2000, progress=lambda *now: told.append(now)
        )
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert len(told) > 3
    assert result.nbytes == total
    assert result.requests > len(arrays)
    assert result.peak_bytes > 1 << 20
    assert json.loads(json.dumps(result.to_json()))["path"] == str(tmp_path / "to" / "0" / "items")
    assert f"{total} bytes" in caplog.text


@pytest.mark.parametrize("memory_bytes", [60_000, 1 << 30])
def test_quantised_tensors_are_decoded(tmp_path, memory_bytes):
    """As a restore through the family decodes them, which is compared with NumPy elsewhere."""
    rng = np.random.default_rng(5)
    stored = {}
    for name in ("a", "b"):
        stored[f"{name}.weight"] = random_bits(rng, (96, 80), np.dtype(ml_dtypes.float8_e4m3fn))
        stored[f"{name}.weight_scale_inv"] = rng.standard_normal((3, 2)).astype(np.float32)
    (tmp_path / "from").mkdir()
    write(tmp_path / "from" / "model.safetensors", stored)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 48]}
    (tmp_path / "from" / "config.json").write_text(json.dumps({"quantization_config": quantization}))

    def tree(config):
        own = [ost.mapping.tensor(f"{name}.weight", (96, 80)).T for name in "ab"]
        return {"w": ost.mapping.stack(own, axis=1)}

    family = ost.mapping.Family("toy.stack", (), tree)
    handler = ost.SafetensorsHandler(family=family)
    expected = handler.restore(epath.Path(tmp_path / "from"))
    ost.convert(tmp_path / "from", tmp_path / "to", to="orbax", family=family, memory_bytes=memory_bytes)
    found = open_orbax(tmp_path / "to").value("w")
    assert found.dtype == BF16
    same_bits(found, expected["w"])
