"""Linked directories: what stock Orbax, which does not know this package, makes of them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import orbax_safetensors as ost
from tests.support import hang, stock_links
from tests.support.family_samples import made_with
from tests.support.link_models import DATA, made_by_maxtext

pytestmark = pytest.mark.process

# Samples, and whether leaves are computed: embeddings and norms that are scaled or offset, queries and keys, or gates,
# that are permuted inside of a dimension, gates that share rows with others, ones that are not stored.
SAMPLES = {
    ("deepseek3", "scanned"): False,
    ("gemma2", "scanned"): True,
    ("gpt-oss", "unscanned"): True,
    ("llama3.1", "scanned"): True,
    ("qwen3", "unscanned"): False,
    ("qwen3.5", "unscanned"): True,
}
EACH = pytest.mark.parametrize("name", [" ".join(sample) for sample in SAMPLES])


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    """The samples, linked as an item of a step each: what `link` returned, by name."""
    root = tmp_path_factory.mktemp("links")
    return {
        f"{sample} {mode}": ost.link(
            DATA / sample / "hf",
            root / f"{sample} {mode}" / "5" / "state",
            family="maxtext",
            variant=made_with(sample, mode),
        )
        for sample, mode in SAMPLES
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
            "ways": list(stock_links.WAYS),
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
def test_everything_of_orbax_reads_what_maxtexts_converter_made(name, read):
    assert read[name] == {way: [] for way in stock_links.WAYS}


@EACH
def test_what_is_geometry_is_not_made(name, links):
    done = links[name]
    assert (done.made_bytes > 0) == SAMPLES[tuple(name.split())]
    with np.load(made_by_maxtext(name)) as arrays:
        assert done.linked_bytes + done.made_bytes == sum(array.nbytes for array in arrays.values())
        assert done.num_arrays == len(arrays)
