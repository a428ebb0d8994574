"""Small files made by hand, at least one for each rule of the format, with the verdict of the reference on each.

Not for random files (`tests.support.strategies`), and no checks: the tests give every file to the reference and to us.
"""

from typing import NamedTuple

from tests.support.strategies import file_of

ONE = b"\0"  # the data of most files here: one byte


class Crafted(NamedTuple):
    """A file; `tensor` is the name that a message about it must hold, or None if no tensor is to blame."""

    content: bytes
    tensor: str | None = None


def entry(dtype: str = '"U8"', shape: str = "[1]", offsets: str = "[0,1]", extra: str = "") -> str:
    return f'{{{extra}"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def tensor(**fields: str) -> Crafted:
    """A file with one tensor `bad`, of one U8 except for the given fields, as JSON text."""
    return Crafted(file_of(f'{{"bad":{entry(**fields)}}}', ONE), "bad")


def tensors(data: bytes = ONE, **entries: str) -> Crafted:
    """A file with these entries, as JSON text; the one called `bad` is to blame."""
    text = ",".join(f'"{name}":{text}' for name, text in entries.items())
    return Crafted(file_of(f"{{{text}}}", data), "bad" if "bad" in entries else None)


GOOD = f'{{"good":{entry()}}}'
ZERO = entry(shape="[0]", offsets="[0,0]")

REJECTED: dict[str, Crafted] = {
    # The prefix.
    "empty file": Crafted(b""),
    "seven bytes": Crafted(bytes(7)),
    "header of no bytes": Crafted(bytes(8)),
    "header beyond the file": Crafted(file_of(GOOD)[:-1]),
    "header length that overflows": Crafted(b"\xff" * 8 + GOOD.encode() + ONE),
    "header over the limit": Crafted((100_000_001).to_bytes(8, "little") + GOOD.encode() + ONE),
    # Text.
    "UTF-16": Crafted(file_of(GOOD.encode("utf-16-le"), ONE)),
    "byte order mark": Crafted(file_of(GOOD.encode("utf-8-sig"), ONE)),
    "surrogate in UTF-8": Crafted(file_of(GOOD.encode().replace(b"good", b"\xed\xa0\x80"), ONE)),
    "overlong UTF-8": Crafted(file_of(GOOD.encode().replace(b"good", b"\xc1\xa1"), ONE)),
    "escaped lone high surrogate": Crafted(file_of(GOOD.replace("good", "\\ud800"), ONE), "\\ud800"),
    "escaped lone low surrogate": Crafted(file_of(GOOD.replace("good", "\\udc00"), ONE), "\\udc00"),
    "escaped surrogates in reverse": Crafted(file_of(GOOD.replace("good", "\\ude00\\ud83d"), ONE), "\\ude00\\ud83d"),
    "lone surrogate in metadata": Crafted(file_of('{"__metadata__":{"k":"\\ud800"}}')),
    "lone surrogate in an ignored field": tensor(extra='"x":{"\\ud800":1},'),
    "lone surrogate in the name of an ignored field": tensor(extra='"\\ud800":1,'),
    # JSON.
    "list": Crafted(file_of("[]")),
    "null": Crafted(file_of("null")),
    "spaces": Crafted(file_of("    ")),
    "truncated": Crafted(file_of(GOOD[:-1], ONE)),
    "NaN": tensor(extra='"x":NaN,')._replace(tensor=None),
    "Infinity": tensor(extra='"x":Infinity,')._replace(tensor=None),
    "minus Infinity": tensor(extra='"x":-Infinity,')._replace(tensor=None),
    "float out of range": tensor(extra='"x":-1e999,')._replace(tensor=None),
    "integer out of range of a float": tensor(extra=f'"x":{"9" * 400},')._replace(tensor=None),
    "integer of 5,000 digits": tensor(shape=f"[{'9' * 5000}]")._replace(tensor=None),
    "nesting bomb": tensor(extra=f'"x":{"[" * 100_000},')._replace(tensor=None),
    "128 levels of lists": tensor(extra=f'"x":{"[" * 126}{"]" * 126},'),
    "128 levels of objects": tensor(extra='"x":' + '{"k":' * 126 + "1" + "}" * 126 + ","),
    "128 levels that end in what looks like a tensor": tensor(
        extra=f'"x":{"[" * 123}{entry(offsets="[[],1]")}{"]" * 123},'
    ),
    "trailing text": Crafted(file_of(GOOD + "x", ONE)),
    "trailing object": Crafted(file_of(GOOD + "{}", ONE)),
    "trailing NUL": Crafted(file_of(GOOD + "\0", ONE)),
    "brace for a comma": Crafted(file_of(f'{{"a":{ZERO}}}"b":{entry()}}}', ONE)),
    "vertical tab": Crafted(file_of("\v" + GOOD, ONE)),
    "control character in a name": Crafted(file_of(GOOD.replace("good", "\1"), ONE)),
    "unknown escape": Crafted(file_of(GOOD.replace("good", "\\x61"), ONE)),
    "single quotes": Crafted(file_of(GOOD.replace('"', "'"), ONE)),
    "trailing comma": Crafted(file_of(GOOD[:-1] + ",}", ONE)),
    "comment": Crafted(file_of(GOOD + "//", ONE)),
    "leading zero": tensor(shape="[01]")._replace(tensor=None),
    "plus sign": tensor(shape="[+1]")._replace(tensor=None),
    # The fields of a tensor.
    "tensor is null": tensors(bad="null"),
    "tensor is a number": tensors(bad="5"),
    "tensor is a list of two": tensors(bad='["U8",[1]]'),
    "tensor is a list of four": tensors(bad='["U8",[1],[0,1],0]'),
    "no dtype": tensors(bad='{"shape":[1],"data_offsets":[0,1]}'),
    "no shape": tensors(bad='{"dtype":"U8","data_offsets":[0,1]}'),
    "no data_offsets": tensors(bad='{"dtype":"U8","shape":[1]}'),
    "unknown dtype": tensor(dtype='"F128"'),
    "lower case dtype": tensor(dtype='"u8"'),
    "dtype is a number": tensor(dtype="4"),
    "dtype is a list": tensor(dtype='["U8"]'),
    "dtype is an object of something": tensor(dtype='{"U8":1}'),
    "shape is null": tensor(shape="null"),
    "shape is a number": tensor(shape="1"),
    "shape is text": tensor(shape='"1"'),
    "shape is an object": tensor(shape="{}"),
    "negative size": tensor(shape="[-1]"),
    "size -0": tensor(shape="[-0]", offsets="[0,0]"),
    "size 1.0": tensor(shape="[1.0]"),
    "size 1e0": tensor(shape="[1e0]"),
    "size true": tensor(shape="[true]"),
    'size "1"': tensor(shape='["1"]'),
    "size null": tensor(shape="[null]"),
    "size is a list": tensor(shape="[[1]]"),
    "size beyond u64": tensor(shape="[0,18446744073709551616]", offsets="[0,0]"),
    "size of 30 digits": tensor(shape=f"[0,{'1' * 30}]", offsets="[0,0]"),
    "data_offsets is an object": tensor(offsets='{"0":0,"1":1}'),
    "no offsets": tensor(offsets="[]"),
    "one offset": tensor(offsets="[1]"),
    "three offsets": tensor(offsets="[0,1,1]"),
    "offset -0": tensor(offsets="[-0,1]"),
    "offset 0.0": tensor(offsets="[0.0,1]"),
    "offset false": tensor(offsets="[false,1]"),
    'offset "1"': tensor(offsets='[0,"1"]'),
    "offset null": tensor(offsets="[null,1]"),
    "negative offset": tensor(offsets="[-1,0]"),
    "offset beyond u64": tensor(offsets="[18446744073709551616,18446744073709551617]"),
    # Metadata.
    "metadata is a list": Crafted(file_of('{"__metadata__":[]}')),
    "metadata is text": Crafted(file_of('{"__metadata__":"pt"}')),
    "metadata value is a number": Crafted(file_of('{"__metadata__":{"k":1}}')),
    "metadata value is null": Crafted(file_of('{"__metadata__":{"k":null}}')),
    "metadata value is an object": Crafted(file_of('{"__metadata__":{"k":{}}}')),
    "tensor called __metadata__": tensors(__metadata__=entry()),
    # Where tensors lie.
    "first does not start at 0": tensors(bytes(2), bad=entry(offsets="[1,2]")),
    "hole": tensors(bytes(3), good=entry(), bad=entry(offsets="[2,3]")),
    "overlap": tensors(bytes(3), good=entry(shape="[2]", offsets="[0,2]"), bad=entry(shape="[2]", offsets="[1,3]")),
    "alias": tensors(good=entry(), alias=entry()),
    "zero-size tensor inside another": tensors(
        bytes(2), good=entry(shape="[2]", offsets="[0,2]"), bad=entry(shape="[0]", offsets="[1,1]")
    ),
    "zero-size tensor beyond the end": tensors(good=entry(), bad=entry(shape="[0]", offsets="[2,2]")),
    "end before begin": tensors(good=entry(), bad=entry(offsets="[1,0]")),
    # Sizes.
    "product overflows": tensor(shape="[4294967296,4294967296]"),
    "product overflows before a 0": tensor(shape="[4294967296,4294967296,0]", offsets="[0,0]"),
    "bits overflow": tensor(shape="[2305843009213693952]", offsets="[0,0]"),
    "one F4": tensor(dtype='"F4"'),
    "scalar F4": tensor(dtype='"F4"', shape="[]"),
    "three F4": tensor(dtype='"F4"', shape="[3]"),
    "two F6": tensor(dtype='"F6_E2M3"', shape="[2]"),
    "too few bytes for the shape": tensor(shape="[2]"),
    "too many bytes for the shape": tensor(shape="[]", offsets="[0,2]"),
    "bytes for a shape of none": tensor(shape="[0]"),
    "too few bytes for the dtype": tensor(dtype='"U16"'),
    "missing byte": Crafted(file_of(GOOD)),
    "trailing byte": Crafted(file_of(GOOD, bytes(2))),
    "byte after a file without tensors": Crafted(file_of("{}", ONE)),
}

ACCEPTED: dict[str, Crafted] = {
    "empty object": Crafted(file_of("{}")),
    "metadata only": Crafted(file_of('{"__metadata__":{"format":"pt"}}')),
    "metadata is null": Crafted(file_of('{"__metadata__":null}')),
    "metadata that looks like a tensor": Crafted(
        file_of('{"__metadata__":{"dtype":"U8","shape":"[1]","data_offsets":"[0,1]"}}')
    ),
    "white space": Crafted(file_of(f" \t\r\n{GOOD}\n\r\t ", ONE)),
    "scalar": tensor(shape="[]"),
    "zero-size tensors at one place": tensors(a=ZERO, b=entry(), c=ZERO, d=entry(shape="[9,0]", offsets="[1,1]")),
    "largest sizes after a 0": Crafted(
        file_of(f'{{"a":{entry(shape=f"[0,{2**64 - 1},{2**64 - 1}]", offsets="[0,0]")}}}')
    ),
    "largest size before a 0": Crafted(file_of(f'{{"a":{entry(shape=f"[{2**64 - 1},0]", offsets="[0,0]")}}}')),
    "offsets not in order of keys": tensors(bytes(2), a=entry(offsets="[1,2]"), b=entry()),
    "two F4": tensor(dtype='"F4"', shape="[2]"),
    "four F6": tensors(bytes(3), a=entry(dtype='"F6_E3M2"', shape="[2,2]", offsets="[0,3]")),
    "unaligned": tensors(bytes(5), a=entry(), b=entry(dtype='"F32"', offsets="[1,5]")),
    "ignored field": tensor(extra='"x":{"y":[1.5,null,-0,1e-400,{"z":""}]},'),
    "ignored field of 127 levels": tensor(extra=f'"x":{"[" * 125}{"]" * 125},'),
    "ignored field of 127 levels that looks like a tensor": tensor(
        extra=f'"x":{"[" * 122}{entry(offsets="[[],1]")}{"]" * 122},'
    ),
    "ignored integer beyond u64": tensor(extra=f'"x":{"9" * 300},'),
    "fields with escapes": Crafted(file_of(GOOD.replace("dtype", "\\u0064type").replace("U8", "\\u00558"), ONE)),
    "surrogate pair": Crafted(file_of(GOOD.replace("good", "\\ud83d\\ude00"), ONE)),
    "backslash before what looks like a surrogate": Crafted(file_of(GOOD.replace("good", "\\\\ud800"), ONE)),
    "DEL in a name": Crafted(file_of(GOOD.replace("good", "\x7f"), ONE)),
    "empty name": Crafted(file_of(GOOD.replace("good", ""), ONE)),
    "path as a name": Crafted(file_of(GOOD.replace("good", "../x"), ONE)),
    "NUL in a name": Crafted(file_of(GOOD.replace("good", "\\u0000"), ONE)),
    # Nobody writes these two, but the reference takes them.
    "tensor as a list of its fields": tensors(a='["U8",[1],[0,1]]'),
    "dtype as an object": tensor(dtype='{"U8":null}'),
    "tensors called as the fields are": tensors(
        bytes(3),
        dtype='["U8",[1],[0,1]]',
        shape=entry(offsets="[1,2]"),
        data_offsets=entry(offsets="[2,3]"),
    ),
}

# The one place where we are stricter: the reference lets the last of two tensors, metadata keys or unknown fields win.
DUPLICATES_THE_REFERENCE_ACCEPTS: dict[str, Crafted] = {
    "tensor": Crafted(file_of(f'{{"a":{ZERO},"a":{entry()}}}', ONE)),
    "tensor spelled with an escape": Crafted(file_of(f'{{"a":{ZERO},"\\u0061":{entry()}}}', ONE)),
    "metadata key": Crafted(file_of('{"__metadata__":{"k":"1","k":"2"}}')),
    "ignored field": tensor(extra='"x":1,"x":2,'),
    "inside an ignored field": tensor(extra='"x":{"y":1,"y":2},'),
}
DUPLICATES_THE_REFERENCE_REJECTS: dict[str, Crafted] = {
    "metadata": Crafted(file_of('{"__metadata__":{},"__metadata__":{}}')),
    "field": tensor(extra='"dtype":"U8",'),
}
