"""The README's examples run as they stand, on small checkpoints in the places that they name."""

import re
import shlex
import shutil

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import obstore
import optax
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from orbax_safetensors.mapping import Family, tensor
from orbax_safetensors.orbax_store import open_orbax
from tests.support.files import random_bits, write, write_indexed
from tests.support.roots import ROOT, TESTDATA

README = ROOT / "README.md"
QWEN3 = TESTDATA / "qwen3"
RNG = np.random.default_rng(0)
BF16 = np.dtype(jnp.bfloat16)
NORM = random_bits(RNG, (4096,), BF16)
EMBEDDING = random_bits(RNG, (64, 512), BF16)


@pytest.fixture
def unregistered():
    yield
    ost.unregister()


def my_tree(config):
    return {"embedding": tensor("embed.weight", (64, config["hidden_size"])).T}


@pytest.mark.filterwarnings("ignore:The default axis_types will change")  # JAX before 0.9
def test_the_examples(tmp_path, mesh, unregistered, hub, gcs, monkeypatch):
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    hub.hub.commit("Qwen/Qwen3-0.6B", {path.name: path.read_bytes() for path in QWEN3.iterdir()})
    for name in ("llama", "mine", "state"):
        (tmp_path / name).mkdir()
    llama = {
        "model.norm.weight": NORM,
        "model.embed_tokens.weight": EMBEDDING,
        "model.scale": np.array(3, np.int32),
        "model.odd": random_bits(RNG, (3, 8), BF16),
    }
    write_indexed(tmp_path / "llama", [{name: array} for name, array in llama.items()])
    write(tmp_path / "model.safetensors", llama)
    write(tmp_path / "state" / "model.safetensors", {"params.w": EMBEDDING})

    write(tmp_path / "mine" / "model.safetensors", {"embed.weight": EMBEDDING})
    (tmp_path / "mine" / "config.json").write_text('{"architectures": ["MineForCausalLM"], "hidden_size": 512}')
    shutil.copytree(QWEN3, tmp_path / "qwen3")

    def make_train_state():
        params = {"w": jnp.zeros((64, 512), BF16)}
        return flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    names = {
        "make_train_state": make_train_state,
        "shardings": {"w": NamedSharding(mesh, P("x", "y"))},
        "MY_FAMILY": Family("mine.model", ("MineForCausalLM",), my_tree),
    }
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 18
    found = {}
    for path in (tmp_path / "llama").iterdir():
        obstore.put(gcs.store(), f"llama/{path.name}", path.read_bytes())
    for number, block in enumerate(blocks):
        block = block.replace('{"service_account": "/keys/models.json"}', repr(gcs.options))
        exec(block.replace("/models/", f"{tmp_path}/").replace("gs://bucket", gcs.url), names)
        found[number] = dict(names)

    stored = {
        model: {
            name: array for file in (tmp_path / model).glob("*.safetensors") for name, array in load_file(file).items()
        }
        for model in ("qwen3", "tuned")
    }
    for number in (0, 2, 3):
        for name, array in llama.items():
            assert np.asarray(found[number]["params"][name]).tobytes() == array.tobytes()
    assert ost.plan_restore(tmp_path / "llama", found[0]["args"]).processes[0].over_read == 1
    assert found[0]["params"]["model.embed_tokens.weight"].sharding.spec == P("model")
    assert found[1]["arrays"]["model.norm.weight"].tobytes() == NORM.tobytes()
    assert np.asarray(found[4]["state"].params["w"]).tobytes() == EMBEDDING.tobytes()
    assert np.asarray(found[5]["norm"]["model"]["norm"]["weight"]).tobytes() == NORM.tobytes()
    decoder = found[6]["state_params"]["params"]["decoder"]
    assert decoder["layers"]["mlp"]["wi_0"]["kernel"].sharding.spec == P("model")
    gates = [stored["qwen3"][f"model.layers.{layer}.mlp.gate_proj.weight"].T for layer in range(3)]
    np.testing.assert_array_equal(decoder["layers"]["mlp"]["wi_0"]["kernel"], np.stack(gates, axis=1))
    assert stored["tuned"].keys() == stored["qwen3"].keys()
    for name, array in stored["qwen3"].items():
        assert stored["tuned"][name].tobytes() == array.tobytes()
    assert (tmp_path / "tuned" / "config.json").read_bytes() == (QWEN3 / "config.json").read_bytes()
    assert found[8]["my_params"]["embedding"].tobytes() == EMBEDDING.T.tobytes()
    again = found[9]["state_params"]["params"]["decoder"]
    assert again["layers"]["mlp"]["wi_0"]["kernel"].sharding.spec == P("model")
    np.testing.assert_array_equal(again["layers"]["mlp"]["wi_0"]["kernel"], np.stack(gates, axis=1))
    for directory, count in (("new", 1), ("two", 1), ("copy", 1)):
        saved = ost.open_checkpoint(tmp_path / directory)
        assert len(saved.files) == count
        assert saved.metadata["format"] == "pt"
    assert "params.model.norm.weight" in ost.open_checkpoint(tmp_path / "tree").tensors
    assert len(found[13]["plan"].processes) == 64
    assert len(found[14]["plan"].processes) == 8
    assert not (tmp_path / "planned").exists()
    for name, array in llama.items():
        assert np.asarray(found[15]["params"][name]).tobytes() == array.tobytes()
    assert "new/commit_success.txt" in {one["path"] for one in obstore.list(gcs.store()).collect()}
    of_the_hub = found[16]["params"]["params"]["decoder"]
    np.testing.assert_array_equal(of_the_hub["layers"]["mlp"]["wi_0"]["kernel"], np.stack(gates, axis=1))
    assert len(found[17]["together"].cooperative) == 64

    wanted = NamedSharding(jax.sharding.AbstractMesh((8,), ("fsdp",)), P("fsdp"))
    leaf = open_orbax(tmp_path / "for-8").leaves["params.params.decoder.layers.mlp.wi_0.kernel"]
    assert (leaf.dtype, leaf.chunk_shape) == (BF16, wanted.shard_shape(leaf.shape))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("page", [README, README.parent / "docs" / "converting.md"], ids=["README", "converting"])
def test_from_files_to_files(tmp_path, page, capsys):
    shutil.copytree(QWEN3, tmp_path / "qwen3")
    text = page.read_text()
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if "/models/" in line and " --" in line]
    assert len(commands) >= 3
    for command in commands:
        assert main([part.replace("/models/", f"{tmp_path}/") for part in command]) == 0, capsys.readouterr().err
    if page is not README:
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            if "s3://" in block:  # needs a bucket
                continue
            exec(block.replace("/models/", f"{tmp_path}/"), {"ost": ost})
        assert open_orbax(tmp_path / "unstacked").custom_metadata == {"scan_layers": False}
        assert len(list((tmp_path / "qwen3-for-4").glob("*.safetensors"))) == 4
    leaf = open_orbax(tmp_path / "for-16").leaves["params.params.decoder.layers.mlp.wi_0.kernel"]
    assert leaf.chunk_shape[0] * 16 == leaf.shape[0]
    back = tmp_path / ("back" if page is README else "tuned")
    for file in back.glob("*.safetensors"):
        for name, array in load_file(file).items():
            stored = ost.SafetensorsHandler().restore(epath.Path(QWEN3))[name]
            assert array.tobytes() == stored.astype(array.dtype).tobytes()
            assert array.dtype == (stored.dtype if page is README else BF16)
