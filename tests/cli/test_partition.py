"""Meshes and partitions from a command line."""

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orbax_safetensors.cli.arguments import UsageError, parse_mesh, parse_rule
from orbax_safetensors.cli.partition import axes_text, given_spec, spread
from orbax_safetensors.devices.partition import Partition
from orbax_safetensors.errors import RuleError

MESH = {"data": 2, "model": 4}


def test_mesh():
    assert parse_mesh("data=2,model=4") == MESH
    assert list(parse_mesh("b=1,a=3")) == ["b", "a"]


def test_rule():
    for text, spec in {
        "k=data": ("data",),
        "k=data,model": ("data", "model"),
        "k=-,model": (None, "model"),
        "k=,model": (None, "model"),
        "k=data+model,-": (("data", "model"), None),
        "k=": (),
        "=data": ("data",),
        "(?=x)a=b=data": ("data",),
    }.items():
        assert parse_rule(text) == (text, text.rpartition("=")[0], spec)


@pytest.mark.parametrize(
    ("parse", "expected", "texts"),
    [
        (parse_mesh, "NAME=SIZE", ["", "data", "data=", "=2", "data=0", "data=-1", "data=2,", "a b=2", "a=2.0"]),
        (parse_rule, "REGEX=AXES", ["data"]),
        (parse_rule, "for every dimension", ["k=a b", "k=data+", "k=-+a"]),
    ],
)
def test_what_is_neither(parse, expected, texts):
    for text in texts:
        with pytest.raises(UsageError, match=f"expected {expected}.*{re.escape(repr(text))}"):
            parse(text)


def test_a_mesh_with_an_axis_twice():
    with pytest.raises(UsageError, match="the axis 'a' is passed twice in 'a=2,a=3'"):
        parse_mesh("a=2,a=3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(=data", "not a regular expression"),
        ("k=data,data", "can shard one dimension only"),
        ("k=data+data", "can shard one dimension only"),
        ("k=expert", "no axis 'expert'"),
    ],
)
def test_a_rule_that_does_not_fit_the_mesh(text, message):
    with pytest.raises(RuleError, match=message):
        given_spec([parse_rule(text)], MESH)


def test_rules_are_what_the_functions_take():
    rules = [parse_rule("kernel=data,model"), parse_rule("bias=-")]
    assert given_spec(rules, MESH) == {"kernel": ("data", "model"), "bias": (None,)}
    assert given_spec([], None) is None
    with pytest.raises(UsageError, match="also pass --mesh"):
        given_spec(rules, None)
    with pytest.raises(UsageError, match="is passed twice"):
        given_spec([*rules, rules[0]], MESH)


def test_spread_examples():
    assert spread((64, 48), MESH) == (("data", "model"), None)
    assert spread((2, 48), MESH) == (("data",), ("model",))
    assert spread((3, 48), MESH) == (None, ("data", "model"))
    assert spread((4,), MESH) == (("data",),)
    for shape in ((0, 3), (), (5, 7)):
        assert not any(spread(shape, MESH))


@given(st.lists(st.integers(0, 24), max_size=4), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_spread_is_even(shape, sizes):
    mesh = {f"axis{number}": size for number, size in enumerate(sizes)}
    spec = spread(tuple(shape), mesh)
    assert Partition(mesh, {"": spec}).spec("any", tuple(shape)) == spec


def test_axes_are_written_as_they_are_taken():
    for axes in ((("data",), ("model",)), ((), ("data", "model"))):
        assert parse_rule(f"k={axes_text(axes)}").spec == tuple(
            entry[0] if len(entry) == 1 else entry or None for entry in axes
        )
