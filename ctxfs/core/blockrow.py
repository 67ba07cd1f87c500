"""What is kept of a block that is no object: as bytes, one by one or as columns."""

import struct
from typing import Final

import numpy as np

from ctxfs.core.block import Block

COUNTS_MAX: Final = 2**32 - 1  # of hits, which stop there, and of lookups, which must not pass it
DIGEST_BYTES: Final = 16

ROW: Final = struct.Struct("<QQQqqqqqQqIIIIH16s")
ROW_COLUMNS: Final = np.dtype(  # the same, for many at once
    [
        ("stamp", "<u8"),
        ("origin", "<u8"),
        ("size", "<u8"),
        ("created_ns", "<i8"),
        ("mtime_ns", "<i8"),
        ("ctime_ns", "<i8"),
        ("atime_ns", "<i8"),
        ("used_ns", "<i8"),
        ("expires_ns", "<u8"),
        ("hot_bytes", "<i8"),
        ("hits", "<u4"),
        ("lookups", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("mode", "<u2"),
        ("digest", "u1", 16),
    ]
)


def write(block: Block, rows: bytearray, row: int) -> None:
    """Write down a sealed block with at most COUNTS_MAX lookups; not its number, name, extras."""
    ROW.pack_into(
        rows,
        row * ROW.size,
        block.stamp,
        block.origin,
        block.size,
        block.created_ns,
        block.mtime_ns,
        block.ctime_ns,
        block.atime_ns,
        block.used_ns,
        block.expires_ns,
        block.hot_bytes,
        min(block.hits, COUNTS_MAX),
        block.lookups,
        block.uid,
        block.gid,
        block.mode,
        block.digest,
    )


def read(block: Block, rows: bytearray, row: int) -> None:
    """Set what `write` has written."""
    (
        block.stamp,
        block.origin,
        block.size,
        block.created_ns,
        block.mtime_ns,
        block.ctime_ns,
        block.atime_ns,
        block.used_ns,
        block.expires_ns,
        block.hot_bytes,
        block.hits,
        block.lookups,
        block.uid,
        block.gid,
        block.mode,
        block.digest,
    ) = ROW.unpack_from(rows, row * ROW.size)
