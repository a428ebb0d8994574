"""What is printed for programs and on a terminal: everything, as it is, in the form that each reads."""

import io
import subprocess
import sys

import pytest

from orbax_safetensors.cli.tables import Printer, Share, Size
from tests.support.terminal import terminal

NAME = "model.layers.10.block_sparse_moe.experts.63.w1.weight[bold]:smile:"
COLUMNS = ("name", "bytes", "of all")
ROWS = [(NAME, Size(90_868_376), Share(0.49994)), ("b\n", Size(1), Share(1))]
NOTES = [["layers.{0..2}.gate.weight", "x\x1b"], []]


def test_programs_get_exact_numbers():
    stream = io.StringIO()
    Printer(stream).table(("n", "size", "share", "ratio"), [(12345678, Size(12345678), Share(0.5), 1 / 3)])
    assert stream.getvalue() == "n\tsize\tshare\tratio\n12345678\t12345678\t0.5\t0.333333\n"


def test_notes_are_the_last_column_for_programs():
    stream = io.StringIO()
    Printer(stream).table((*COLUMNS, "made of"), ROWS, NOTES)
    assert stream.getvalue() == (
        f"name\tbytes\tof all\tmade of\n{NAME}\t90868376\t0.49994\tlayers.{{0..2}}.gate.weight, x\\x1b\nb\\n\t1\t1\t\n"
    )


def test_a_terminal_gets_a_table_for_people(monkeypatch):
    shown = terminal(monkeypatch, 120)
    output = Printer(shown)
    output.table((*COLUMNS, "made of"), ROWS, NOTES)
    output.facts([("parameters", 12_345_678)])
    width = len(NAME)
    assert shown.lines == [
        " " + "name".ljust(width) + "                 of",
        " " + "  made of".ljust(width) + "     bytes      all",
        "─" * (width + 21),
        " " + NAME + "  86.7 MiB   49.99%",
        "   layers.{0..2}.gate.weight",
        "   x\\x1b",
        " " + "b\\n".ljust(width) + "    1 Byte  100.00%",
        "",
        " parameters  12,345,678",
    ]


def test_a_name_that_is_a_little_too_long_goes_on_after_a_dot(monkeypatch):
    shown = terminal(monkeypatch, 60)
    Printer(shown).table(("name", "bytes"), [("model.layers.{0..35}.post_attention_layernorm.weight", Size(64))])
    assert shown.lines[2:] == [
        " model.layers.{0..35}.post_attention_layernorm.    64 Bytes",
        "   weight",
    ]


def test_names_that_leave_no_room_for_the_rest_have_their_own_lines(monkeypatch):
    shown = terminal(monkeypatch, 40)
    name = "model.layers.0.post_attention_layernorm"
    rows = [(name, "BF16", Size(64)), ("x", "F32", Size(4000)), ("y", "", "")]
    Printer(shown).table(("name", "dtype", "bytes", "made of"), rows, [["z"], [], []])
    assert shown.lines == [
        " name",
        "   dtype     bytes",
        "   made of",
        "─" * 40,
        " model.layers.0.",
        "   post_attention_layernorm",
        "   BF16   64 Bytes",
        "   z",
        " x",
        "   F32     3.9 KiB",
        " y",
    ]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_folds_long_names_and_cuts_off_nothing(monkeypatch, columns):
    shown = terminal(monkeypatch, columns)
    Printer(shown).table(COLUMNS, ROWS)
    for text in ("86.7 MiB", "49.99%", "100.00%"):
        assert any(text in line for line in shown.lines)
    Printer(shown).table(COLUMNS[:1], [(NAME * 2,)])
    assert NAME * 2 in "".join(line.strip() for line in shown.lines)
    assert max(map(len, shown.lines)) <= columns


def test_a_table_of_nothing_has_its_headings(monkeypatch):
    shown = terminal(monkeypatch, 80)
    Printer(shown).table(COLUMNS, [])
    assert shown.lines[0].split() == ["name", "bytes", "of", "all"]


@pytest.mark.process
def test_a_terminal_is_what_the_stream_says():
    code = "import sys; from orbax_safetensors.cli.tables import Printer; print(Printer(sys.stdout).for_people)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"FORCE_COLOR": "1"})
    assert done.stdout == "False\n"
