"""The other members, each with its connections while it is one, and what is known of its load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from ctxfs.core.members import Member, Membership
from ctxfs.device.peer import Peer
from ctxfs.errors import PeerUnreachable
from ctxfs.tiers.remote_asking import Asker
from ctxfs.tiers.remote_facts import LOAD_MAX, PeerStatistics
from ctxfs.wire.breaker import Health
from ctxfs.wire.messages import Stats

LOAD_STEP = 64  # loads that differ by less are alike: they are old, and not exact
MakePeer = Callable[[Member], Peer]


class Neighbour:
    """One other member. `run` while it is one."""

    def __init__(self, member: Member, peer: Peer, deadline_s: float) -> None:
        self.member = member
        self.peer = peer
        self.asker = Asker(member.name, peer, deadline_s)
        self.in_flight_bytes = 0  # of blocks, to it and from it
        self.corrupt = 0  # fetches whose bytes were wrong
        self._scope = trio.CancelScope()
        self._calls: set[trio.CancelScope] = set()
        self._is_over = False
        self._load = 0
        self._stats: Stats | None = None

    async def run(self) -> None:
        """Keep the connections and ask, until `end`."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.peer.run)
                    nursery.start_soon(self.asker.run)
        finally:
            self.end()

    def end(self) -> None:
        """It is no member any more: whoever waits for it is told so at once."""
        self._is_over = True
        self._scope.cancel()
        self.asker.end()
        for scope in self._calls:
            scope.cancel()

    @contextmanager
    def calling(self, length_bytes: int = 0) -> Iterator[Peer]:
        """A request that moves so many bytes. Raises PeerUnreachable where `end` comes first."""
        if self._is_over:
            raise self._departed()
        self.in_flight_bytes += length_bytes
        with trio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                yield self.peer
            finally:
                self._calls.discard(scope)
                self.in_flight_bytes -= length_bytes
        if scope.cancelled_caught:
            raise self._departed()

    def _departed(self) -> PeerUnreachable:
        return PeerUnreachable(f"{self.member.name} is not a member any more")

    # -- how it is

    @property
    def is_ill(self) -> bool:
        """Whether it is better asked after others."""
        return self.peer.health is not Health.HEALTHY

    @property
    def load(self) -> int:
        """0 idle to LOAD_MAX: what it said last."""
        stats = self.peer.last_stats
        if stats is not None and stats is not self._stats:
            self._stats, self._load = stats, stats.load
        return self._load

    def sends_away(self) -> None:
        """It was busy; until its next heartbeat, that holds."""
        self._stats, self._load = self.peer.last_stats, LOAD_MAX

    def ease(self, zone: str | None) -> tuple[bool, int, bool, int]:
        """What orders holders to read from, as seen from a zone: the lowest first."""
        is_far = self.member.zone != zone
        return (self.is_ill, self.load // LOAD_STEP, is_far, self.in_flight_bytes)

    def statistics(self) -> PeerStatistics:
        """What there is to tell of it."""
        peer, member, stats = self.peer, self.member, self.peer.last_stats
        counters = peer.counters
        return PeerStatistics(
            name=member.name,
            address=member.address,
            zone=member.zone,
            state=member.state.value,
            health=peer.health.value,
            ill_for_s=peer.ill_for_s,
            trouble=peer.trouble,
            round_trip_s=peer.round_trip_s,
            load=self.load,
            capacity_bytes=stats.capacity_bytes if stats else None,
            free_bytes=stats.free_bytes if stats else None,
            blocks=stats.blocks if stats else None,
            requests=counters.requests,
            missed=counters.missed,
            connected=counters.connected,
            received_bytes=counters.traffic.received_bytes,
            sent_bytes=counters.traffic.sent_bytes,
            in_flight_bytes=self.in_flight_bytes,
            corrupt=self.corrupt,
            protocol=peer.protocol,
            clock_ahead_s=peer.clock_ahead_s,
        )


class Neighbours:
    """All other members by name, as the last snapshot has them."""

    def __init__(self, me: str, make_peer: MakePeer, deadline_s: float) -> None:
        self.zone: str | None = None  # ours
        self._me = me
        self._make_peer = make_peer
        self._deadline_s = deadline_s
        self._by_name: dict[str, Neighbour] = {}
        self._nursery: trio.Nursery | None = None

    def __iter__(self) -> Iterator[Neighbour]:
        return iter(tuple(self._by_name.values()))

    def get(self, name: str) -> Neighbour | None:
        """The one of this name, or None: it is no member, or ourselves."""
        return self._by_name.get(name)

    def set_deadline(self, deadline_s: float) -> None:
        """How long an answer may take from now on."""
        self._deadline_s = deadline_s
        for neighbour in self:
            neighbour.asker.deadline_s = deadline_s

    def start(self, nursery: trio.Nursery) -> None:
        """Connect to all of them, and to those that come; cancelling the nursery ends it."""
        self._nursery = nursery
        for neighbour in self:
            nursery.start_soon(neighbour.run)

    def stop(self) -> None:
        """Connect to nobody any more."""
        self._nursery = None
        for neighbour in self:
            neighbour.end()

    def follow(self, membership: Membership) -> None:
        """End those that left, and begin with those that came. Others keep their connections."""
        mine = membership.get(self._me)
        self.zone = mine.zone if mine is not None else None
        for name, neighbour in list(self._by_name.items()):
            member = membership.get(name)
            if member is None or member.address != neighbour.member.address:
                del self._by_name[name]
                neighbour.end()
            else:
                neighbour.member = member
        for member in membership:
            if member.name != self._me and member.name not in self._by_name:
                self._begin(member)

    def _begin(self, member: Member) -> None:
        neighbour = Neighbour(member, self._make_peer(member), self._deadline_s)
        self._by_name[member.name] = neighbour
        if self._nursery is not None:
            self._nursery.start_soon(neighbour.run)
