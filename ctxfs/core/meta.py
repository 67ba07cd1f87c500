"""What is kept of a block and of a directory wherever they are written down."""

import enum
from dataclasses import dataclass


class Placement(enum.IntEnum):
    """Where a user wants a block to stay (`user.ctx.tier`, as written)."""

    AUTO = 0
    HOT = 1
    WARM = 2
    COLD = 3


PIN_NONE = 0
PIN_FOREVER = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMeta:
    """One sealed block, as the hot journal and the cold tier record it.

    Times are wall-clock nanoseconds since 1970. `generation` names the content for ever: it is
    unique in a store, never used again, and is the inode number. `stamp` grows with every change
    to any block or directory; where two records disagree, the higher stamp is right.
    """

    generation: int
    stamp: int
    key: bytes
    size: int
    digest: bytes  # XXH3-128 of the content, 16 bytes, big-endian
    mode: int  # permission bits only
    uid: int
    gid: int
    created_ns: int
    mtime_ns: int
    atime_ns: int
    expires_ns: int = 0  # 0: never
    pin_until_ns: int = PIN_NONE  # PIN_FOREVER, or when the pin lapses
    placement: Placement = Placement.AUTO
    origin: int = 0  # version of the content, where that is not `generation`: docs/cluster.md
    revision: int = 0  # version of the attributes, where they changed after sealing: the same
    replicas: int = 0  # members that are to hold it; 0: as many as the cluster says
    parent: bytes = b""  # key of the block before this one in its conversation
    dtype: bytes = b""
    attributes: tuple[tuple[bytes, bytes], ...] = ()  # foreign user.*, name and value


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryMeta:
    """One prefix that somebody made, or that carries attributes. The root has key b""."""

    inode: int
    stamp: int
    key: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    default_ttl_ns: int = -1  # -1: not set here; 0: set to `none`
    together: bool = False
    default_replicas: int = 0  # of blocks made beneath; 0: not set here
    attributes: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Put:
    """This generation exists, with these attributes."""

    meta: BlockMeta


@dataclass(frozen=True, slots=True)
class Drop:
    """This generation is gone for good: unlinked, overwritten, evicted or expired."""

    generation: int
    stamp: int


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """This directory exists, with these attributes."""

    meta: DirectoryMeta


@dataclass(frozen=True, slots=True)
class RemoveDirectory:
    """This directory is gone."""

    inode: int
    stamp: int


@dataclass(frozen=True, slots=True)
class Alias:
    """This generation exists, with these attributes; its bytes are those written for `holder`.

    Only the cold tier has it, and only where both lie on one device.
    """

    meta: BlockMeta
    holder: int


class TransientFlag(enum.IntFlag):
    """What is known of a generation that lasts no longer than somebody has it open."""

    PUBLISHED = 1
    GONE = 2  # it was sealed or written; no name leads to it any more
    SEEN = 4  # another process opened it since it was published
    TIME_GIVEN = 8  # the writer set a modification time


NOT_REFUSED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Transient:
    """This generation is being written, or is gone and still open.

    `meta` has no digest. `base` is the generation it began as a copy of, 0 for none; `refused_at`
    the offset of bytes that had no room, or NOT_REFUSED.
    """

    meta: BlockMeta
    owner: int  # the process that writes it
    flags: TransientFlag
    opener: int = 0  # the thread it was made for, where that has not opened it yet
    base: int = 0
    refused_at: int = NOT_REFUSED
    shadow: int = 0  # generation under which the cold tier has what was synced of it, 0 for none
    coming: int = 0  # and of one that was being written


Entry = Put | Drop | MakeDirectory | RemoveDirectory | Alias
JournalEntry = Entry | Transient
