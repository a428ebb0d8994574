"""The examples of all pages run, Python and commands alike, in the order of the page."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental import v1
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.orbax_store import open_orbax
from tests.support import examples
from tests.support.compare import names_of
from tests.support.roots import ROOT

DOCS = ROOT / "docs"
# Pages that need other checkpoints, or servers: `test_PAGE.py` beside this file runs them.
OF_THEIR_OWN = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
OF_THEIR_OWN |= {"own-families", "quantized", "tables"}  # test_families.py
OF_THEIR_OWN |= {"own-formats", "several-hosts"}  # test_own_formats.py, test_several_hosts.py
# Pages set these, and other tests do not.
COMPILATION_CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
# The tests below look at the results.
CHECKED = {"converting.md", "how-it-works.md", "quickstart.md", "restore.md", "training.md"}
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if path.stem not in OF_THEIR_OWN and examples.blocks(path, "python", "sh")
)


@pytest.fixture
def models(tmp_path):
    return examples.make_models(tmp_path)


@pytest.fixture
def of_page(tmp_path, models):
    """Returns a function that runs a page, and returns the names of its examples and those after each block."""

    def run(page):
        names, after = {}, []
        for block in examples.blocks(DOCS / page, "python", "sh"):
            if "s3://" in block.text:  # needs a bucket
                continue
            if hasattr(v1, "load") or "v1." not in block.text:  # older versions of Orbax have other names
                examples.run(block, tmp_path, names)
            after.append(dict(names))
        return names, after

    cache = {name: getattr(jax.config, name) for name in COMPILATION_CACHE}
    yield run
    ost.unregister()
    for name, value in cache.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def stored(directory):
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in CHECKED])
def test_the_examples(of_page, page):
    of_page(page)


def test_the_guide_to_restores(of_page, models, tmp_path):
    llama = models["llama"]
    names, after = of_page("restore.md")
    whole, cast = list({id(found["params"]): found["params"] for found in after if "params" in found}.values())[:2]
    for params in (whole, names["arrays"], names["weights"]):
        assert params.keys() == llama.keys()
        assert all(np.asarray(params[name]).tobytes() == array.tobytes() for name, array in llama.items())
    assert whole["model.embed_tokens.weight"].sharding.spec == P("model")
    for name, array in llama.items():
        assert np.asarray(cast[name]).tobytes() == array.astype("float32" if "norm" in name else "float16").tobytes()
    for name, array in names["doubled"].items():
        np.testing.assert_array_equal(np.asarray(array, np.float32), 2 * llama[name].astype(np.float32))
    first = [name for name in llama if name.startswith(("model.embed_tokens.", "model.layers.0."))]
    assert list(names["first"]) == sorted(first)
    assert {leaf.dtype for leaf in names_of(names["mlps"]).values()} == {np.dtype("float32")}
    assert set(names["mlps"]["params"]["decoder"]["layers"]) == {"mlp"}
    assert set(names["layer"]["params"]["decoder"]) == {"layers_0"}
    assert ost.plan_restore(tmp_path / "llama", names["args"]).processes[0].over_read == 1
    weight, (adam, *_) = names["state"].params["w"], names["state"].opt_state
    assert np.asarray(weight).tobytes() == models["state"]["params.w"].tobytes()
    assert adam.mu["w"].sharding == weight.sharding
    norm = np.asarray(names["norm"]["model"]["norm"]["weight"])
    assert norm.tobytes() == llama["model.norm.weight"].tobytes()

    source = stored(tmp_path / "qwen3")
    assert jax.tree.all(jax.tree.map(np.array_equal, names["leaves"], names["state_params"]))
    kernel = names["state_params"]["params"]["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    gates = [source[f"model.layers.{layer}.mlp.gate_proj.weight"].T for layer in range(3)]
    np.testing.assert_array_equal(kernel, np.stack(gates, axis=1))
    assert kernel.sharding.spec == P(None, None, ("data", "model"))
    tuned = stored(tmp_path / "saved-back")
    assert tuned.keys() == source.keys()
    assert all(tuned[name].tobytes() == array.tobytes() for name, array in source.items())
    assert (tmp_path / "saved-back" / "config.json").read_bytes() == (tmp_path / "qwen3" / "config.json").read_bytes()


def test_the_quick_start_ends_in_other_logits(of_page, tmp_path):
    """Their values are those of `transformers`: `tests/interop/test_logits.py`."""
    names, _ = of_page("quickstart.md")
    before, after = (names["logits"](names[params], names["jnp"].arange(5)) for params in ("params", "tuned"))
    assert before.shape == after.shape == (5, 64)
    assert not np.array_equal(before, after)
    assert stored(tmp_path / "same").keys() == stored(tmp_path / "qwen3").keys()


def test_the_guide_to_training_shards_what_is_long(of_page):
    names, _ = of_page("training.md")
    (moments, *_), params = names["state"], names["params"]
    assert params["model.embed_tokens.weight"].sharding.spec == P("model")
    assert all(moments.mu[name].sharding == array.sharding for name, array in params.items())
    assert moments.count.sharding == names["replicated"]
    assert names["weights"].keys() == params.keys()


def test_the_guide_to_conversions(of_page, tmp_path):
    of_page("converting.md")
    assert open_orbax(tmp_path / "unstacked").custom_metadata["scan_layers"] is False
    assert len(list((tmp_path / "qwen3-for-4").glob("*.safetensors"))) == 4
    leaf = open_orbax(tmp_path / "for-16").leaves["params.params.decoder.layers.mlp.wi_0.kernel"]
    assert leaf.chunk_shape[0] * 16 == leaf.shape[0]
    unstacked = open_orbax(tmp_path / "for-8").leaves["params.params.decoder.layers_0.mlp.wi_0.kernel"]
    assert (unstacked.dtype, unstacked.chunk_shape) == ("bfloat16", (unstacked.shape[0] // 8, unstacked.shape[1]))
    for name, array in stored(tmp_path / "back").items():
        assert array.dtype == "bfloat16"
        assert array.tobytes() == stored(tmp_path / "qwen3")[name].astype(array.dtype).tobytes()


def test_a_model_runs_on_the_meshes_of_examples():
    """Those of pages and docstrings are looked at as they run, by `examples.run`."""
    texts = {path.name: path.read_text() for path in (ROOT / "examples").iterdir() if path.is_file()}
    made = {name: re.findall(r"make_mesh\(.*", text) for name, text in texts.items()}
    assert [call for calls in made.values() for call in calls if "AxisType.Auto" not in call] == []
    assert any(made.values())


def test_how_it_works_prints_what_it_shows(of_page, capsys):
    of_page("how-it-works.md")
    (block,) = examples.python(DOCS / "how-it-works.md")
    assert capsys.readouterr().out.splitlines() == [line[2:] for line in block.splitlines() if line.startswith("# ")]


def test_no_page_writes_where_another_does(models):
    """So readers can follow all pages on one machine."""
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    using = {}
    for page in pages:
        for block in examples.blocks(page, "python", "sh"):
            for name in re.findall(rf"{examples.MODELS}([\w.-]+)", block.text):
                using.setdefault(name, set()).add(page.name)
    assert {name for name, names in using.items() if len(names) > 1} <= models.keys()
    assert {"tuned", "qwen3"} <= using.keys()
