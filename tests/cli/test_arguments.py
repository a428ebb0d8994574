"""Sizes, speeds, times and switches of families on a command line."""

from argparse import Namespace

import pytest

from orbax_safetensors.cli.arguments import (
    UsageError,
    parse_bandwidth,
    parse_bytes,
    parse_latency,
    parse_switch,
    switches_text,
    variant,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("5GB", 5 * 10**9),
        ("2GiB", 2**31),
        ("1.5 kB", 1500),
        ("0.5GiB", 2**29),
        ("7M", 7 * 10**6),
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993.9", 2**53 + 1),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "lots", "-1", "1e3", "2gb", "2Gb", "1.", ".5GB", "0.1", "٣", "GB"])
def test_no_sizes(text):
    with pytest.raises(UsageError, match="expected a number of bytes above 0, as in 2GB or 512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("2GB/s", 2e9), ("1.5 GB/s", 1.5e9), ("500MiB/s", 500 * 2**20), ("7B/s", 7)]
)
def test_bandwidths(text, expected):
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    "text", ["", "2GB", "GB/s", "2Gb/s", "-1GB/s", "0GB/s", "2GB/h", "25Gbit/s", "9" * 400 + "B/s"]
)
def test_no_bandwidths(text):
    with pytest.raises(UsageError, match="expected bytes per second above 0, as in 2GB/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("10ms", 0.01), ("200us", 2e-4), ("0.5 s", 0.5), ("0s", 0), ("3µs", 3e-6)]
)
def test_latencies(text, expected):
    assert parse_latency(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("text", ["", "10", "ms", "-1ms", "1h", "9" * 400 + "s"])
def test_no_latencies(text):
    with pytest.raises(UsageError, match="expected a time as in 10ms"):
        parse_latency(text)


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
