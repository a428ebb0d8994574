"""Sizes, speeds, times and switches of families on a command line."""

from argparse import Namespace

import pytest

from orbax_safetensors.cli.arguments import (
    UsageError,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_latency,
    parse_switch,
    switches_text,
    variant,
)

UNDERSTOOD = {
    parse_bytes: {
        "1": 1,
        "5GB": 5 * 10**9,
        "2GiB": 2**31,
        "1.5 kB": 1500,
        "0.5GiB": 2**29,
        "7M": 7 * 10**6,
        "9007199254740993": 2**53 + 1,
        "9007199254740993.9": 2**53 + 1,
    },
    parse_bandwidth: {"2GB/s": 2e9, "1.5 GB/s": 1.5e9, "500MiB/s": 500.0 * 2**20, "7B/s": 7.0},
    parse_latency: {"10ms": 0.01, "250us": 250 * 1e-6, "0.5 s": 0.5, "0s": 0.0, "3µs": 3e-6},
    parse_switch: {
        "scan_layers=true": ("scan_layers", True),
        "scan_layers=false": ("scan_layers", False),
        "mtp=null": ("mtp", None),
        "param_scan_axis=0": ("param_scan_axis", 0),
        "param_scan_axis=-1": ("param_scan_axis", -1),
        "vocab_size=152064": ("vocab_size", 152064),
        "scale=1.5e-3": ("scale", 0.0015),
        "rope_type=llama3.1": ("rope_type", "llama3.1"),
        "rope_type=default": ("rope_type", "default"),
        "text=a=b": ("text", "a=b"),
        "text=007": ("text", "007"),
        "text=NaN": ("text", "NaN"),
        'text="1"': ("text", '"1"'),
        'base={"hidden_size": 8}': ("base", {"hidden_size": 8}),
    },
}
REFUSED = [
    (
        parse_bytes,
        "expected a number of bytes above 0, as in 2GB or 512MiB",
        ["", "0", "lots", "-1", "1e3", "2gb", "2Gb", "1.", ".5GB", "0.1", "٣", "GB", "9" * 400],
    ),
    (
        parse_bandwidth,
        "expected bytes per second above 0, as in 2GB/s",
        ["", "2GB", "GB/s", "2Gb/s", "-1GB/s", "0GB/s", "2GB/h", "25Gbit/s", "9" * 400 + "B/s"],
    ),
    (parse_latency, "expected a time as in 10ms", ["", "10", "ms", "-1ms", "1h", "9" * 400 + "s"]),
    (parse_count, "expected a positive number", ["", "0", "-1", "1.5"]),
    (
        parse_switch,
        "expected KEY=VALUE as in scan_layers=false, found",
        ["", "scan_layers", "scan_layers=", "=true", "scan layers=true", "a.b=1", "1=1"],
    ),
    (parse_switch, "expected a JSON object for base", ['base={"hidden_size": 8', "base={hidden_size: 8}"]),
    (
        parse_switch,  # as text, these would count as true
        "expected true, false or null in 'scan_layers=",
        [f"scan_layers={value}" for value in ("True", "False", "FALSE", "None", "no", "Off")],
    ),
]


@pytest.mark.parametrize("parse", UNDERSTOOD)
def test_what_is_understood(parse):
    found = {text: parse(text) for text in UNDERSTOOD[parse]}
    assert repr(found) == repr(UNDERSTOOD[parse])  # with the types of the values


@pytest.mark.parametrize(("parse", "message", "texts"), REFUSED)
def test_what_is_refused(parse, message, texts):
    for text in texts:
        with pytest.raises(UsageError, match=message):
            parse(text)


def test_variant():
    assert variant(Namespace(family=None, variant=[])) == {}
    switches = {"scan_layers": False, "vocab_size": 7, "rope_type": "default"}
    assert variant(Namespace(family="maxtext", variant=list(switches.items()))) == switches
    assert switches_text(switches) == "scan_layers=false vocab_size=7 rope_type=default"
    with pytest.raises(UsageError, match="--variant a is passed twice"):
        variant(Namespace(family="maxtext", variant=[("a", 1), ("a", 1)]))
    with pytest.raises(UsageError, match="--variant needs a --family"):
        variant(Namespace(family=None, variant=[("a", 1)]))


def test_a_whole_config_as_a_switch_is_not_printed():
    assert switches_text({"base": {"model_type": "qwen3"}, "scan_layers": True}) == "base={...} scan_layers=true"
