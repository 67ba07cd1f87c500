"""Segments of one cold device and the room in them: pure accounting, no I/O.

Bytes are bytes on the medium: record headers and padding count.
"""

import enum
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ctxfs.core.columns import U64
from ctxfs.core.meta import Entry
from ctxfs.ondisk.facts import FactsBuilder
from ctxfs.ondisk.layout import ALIGN_BYTES, Geometry, padded
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES

# Held back from blocks, so that reclaiming always has somewhere to carry to, and so that at the
# fullest there is still something to gain in the segments it looks at.
RESERVE_SHARE: Final = 20  # one in so many
RESERVE_COUNT_MIN: Final = 2
VICTIMS_MAX: Final = 64  # empty segments freed in one go

# How many free segments each kind of write must leave alone: the last one is for carrying.
FLOOR_WRITE: Final = 1
FLOOR_CARRY: Final = 0


class SegmentState(enum.Enum):
    """FREE → OPEN → CLOSED → RETIRING → FREE."""

    FREE = "free"  # its header is zero on the medium: nothing in it can come back
    OPEN = "open"  # written to, or still has writes in flight
    CLOSED = "closed"
    RETIRING = "retiring"  # its live records are being carried over
    TABLE = "table"  # it holds summaries and checkpoints, no records


@dataclass(slots=True)
class Segment:
    """One segment of a device, in its present life.

    `generations` and `notes` name what was ever written to it, dead or alive: what is live is
    known by where the index points.
    """

    index: int
    state: SegmentState = SegmentState.FREE
    sequence: int = 0
    used_bytes: int = 0  # where the next record goes
    live_bytes: int = 0  # of records and notes that are still needed
    readers: int = 0  # reads in flight: their bytes must stay what they are
    kept: bool = False  # any of its records was acknowledged, or found by a recovery
    unreadable: bool = False  # carrying over failed: it waits until nothing in it is needed
    generations: "array[int]" = field(default_factory=lambda: array("Q"))
    notes: "dict[type[Entry], array[int]]" = field(default_factory=dict)
    # What its records say, for its summary; None where none is to be written.
    facts: FactsBuilder | None = None

    def remember_note(self, kind: type[Entry], number: int) -> None:
        """`number`: the generation or inode that a note of this kind is about."""
        found = self.notes.get(kind)
        if found is None:
            found = self.notes[kind] = array("Q")
        found.append(number)

    def remember_notes(self, kind: type[Entry], numbers: U64) -> None:
        """The same of many."""
        self.notes.setdefault(kind, array("Q")).frombytes(numbers.tobytes())


def choose_victims(segments: Iterable[Segment], live_bytes_max: int) -> list[Segment]:
    """What to reclaim next: all that are empty, up to a limit, else the one with least in it.

    Empty list: none with at most `live_bytes_max` live bytes.
    """
    closed = [segment for segment in segments if segment.state is SegmentState.CLOSED]
    empty = [segment for segment in closed if not segment.live_bytes]
    if empty:
        return empty[:VICTIMS_MAX]
    readable = [segment for segment in closed if not segment.unreadable]
    if not readable:
        return []
    best = min(readable, key=lambda segment: segment.live_bytes)
    return [best] if best.live_bytes <= live_bytes_max else []


def _reserve_count(geometry: Geometry) -> int:
    return max(RESERVE_COUNT_MIN, -(-geometry.segment_count // RESERVE_SHARE))


class Space:
    """Which segments are free, which one is written, and how much may still be promised.

    A claim is room promised to a write that is on its way. It is taken at its worst case: headers
    for every part, and what splitting may waste.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.segments = [Segment(index) for index in range(geometry.segment_count)]
        self.free: deque[int] = deque(range(geometry.segment_count))
        self.open: Segment | None = None
        self.reserve_count = _reserve_count(geometry)
        # Invariant: live_bytes == sum(segment.live_bytes for segment in segments)
        self.live_bytes = 0
        self.claimed_bytes = 0
        self.keeps_facts = False  # of new segments, for their summaries
        self.finished: deque[Segment] = deque()  # closed since, with facts to be summarised
        self.table_count = 0  # segments that hold tables
        self.table_wanted = 0  # segments kept back for the next tables

    @property
    def capacity_bytes(self) -> int:
        """What blocks and notes may fill."""
        others = self.reserve_count + self.table_count + self.table_wanted
        return max(0, len(self.segments) - others) * self.geometry.content_bytes

    @property
    def block_floor(self) -> int:
        """How many free segments blocks must leave."""
        return self.reserve_count + self.table_wanted

    @property
    def room_bytes(self) -> int:
        """What may still be promised, though reclaiming may have to come first."""
        return max(0, self.capacity_bytes - self.live_bytes - self.claimed_bytes)

    def ready_bytes(self, reserve_count: int) -> int:
        """What can be written now, without reclaiming, and leave so many segments free."""
        full_bytes = self.geometry.segment_bytes - SEGMENT_HEADER_BYTES
        rest = self.rest_bytes - (full_bytes - self.geometry.content_bytes)
        segments = len(self.free) - reserve_count
        return segments * self.geometry.content_bytes + max(0, rest) - self.claimed_bytes

    def cost_bytes(self, header_bytes: int, data_bytes: int) -> int:
        """The most that a block can take, split as it may be."""
        longest = self.geometry.segment_bytes - SEGMENT_HEADER_BYTES - header_bytes
        parts = 1 + -(-data_bytes // longest)
        # A longer header leaves a longer end of a segment unused, each time one is closed.
        return data_bytes + parts * (2 * header_bytes - ALIGN_BYTES)

    @property
    def rest_bytes(self) -> int:
        """What is left of the open segment."""
        return self.geometry.segment_bytes - self.open.used_bytes if self.open else 0

    def open_next(self, sequence: int, floor: int) -> Segment | None:
        """Begin the next free segment; None where no more than `floor` are free.

        The one open until now keeps its state: its writes may be in flight. `settle` closes it.
        """
        if len(self.free) <= floor:
            return None
        segment = self.segments[self.free.popleft()]
        segment.state = SegmentState.OPEN
        segment.sequence = sequence
        segment.used_bytes = SEGMENT_HEADER_BYTES
        if self.keeps_facts:
            segment.facts = FactsBuilder(segment.index)
        self.open = segment
        return segment

    def take_for_tables(self, sequence: int) -> Segment | None:
        """A free segment for summaries and checkpoints; None where that would take the room of
        what is promised."""
        if len(self.free) <= self.reserve_count:
            return None
        if self.ready_bytes(self.reserve_count) < self.geometry.content_bytes:
            return None
        segment = self.segments[self.free.popleft()]
        segment.state = SegmentState.TABLE
        segment.sequence = sequence
        segment.used_bytes = SEGMENT_HEADER_BYTES
        self.table_count += 1
        return segment

    def settle(self, segments: Iterable[Segment]) -> None:
        """The writes to these, which are not the open one any more, have ended."""
        for segment in segments:
            segment.state = SegmentState.CLOSED
            if segment.facts is not None:
                self.finished.append(segment)

    def close_open(self) -> None:
        """Write no more to the open segment. None of its writes may be in flight."""
        closed, self.open = self.open, None
        if closed is not None:
            self.settle([closed])

    def adopt(
        self, index: int, sequence: int, used_bytes: int, holds_tables: bool = False
    ) -> Segment:
        """A segment that was found on the medium: nothing more is written to it.

        `find_free` must follow the last of them.
        """
        segment = self.segments[index]
        segment.state = SegmentState.TABLE if holds_tables else SegmentState.CLOSED
        segment.sequence = sequence
        segment.used_bytes = padded(used_bytes)
        segment.kept = True
        return segment

    def grow(self, geometry: Geometry) -> None:
        """The device has more segments now, of the same size."""
        more = range(len(self.segments), geometry.segment_count)
        self.geometry = geometry
        self.segments += map(Segment, more)
        self.free.extend(more)
        self.reserve_count = _reserve_count(geometry)

    def find_free(self) -> None:
        """Make the list of free segments anew."""
        self.free = deque(s.index for s in self.segments if s.state is SegmentState.FREE)
        self.table_count = sum(s.state is SegmentState.TABLE for s in self.segments)

    def add_live(self, index: int, length_bytes: int) -> None:
        self.segments[index].live_bytes += length_bytes
        self.live_bytes += length_bytes

    def remove_live(self, index: int, length_bytes: int) -> None:
        self.segments[index].live_bytes -= length_bytes
        self.live_bytes -= length_bytes

    def release(self, index: int) -> None:
        """Its header is zero on the medium: it is free, for the time after all others are used."""
        assert not self.segments[index].live_bytes
        self.table_count -= self.segments[index].state is SegmentState.TABLE
        self.segments[index] = Segment(index)
        self.free.append(index)
