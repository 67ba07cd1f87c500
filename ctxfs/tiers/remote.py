"""The remote tier: blocks that other members hold. Nobody else above the transport knows peers.

Who is asked for a key follows from placement alone; what came of it is counted. It moves bytes into
memory that it is given and verifies none of them: that is for whoever knows the digest.
docs/cluster.md has the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from ctxfs.core.key import split_key
from ctxfs.core.members import Membership
from ctxfs.core.placement import Placement
from ctxfs.device.lanes import Source
from ctxfs.errors import BlockGone, CtxfsError, PeerUnreachable
from ctxfs.tiers.remote_asking import batches
from ctxfs.tiers.remote_facts import Found, PeerStatistics, RemoteCounters, RemoteSettings
from ctxfs.tiers.remote_missing import MissingKeys
from ctxfs.tiers.remote_neighbour import MakePeer, Neighbour, Neighbours
from ctxfs.tiers.remote_reading import Reading
from ctxfs.tiers.remote_search import Search
from ctxfs.wire.messages import Gone, GoneKey, Offer, Refused, Stored, Tombstones

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Finding:
    """One search, however many wait for it."""

    done: trio.Event = field(default_factory=trio.Event)
    found: Found | None = None
    may_be_remembered: bool = True  # nothing came meanwhile that makes a miss doubtful
    is_over: bool = False

    async def wait(self) -> Found | None:
        """Wait until it has ended; what was found."""
        if not self.is_over:
            await self.done.wait()
        return self.found


_NOWHERE = Finding(is_over=True)


def _can_travel(key: bytes) -> bool:
    """Whether it is a legal key. One that is not would spoil the request of others."""
    try:
        split_key(key)
    except CtxfsError:
        return False
    return True


class RemoteTier:
    """Works while `run` does; before and after, nobody has anything."""

    def __init__(
        self, me: str, make_peer: MakePeer, settings: RemoteSettings | None = None
    ) -> None:
        """`make_peer`: the way to a member, not running yet."""
        self.settings = settings or RemoteSettings()
        self.counters = RemoteCounters()
        self._me = me
        self._neighbours = Neighbours(me, make_peer, self.settings.deadline_s)
        self._membership = Membership(0, ())
        self._placement = Placement(())
        self._missing = MissingKeys(self.settings.negative_s, self.settings.missing_max)
        self._flights: dict[bytes, Finding] = {}
        self._nursery: trio.Nursery | None = None
        self._telling = trio.CapacityLimiter(self.settings.tell_at_once)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connections to all members until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._neighbours.start(nursery)
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:  # before the nursery takes no more tasks
                self._nursery = None
                self._neighbours.stop()

    def set_members(self, membership: Membership) -> None:
        """Another snapshot. Who waits for a member that left is told so, and asks the next."""
        moves_homes = membership.fingerprint != self._membership.fingerprint
        self._membership = membership
        self._neighbours.follow(membership)
        if moves_homes:
            self._placement = Placement(membership)
            # Who is asked from now on may have what those asked before did not.
            self._missing.clear()
            for flight in self._flights.values():
                flight.may_be_remembered = False

    def apply(self, settings: RemoteSettings) -> None:
        """Ask so from now on; what is under way goes on as it began."""
        self.settings = settings
        self._neighbours.set_deadline(settings.deadline_s)
        self._missing.clear()
        self._missing.keep_s = settings.negative_s

    # -- who holds what

    @property
    def others(self) -> tuple[str, ...]:
        """The names of all other members."""
        return tuple(neighbour.member.name for neighbour in self._neighbours)

    def homes(self, key: bytes, replicas: int | None = None) -> tuple[str, ...]:
        """Names of a key's homes, ourselves included; `replicas`: if not as the settings say."""
        return self._placement.homes(key, self.wanted(replicas))

    def wanted(self, replicas: int | None = None) -> int:
        """How many homes a key is to have, also where there are fewer members."""
        return replicas or self.settings.replicas

    def is_home(self, key: bytes, replicas: int | None = None) -> bool:
        """Whether we are one of them."""
        return self._me in self.homes(key, replicas)

    def _others(self, key: bytes) -> list[str]:
        """Who may have it: the homes, those in our zone first, and one more."""
        replicas, zone = self.settings.replicas, self._neighbours.zone
        ranking = self._placement.ranking(key, replicas + 1)
        near = [name for name in ranking[:replicas] if self._zone_of(name) == zone]
        far = [name for name in ranking if name not in near]
        return [name for name in (*near, *far) if name != self._me]

    def _zone_of(self, name: str) -> str | None:
        member = self._membership.get(name)
        return member.zone if member is not None else None

    # -- looking for a key

    def is_missing(self, key: bytes) -> bool:
        """Whether it was asked for a moment ago and nobody had it."""
        return self._missing.is_missing(key, trio.current_time())

    def removed(self, key: bytes) -> Gone | None:
        """The deletion that a member told of when the key was found missing, while remembered."""
        return self._missing.gone(key, trio.current_time())

    def came(self, key: bytes) -> None:
        """Somebody has it now: it is not missing, whatever was heard and is being heard."""
        self._missing.forget(key)
        flight = self._flights.get(key)
        if flight is not None:
            flight.may_be_remembered = False

    async def find(self, key: bytes) -> Found | None:
        """Ask the key's homes for it, once however many ask here. A peer's trouble is a miss."""
        return await self.begin(key).wait()

    def begin(self, key: bytes) -> Finding:
        """The same, without waiting yet. It goes on also where nobody waits."""
        if self.is_missing(key):
            self.counters.remembered += 1
            return _NOWHERE
        flight = self._flights.get(key)
        if flight is not None:
            self.counters.shared += 1
            return flight
        candidates = self._candidates(key)
        if not candidates or self._nursery is None or not _can_travel(key):
            return _NOWHERE
        flight = self._flights[key] = Finding()
        # Of its own: it goes on for the others when the first to ask is cancelled.
        self._nursery.start_soon(self._fly, key, candidates, flight)
        return flight

    def _candidates(self, key: bytes) -> list[Neighbour]:
        named = [self._neighbours.get(name) for name in self._others(key)]
        return sorted((each for each in named if each is not None), key=lambda each: each.is_ill)

    async def _fly(self, key: bytes, candidates: Sequence[Neighbour], flight: Finding) -> None:
        search = Search(key, self.settings, self.counters)
        self.counters.lookups += 1
        try:
            flight.found = await search.run(candidates)
        finally:
            del self._flights[key]
            flight.done.set()
        if flight.found is not None:
            self.counters.found += 1
            return
        self.counters.missed += 1
        if search.is_sure and flight.may_be_remembered:
            self._missing.add(key, search.gone, trio.current_time())

    # -- bytes

    async def fetch(
        self,
        key: bytes,
        version: int,
        holders: Sequence[str],
        into: memoryview,
        *,
        but: Collection[str] = (),
    ) -> str:
        """Fill `into`, exactly as long as the block; returns who gave it.

        Holders come first, the least loaded first, then other homes; none of `but`, whose bytes
        were wrong (see `lied`). Raises BlockNotFound where all say that they do not have it,
        BlockGone where it was deleted; DeadlineExceeded or PeerUnreachable for anything else.
        Nothing is written to `into` after the return, whatever becomes of it.
        """
        named = [name for name in dict.fromkeys(holders) if name not in but]
        others = [name for name in self._others(key) if name not in (*named, *but)]
        reading = Reading(self._neighbours, self.settings, self.counters, key, version)
        try:
            return await reading.run(named, others, into)
        except BlockGone as error:
            gone = Gone(error.version, error.until_ns)
            self._missing.add(key, gone, trio.current_time())
            raise

    def lied(self, name: str) -> None:
        """What this member gave last does not match the block's digest. It is counted."""
        self.counters.corrupt += 1
        neighbour = self._neighbours.get(name)
        if neighbour is not None:
            neighbour.corrupt += 1

    async def push(self, name: str, offer: Offer, source: Source) -> Stored | Refused:
        """Offer a member a block, and send it if it is wanted. `source` stays until the return.

        Refused is HAVE, GONE, NO_ROOM or BUSY. Raises PeerError, DeadlineExceeded.
        """
        neighbour = self._neighbours.get(name)
        if neighbour is None:
            raise PeerUnreachable(f"{name} is not a member any more")
        with neighbour.calling(offer.size) as peer:
            within_s = self.settings.within_s(neighbour.in_flight_bytes)
            said = await peer.push(offer, source, within_s)
        if isinstance(said, Stored):
            self.counters.pushed += 1
            self.counters.pushed_bytes += offer.size
        else:
            self.counters.refused += 1
        return said

    async def amend(self, name: str, offer: Offer) -> Refused:
        """Tell a member the attributes of a block, for the case that it has that version.

        Returns HAVE, MISS, GONE or BUSY. Raises PeerError, DeadlineExceeded.
        """
        neighbour = self._neighbours.get(name)
        if neighbour is None:
            raise PeerUnreachable(f"{name} is not a member any more")
        with neighbour.calling() as peer:
            return await peer.amend(offer, self.settings.deadline_s)

    # -- deletions

    async def tell_gone(self, entries: Sequence[GoneKey]) -> tuple[str, ...]:
        """Tell all members; returns the names of those that did not say that they know now."""
        untold: list[str] = []
        async with trio.open_nursery() as nursery:
            for neighbour in self._neighbours:
                nursery.start_soon(self._tell, neighbour, entries, untold)
        return tuple(sorted(untold))

    async def _tell(
        self, neighbour: Neighbour, entries: Sequence[GoneKey], untold: list[str]
    ) -> None:
        try:
            async with self._telling:
                for batch in batches(entries, lambda entry: len(entry.key)):
                    with neighbour.calling() as peer:
                        await peer.forget(batch, self.settings.deadline_s)
        except CtxfsError as error:
            log.debug("%s was not told of deletions: %s", neighbour.member.name, error)
            self.counters.untold += 1
            untold.append(neighbour.member.name)
        else:
            self.counters.told += 1

    async def tombstones(self, name: str, known: Mapping[int, int]) -> Tombstones:
        """Ask a member for all deletions that one who knows so much has not heard of. Raises
        PeerError, DeadlineExceeded."""
        neighbour = self._neighbours.get(name)
        if neighbour is None:
            raise PeerUnreachable(f"{name} is not a member any more")
        with neighbour.calling() as peer:
            return await peer.tombstones(known, self.settings.deadline_s)

    # -- what there is to tell

    def statistics(self) -> tuple[PeerStatistics, ...]:
        """All other members, in the order of their names."""
        every = (neighbour.statistics() for neighbour in self._neighbours)
        return tuple(sorted(every, key=lambda each: each.name))
