"""Switches of families from a command line."""

from argparse import Namespace

import pytest

from orbax_safetensors.cli.family import parse_switch, switches_text, variant
from orbax_safetensors.cli.partition import UsageError


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("scan_layers=true", ("scan_layers", True)),
        ("scan_layers=false", ("scan_layers", False)),
        ("mtp=null", ("mtp", None)),
        ("param_scan_axis=0", ("param_scan_axis", 0)),
        ("param_scan_axis=-1", ("param_scan_axis", -1)),
        ("vocab_size=152064", ("vocab_size", 152064)),
        ("scale=1.5e-3", ("scale", 0.0015)),
        ("rope_type=llama3.1", ("rope_type", "llama3.1")),
        ("rope_type=default", ("rope_type", "default")),
        ("text=a=b", ("text", "a=b")),
        ("text=007", ("text", "007")),
        ("text=NaN", ("text", "NaN")),
        ('text="1"', ("text", '"1"')),
    ],
)
def test_switch(text, switch):
    key, value = parse_switch(text)
    assert (key, value) == switch
    assert type(value) is type(switch[1])


@pytest.mark.parametrize("text", ["", "scan_layers", "scan_layers=", "=true", "scan layers=true", "a.b=1", "1=1"])
def test_bad_switch(text):
    with pytest.raises(UsageError, match="expected KEY=VALUE as in scan_layers=false, found"):
        parse_switch(text)


@pytest.mark.parametrize("value", ["True", "False", "FALSE", "None", "no", "Off"])
def test_truth_that_would_be_text(value):
    with pytest.raises(UsageError, match=f"expected true, false or null in 'scan_layers={value}', found '{value}'"):
        parse_switch(f"scan_layers={value}")


def test_variant():
    assert variant(Namespace(family=None, variant=[])) == {}
    switches = {"scan_layers": False, "vocab_size": 7, "rope_type": "default"}
    assert variant(Namespace(family="maxtext", variant=list(switches.items()))) == switches
    assert switches_text(switches) == "scan_layers=false vocab_size=7 rope_type=default"
    with pytest.raises(UsageError, match="--variant a is passed twice"):
        variant(Namespace(family="maxtext", variant=[("a", 1), ("a", 1)]))
    with pytest.raises(UsageError, match="--variant needs a --family"):
        variant(Namespace(family=None, variant=[("a", 1)]))
