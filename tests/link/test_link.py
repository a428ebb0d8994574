"""Linked directories: what stock Orbax, which does not know this package, makes of them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import orbax_safetensors as ost
from tests.support import hang, stock_links
from tests.support.family_samples import TREES, made_with
from tests.support.link_models import DATA, made_by_maxtext

pytestmark = pytest.mark.process

# Samples with leaves that are computed: embeddings, norms and queries that are scaled or offset, ones that are not
# stored, queries and keys, or gates, that are permuted inside of a dimension, and gates that share rows with others.
MADE = {
    "deepseek4",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "gemma4_small",
    "gpt-oss",
    "llama2",
    "llama3.1",
    "llama4",
    "llama4_dense",
    "mistral",
    "mixtral",
    "qwen3.5",
    "qwen3_vl_moe",
}
ALL_WAYS = {"gemma2 scanned", "qwen3 unscanned", "deepseek3 scanned"}
EACH = pytest.mark.parametrize("name", [" ".join(tree) for tree in TREES])


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    """All samples, linked as an item of a step each: what `link` returned, by name."""
    root = tmp_path_factory.mktemp("links")
    return {
        f"{sample} {mode}": ost.link(
            DATA / sample / "hf",
            root / f"{sample} {mode}" / "5" / "state",
            family="maxtext",
            variant=made_with(sample, mode),
        )
        for sample, mode in TREES
    }


@pytest.fixture(scope="module")
def read(links, tmp_path_factory):
    """What was wrong in the process without this package: by name and way."""
    scratch = tmp_path_factory.mktemp("stock")
    jobs = {
        name: {
            "path": done.path,
            "npz": str(made_by_maxtext(name)),
            "above": ["params"],
            "around": {"step": 0, "params": {}, "opt_state": {}},
            "ways": list(stock_links.WAYS) if name in ALL_WAYS else ["whole", "sharded"],
        }
        for name, done in links.items()
    }
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    worker = subprocess.run(
        [sys.executable, "-W", "error", stock_links.__file__, scratch / "jobs.json", scratch / "found.json"],
        capture_output=True,
        text=True,
        cwd=scratch,
        env=environment,
        check=False,
        timeout=hang.SECONDS,
    )
    assert worker.returncode == 0, worker.stderr
    return json.loads((scratch / "found.json").read_text())


@EACH
@pytest.mark.parametrize("way", ["whole", "sharded"])
def test_stock_orbax_restores_what_maxtexts_converter_made(name, way, read):
    assert read[name][way] == []


@pytest.mark.parametrize("name", sorted(ALL_WAYS))
@pytest.mark.parametrize("way", list(stock_links.WAYS)[2:])
def test_everything_of_orbax_reads_a_link(name, way, read):
    assert read[name][way] == []


@EACH
def test_what_is_geometry_is_not_made(name, links):
    done = links[name]
    assert (done.made_bytes > 0) == (name.split()[0] in MADE)
    with np.load(made_by_maxtext(name)) as arrays:
        assert done.linked_bytes + done.made_bytes == sum(array.nbytes for array in arrays.values())
        assert done.num_arrays == len(arrays)
