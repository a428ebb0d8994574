"""What is printed on a terminal, in what form numbers are, and names in braces against what a shell makes of them."""

import io
import re
import shutil
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orbax_safetensors.cli.tables import (
    Printer,
    Seconds,
    Share,
    Size,
    _for_people,
    in_braces,
)
from tests.support.strategies import examples

BASH = shutil.which("bash")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_programs_get_exact_numbers():
    stream = io.StringIO()
    Printer(stream).table(("n", "size", "share", "ratio"), [(12345678, Size(12345678), Share(0.5), 1 / 3)])
    assert stream.getvalue() == "n\tsize\tshare\tratio\n12345678\t12345678\t0.5\t0.333333\n"


@pytest.mark.parametrize("columns", ["40", "80", "120"])
def test_a_terminal_gets_a_table_that_fits_and_holds_everything(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    output = Printer(stream)
    name = "model.layers.10.block_sparse_moe.experts.63.w1.weight[bold]"
    output.table(("name", "bytes", "share"), [(name, Size(90_868_376), Share(0.49994)), ("b", Size(1), Share(1))])
    output.facts([("parameters", 12_345_678)])
    text = re.sub(r"\x1b\[\d*m", "", stream.getvalue())
    lines = text.splitlines()
    # A name is whole, to be copied; a terminal that is narrower than the name wraps it.
    assert (f" {name}" in lines) == (columns == "40")
    assert max(len(line) for line in lines if line != f" {name}") <= int(columns)
    assert name in text
    for number in ("86.7 MiB", "49.99%", "100.00%", "12,345,678"):
        assert number in text


LISTED = (
    ("leaf", "shape", "bytes", "made of"),
    [("params.decoder.layers.mlp.wi_0.kernel[bold]", "[2,3]", Size(2048)), ("b\n", "[]", Size(4))],
    [["layers.{0..2}.gate.weight", "x\x1b"], []],
)


def test_a_listing_for_programs():
    stream = io.StringIO()
    Printer(stream).listing(*LISTED)
    assert stream.getvalue() == (
        "leaf\tshape\tbytes\tmade of\n"
        "params.decoder.layers.mlp.wi_0.kernel[bold]\t[2,3]\t2048\tlayers.{0..2}.gate.weight, x\\x1b\n"
        "b\\n\t[]\t4\t\n"
    )


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (
            "40",
            [
                " leaf                    shape    bytes",
                "   made of",
                " " + 38 * "─",
                " params.decoder.layers.mlp.wi_0.kernel[bold]",
                "                         [2,3]  2.0 KiB",
                "   layers.{0..2}.gate.weight",
                "   x\\x1b",
                " b\\n                     []     4 Bytes",
            ],
        ),
        (
            "80",
            [
                " leaf                                         shape    bytes",
                "   made of",
                " " + 78 * "─",
                " params.decoder.layers.mlp.wi_0.kernel[bold]  [2,3]  2.0 KiB",
                "   layers.{0..2}.gate.weight",
                "   x\\x1b",
                " b\\n                                          []     4 Bytes",
            ],
        ),
    ],
)
def test_a_listing_on_a_terminal(monkeypatch, columns, lines):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    Printer(stream).listing(*LISTED)
    assert re.sub(r"\x1b\[\d*m", "", stream.getvalue()).splitlines() == lines


def test_a_listing_of_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    Printer(stream).listing(("leaf", "made of"), [], [])
    assert "leaf" in stream.getvalue()


@pytest.mark.process
def test_a_terminal_is_what_the_stream_says():
    code = "import sys; from orbax_safetensors.cli.tables import Printer; print(Printer(sys.stdout).for_people)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"FORCE_COLOR": "1"})
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        ([], []),
        (["norm.weight"], ["norm.weight"]),
        (["layers.7.w1"], ["layers.7.w1"]),
        ([f"layers.{n}.w1" for n in range(3, 61)], ["layers.{3..60}.w1"]),
        ([f"layers.{n}.w" for n in (10, 2, 6)], ["layers.{2..10..4}.w"]),
        ([f"l.{n}.e.{e}" for n in range(2) for e in range(3)], ["l.{0..1}.e.{0..2}"]),
        (["a.0.weight", "a.0.scale", "a.1.weight", "a.1.scale"], ["a.{0..1}.weight", "a.{0..1}.scale"]),
        (["a.0", "a.1", "a.3"], ["a.0 +2"]),  # a gap
        (["a.0.b.0", "a.1.b.1"], ["a.0.b.0 +1"]),  # not all pairs
        (["a.00", "a.01"], ["a.00 +1"]),  # braces would write 0 and 1
        (["a.1", "a.01"], ["a.1 +1"]),  # one number, two names
        (["0", "1"], ["{0..1}"]),
        (["a.0", "a.1", f"a.{10**6}"], ["a.0 +2"]),
        (["a.0", f"a.{10**6}"], ["a.{0..1000000..1000000}"]),
        (["a.1", "a.2", f"a.{'9' * 5000}"], ["a.1 +2"]),  # more digits than Python reads
        ([f"a.{'9' * 5000}"], [f"a.{'9' * 5000}"]),
    ],
)
def test_texts(names, texts):
    assert [text for text, _ in in_braces(names)] == texts


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@given(st.sets(st.from_regex(r"(a|b)\.([0-9]|1[0-9])(\.w[0-3])?", fullmatch=True), min_size=1, max_size=40))
@examples(50)
def test_a_shell_agrees(names):
    found = in_braces(sorted(names))
    assert {name for _, own in found for name in own} == names
    in_full = [(text, own) for text, own in found if " +" not in text]
    script = "\n".join(f"echo {text}" for text, _ in in_full)
    done = subprocess.run([BASH, "-c", script], capture_output=True, text=True, check=True)
    assert [set(line.split()) for line in done.stdout.splitlines()] == [set(own) for _, own in in_full]


WIDE = (
    ("process", "file", "needed", "written decoded", "over-read", "chunks written", "memory"),
    [
        (n, f"model-{n:05}-of-00003.safetensors", Size(3 << 30), Size(5 << 20), 1.5, 12_345, Size(9 << 30))
        for n in (1, 2)
    ],
)
MESHES = (
    ("mesh", "devices", "processes", "per device", "read", "over-read", "requests", "memory", "time"),
    [
        (name, 8, 1, Size(900 << 20), Size(7 << 30), 1.25, 1234, Size(8 << 30), Seconds(12.3))
        for name in ("a=8", "b=2,c=4")
    ],
)


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
@pytest.mark.parametrize(("method", "columns_and_rows"), [("table", WIDE), ("table", MESHES), ("comparison", MESHES)])
def test_no_word_is_broken(monkeypatch, columns, method, columns_and_rows):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    getattr(Printer(stream), method)(*columns_and_rows)
    text = re.sub(r"\x1b\[\d*m", "", stream.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    for word in " ".join(columns_and_rows[0]).split():
        assert re.search(rf"(?<!\S){word}(?!\S)", text)
    for row in columns_and_rows[1]:
        for cell in row:
            shown = _for_people(cell)
            assert re.search(rf"(?<!\S){re.escape(shown)}(?!\S)", text), shown


def test_what_is_compared_stands_side_by_side_if_there_is_room_for_it_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    Printer(stream).comparison(*MESHES)
    lines = re.sub(r"\x1b\[\d*m", "", stream.getvalue()).splitlines()
    assert lines[0].split() == ["mesh", "a=8", "b=2,c=4"]
    assert lines[-1].split() == ["time", "12.3", "s", "12.3", "s"]
    programs = io.StringIO()
    Printer(programs).comparison(*MESHES)
    assert programs.getvalue().splitlines()[1].startswith("a=8\t8\t1\t")


def test_notes_wrap_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    Printer(stream).listing(("family", "switches"), [("a",)], [["scan_layers=true param_scan_axis=1"]])
    assert re.sub(r"\x1b\[\d*m", "", stream.getvalue()).splitlines()[-2:] == [
        "   scan_layers=true",
        "   param_scan_axis=1",
    ]
