"""An open description, and how its bytes come to who has it open."""

from __future__ import annotations

import enum

from ctxfs.core.block import Block
from ctxfs.tiers.hot import HotFile


class Way(enum.Enum):
    """How a client's reads and writes come to the bytes, where the kernel can be lent the file."""

    UNSAID = enum.auto()  # a channel that never lends, or one of our own
    KEPT = enum.auto()  # the kernel asks, and caches what it is told
    LENT = enum.auto()  # the kernel reads and writes the hot file itself


class Handle:
    """One open description. Holds a lease on the block's bytes until `Store.release`."""

    __slots__ = ("block", "file", "owner", "way", "writable", "wrote")

    def __init__(self, block: Block, file: HotFile, owner: int, *, writable: bool) -> None:
        self.block = block
        self.file = file
        self.owner = owner
        self.writable = writable
        self.way = Way.UNSAID
        self.wrote = False
