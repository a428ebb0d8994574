"""Checkpoints behind URLs: opened, verified, planned and restored as those in directories are.

What a store promises, whatever fails, is in `tests/storage/test_contract.py`; here it is seen from above.
"""

import _thread
import json

import jax
import jax.numpy as jnp
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.storage import remote
from tests.support.files import DTYPES, random_bits, write, write_indexed
from tests.support.quantized_layers import BF16, FAMILY, FP8, GRIDS, in_tree, quantized
from tests.support.quantized_layers import same as same_but_nan
from tests.support.servers.faults import Answer, Call, Cut, SetHeader
from tests.support.servers.files import Files
from tests.support.servers.server import Server
from tests.support.sharded_files import PIECES, WHOLE, write_pieces

RNG = np.random.default_rng(0)
# Rows of `wide` are far enough apart that a column of it is read row by row.
TENSORS = {
    "wide": random_bits(RNG, (8, 2**17), np.dtype(np.float32)),
    "tall": random_bits(RNG, (2**18, 8), np.dtype(np.float16)),
    "bias": random_bits(RNG, (16,), np.dtype(np.float32)),
}


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def server(tmp_path):
    (tmp_path / "many").mkdir()
    write_indexed(tmp_path / "many", [{"wide": TENSORS["wide"]}, {name: TENSORS[name] for name in ("tall", "bias")}])
    (tmp_path / "one").mkdir()
    write(tmp_path / "one" / "model.safetensors", TENSORS)
    with Server(Files(tmp_path)) as server:
        yield server


def same(a, b):
    return np.asarray(a).tobytes() == b.tobytes() and a.dtype == b.dtype and a.shape == b.shape


@pytest.mark.parametrize("path", ["many/", "one", "one/model.safetensors"])
def test_everything_comes_back(server, path):
    checkpoint = ost.open_checkpoint(f"{server.url}/{path}")
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }
    assert ost.verify(f"{server.url}/{path}") == []
    restored = ost.SafetensorsHandler().restore(f"{server.url}/{path}")
    assert restored.keys() == TENSORS.keys()
    assert all(same(restored[name], TENSORS[name]) for name in TENSORS)


def test_a_server_that_names_no_version_is_warned_of_once(server):
    server.fail(SetHeader("ETag", None), times=None)
    ost.open_checkpoint(f"{server.url}/many")  # pinned by its date
    server.fail(SetHeader("Last-Modified", None), times=None)
    url = f"{server.url}/many"
    with pytest.warns(UserWarning, match=f"{url}: the server gives neither an ETag nor a Last-Modified") as warned:
        restored = ost.SafetensorsHandler().restore(url)
    assert len(warned) == 1
    assert all(same(restored[name], TENSORS[name]) for name in TENSORS)


def test_headers_are_one_request_for_each_file(server):
    ost.open_checkpoint(f"{server.url}/many")
    asked = sorted((one.path, one.range) for one in server.log)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    names = (*files, "model.safetensors", "model.safetensors.index.json")  # the third is not there
    assert asked == [(f"/many/{name}", (0, remote.HEAD_BYTES)) for name in names]


@pytest.mark.both_devices
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "y"), P()])
def test_shards_and_what_is_read_for_them(server, mesh, spec, device):
    item = {
        name: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(mesh, P("x") if array.ndim == 1 else spec)
        )
        for name, array in TENSORS.items()
    }
    url = f"{server.url}/many"
    plan = ost.plan_restore(url, item)
    server.clear()
    restored = ost.SafetensorsHandler().restore(url, ost.SafetensorsRestore(item))
    assert all(same(restored[name], TENSORS[name]) for name in TENSORS)
    read = [one for one in server.log if one.range != (0, remote.HEAD_BYTES)]
    (cost,) = plan.processes
    # To an accelerator, a long shard is a request of its own, whose answer goes there as it is.
    assert len(read) == cost.num_requests + (device is not None and spec == P())
    assert sum(one.sent for one in read) == cost.read_bytes
    assert max(one.sent for one in read) <= 8 * 2**20


def test_gaps_that_cost_less_than_a_request_are_read_along(server, mesh):
    url = f"{server.url}/one/model.safetensors"
    column = NamedSharding(mesh, P(None, "y"))
    item = {"tall": jax.ShapeDtypeStruct((2**18, 8), np.float16, sharding=column)}
    for gap, over_read in ((None, 4), (3, 1)):
        options = ost.SafetensorsOptions(max_gap_bytes=gap)
        costs = ost.plan_restore(url, item, process_count=8, options=options).processes
        assert {round(cost.over_read) for cost in costs} == {over_read}
        assert {cost.num_requests for cost in costs} == {1 if gap is None else 2**18}


@pytest.mark.both_devices
def test_every_dtype(server, tmp_path, mesh):
    tensors = {name: random_bits(RNG, (8, 4), dtype) for name, dtype in DTYPES.items()}
    names = sorted(tensors)
    write_indexed(tmp_path / "many", [{name: tensors[name] for name in names[number::3]} for number in range(3)])
    with jax.enable_x64(True):
        item = {
            name: jax.ShapeDtypeStruct((8, 4), array.dtype, sharding=NamedSharding(mesh, P("x", "y")))
            for name, array in tensors.items()
        }
        restored = ost.SafetensorsHandler().restore(f"{server.url}/many", ost.SafetensorsRestore(item))
    assert all(same(restored[name], tensors[name]) for name in tensors)


def test_every_request(server, mesh):
    """Padding and truncating, casts, NumPy arrays, parts, and what is missing."""
    sharding = NamedSharding(mesh, P("x", "y"))
    with ost.SafetensorsCheckpointer() as checkpointer:
        url = f"{server.url}/many"
        args = {
            "wide": ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(4, 2**17 + 8), strict=False),
            "tall": ocp.RestoreArgs(restore_type=np.ndarray),
            "bias": ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=P("y"), dtype=jnp.float16),
        }
        restored = checkpointer.restore(url, restore_args=args)
        assert same(restored["wide"], np.pad(TENSORS["wide"][:4], ((0, 0), (0, 8))))
        assert same(restored["tall"], TENSORS["tall"])
        assert restored["bias"].dtype == jnp.float16
        placeholders = dict.fromkeys(TENSORS, ocp.PLACEHOLDER)
        item = {**placeholders, "bias": jax.ShapeDtypeStruct((16,), np.float32, sharding=NamedSharding(mesh, P()))}
        restored = checkpointer.restore(url, item=item)
        assert same(restored["bias"], TENSORS["bias"])
        assert restored["wide"] is ocp.PLACEHOLDER
        with pytest.raises(ost.TensorMismatchError, match="missing"):
            checkpointer.restore(url, item={"missing": item["bias"]})


@pytest.mark.both_devices
def test_a_quantised_checkpoint_of_a_family(server, tmp_path, mesh):
    stored, plain = quantized(np.random.default_rng(11), *GRIDS["blocks"])
    write(tmp_path / "one" / "model.safetensors", stored)
    (tmp_path / "one" / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    expected = in_tree({name: np.asarray(array).astype(BF16) for name, array in plain.items()})
    specs = {"layers": {"up": P(None, None, "y"), "norm": P("y")}}
    item = jax.tree.map(
        lambda array, spec: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec)),
        expected,
        specs,
    )
    restored = ost.SafetensorsHandler(family=FAMILY).restore(f"{server.url}/one", ost.SafetensorsRestore(item))
    jax.tree.map(same_but_nan, restored, expected)


def test_pieces_of_tensors_in_a_bucket(s3, mesh, tmp_path):
    """A plain server does not tell which files of pieces there are."""
    (tmp_path / "pieces").mkdir()
    write_pieces(tmp_path / "pieces", PIECES)
    for path in (tmp_path / "pieces").iterdir():
        obstore.put(s3.store(), f"x/{path.name}", path.read_bytes())
    item = {
        name: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(mesh, P("x", "y") if name == "grid" else P())
        )
        for name, array in WHOLE.items()
    }
    options = ost.SafetensorsOptions(storage_options=s3.options)
    restored = ost.SafetensorsHandler(options=options).restore(f"{s3.url}/x", ost.SafetensorsRestore(item))
    assert all(same(restored[name], WHOLE[name]) for name in WHOLE)


def test_credentials_that_expire_on_the_way(s3, tmp_path):
    write(tmp_path / "x", TENSORS)
    obstore.put(s3.store(), "x/model.safetensors", (tmp_path / "x").read_bytes())
    expired = Answer(400, {}, b"<Error><Code>ExpiredToken</Code></Error>")
    s3.server.fail(expired, method="GET", path="*model.safetensors", skip=1, times=None)
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(storage_options=s3.options))
    with pytest.raises(ost.StorageError, match=f"{s3.url}/x/model.safetensors: reading .*400.*ExpiredToken"):
        handler.restore(f"{s3.url}/x")


@pytest.mark.both_devices
def test_faults_on_the_way_do_not_show(server):
    for fault in (Answer(503), Cut(100, "reset"), Cut(None, "close"), Answer(429)):
        server.fail(fault, skip=2, times=2)
    restored = ost.SafetensorsHandler().restore(f"{server.url}/many")
    assert all(same(restored[name], TENSORS[name]) for name in TENSORS)


def test_a_file_that_is_replaced_while_it_is_restored(server, tmp_path):
    name = "model-00001-of-00002.safetensors"
    other = tmp_path / "other.safetensors"
    write(other, {"wide": TENSORS["wide"][::-1]})
    url = f"{server.url}/many"
    server.fail(Call(lambda: other.replace(tmp_path / "many" / name)), path=f"*{name}", skip=1)
    with pytest.raises(ost.StorageError, match=f"{url}/{name}: changed while it was in use"):
        ost.SafetensorsHandler().restore(url)


def test_what_is_missing(server, tmp_path):
    with pytest.raises(ost.MissingError, match=rf"{server.url}/no/model.safetensors: cannot be opened"):
        ost.open_checkpoint(f"{server.url}/no")
    (tmp_path / "many" / "model-00002-of-00002.safetensors").unlink()
    faults = ost.verify(f"{server.url}/many")
    assert [str(fault) for fault in faults] == [
        f"{server.url}/many/model-00002-of-00002.safetensors: cannot be opened: there is no such object"
    ]


def test_files_that_cannot_be_mapped(server):
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(alias=True))
    with pytest.raises(ost.SafetensorsError, match=r"one: SafetensorsOptions\(alias=True\) maps local files"):
        handler.restore(f"{server.url}/one")


def test_a_config_beside_the_files(server, tmp_path):
    (tmp_path / "one" / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    with pytest.raises(ost.MappingError, match="X"):
        ost.open_checkpoint(f"{server.url}/one", family="maxtext")
    (tmp_path / "one" / "config.json").unlink()
    with pytest.raises(ost.MappingError):
        ost.open_checkpoint(f"{server.url}/one", family="maxtext")


def test_an_interrupt_ends_a_restore(server):
    url = f"{server.url}/one/model.safetensors"
    ost.open_checkpoint(url)
    server.fail(Call(_thread.interrupt_main), skip=1)
    server.fail(Cut(None, "stall"), skip=1, times=None)
    with pytest.raises(KeyboardInterrupt):
        ost.SafetensorsHandler().restore(url)
