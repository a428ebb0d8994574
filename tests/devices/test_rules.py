"""Regular expressions of names, told apart from shell patterns."""

import re
from fnmatch import fnmatchcase

import pytest

from orbax_safetensors.devices.rules import check_pattern
from orbax_safetensors.errors import RuleError

NAMES = ["model.layers.1.mlp.up", "model.layers.0.norm", "model.layers.11.mlp.up", "norm", "model.norm", "lm_head"]


@pytest.mark.parametrize(
    "glob", ["*", "**", "*.mlp.*", "model.layers.1*", "*norm", "model.*.mlp*", "*layers.?.*", "*layer?*", "lm_head*"]
)
def test_the_advice_for_a_shell_pattern_finds_the_same_names(glob):
    with pytest.raises(RuleError, match=r"^dtype: .* is a regular expression, searched anywhere in the name") as raised:
        check_pattern("dtype", glob)
    regex = str(raised.value).partition(" write ")[2].strip("'")
    assert [name for name in NAMES if re.search(regex, name)] == [name for name in NAMES if fnmatchcase(name, glob)]


def test_the_advice_keeps_what_only_a_regular_expression_has():
    with pytest.raises(RuleError, match=re.escape(r"write 'layers\.1.*(up|down)'")):
        check_pattern("dtype", r"layers\.1*(up|down)")


@pytest.mark.parametrize(
    "regex",
    [
        r"layers\.\d*",
        r"[ab]*x",
        ".*norm",
        "(up|down)*",
        "model.*norm",
        r"l[0-9*]",
        r"[\]a*]",
        "[^]a*]",
        r"a\*b",
        "norm",
    ],
)
def test_what_repeats_no_character_of_a_word_is_a_regular_expression(regex):
    check_pattern("spec", regex)
