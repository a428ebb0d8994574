"""The demo's page: whole in itself, exact, and safe with hostile names."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cli.heat_map import draw
from tests.support.pages import HOSTILE, Page

MESH = {"process": 2, "device": 4}


@pytest.fixture
def drawn(tmp_path):
    """A file of which process 0 read the first half, process 1 the rest, and both the last ten bytes."""
    save_file({"a": np.zeros((8, 8), np.float32), HOSTILE: np.zeros(24, np.uint8)}, tmp_path / "a.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    start, end = checkpoint.files[0].header.data_start, checkpoint.files[0].header.file_bytes
    ranges = [[[start, start + 140], [end - 10, end]], [[start + 140, end]]]
    reports = [
        {"process": process, "devices": 4, "shards": 8, "needed_bytes": 140, "planned_bytes": 150,
         "measured_bytes": 150, "ranges": {"0": ranges[process]}}
        for process in range(2)
    ]  # fmt: skip
    return checkpoint, reports


def test_complete_in_itself(drawn):
    page = Page(draw(*drawn, [], MESH))
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not {"src", "href", "srcset"} & {name for name, _ in page.attributes}
    text = draw(*drawn, [], MESH)
    assert "url(" not in text
    assert "http" not in text
    assert "{{" not in text.replace("{{data}}\\", "")


def test_a_name_is_text_and_nothing_else(drawn):
    page = Page(draw(*drawn, [], MESH))
    assert page.tags.count("script") == 2
    names = [tensor["name"] for tensor in json.loads(page.data)["tensors"]]
    assert names == ["a", HOSTILE.replace("\x1b", "\\x1b")]


def test_numbers(drawn):
    page = Page(draw(*drawn, [], MESH))
    first, second = json.loads(page.data)["tensors"]
    assert first["owners"] == [140, 116, 0]
    assert second["owners"] == [0, 14, 10]
    assert (first["end"] - first["begin"], second["end"] - second["begin"]) == (256, 24)


def test_areas_are_to_scale(drawn):
    checkpoint, reports = drawn
    text = draw(checkpoint, reports, [], MESH)
    size = checkpoint.files[0].header.file_bytes
    row_bytes = json.loads(Page(text).data)["row_bytes"]
    widths = {
        colour: sum(float(width) for width in re.findall(r"h([\d.]+)v", path))
        for colour, path in re.findall(r'<path class="(\w+)" d="(M[^"]*h[^"]*)"/>', text)
    }
    expected = {"first": 140, "second": 130, "both": 10, "header": size - 280}
    for colour, nbytes in expected.items():
        assert widths.pop(colour) == pytest.approx(nbytes / row_bytes * 1000, rel=1e-5)
    assert not widths


def test_faults_are_shown(drawn):
    text = draw(*drawn, ["process 1: <two> of 8 shards differ"], MESH)
    assert '<p class="bad">process 1: &lt;two&gt; of 8 shards differ</p>' in text
    assert "All bits are equal" not in text
