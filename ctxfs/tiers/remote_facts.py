"""What is known of blocks that other members hold, and what came of asking for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ctxfs.units import MIB
from ctxfs.wire.messages import Attributes

LOAD_MAX: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """How other members are asked. Times are seconds."""

    replicas: int = 2  # homes of a key; one more is asked, for what was written while one was away
    hedge_s: float = 0.02  # without an answer for so long, the next one is asked, too
    deadline_s: float = 1.0  # to answer, beside the time that bytes take
    pace_bytes_per_s: int = 16 * MIB  # bytes that go slower than this miss their deadline
    negative_s: float = 0.5  # a key that nobody has is not asked for again
    missing_max: int = 100_000  # such keys that are remembered
    busy_pause_s: float = 0.01  # before holders that are all busy are asked again; it doubles
    loaded: int = 192  # of LOAD_MAX: from here on it is worth asking who else has a block
    tell_at_once: int = 32  # members that are told of deletions at a time

    def __post_init__(self) -> None:
        """Raise ValueError where the figures do not go together."""
        if self.replicas < 1 or self.missing_max < 1 or self.tell_at_once < 1:
            raise ValueError("replicas, missing_max and tell_at_once are at least 1")
        if not 0 < self.hedge_s < self.deadline_s:
            raise ValueError("hedge_s is above 0 and below deadline_s: or nobody else is asked")
        if self.pace_bytes_per_s < 1 or self.busy_pause_s <= 0 or self.negative_s < 0:
            raise ValueError("a pace, a pause or a memory that is none")

    def within_s(self, length_bytes: int) -> float:
        """The deadline for a request while so many bytes are to go to or come from a member."""
        return self.deadline_s + length_bytes / self.pace_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A block that others hold: its newest version among those who answered in time."""

    version: int
    size: int
    digest: bytes  # XXH3-128 of the content, big-endian
    attributes: Attributes
    holders: tuple[str, ...]  # who said so, the least loaded first; others may have it too


@dataclass(slots=True)
class RemoteCounters:
    """Numbers that only grow."""

    lookups: int = 0  # keys that members were asked for
    found: int = 0  # of these
    missed: int = 0  # of these
    shared: int = 0  # asked for while the same key was being asked for
    remembered: int = 0  # answered as missing without asking
    hedged: int = 0  # another member was asked because one took its time
    trouble: int = 0  # questions and reads that a member answered with trouble, or not in time
    fetched: int = 0
    fetched_bytes: int = 0
    failed_over: int = 0  # reads of which a holder gave nothing, and another one was tried
    busy: int = 0  # reads that a holder sent elsewhere
    corrupt: int = 0  # fetches whose bytes did not match their digest
    pushed: int = 0
    pushed_bytes: int = 0
    refused: int = 0  # pushes that were not wanted
    told: int = 0  # members told of deletions, for each telling
    untold: int = 0  # those that could not be told


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatistics:
    """One other member, as seen from here."""

    name: str
    address: str
    zone: str
    state: str  # of MemberState
    health: str  # of Health
    ill_for_s: float  # 0 where it is healthy
    trouble: str | None  # why there is no connection, in words
    round_trip_s: float | None  # of the last heartbeat
    load: int  # 0 idle to LOAD_MAX
    capacity_bytes: int | None  # as it said last; None: it never did
    free_bytes: int | None
    blocks: int | None
    requests: int
    missed: int  # deadlines
    connected: int  # how often
    received_bytes: int  # of blocks, from it
    sent_bytes: int
    in_flight_bytes: int
    corrupt: int  # fetches whose bytes were wrong
    protocol: str | None  # version.minor that it speaks; None without a connection
    clock_ahead_s: float | None  # its wall clock before ours, at the last heartbeat
