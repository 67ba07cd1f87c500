"""Requests of the kernel, both ways, and what is no request."""

from __future__ import annotations

import contextlib
import os
import re
import typing
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mountd.fuseproto import requests
from mountd.fuseproto.constants import Opcode
from mountd.fuseproto.requests import (
    HEADER,
    LAYOUTS,
    BatchForget,
    Body,
    Header,
    Init,
    Layout,
    Malformed,
    UnknownOpcode,
    parse_body,
    parse_header,
)

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
NUMBERS = {"I": U32, "Q": U64, "q": I64}
NAMES = st.binary(max_size=300).map(lambda name: name.replace(b"\0", b"/"))
HEADER_FILE = Path("/usr/include/linux/fuse.h")


def fixed_fields(layout: Layout) -> list[st.SearchStrategy[int]]:
    """Return what the fields of the fixed part may be."""
    found: list[st.SearchStrategy[int]] = []
    for count, kind in re.findall(r"(\d*)([IQqx])", layout.fixed.format):
        if kind != "x":
            found += [NUMBERS[kind]] * int(count or 1)
    return found


@st.composite
def bodies(draw: st.DrawFn, layout: Layout) -> Body:
    values: list[Any] = [draw(numbers) for numbers in fixed_fields(layout)]
    names = [draw(NAMES) for _ in range(layout.names)]
    data = []
    if layout.data is not None:
        content = draw(st.binary(max_size=5000))
        values[layout.data] = len(content)
        data = [memoryview(content)]
    return layout.make(*values, *names, *data)


@st.composite
def messages(draw: st.DrawFn) -> tuple[Header, Body]:
    opcode = draw(st.sampled_from([*LAYOUTS, Opcode.INIT, Opcode.BATCH_FORGET]))
    body: Body
    if opcode == Opcode.INIT:
        body = Init(*(draw(U32) for _ in range(5)))
    elif opcode == Opcode.BATCH_FORGET:
        body = BatchForget(tuple(draw(st.lists(st.tuples(U64, U64), max_size=40))))
    else:
        body = draw(bodies(LAYOUTS[opcode]))
    return Header(0, opcode, draw(U64), draw(U64), draw(U32), draw(U32), draw(U32)), body


def parse(message: bytes) -> tuple[Header, Body]:
    buffer = bytearray(message) + b"left over from an earlier, longer request"
    header = parse_header(buffer, len(message))
    return header, parse_body(header, buffer)


@given(messages())
def test_what_is_packed_is_parsed_as_it_was(message: tuple[Header, Body]) -> None:
    header, body = message
    content = requests.pack(header, body)
    assert parse(content) == (header._replace(length=len(content)), body)


@given(messages(), st.binary(max_size=64).filter(lambda extra: len(extra) % 8 == 0))
def test_extensions_behind_a_request_are_left_alone(
    message: tuple[Header, Body], extra: bytes
) -> None:
    header, body = message
    content = bytearray(requests.pack(header, body) + extra)
    content[:4] = pack("=I", len(content))
    content[36:38] = pack("=H", len(extra) // 8)
    assert parse(bytes(content))[1] == body


@given(messages(), st.data())
def test_a_request_that_is_cut_short_is_malformed(
    message: tuple[Header, Body], data: st.DataObject
) -> None:
    content = requests.pack(*message)
    length = data.draw(st.integers(0, len(content) - 1))
    cut = bytearray(content[:length])
    if length >= HEADER.size:
        cut[:4] = pack("=I", length)
    # INIT may end early, after four numbers or more: so it does before 7.36.
    assume(message[0].opcode != Opcode.INIT or length < HEADER.size + 16)
    with pytest.raises(Malformed):
        parse(bytes(cut))


@given(st.binary(max_size=200), st.integers(0, 80), U16)
def test_arbitrary_bytes_are_parsed_or_refused_by_name(
    content: bytes, opcode: int, extensions: int
) -> None:
    message = HEADER.pack(HEADER.size + len(content), opcode, 1, 1, 0, 0, 0, extensions) + content
    with contextlib.suppress(Malformed, UnknownOpcode):
        parse(message)


@given(st.integers(1, 2**31).filter(lambda number: number not in list(Opcode)))
def test_unknown_opcodes_are_told_apart_from_malformed_requests(opcode: int) -> None:
    with pytest.raises(UnknownOpcode):
        parse(HEADER.pack(HEADER.size, opcode, 1, 1, 0, 0, 0, 0))


def test_a_length_that_is_not_that_of_the_message_is_malformed() -> None:
    message = HEADER.pack(HEADER.size + 1, Opcode.STATFS, 1, 1, 0, 0, 0, 0)
    with pytest.raises(Malformed):
        parse(message)


def test_a_write_that_announces_more_than_it_brings_is_malformed() -> None:
    fixed = pack("=QQIIQII", 1, 0, 4096, 0, 0, 0, 0)
    message = HEADER.pack(HEADER.size + len(fixed) + 10, Opcode.WRITE, 1, 1, 0, 0, 0, 0)
    with pytest.raises(Malformed):
        parse(message + fixed + b"0123456789")


def test_an_init_of_a_kernel_before_flags2_is_understood() -> None:
    message = HEADER.pack(HEADER.size + 16, Opcode.INIT, 2, 0, 0, 0, 0, 0)
    assert parse(message + pack("=IIII", 7, 31, 131072, 0xFF))[1] == Init(7, 31, 131072, 0xFF, 0)


def test_a_known_lookup_lies_where_the_header_file_says() -> None:
    message = pack("=IIQQIIIHH", 46, 1, 0x1122, 1, 1000, 100, 4242, 0, 0) + b"block\0"
    header, body = parse(message)
    assert header == Header(46, Opcode.LOOKUP, 0x1122, 1, 1000, 100, 4242)
    assert body == requests.Name(b"block")


def test_every_kind_of_request_has_a_layout_or_is_special() -> None:
    special = {Opcode.INIT, Opcode.BATCH_FORGET}
    assert set(LAYOUTS) | special == set(Opcode)
    made = {layout.make for layout in LAYOUTS.values()} | {Init, BatchForget}
    assert made == set(typing.get_args(Body))


@pytest.mark.skipif(not HEADER_FILE.exists(), reason="linux-libc-dev is missing")
def test_opcodes_are_those_of_the_header_file() -> None:
    text = HEADER_FILE.read_text()
    told = {name: int(number) for name, number in re.findall(r"FUSE_(\w+)\s*= (\d+),", text)}
    assert {code.name: told.get(code.name, code.value) for code in Opcode} == {
        code.name: code.value for code in Opcode
    }


@pytest.mark.parametrize(
    ("opcode", "flags", "expected"),
    [
        (Opcode.RELEASE, os.O_RDONLY, True),
        (Opcode.RELEASE, os.O_RDWR, False),
        (Opcode.RELEASEDIR, os.O_RDONLY, False),
        (Opcode.FLUSH, os.O_RDONLY, False),
    ],
)
def test_release_of_a_reader_is_told_from_all_else(
    opcode: Opcode, flags: int, expected: bool
) -> None:
    body: Body = requests.Release(7, flags, 0, 0)
    if opcode is Opcode.FLUSH:
        body = requests.Flush(7, 0)
    message = requests.pack(Header(0, opcode, 2, 3, 0, 0, 1), body)
    assert requests.is_release_without(os.O_RDWR | os.O_WRONLY, message, len(message)) is expected
    assert not requests.is_release_without(0, message, len(message) - 1)


@pytest.mark.parametrize(
    ("opcode", "flags", "is_told"),
    [
        (Opcode.OPEN, os.O_RDONLY, True),
        (Opcode.OPEN, os.O_RDWR, False),
        (Opcode.OPENDIR, os.O_RDONLY, False),
        (Opcode.LOOKUP, os.O_RDONLY, False),
    ],
)
def test_open_for_reading_is_told_from_all_else(opcode: Opcode, flags: int, is_told: bool) -> None:
    body: Body = requests.Name(b"1234567") if opcode is Opcode.LOOKUP else requests.Open(flags, 0)
    message = requests.pack(Header(0, opcode, 2, 3, 1000, 100, 4711), body)
    gist = requests.open_without(os.O_RDWR | os.O_WRONLY, message, len(message))
    assert gist == ((2, 3, 4711) if is_told else None)
    assert requests.open_without(0, message, len(message) - 1) is None
    extended = bytearray(message)
    extended[36] = 1  # extensions
    assert requests.open_without(os.O_WRONLY, extended, len(message)) is None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"block\0", (2, 3, 4711, b"block")),
        (b"block", None),
        (b"block\0\0", None),
        (b"bl\0ck\0", None),
        (b"\0", (2, 3, 4711, b"")),
    ],
)
def test_lookup_is_told_with_the_one_name_that_it_has(
    content: bytes, told: tuple[int, int, int, bytes] | None
) -> None:
    message = pack("=IIQQIIIHH", 40 + len(content), 1, 2, 3, 1000, 100, 4711, 0, 0) + content
    assert requests.looked_up(message, len(message)) == told
    assert requests.looked_up(message, len(message) - 1) is None
    other = bytearray(message)
    other[4] = int(Opcode.UNLINK)
    assert requests.looked_up(other, len(message)) is None
