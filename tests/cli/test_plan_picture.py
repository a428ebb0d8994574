"""`plan --picture`: whole in itself, exact, small, and safe with hostile names."""

import base64
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.pages import HOSTILE, Page
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "qwen3"


def drawn(cli, tmp_path, path, *argv):
    """The page's text, its data, and the plan."""
    picture = tmp_path / "picture.html"
    result = cli("plan", path, *argv, "--picture", picture, "--json")
    assert (result.status, result.err) == (0, "")
    text = picture.read_text(encoding="utf-8")
    return text, json.loads(Page(text).data), json.loads(result.out)


def amounts(data, key):
    """Bytes by row and stretch."""
    shares = np.frombuffer(base64.b64decode(data[key]), "<u2").reshape(len(data["rows"]), -1) / data["unit"]
    return shares * np.concatenate([np.diff(file["cuts"]) for file in data["files"]])


def test_complete_in_itself(cli, tmp_path):
    text, _, _ = drawn(cli, tmp_path, QWEN3, "--mesh", "x=4", "--processes", "4", "--bandwidth", "1GB/s")
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not {"src", "href", "srcset"} & {name for name, _ in page.attributes}
    assert "url(" not in text
    assert "http" not in text
    assert "{{" not in text
    assert page.tags.count("canvas") == 3
    assert '<td class="left">estimated time</td>' in text


@pytest.mark.parametrize("spec", [[], ["--spec", r"proj\.weight=-,x"]])
def test_rows_hold_what_the_plan_reads(cli, tmp_path, spec):
    _, data, plan = drawn(cli, tmp_path, QWEN3, "--mesh", "x=4", "--processes", "2", *spec)
    assert data["rows"] == [[0, 0], [1, 1]]
    read, needed = amounts(data, "read"), amounts(data, "needed")
    for process, cost in enumerate(plan["processes"]):
        assert read[process].sum() == pytest.approx(cost["read_bytes"], rel=1e-3)
        assert needed[process].sum() == pytest.approx(cost["needed_bytes"], rel=1e-3)
        for file, own in zip(data["files"], cost["files"], strict=True):
            assert own["file"].endswith(file["name"])
            stretches = slice(file["first"], file["first"] + len(file["cuts"]) - 1)
            assert read[process, stretches].sum() == pytest.approx(own["read_bytes"], rel=1e-3)
    assert (read.sum() > 1.1 * needed.sum()) == bool(spec)
    assert len(data["tensors"]) == read.shape[1]


def test_many_processes_share_rows(cli, tmp_path, single):
    text, data, plan = drawn(cli, tmp_path, single, "--mesh", "x=256", "--processes", "256", "--spec", "big=x")
    assert data["rows"][0] == [0, 3]
    assert data["rows"][-1] == [252, 255]
    assert len(data["rows"]) == 64
    assert "4 or so in a row" in text
    total = sum(cost["read_bytes"] for cost in plan["processes"])
    assert 4 * amounts(data, "read").sum() == pytest.approx(total, rel=1e-3)


@pytest.fixture
def single(tmp_path):
    save_file({"big": np.zeros((512, 64), np.float32), "scale": np.zeros(3, np.int8)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_many_files_are_side_by_side(cli, tmp_path):
    (tmp_path / "model").mkdir()
    for number in range(12):
        save_file(
            {f"{number}": np.zeros((8, 8), np.float32)}, tmp_path / "model" / f"model-{number:05}-of-12.safetensors"
        )
    text, data, _ = drawn(cli, tmp_path, tmp_path / "model", "--mesh", "x=8", "--processes", "8")
    captions = re.findall(r"<figcaption title=\"([^\"]*)\">(\S+) <span", text)
    assert captions == [(f"model-{number:05}-of-12.safetensors", f"{number:05}") for number in range(12)]
    assert len(data["files"]) == 12
    assert "to scale" not in text


def test_hostile_names(cli, tmp_path):
    save_file({HOSTILE: np.zeros(64, np.uint8), "empty": np.zeros((0, 2), np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "out").mkdir()
    text, data, _ = drawn(cli, tmp_path / "out", tmp_path, "--mesh", "x=2")
    assert Page(text).tags.count("script") == 2
    clean = HOSTILE.replace("\x1b", "\\x1b")
    assert {tuple(one) for one in data["tensors"]} == {(clean, clean, 1)}


def test_over_reads_and_what_to_do(cli, tmp_path):
    save_file({"kernel": np.zeros((64, 16), np.float32)}, tmp_path / "a.safetensors")
    text, _, _ = drawn(cli, tmp_path, tmp_path, "--mesh", "x=2", "--processes", "2", "--spec", "kernel=-,x")
    assert re.search(r'kernel</td><td>4.0 KiB</td><td>\S+ KiB</td><td>1.98</td><td class="left">x,-</td><td>1.00', text)


def test_the_line_that_says_where_and_mistakes(cli, tmp_path, single):
    picture = tmp_path / "picture.html"
    result = cli("plan", single, "--mesh", "x=2", "--picture", picture)
    assert result.status == 0
    assert result.out.endswith(f"\n\nWhich bytes each process reads: {picture}\n")
    result = cli("plan", single, "--mesh", "x=2", "--mesh", "x=4", "--picture", picture)
    assert (result.status, result.out) == (2, "")
    assert "--picture is for one --mesh" in result.err
    result = cli("plan", single, "--mesh", "x=2", "--picture", tmp_path / "no" / "picture.html")
    assert (result.status, result.out) == (1, "")
    assert "there is no directory to write it to" in result.err


@pytest.mark.process
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_draws_every_cell_and_tells_its_numbers(cli, tmp_path, single):
    text, data, _ = drawn(cli, tmp_path, single, "--mesh", "x=4", "--processes", "4", "--spec", "big=x")
    # Tells how many cells of the canvas have been painted, and points at the last one.
    probe = """<script>
const canvas = document.querySelector("canvas");
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
document.title = "painted " + pixels.filter((value, at) => at % 4 === 3 && value).length;
const box = canvas.getBoundingClientRect();
const place = { clientX: box.right - 1, clientY: box.bottom - 1 };
canvas.dispatchEvent(new PointerEvent("pointermove", place));
</script></body>"""
    (tmp_path / "probed.html").write_text(text.replace("</body>", probe))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", tmp_path / "probed.html"], capture_output=True, text=True, timeout=120
    )
    assert f"<title>painted {np.count_nonzero(amounts(data, 'read'))}</title>" in done.stdout
    tip = re.search(r'<div id="tip"[^>]*>(.*?)</div>', done.stdout, re.DOTALL)[1]
    nbytes = data["files"][0]["cuts"][-1] - data["files"][0]["cuts"][-2]
    assert tip.startswith("<b>a.safetensors</b>")
    assert f"process 3 reads 100%: {nbytes:,} of {nbytes:,}\nand needs {nbytes:,}\n" in tip
