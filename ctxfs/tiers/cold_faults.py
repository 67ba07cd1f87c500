"""What a check of cold devices can find, and what a daemon makes of it at its next start."""

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


class FaultKind(enum.StrEnum):
    """In the order in which a check looks."""

    SUPERBLOCK = "superblock"
    SIZE = "size"
    SEGMENT = "segment"
    TABLE = "table"
    UNREADABLE = "unreadable"
    HEADER = "header"
    GAP = "gap"
    DATA = "data"
    TORN = "torn"
    UNBORNE = "unborne"
    MISSED = "missed"
    INCOMPLETE = "incomplete"
    CONTENT = "content"
    COPY = "copy"
    KEY = "key"
    SPACE = "space"


# What a daemon does at its next start, or with the next read.
THEN = {
    FaultKind.SUPERBLOCK: "the start takes the other one, and writes this one anew",
    FaultKind.SIZE: "the start refuses the device",
    FaultKind.SEGMENT: "the start takes the segment for free; what is in it is lost",
    FaultKind.TABLE: "the start reads the segments it spoke of from record to record",
    FaultKind.UNREADABLE: "the start goes on without what is there",
    FaultKind.HEADER: "the start reads no further in this segment; what is behind is lost",
    FaultKind.GAP: "the start reads no further in this segment; what is behind is lost",
    FaultKind.DATA: "the block is found, and dropped when it is read",
    FaultKind.TORN: "the start cuts it off; it was never promised",
    FaultKind.UNBORNE: "the start believes it; what is not there is dropped when it is read",
    FaultKind.MISSED: "the start does not find it",
    FaultKind.INCOMPLETE: "the start drops the block",
    FaultKind.CONTENT: "the block is found, and dropped when it is read",
    FaultKind.COPY: "the start drops this copy, and keeps the newer one",
    FaultKind.KEY: "the start drops this block, and keeps the newer one",
    FaultKind.SPACE: "the start counts as told",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`expected`: a crash leaves such things behind, and nothing that was promised is hurt."""

    kind: FaultKind
    path: str
    what: str
    offset: int | None = None  # on the device, bytes
    key: bytes | None = None
    generation: int | None = None
    expected: bool = False
    then: str = ""  # else what THEN says of the kind

    @property
    def consequence(self) -> str:
        """What a daemon does with it."""
        return self.then or THEN[self.kind]


Tell = Callable[[Fault], None]


@dataclass(slots=True, kw_only=True)
class DeviceReport:
    """One device, in bytes on the medium as the daemon would count them but for `content_bytes`."""

    path: str
    uuid: str = ""
    clean: bool = False
    segments: int = 0
    free_segments: int = 0
    table_segments: int = 0
    records: int = 0
    blocks: int = 0
    content_bytes: int = 0
    aliases: int = 0  # blocks that are read from records written for another
    saved_bytes: int = 0  # what these would take besides
    live_bytes: int = 0
    dead_bytes: int = 0  # in segments, and to be reclaimed
    capacity_bytes: int = 0
    room_bytes: int = 0
    dead_corrupt: int = 0  # records with bad data that nothing needs
    blocks_read: int = 0  # whose content was compared with its digest
    undecoded: int = 0  # whose content could not be: no key, or encoded by a later version
    faults: Counter[FaultKind] = field(default_factory=Counter)
    expected: Counter[FaultKind] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        return not self.faults
