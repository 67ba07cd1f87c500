"""Answers to the kernel, and what both sides agree on at the beginning."""

from __future__ import annotations

import stat
from struct import unpack_from

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mountd.fuseproto import negotiation, notices, replies
from mountd.fuseproto.constants import MINOR_MAX, InitFlag
from mountd.fuseproto.negotiation import TooOld, agree
from mountd.fuseproto.replies import SECOND_NS, Attributes
from mountd.fuseproto.requests import Init

U32 = st.integers(0, 2**32 - 1)
U63 = st.integers(0, 2**63 - 1)
TIMES = st.integers(-(2**33) * SECOND_NS, 2**33 * SECOND_NS)
LIFETIMES = st.integers(0, 10**6).map(lambda ms: ms / 1000)
ATTRIBUTES = st.builds(
    Attributes, U63, U32, U32, U32, U32, U63, U63, TIMES, TIMES, TIMES, LIFETIMES, LIFETIMES
)
EVERYTHING = 0xFFFFFFFF
PASSES = int(InitFlag.PASSTHROUGH) >> 32


def read_attr(content: bytes, start: int) -> dict[str, int]:
    """Read a fuse_attr by the offsets of the header file."""
    names = ("ino", "size", "blocks", "atime", "mtime", "ctime")
    found = dict(zip(names, unpack_from("=QQQqqq", content, start), strict=True))
    more = ("ansec", "mnsec", "cnsec", "mode", "nlink", "uid", "gid", "rdev", "blksize", "flags")
    return found | dict(zip(more, unpack_from("=10I", content, start + 48), strict=True))


@given(ATTRIBUTES)
def test_entries_say_what_the_attributes_are(attr: Attributes) -> None:
    content = replies.entry(attr)
    assert len(content) == 128
    node, generation, entry_s, attr_s, entry_ns, attr_ns = unpack_from("=QQQQII", content)
    assert (node, generation) == (attr.inode, 0)
    assert entry_s + entry_ns / SECOND_NS == pytest.approx(attr.entry_s, abs=1e-6)
    assert attr_s + attr_ns / SECOND_NS == pytest.approx(attr.attr_s, abs=1e-6)
    found = read_attr(content, 40)
    assert found["ino"] == attr.inode
    assert found["mode"] == attr.mode
    assert found["size"] == attr.size
    assert found["mtime"] * SECOND_NS + found["mnsec"] == attr.mtime_ns
    assert found["atime"] * SECOND_NS + found["ansec"] == attr.atime_ns
    assert 0 <= found["cnsec"] < SECOND_NS
    assert replies.attributes(attr)[16:] == content[40:]


@given(st.integers(0, 2**64 - 1), st.integers(0, 133))
def test_failures_carry_the_negative_number_of_the_error(unique: int, code: int) -> None:
    assert unpack_from("=IiQ", replies.failure(unique, code)) == (16, -code, unique)


@given(st.lists(st.tuples(ATTRIBUTES, st.binary(min_size=1, max_size=255)), max_size=5))
def test_lines_of_a_directory_can_be_read_back(
    entries: list[tuple[Attributes, bytes]],
) -> None:
    content = b"".join(
        replies.direntplus(attr, place, name) for place, (attr, name) in enumerate(entries, 1)
    )
    start, found = 0, []
    while start < len(content):
        inode, place, length, kind = unpack_from("=QQII", content, start + 128)
        found.append((inode, place, content[start + 152 : start + 152 + length], kind))
        start += (152 + length + 7) // 8 * 8
    assert found == [
        (attr.inode, place, name, attr.mode >> 12) for place, (attr, name) in enumerate(entries, 1)
    ]


@given(LIFETIMES)
def test_a_missing_name_is_an_entry_without_a_node(seconds: float) -> None:
    content = replies.missing(seconds)
    assert len(content) == 128
    node, generation, entry_s, attr_s, entry_ns, attr_ns = unpack_from("=QQQQII", content)
    assert (node, generation, attr_s, attr_ns) == (0, 0, 0, 0)
    assert entry_s + entry_ns / SECOND_NS == pytest.approx(seconds, abs=1e-6)
    assert not any(content[40:])


@given(st.integers(0, 2**64 - 1))
def test_notices_are_answers_without_a_request(node: int) -> None:
    content = notices.attributes_changed(node)
    assert unpack_from("=IiQ", content) == (len(content), 2, 0) == (40, 2, 0)
    inode, offset, length = unpack_from("=Qqq", content, 16)
    assert (inode, length) == (node, 0)
    assert offset < 0  # attributes alone: the pages stay
    assert unpack_from("=IiQ", notices.names_changed()) == (16, 8, 0)
    assert len(notices.names_changed()) == 16


def test_types_in_a_directory_are_those_of_dirent() -> None:
    assert unpack_from("=QQII", replies.dirent(7, 1, b"k", stat.S_IFREG | 0o644))[3] == 8
    assert unpack_from("=QQII", replies.dirent(7, 1, b"k", stat.S_IFDIR | 0o755))[3] == 4


def test_statfs_fills_what_the_kernel_reads() -> None:
    content = replies.filesystem(replies.Filesystem(100, 40, 9, 5, 4096, 255))
    assert len(content) == 80
    assert unpack_from("=5Q3I", content) == (100, 40, 40, 9, 5, 4096, 255, 4096)


@given(U32, U32, st.integers(31, 60), st.integers(1, 70_000), st.booleans())
def test_nothing_is_taken_that_was_not_offered(
    flags: int, flags2: int, minor: int, max_pages: int, passthrough: bool
) -> None:
    offer = Init(7, minor, 131072, flags, flags2)
    agreement = agree(offer, max_pages=max_pages, passthrough=passthrough)
    assert agreement is not None
    content = replies.init(agreement.answer)
    assert len(content) == 64
    low = unpack_from("=4I", content)[3]
    high, depth = unpack_from("=II", content, 32)
    assert not low & ~flags
    assert not high & ~flags2
    offered = bool(flags & InitFlag.INIT_EXT and flags2 & PASSES)
    assert agreement.passthrough == (offered and passthrough) == bool(high & PASSES) == bool(depth)
    pages = unpack_from("=H", content, 28)[0]
    assert unpack_from("=I", content, 20)[0] == pages * 4096 == agreement.max_write
    assert agreement.minor == min(minor, MINOR_MAX)


def test_a_kernel_of_a_newer_major_version_is_told_ours_and_asks_again() -> None:
    offer = Init(8, 0, 0, EVERYTHING, EVERYTHING)
    assert agree(offer, max_pages=256, passthrough=True) is None
    assert unpack_from("=II", replies.init(negotiation.major_only())) == (7, MINOR_MAX)


@pytest.mark.parametrize(("major", "minor"), [(7, 30), (6, 40), (7, 0)])
def test_a_protocol_before_7_31_is_refused(major: int, minor: int) -> None:
    with pytest.raises(TooOld, match=f"{major}.{minor}"):
        agree(Init(major, minor, 0, 0, 0), max_pages=256, passthrough=False)
