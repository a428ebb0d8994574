"""Names in braces, against what a shell makes of them."""

import shutil
import subprocess

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orbax_safetensors.cli.braces import in_braces
from tests.support.strategies import examples

BASH = shutil.which("bash")


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
