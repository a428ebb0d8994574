"""The picture of what processes read: each cell is right, and the page whole in itself and safe with any name."""

import re
from html.parser import HTMLParser
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
from orbax_safetensors.cli.picture import Stretches, amounts, picture, stretches
from orbax_safetensors.cli.tables import Page
from orbax_safetensors.geometry.box import Box
from orbax_safetensors.geometry.coalesce import Direct
from orbax_safetensors.geometry.strided import runs_of
from orbax_safetensors.transfer.plan import Block, Location, Part, TransferPlan, transfer_plan
from tests.support import examples, full_size
from tests.support.roots import TESTDATA

QWEN3 = TESTDATA / "qwen3"
PROCESSES = 4
# A name that would break out of a page.
HOSTILE = "<script>alert(1)<|script>&\"'[red]{0}\x1b[31m"
CLEAN = HOSTILE.replace("\x1b", "\\x1b")


class BrowserPage(HTMLParser):
    """A page as a browser reads it: its tags and attributes, its text, and each character of that with its colour."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self._colours, self._classes = [], [], "", [], [None]
        self._colour_of = dict(re.findall(r"\.(r\d+) \{background-color: (#\w+)", html))
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._classes.append(dict(attrs).get("class"))

    def handle_endtag(self, tag):
        self._classes.pop()

    def handle_data(self, data):
        if "pre" in self.tags:
            self.text += data
            self._colours += [self._colour_of.get(self._classes[-1])] * len(data)

    def cells(self):
        """The colours of the cells of each row, as red, green and blue."""
        rows = [
            [self._colours[at] for at in range(*row.span(1))]
            for row in re.finditer(r"^ process +\d+ ( +)$", self.text, re.MULTILINE)
        ]
        return [[tuple(bytes.fromhex(colour[1:])) for colour in row] for row in rows]


def kind(colour):
    """What a cell's colour says: nothing is read, only what is needed, or more."""
    red, _, blue = colour
    return "nothing" if colour == (233, 235, 238) else "read" if blue > red else "over-read"


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
        TransferPlan((), (part,), (), ()), Stretches([-100], cuts, np.arange(len(cuts) - 1), [("t", len(cuts) - 1)])
    )
    expected = [sum(low <= byte < high for byte in held) for low, high in pairwise(cuts)]
    assert found.tolist() == [expected, expected]


def test_a_leaf_is_as_wide_as_it_is_long(directory, tmp_path):
    assert stretches(read_checkpoint(directory)).bands == [
        ("layer.{0..1}.kernel, 12.2 KiB", 64),
        ("3 others, 213 Bytes", 1),
    ]
    save_file({"a": np.zeros(3, np.uint8), "none": np.zeros((0, 2), np.int8)}, tmp_path / "few.safetensors")
    few = stretches(read_checkpoint(tmp_path / "few.safetensors"))
    assert (few.cuts.tolist(), few.bands) == ([0, 1, 2, 3], [("a, 3 Bytes", 3)])
    save_file({"none": np.zeros((0, 2), np.int8)}, tmp_path / "none.safetensors")
    assert stretches(read_checkpoint(tmp_path / "none.safetensors")).cuts.tolist() == [0]


def test_leaves_of_layers_are_one_band_and_many_leaves_share_one(cli, tmp_path):
    tensors = {f"layers.{n}.w": np.zeros((8, 8), np.float32) for n in range(12)}
    save_file(
        tensors | {f"{chr(97 + n)}": np.zeros((8, 8 + n), np.float32) for n in range(26)}, tmp_path / "a.safetensors"
    )
    page = drawn(cli, tmp_path, tmp_path, "--mesh", "x=16", "--processes", "16")
    assert "\n layers.{0..11}.w, 3.0 KiB\n" in page.text
    assert "\n 4 others, " in page.text
    assert len(page.cells()) == 24 * 4
    assert "\n process  0  " in page.text
    assert "\n process 15  " in page.text


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
    text = "".join(element.text for element in root.iter(f"{space}text")).replace("\xa0", " ")
    assert f"Read and over-read by each process, to restore {tmp_path}" in text
    assert " <b>&, 4.0 KiB" in text
    colours = {element.get("fill") for element in root.iter(f"{space}rect")}
    kinds = {kind(tuple(bytes.fromhex(colour[1:]))) for colour in colours if colour and colour != "#ffffff"}
    assert kinds == {"read", "over-read", "nothing"}
    content = (tmp_path / "p.svg").read_text()
    assert "href" not in content
    assert not re.search(r"url\((?!#)", content)


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
    kinds = [[kind(colour) for colour in row] for row in page.cells()]
    over, exact, nothing = ["over-read"] * 64, ["read"] * 32, ["nothing"] * 32
    assert kinds == [over, over, [*exact, *nothing], [*nothing, *exact]]
    # The whole is darker than a part of it.
    assert sum(page.cells()[0][20]) < sum(page.cells()[0][63])
    assert re.search(r"^ a +4\.0 KiB +\S+ KiB +1\.98 +x,- +1\.00", page.text, re.MULTILINE)


def test_a_page_is_complete_in_itself(cli, tmp_path):
    page = drawn(cli, tmp_path, QWEN3, "--mesh", "x=4", "--processes", "4", "--bandwidth", "1GB/s")
    html = (tmp_path / "page.html").read_text()
    assert set(page.tags) == {"html", "head", "meta", "style", "body", "pre", "code", "span"}
    assert {name for name, _ in page.attributes} == {"charset", "class", "style"}
    assert "http" not in html
    assert "url(" not in html
    assert f"to restore {QWEN3}\n" in page.text
    assert "estimated time" in page.text


def test_names_are_text_and_nothing_else(cli, tmp_path):
    directory = tmp_path / HOSTILE
    directory.mkdir()
    save_file({HOSTILE: np.zeros((64, 16), np.float32)}, directory / f"{HOSTILE}.safetensors")
    page = drawn(cli, tmp_path, directory, "--mesh", "x=2", "--spec", ".=-,x", "--processes", "2")
    assert "script" not in page.tags
    assert f"/{CLEAN}\n" in page.text
    assert f"\n {CLEAN}, 4.0 KiB\n" in page.text
    assert f"\n {CLEAN} " in page.text.split("leaf ")[1]


def test_mistakes(cli, tmp_path, single):
    result = cli("plan", single, "--mesh", "x=2", "--mesh", "x=4", "--picture", tmp_path / "page.html")
    assert (result.status, result.out) == (2, "")
    assert "--picture is for one --mesh" in result.err
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
    page = Page(str(tmp_path / "demo.html"))
    show(*restored, page)
    page.write()
    return BrowserPage((tmp_path / "demo.html").read_text(encoding="utf-8"))


def test_the_demo_draws_what_was_measured(restored, tmp_path):
    page = shown(tmp_path, *restored, [])
    kinds = [[kind(colour) for colour in row] for row in page.cells()]
    ends = ["over-read", "read"]
    assert kinds == [["read"] * 32 + ["nothing"] * 30 + ends, ["nothing"] * 32 + ["read"] * 30 + ends]
    assert "\n a, 64 Bytes\n" in page.text
    assert "script" not in page.tags
    assert "All bits are equal: 16 shards" in page.text


def test_the_demo_shows_what_went_wrong(restored, tmp_path):
    page = shown(tmp_path, *restored, ["process 1: <two> of 8 shards differ"])
    assert "\nprocess 1: <two> of 8 shards differ\n" in page.text
    assert "All bits are equal" not in page.text


def test_a_terminal_of_80_columns_holds_the_picture(restored):
    checkpoint, reports = restored
    drawn = stretches(checkpoint)
    reads = {report["process"] + 998: np.array(report["drawn"]) for report in reports}
    assert max(map(len, str(picture(drawn, reads, 1000)).splitlines())) <= 80
