"""Meshes and partitions from a command line."""

from math import prod

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orbax_safetensors.cli.arguments import UsageError
from orbax_safetensors.cli.partition import assign, axes_text, parse_mesh, parse_rule, shards, spread
from orbax_safetensors.errors import RuleError

MESH = {"data": 2, "model": 4}


def test_mesh():
    assert parse_mesh("data=2,model=4") == MESH
    assert list(parse_mesh("b=1,a=3")) == ["b", "a"]


@pytest.mark.parametrize(
    "text", ["", "data", "data=", "=2", "data=0", "data=-1", "data=2,", "a=2,a=3", "a b=2", "a=2.0"]
)
def test_bad_mesh(text):
    with pytest.raises(UsageError):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("k=data", (("data",),)),
        ("k=data,model", (("data",), ("model",))),
        ("k=-,model", ((), ("model",))),
        ("k=,model", ((), ("model",))),
        ("k=data+model,-", (("data", "model"), ())),
        ("k=", ()),
        ("=data", (("data",),)),
        ("(?=x)a=b=data", (("data",),)),
    ],
)
def test_rule(text, axes):
    rule = parse_rule(text)
    assert rule.axes == axes
    assert rule.pattern.pattern == text.rpartition("=")[0]


@pytest.mark.parametrize("text", ["data", "(=data", "k=a b", "k=data+", "k=data,data", "k=a+a", "k=-+a"])
def test_bad_rule(text):
    with pytest.raises(UsageError):
        parse_rule(text)


def test_the_first_rule_that_is_found_counts():
    rules = [parse_rule("0.*kernel=model"), parse_rule("kernel$=data,model")]
    shapes = {"layer.0.kernel": (8, 8), "layer.1.kernel": (8, 8), "layer.1.bias": (8,)}
    assert assign(shapes, rules, MESH) == {
        "layer.0.kernel": (("model",),),
        "layer.1.kernel": (("data",), ("model",)),
        "layer.1.bias": (),
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["kernel=expert"], "no axis 'expert', it has data, model"),
        (["kernel=data,-,-"], "'kernel' of shape (8, 8), sharded as data,-,-: expected at most 2 entries"),
        (["nothing=data"], "spec: 'nothing' is found in none of the 3 names of arrays, such as 'kernel'"),
        (["k=data", "kernel=model"], "spec: 'kernel' is not used: earlier patterns apply to all 1 arrays"),
    ],
)
def test_rules_that_do_not_fit(rules, message):
    with pytest.raises((UsageError, RuleError)) as raised:
        assign({"kernel": (8, 8), "bias": (8,), "step": ()}, [parse_rule(rule) for rule in rules], MESH)
    assert message in str(raised.value)


def test_arrays_of_fewer_dimensions_stay_whole(caplog):
    shapes = {"kernel": (8, 8), "kernel.count": (3,), "step": ()}
    assert assign(shapes, [parse_rule("=data,model")], MESH) == {
        "kernel": (("data",), ("model",)),
        "kernel.count": (),
        "step": (),
    }
    (said,) = (record.getMessage() for record in caplog.records)
    assert "left whole: 'kernel.count' of shape (3,) (expected at most 1 entries)" in said


def test_spread_examples():
    assert spread((64, 48), MESH) == (("data", "model"),)
    assert spread((2, 48), MESH) == (("data",), ("model",))
    assert spread((3, 48), MESH) == ((), ("data", "model"))
    assert spread((4,), MESH) == (("data",),)
    assert spread((0, 3), MESH) == spread((), MESH) == spread((5, 7), MESH) == ()


@given(st.lists(st.integers(0, 24), max_size=4), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_spread_is_even(shape, sizes):
    mesh = {f"axis{number}": size for number, size in enumerate(sizes)}
    axes = spread(tuple(shape), mesh)
    used = [axis for entry in axes for axis in entry]
    assert len(set(used)) == len(used)
    for size, count in zip(shape, shards(axes, mesh), strict=False):
        assert size % count == 0
        assert count == 1 or size
    assert prod(shards(axes, mesh)) == prod(mesh[axis] for axis in used)
    assert parse_rule(f"x={axes_text(axes)}").axes == axes
