"""The picture of what processes read: each cell is right, and the page whole in itself and safe with any name."""

from itertools import pairwise
from math import prod
from xml.etree import ElementTree

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import save_file

from orbax_safetensors.checkpoint.open import open_checkpoint
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.cli.demo import show
from orbax_safetensors.cli.page import Page
from orbax_safetensors.cli.picture import Stretches, amounts, picture, stretches
from orbax_safetensors.cli.tables import Printer
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import Direct
from orbax_safetensors.geometry.strided import runs_of
from orbax_safetensors.transfer.plan import Block, Location, Part, TransferPlan, transfer_plan
from tests.support import examples, full_size
from tests.support.browser_page import BrowserPage
from tests.support.roots import TESTDATA
from tests.support.terminal import terminal

QWEN3 = TESTDATA / "qwen3"
PROCESSES = 4
# A name that would break out of a page.
HOSTILE = "<script>alert(1)<|script>&\"'[red]{0}\x1b[31m"
CLEAN = HOSTILE.replace("\x1b", "\\x1b")


def share(shape, process, axis):
    """The box of a process if `axis` is cut, or the whole if it cannot be."""
    cut = range(len(shape))[axis] if shape and axis is not None else None
    if cut is None or shape[cut] % PROCESSES:
        return Box.whole(shape)
    step = shape[cut] // PROCESSES
    return Box((process * step, process * step + step) if at == cut else (0, size) for at, size in enumerate(shape))


def planned(checkpoint, process, axis, max_gap_bytes):
    boxes = {name: share(view.shape, process, axis) for name, view in checkpoint.leaves.items()}
    blocks = [Block(view, boxes[name], boxes[name].shape, view.dtype) for name, view in checkpoint.leaves.items()]
    return transfer_plan(blocks, checkpoint.location, max_gap_bytes)


def filled(held, gap):
    """`held` with each gap of at most `gap` bytes between two bytes filled."""
    at = np.flatnonzero(held)
    short = np.flatnonzero(np.diff(at) - 1 <= gap)
    edges = np.zeros(held.size + 1, np.int8)
    np.add.at(edges, at[short], 1)
    np.add.at(edges, at[short + 1], -1)
    return held | (np.cumsum(edges[:-1]) > 0)


@pytest.mark.parametrize(("axis", "max_gap_bytes"), [(0, 50), (-1, 0), (-1, 50), (-1, 10_000), (None, 0)])
@pytest.mark.parametrize("family", [None, "maxtext"])
def test_cells_are_the_bytes_of_boxes(axis, max_gap_bytes, family):
    """By the file: each byte that is read, and the leaf that it belongs to."""
    stored = open_checkpoint(QWEN3)
    drawn = stretches(open_checkpoint(QWEN3, family=family))
    assert len(drawn.bands) > 5
    assert drawn.sums(np.diff(drawn.cuts)).sum() == stored.nbytes
    cell_of = np.repeat(drawn.cells, np.diff(drawn.cuts))
    for process in range(PROCESSES):
        needed, read = [], []
        for file in stored.files:
            for name, entry in sorted(file.header.tensors.items(), key=lambda item: item[1].begin):
                view = stored.leaves[name]
                held = np.zeros((*view.shape, view.dtype.itemsize), bool)
                held[tuple(slice(*edge) for edge in share(view.shape, process, axis))] = True
                assert held.size == entry.nbytes
                read.append(filled(held.ravel(), max_gap_bytes))
                # Spread evenly over what is read of the tensor.
                needed.append(read[-1] * (np.count_nonzero(held) / np.count_nonzero(read[-1])))
        expected = [np.bincount(cell_of, np.concatenate(tensors)) for tensors in (needed, read)]
        found = amounts(planned(stored, process, axis, max_gap_bytes), drawn)
        assert found[1].tolist() == expected[1].tolist()
        np.testing.assert_allclose(found[0], expected[0])


@pytest.mark.full_size
@pytest.mark.parametrize("model", ["deepseek-v3-fp8", "gpt-oss-120b-mxfp4", "llama-3.1-405b"])
def test_full_size_models_encoded_or_not(model, tmp_path):
    checkpoint = open_checkpoint(full_size.make(model, tmp_path), family="maxtext")
    plan = planned(checkpoint, 1, -1, 2**14)
    needed, read = amounts(plan, stretches(checkpoint))
    # Of scales, those beside the needed ones are read as well, which is not drawn.
    assert read.sum() == pytest.approx(plan.moved_bytes, rel=0.02 if checkpoint.quantized else 1e-9)
    assert needed.sum() == pytest.approx(plan.needed_bytes, rel=0.02 if checkpoint.quantized else 1e-9)


@given(st.data())
def test_runs_are_counted_between_any_cuts(data):
    length = data.draw(st.integers(1, 5))
    modes, reach = [], length
    for _ in range(data.draw(st.integers(0, 3))):
        size, gap = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 5))
        modes.append((size, reach + gap))
        reach += (size - 1) * (reach + gap)
    runs = runs_of(data.draw(st.integers(0, 9)), length, modes)
    assert runs.nbytes == length * prod(size for size, _ in modes)
    held = {begin + at for begin, count in runs.pieces(0, runs.nbytes) for at in range(count)}
    inner = data.draw(st.sets(st.integers(1, runs.end)))
    cuts = np.array(sorted({0, runs.end + 2} | inner))
    part = Part("t", Location(0, 100, np.dtype(np.uint8)), Direct(runs, 0, 0), ())
    found = amounts(
        TransferPlan((), (part,), (), ()), Stretches([-100], cuts, np.arange(len(cuts) - 1), [("t", 1, len(cuts) - 1)])
    )
    expected = [sum(low <= byte < high for byte in held) for low, high in pairwise(cuts)]
    assert found.tolist() == [expected, expected]


def test_a_leaf_is_as_wide_as_it_is_long(directory, tmp_path):
    assert stretches(read_checkpoint(directory)).bands == [
        ("layer.{0..1}.kernel, 12.2 KiB in 2 tensors", 2, 64),
        ("3 others, 213 Bytes in 3 tensors", 3, 1),
    ]
    save_file({"a": np.zeros(3, np.uint8), "none": np.zeros((0, 2), np.int8)}, tmp_path / "few.safetensors")
    few = stretches(read_checkpoint(tmp_path / "few.safetensors"))
    assert (few.cuts.tolist(), few.bands) == ([0, 1, 2, 3], [("a, 3 Bytes", 1, 3)])
    save_file({"none": np.zeros((0, 2), np.int8)}, tmp_path / "none.safetensors")
    assert stretches(read_checkpoint(tmp_path / "none.safetensors")).cuts.tolist() == [0]


def test_halves_of_the_tensors_of_layers_are_a_chessboard(cli, tmp_path):
    """Six layers of an eighth of the longest leaf, which eight cells would not show."""
    layers = {f"layers.{n}.w": np.zeros((8, 8), np.float32) for n in range(6)}
    save_file(layers | {"long": np.zeros((6 * 64, 8), np.float32)}, tmp_path / "a.safetensors")
    page = drawn(cli, tmp_path, tmp_path, "--mesh", "x=2", "--processes", "2", "--spec", ".=x,-")
    assert page.drawn[:2] == [["moved", "stored"] * 6, ["stored", "moved"] * 6]
    assert page.drawn[2:] == [["moved"] * 32 + ["stored"] * 32, ["stored"] * 32 + ["moved"] * 32]
    assert any("that makes the chessboard" in line for line in page.lines)


def test_leaves_of_layers_are_one_band_and_many_leaves_share_one(cli, tmp_path):
    tensors = {f"layers.{n}.w": np.zeros((8, 8), np.float32) for n in range(12)}
    save_file(
        tensors | {f"{chr(97 + n)}": np.zeros((8, 8 + n), np.float32) for n in range(26)}, tmp_path / "a.safetensors"
    )
    page = drawn(cli, tmp_path, tmp_path, "--mesh", "x=16", "--processes", "16")
    assert "layers.{0..11}.w, 3.0 KiB in 12 tensors" in page.lines
    assert any(line.startswith("4 others, ") for line in page.lines)
    assert len(page.drawn) == 24 * 4
    assert "process  0" in page.lines
    assert "process 15" in page.lines


def test_quantised_tensors_are_drawn_with_their_scales(cli, tmp_path):
    examples.make_models(tmp_path)
    fp8 = stretches(open_checkpoint(tmp_path / "qwen3-fp8", family="maxtext"))
    assert fp8.sums(np.diff(fp8.cuts)).sum() == read_checkpoint(tmp_path / "qwen3-fp8").nbytes


def test_bytes_that_no_leaf_has_are_in_no_cell(tmp_path):
    examples.make_models(tmp_path)
    drawn = stretches(open_checkpoint(tmp_path / "llama", family="maxtext"))
    left_out = sum(
        array.nbytes for name, array in read_checkpoint(tmp_path / "llama").tensors.items() if "inv_freq" in name
    )
    assert drawn.sums(np.diff(drawn.cuts)).sum() == read_checkpoint(tmp_path / "llama").nbytes - left_out


def test_the_same_picture_as_svg(cli, tmp_path):
    tensors = {"a": np.zeros((64, 16), np.float32), "<b>&": np.zeros((64, 16), np.float32)}
    save_file(tensors, tmp_path / "a.safetensors")
    result = cli(
        "plan", tmp_path, "--mesh", "x=2", "--processes", "2", "--spec", "a=-,x", "--picture", tmp_path / "p.svg"
    )
    assert (result.status, result.err) == (0, "")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    lines = [element.text for element in root.iter(f"{space}text")]
    assert f"What each process reads of {tmp_path}" in lines
    assert "<b>&, 4.0 KiB" in lines
    assert {element.get("class") for element in root.iter(f"{space}rect")} == {"ground", "moved", "over", "stored"}
    width, height = map(float, root.get("viewBox").split()[2:])
    for element in root.iter(f"{space}text"):
        assert float(element.get("x")) + 7.8 * len(element.text) <= width
        assert float(element.get("y")) <= height
    content = (tmp_path / "p.svg").read_text()
    assert "href" not in content
    assert "url(" not in content


def drawn(cli, tmp_path, path, *argv):
    """The page of a plan."""
    result = cli("plan", path, *argv, "--picture", tmp_path / "page.html")
    assert result.status == 0, result.err
    assert result.out.endswith(f"\n\nWhich bytes each process reads: {tmp_path}/page.html\n")
    return BrowserPage((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_over_reads_have_another_hue_and_an_advice(cli, tmp_path):
    save_file({"a": np.zeros((64, 16), np.float32), "b": np.zeros((64, 16), np.float32)}, tmp_path / "a.safetensors")
    argv = ["--mesh", "x=2", "--processes", "2", "--spec", "a=-,x", "--spec", "b=x,-"]
    page = drawn(cli, tmp_path, tmp_path, *argv)
    over, exact, nothing = ["over"] * 64, ["moved"] * 32, ["stored"] * 32
    assert page.drawn == [over, over, [*exact, *nothing], [*nothing, *exact]]
    # The whole is stronger than a part of it.
    assert page.process_rows[0][20][1] > page.process_rows[0][63][1]
    at = page.lines.index("leaf")
    assert page.lines[at + 6 : at + 9] == ["a", "4.0 KiB", "7.9 KiB"]
    assert page.lines[at + 9 : at + 12] == ["1.98", "x,-", "1.00"]


def test_a_page_is_complete_in_itself(cli, tmp_path):
    page = drawn(cli, tmp_path, QWEN3, "--mesh", "x=4", "--processes", "4", "--bandwidth", "1GB/s")
    html = (tmp_path / "page.html").read_text()
    assert not {"script", "link", "img", "a"} & set(page.tags)
    assert "http" not in html
    assert "url(" not in html
    assert ("content", "width=device-width, initial-scale=1") in page.attributes
    assert "prefers-color-scheme: dark" in html
    assert f"<title>What each process reads of {QWEN3}</title>" in html
    assert "estimated time" in page.lines


def test_names_are_text_and_nothing_else(cli, tmp_path):
    directory = tmp_path / HOSTILE
    directory.mkdir()
    save_file({HOSTILE: np.zeros((64, 16), np.float32)}, directory / f"{HOSTILE}.safetensors")
    page = drawn(cli, tmp_path, directory, "--mesh", "x=2", "--spec", ".=-,x", "--processes", "2")
    assert "script" not in page.tags
    assert f"What each process reads of {tmp_path}/{CLEAN}" in page.lines
    assert f"{CLEAN}, 4.0 KiB" in page.lines
    assert CLEAN in page.lines[page.lines.index("leaf") :]


def test_mistakes(cli, tmp_path, single):
    result = cli("plan", single, "--mesh", "x=2", "--mesh", "x=4", "--picture", tmp_path / "page.html")
    assert (result.status, result.out) == (2, "")
    assert "--picture is for one --mesh" in result.err
    for command in (("plan", single, "--mesh", "x=2", "--picture"), ("demo", single, "--output")):
        result = cli(*command, tmp_path / "page.png")
        assert (result.status, result.out) == (2, "")
        assert f"expected a name that ends in .html or .svg, found '{tmp_path}/page.png'" in result.err
        assert not (tmp_path / "page.png").exists()
    result = cli("plan", single, "--mesh", "x=2", "--picture", tmp_path / "no" / "page.html")
    assert (result.status, result.out) == (1, "")
    assert result.err == f"error: {tmp_path}/no/page.html: there is no directory to write it to\n"


@pytest.fixture
def restored(tmp_path):
    """A checkpoint of 64 bytes, of which process 0 reads the first half, process 1 the rest, and both the last two."""
    save_file({"a": np.zeros(64, np.uint8)}, tmp_path / f"{HOSTILE}.safetensors")
    reads = [[1] * 32 + [0] * 30 + [1] * 2, [0] * 32 + [1] * 32]
    reports = [
        {"process": process, "devices": 4, "arrays": 1, "shards": 8, "planned_bytes": sum(read),
         "measured_bytes": sum(read), "drawn": [[*read[:-2], 0, 1], read]}
        for process, read in enumerate(reads)
    ]  # fmt: skip
    return read_checkpoint(tmp_path), reports


def shown(tmp_path, *restored):
    page = Page(str(tmp_path / "demo.html"), "The demo")
    show(*restored, page)
    page.write()
    return BrowserPage((tmp_path / "demo.html").read_text(encoding="utf-8"))


def test_the_demo_draws_what_was_measured(restored, tmp_path):
    page = shown(tmp_path, *restored, [])
    ends = ["over", "moved"]
    assert page.drawn == [["moved"] * 32 + ["stored"] * 30 + ends, ["stored"] * 32 + ["moved"] * 30 + ends]
    assert "a, 64 Bytes" in page.lines
    assert "script" not in page.tags
    assert page.lines[1].startswith("Two processes restored ")
    assert "All bits are equal: 16 shards, compared with the safetensors package." in page.lines


def test_the_demo_shows_what_went_wrong(restored, tmp_path):
    page = shown(tmp_path, *restored, ["process 1: <two> of 8 shards differ"])
    assert "process 1: <two> of 8 shards differ" in page.lines
    assert not any("All bits are equal" in line for line in page.lines)


def test_the_legend_is_above_the_bands_and_has_only_what_is_drawn(tmp_path):
    save_file({f"layers.{n}.w": np.zeros(16, np.uint8) for n in range(2)}, tmp_path / "a.safetensors")
    drawn = stretches(read_checkpoint(tmp_path))
    whole, half = np.ones(32), np.repeat([1, 0, 1, 0], 8)
    reads = {0: np.array([half, half]), 1: np.array([1 - half, 1 - half])}
    several = picture(drawn, reads, 2)
    assert [row.name for row in several.legend] == ["read and needed", "not read by this process"]
    (only,) = picture(drawn, {0: np.array([whole, whole])}, 1).legend
    assert only.name == "read and needed"
    above = ["read and needed", "that makes the chessboard", "layers.{0..1}.w", "process 0"]
    for text in (str(several.text()), several.html(), several.svg("")):
        places = [text.index(part) for part in above]
        assert places == sorted(places)


def test_a_terminal_of_80_columns_holds_the_picture(restored):
    checkpoint, reports = restored
    drawn = stretches(checkpoint)
    reads = {report["process"] + 998: np.array(report["drawn"]) for report in reports}
    assert max(map(len, str(picture(drawn, reads, 1000).text()).splitlines())) <= 80


def test_a_terminal_without_colours_tells_the_kinds_of_cells_apart(restored, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    output = terminal(monkeypatch, 80)
    show(*restored, [], Printer(output))
    assert " process 0 " + "█" * 32 + "·" * 30 + "x█" in output.lines
    assert " xxxx read, but more than a tenth of it is not needed" in output.lines
    assert max(map(len, output.lines)) <= 80
    assert "[3" not in output.getvalue()
