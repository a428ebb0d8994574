"""Quantised checkpoints restored through a family: as if they were stored plainly, shard by shard."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor
from tests.support.files import random_bits, write, write_indexed
from tests.support.quantized_layers import (
    BF16,
    EXPERTS,
    F8,
    FAMILY,
    GRIDS,
    HIDDEN,
    LAYERS,
    WIDTH,
    config_of,
    in_tree,
    quantized,
    same,
)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def checkpointer(**options):
    return ocp.Checkpointer(ost.SafetensorsHandler(family=FAMILY, options=ost.SafetensorsOptions(**options)))


@pytest.fixture
def model(request, tmp_path, rng):
    """With scales for blocks, unless a test is for all grids."""
    grid = getattr(request, "param", "blocks")
    shape, expand = GRIDS[grid]
    stored, plain = quantized(rng, shape, expand)
    # Scales in other files than their codes.
    write_indexed(tmp_path, [{n: a for n, a in stored.items() if n.endswith(end)} for end in ("weight", "inv")])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config_of(grid)}))
    return tmp_path, in_tree({name: array.astype(BF16) for name, array in plain.items()}), in_tree(plain)


EVERY_GRID = pytest.mark.parametrize("model", GRIDS, indirect=True)


class TestFp8:
    @EVERY_GRID
    def test_whole(self, model):
        directory, wanted, _ = model
        restored = checkpointer().restore(directory)
        jax.tree.map(same, restored, wanted)

    @EVERY_GRID
    @pytest.mark.parametrize(
        ("axis", "dtype"), [(0, BF16), (1, np.dtype(np.float32)), (2, BF16), (3, np.dtype(np.float32))]
    )
    @pytest.mark.both_devices
    def test_shards(self, model, axis, dtype):
        directory, bf16, exact = model
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        wanted = {"layers": {"up": bf16["layers"]["up"] if dtype == BF16 else exact["layers"]["up"]}}
        up = wanted["layers"]["up"]
        names = [None] * 4
        names[axis] = next((name for name, size in (("x", 4), ("y", 2)) if up.shape[axis] % size == 0), None)
        item = {
            "layers": {"up": jax.ShapeDtypeStruct(up.shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*names)))}
        }
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        jax.tree.map(same, checkpointer(max_gap_bytes=64).restore(directory, args=args), wanted)

    @EVERY_GRID
    def test_the_plan_is_what_is_read(self, model, monkeypatch):
        directory, wanted, _ = model
        read = {}
        monkeypatch.setattr(jax.monitoring, "record_scalar", lambda name, value: read.update({name: value}))
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        up = wanted["layers"]["up"]
        sharding = NamedSharding(mesh, PartitionSpec(None, None, "x"))
        item = {"layers": {"up": jax.ShapeDtypeStruct(up.shape, BF16, sharding=sharding)}}
        plan = ost.plan_restore(directory, item, family=FAMILY).processes[0]
        checkpointer().restore(directory, args=ost.SafetensorsRestore(item=item, partial_restore=True))
        assert read["/jax/orbax/read/safetensors/bytes_read"] == plan.read_bytes
        assert read["/jax/orbax/read/safetensors/storage_reads"] == plan.num_requests
        stored = EXPERTS * LAYERS * HIDDEN * WIDTH
        assert stored < plan.needed_bytes <= plan.read_bytes < 1.05 * stored + EXPERTS * LAYERS * HIDDEN * 4

    def test_codes_are_not_shared_as_if_they_were_elements(self, model):
        directory, _, wanted = model
        item = {"layers": {"up": jax.ShapeDtypeStruct(wanted["layers"]["up"].shape, np.float32)}}
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        same(checkpointer(alias=True).restore(directory, args=args)["layers"]["up"], wanted["layers"]["up"])

    @pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
    def test_a_config_for_the_text_says_it_too(self, model, key):
        directory, wanted, _ = model
        config = json.loads((directory / "config.json").read_text())["quantization_config"]
        (directory / "config.json").write_text(json.dumps({"text_config": {key: config}}))
        same(checkpointer().restore(directory)["layers"]["up"], wanted["layers"]["up"])

    @EVERY_GRID
    def test_codes_are_not_taken_for_weights(self, model):
        """A part of a checkpoint whose config does not say that it is quantised, of which nothing is left over."""
        directory, wanted, _ = model
        (directory / "config.json").unlink()
        up = wanted["layers"]["up"]
        args = ost.SafetensorsRestore(
            item={"layers": {"up": jax.ShapeDtypeStruct(up.shape, BF16)}}, partial_restore=True
        )
        grid = ost.open_checkpoint(directory)["0.experts.0.weight_scale_inv"].shape
        if grid != GRIDS["blocks"][0]:  # shapes say it all
            same(checkpointer().restore(directory, args=args)["layers"]["up"], up)
            return
        with pytest.raises(ost.MappingError, match=r"'0\.experts\.0\.weight_scale_inv'.* has no block size"):
            checkpointer().restore(directory, args=args)

    @EVERY_GRID
    def test_metadata_is_of_what_is_decoded(self, model):
        directory, wanted, _ = model
        metadata = checkpointer().metadata(directory).item_metadata.tree
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), metadata) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), wanted
        )

    def test_the_configs_dtype_is_the_default(self, model):
        directory, _, wanted = model
        config = json.loads((directory / "config.json").read_text()) | {"dtype": "float32"}
        (directory / "config.json").write_text(json.dumps(config))
        same(checkpointer().restore(directory)["layers"]["up"], wanted["layers"]["up"])

    def test_a_dtype_that_values_cannot_have(self, model):
        directory, _, _ = model
        config = json.loads((directory / "config.json").read_text())
        for dtype in ("int8", "bool", "float8_e4m3fn", "complex64", "longdouble", "float7", "O", 16, ["bfloat16"]):
            (directory / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
            with pytest.raises(ost.MappingError, match=r"config\.json: expected dtype bfloat16, .*, found "):
                checkpointer().restore(directory)
        for dtype in ("", {}):  # as if there were none
            (directory / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
            assert checkpointer().restore(directory)["layers"]["up"].dtype == BF16

    @pytest.mark.parametrize("text", [{}, {"text_config": "float32"}], ids=["all", "text"])
    def test_a_dtype_for_each_part_of_the_model(self, model, text):
        directory, _, wanted = model
        dtype = (
            {"": "bfloat16", "vision_config": "float16"} | text if text else {"": "float32", "vision_config": "int8"}
        )
        config = json.loads((directory / "config.json").read_text()) | {"dtype": dtype}
        (directory / "config.json").write_text(json.dumps(config))
        same(checkpointer().restore(directory)["layers"]["up"], wanted["layers"]["up"])

    def test_passed_through(self, model):
        directory, _, _ = model
        with pytest.raises(ost.MappingError, match=r"no leaf .* uses these stored tensors: .*weight_scale_inv"):
            checkpointer(dequantize=False).restore(directory)
        raw = ocp.Checkpointer(ost.SafetensorsHandler()).restore(directory)
        assert raw["0.experts.0.weight"].dtype == F8

    def test_a_missing_scale(self, model):
        directory, _, _ = model
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        del index["weight_map"]["1.experts.1.weight_scale_inv"]
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ost.MappingError, match=r"'1\.experts\.1\.weight' is F8_E4M3: expected its scales"):
            checkpointer().restore(directory)

    def test_scales_under_another_name(self, model):
        """They are as good as missing, for a part of the tree and for a save as well."""
        directory, wanted, _ = model
        for file in directory.glob("*.safetensors*"):
            file.write_bytes(file.read_bytes().replace(b"scale_inv", b"rescaling"))
        up = wanted["layers"]["up"]
        args = ost.SafetensorsRestore(
            item={"layers": {"up": jax.ShapeDtypeStruct(up.shape, BF16)}}, partial_restore=True
        )
        said = r"'0\.experts\.0\.weight' \(F8_E4M3, .*'0\.experts\.0\.weight_rescaling'.* a known format"
        for config in ((directory / "config.json").read_text(), "{}"):
            (directory / "config.json").write_text(config)
            with pytest.raises(ost.MappingError, match=said):
                checkpointer().restore(directory, args=args)
            with pytest.raises(ost.MappingError, match=said):
                ost.load(directory, family="dequantized")
            raw = ost.load(directory)
            assert raw["0.experts.0.weight"].dtype == F8

    def test_a_method_that_is_not_known(self, model):
        directory, _, _ = model
        (directory / "config.json").write_text('{"quantization_config": {"quant_method": "hqq"}}')
        with pytest.raises(ost.MappingError, match=r"expected quant_method .* found 'hqq'"):
            checkpointer().restore(directory)


@pytest.mark.both_devices
def test_an_aligned_tensor_is_decoded_too(tmp_path, rng):
    """Its codes lie where elements could be shared with the file."""
    codes, scales = random_bits(rng, (32, 48), F8), np.ones((32, 1), np.float32)
    ocp.Checkpointer(ost.SafetensorsHandler()).save(tmp_path / "saved", {"w": codes, "w_scale": scales})
    config = {"quantization_config": {"quant_method": "fp8"}, "dtype": "float32"}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    assert ost.open_checkpoint(tmp_path / "saved").location("w").begin % 64 == 0
    family = Family("one", (), lambda config: {"w": tensor("w", (32, 48))})
    ckptr = ocp.Checkpointer(ost.SafetensorsHandler(family=family, options=ost.SafetensorsOptions(alias=True)))
    item = {"w": jax.ShapeDtypeStruct((32, 48), np.float32)}
    restored = ckptr.restore(tmp_path / "saved", args=ost.SafetensorsRestore(item=item))
    same(restored["w"], codes.astype(np.float32))


MLX = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"quantization": MLX}, "MXFP4"),
        ({"quantization": MLX, "quantization_config": MLX}, "MXFP4"),
        ({"text_config": {"quantization": MLX}}, "MXFP4"),
        ({"quantization": MLX, "quantization_config": {"quant_method": "hqq"}}, "MXFP4"),
        ({"quantization": MLX, "quantization_config": {"quant_method": "fp8", "bits": 8}}, "MXFP4"),
        ({"quantization_config": MLX}, "expected quant_method .* found None"),
    ],
    ids=str,
)
def test_configs_of_mlx_name_no_method(tmp_path, config, found):
    rng = np.random.default_rng(2)
    codes, scales = rng.integers(0, 2**32, (8, 16), np.uint32), rng.integers(120, 130, (8, 4), np.uint8)
    write(tmp_path / "model.safetensors", {"a.weight": codes, "a.scales": scales})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if found == "MXFP4":
        assert ost.load(tmp_path, family="dequantized")["a"]["weight"].shape == (8, 128)
        return
    with pytest.raises(ost.MappingError, match=found):
        ost.load(tmp_path, family="dequantized")


class TestMxfp4:
    EXPERTS, HIDDEN, WIDTH = 4, 96, 64

    @pytest.fixture
    def model(self, tmp_path, rng):
        blocks = rng.integers(0, 256, (self.EXPERTS, 2 * self.HIDDEN, self.WIDTH // 32, 16), np.uint8)
        scales = rng.integers(100, 150, blocks.shape[:-1], np.uint8)
        write(tmp_path / "model.safetensors", {"gate_up_blocks": blocks, "gate_up_scales": scales})
        (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        table = np.concatenate([table, -table])
        values = np.stack([table[blocks & 15], table[blocks >> 4]], -1).reshape(*blocks.shape[:-1], 32)
        values = np.ldexp(values, scales.astype(int)[..., None] - 127).reshape(self.EXPERTS, -1, self.WIDTH)
        both = values.swapaxes(1, 2)

        def tree(config):
            stored = tensor("gate_up", (self.EXPERTS, self.WIDTH, 2 * self.HIDDEN))
            every = slice(None)
            return {name: stored.slice(every, every, slice(at, None, 2)) for at, name in enumerate(("gate", "up"))}

        return tmp_path, Family("toy.mx", (), tree), {"gate": both[..., ::2], "up": both[..., 1::2]}

    @pytest.mark.parametrize(
        ("spec", "dtype"),
        [(("x",), BF16), ((None, "x"), np.dtype(np.float32)), (("y", None, "x"), BF16)],
        ids=str,
    )
    @pytest.mark.both_devices
    def test_shards(self, model, spec, dtype):
        directory, family, wanted = model
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        item = {name: jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding) for name, array in wanted.items()}
        ckptr = ocp.Checkpointer(ost.SafetensorsHandler(family=family))
        restored = ckptr.restore(directory, args=ost.SafetensorsRestore(item=item))
        for name, array in wanted.items():
            same(restored[name], np.ascontiguousarray(array.astype(dtype)))

    def test_a_save_like_it_stores_the_values(self, model, tmp_path):
        directory, family, wanted = model
        ckptr = ocp.Checkpointer(ost.SafetensorsHandler(family=family))
        ckptr.save(tmp_path / "saved", args=ost.SafetensorsSave(ckptr.restore(directory), like=directory))
        saved = ost.SafetensorsHandler().restore(
            epath.Path(tmp_path / "saved"), ost.SafetensorsRestore(family="identity")
        )
        both = np.stack([wanted["gate"], wanted["up"]], -1).reshape(self.EXPERTS, self.WIDTH, -1)
        assert saved.keys() == {"gate_up"}
        same(saved["gate_up"], both.astype(BF16))
        assert json.loads((tmp_path / "saved" / "config.json").read_text()) == {}


@pytest.mark.parametrize(
    ("dtype", "method"),
    [(None, {"quant_method": "hqq"}), ("int8", {}), ({"": "bfloat16"}, "none"), ([7], {})],
    ids=str,
)
def test_plain_tensors_do_not_need_a_config(tmp_path, rng, caplog, dtype, method):
    """Also those without elements."""
    tensors = {"a.weight": random_bits(rng, (3, 4), BF16), "ids": np.arange(5), "registers": np.zeros((1, 0, 32), BF16)}
    write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": dtype, "quantization_config": method}))
    restored = ost.load(tmp_path, family="dequantized")
    jax.tree.map(same, restored, {"a": {"weight": tensors.pop("a.weight")}, **tensors})
    assert "quantization_config: expected " in caplog.text
    assert "no codes" in caplog.text


def test_tensors_without_elements_are_converted_and_saved(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write(source / "model.safetensors", {"a.weight": np.ones((3, 4), BF16), "registers": np.zeros((1, 0, 32), BF16)})
    ost.convert(source, tmp_path / "plain", to="safetensors", family="dequantized")
    ost.save(tmp_path / "saved", ost.load(tmp_path / "plain", family="dequantized"), like=source)
    for directory in ("plain", "saved"):
        shapes = ost.open_checkpoint(tmp_path / directory).shapes
        assert dict(shapes) == {"a.weight": (3, 4), "registers": (1, 0, 32)}


@pytest.mark.parametrize(
    "method", [None, {"quant_method": "modelopt", "quant_algo": "NVFP4"}], ids=["none", "modelopt"]
)
def test_groups_in_the_order_of_comfyui_are_refused(tmp_path, rng, method):
    """Names, dtypes and shapes are those of ModelOpt's NVFP4; scales for whole tensors have no order."""
    fp8 = {"b.weight": random_bits(rng, (128, 64), F8), "b.weight_scale": np.float32(2).reshape(())}
    nvfp4 = {
        "a.weight": rng.integers(0, 256, (128, 32), np.uint8),
        "a.weight_scale": np.ones((128, 4), F8),
        "a.weight_scale_2": np.ones((), np.float32),
    }
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": {"format": "nvfp4"}}})}
    if method:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": method}))
    write(tmp_path / "model.safetensors", fp8, metadata)
    assert ost.load(tmp_path, family="dequantized")["b"]["weight"].dtype == BF16
    write(tmp_path / "model.safetensors", fp8 | nvfp4, metadata)
    with pytest.raises(ost.MappingError, match=r"'a.weight' is NVFP4, group 16 in the order of ComfyUI"):
        ost.load(tmp_path, family="dequantized")
    assert ost.load(tmp_path, family="identity")["a.weight"].dtype == np.uint8
    write(tmp_path / "model.safetensors", fp8 | nvfp4)
    assert ost.load(tmp_path, family="dequantized")["a"]["weight"].shape == (128, 64)
