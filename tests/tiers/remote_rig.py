"""A member that asks others over real sockets, by roads that can be closed."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import trio

from ctxfs.addresses import split_address
from ctxfs.core.members import Member, Membership
from ctxfs.core.placement import Placement
from ctxfs.device.door import Opened
from ctxfs.device.peer import Peer
from ctxfs.device.peerserver import PeerServer
from ctxfs.device.tcp import Address, Listener
from ctxfs.device.timing import Timing
from ctxfs.errors import PeerBusy
from ctxfs.tiers.remote import RemoteTier
from ctxfs.tiers.remote_facts import RemoteSettings
from ctxfs.wire.breaker import Health
from ctxfs.wire.greeting import Identity
from ctxfs.wire.messages import Answer, GoneKey, Have, Read, Stats
from tests.device.peering import INSECURE, PATIENCE_S, SMALL, MemoryDoor

ME = "me"
# Only deadlines of requests say who is dead: heartbeats are patient on a machine that is busy.
TIMING = Timing(beat_s=5.0, beat_deadline_s=PATIENCE_S, silence_s=60.0, idle_s=60.0)
PATIENT = RemoteSettings(deadline_s=PATIENCE_S, hedge_s=PATIENCE_S / 2)  # hedges nothing


@dataclass
class Holder(MemoryDoor):
    """Notes what it is asked, and can be under load."""

    load: int = 0
    busy_reads: int = 0  # to be sent away
    lookups: list[list[bytes]] = field(default_factory=list)
    reads: list[bytes] = field(default_factory=list)

    def stats(self) -> Stats:
        return replace(super().stats(), load=self.load)

    def lookup(self, peer: Identity, keys: Sequence[bytes]) -> Sequence[Answer]:
        self.lookups.append(list(keys))
        return [
            replace(each, load=self.load) if isinstance(each, Have) else each
            for each in super().lookup(peer, keys)
        ]

    async def read(self, peer: Identity, request: Read) -> Opened:
        self.reads.append(request.key)
        if self.busy_reads:
            self.busy_reads -= 1
            raise PeerBusy("read elsewhere")
        return await super().read(peer, request)

    def delete(self, key: bytes, version: int) -> None:
        self.gone[key] = GoneKey(key, version, 9)


class Road:
    """A way to a member's door. While it is closed, nothing arrives and nobody is told."""

    def __init__(self, target: Address) -> None:
        self.address = ("", 0)
        self.closed = trio.Event()  # by `close_after`
        self._target = target
        self._open = trio.Event()
        self._open.set()
        self._left: int | None = None
        self._scopes: set[trio.CancelScope] = set()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = listener.socket.getsockname()
        task_status.started()
        await trio.serve_listeners(self._carry, [listener])

    def close(self) -> None:
        if self._open.is_set():
            self._open = trio.Event()

    def open(self) -> None:
        self._left = None
        self._open.set()

    def close_after(self, length_bytes: int) -> None:
        """Close when so many bytes more came back."""
        self._left, self.closed = length_bytes, trio.Event()

    def cut(self) -> None:
        """End all connections, as the end of a process does."""
        for scope in self._scopes:
            scope.cancel()

    async def _carry(self, near: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                far = await trio.open_tcp_stream(*self._target)
                async with far, trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, near, far, False, scope)
                    nursery.start_soon(self._pump, far, near, True, scope)
            finally:
                self._scopes.discard(scope)

    async def _pump(
        self,
        source: trio.SocketStream,
        target: trio.SocketStream,
        is_back: bool,
        scope: trio.CancelScope,
    ) -> None:
        try:
            async for data in source:
                while not self._open.is_set():
                    await self._open.wait()
                await target.send_all(data)
                if is_back and self._left is not None:
                    self._count(len(data))
        except trio.BrokenResourceError:
            pass  # one side went
        scope.cancel()

    def _count(self, length_bytes: int) -> None:
        assert self._left is not None
        self._left -= length_bytes
        if self._left < 0:
            self._left = None
            self.close()
            self.closed.set()


@dataclass
class Host:
    """One of the others."""

    name: str
    door: Holder
    road: Road
    server: PeerServer
    address: Address
    zone: str = ""

    def member(self) -> Member:
        host, port = self.road.address[:2]
        return Member(
            name=self.name, slot=1, address=f"{host}:{port}", zone=self.zone, weight=1 << 40
        )


class Cluster:
    """We, and the others by name."""

    def __init__(self, settings: RemoteSettings, zone: str, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.hosts: dict[str, Host] = {}
        self.peers: dict[str, Peer] = {}
        self.tier = RemoteTier(ME, self._make_peer, settings)
        self._zone = zone
        self._numbers = itertools.count()
        self._epochs = itertools.count(1)

    def door(self, name: str) -> Holder:
        return self.hosts[name].door

    def road(self, name: str) -> Road:
        return self.hosts[name].road

    def set_members(self, *names: str) -> None:
        """These are members now, and we."""
        self.tier.set_members(Membership(next(self._epochs), self._members(names)))

    def _members(self, names: Sequence[str]) -> list[Member]:
        # So light that it is home to nothing.
        mine = Member(name=ME, slot=0, address="127.0.0.1:1", zone=self._zone, weight=1)
        return [mine, *(self.hosts[name].member() for name in names)]

    def key(self, *order: str) -> bytes:
        """A new key that these members are asked for in this order."""
        placement = Placement(self._members(tuple(self.hosts)))
        while True:
            key = b"key%d" % next(self._numbers)
            if placement.ranking(key, len(order)) == order:
                return key

    def _make_peer(self, member: Member) -> Peer:
        me = Identity(cluster=b"lab", name=ME.encode(), slot=0)
        name, address = member.name, split_address(member.address)
        peer = self.peers[name] = Peer(
            me, name.encode(), address, INSECURE, lanes=2, limits=SMALL, timing=TIMING
        )
        return peer

    async def add(self, name: str, zone: str) -> None:
        """Have this one listen, and a road to it."""
        door, listener = Holder(), Listener(("127.0.0.1", 0))
        address = listener.address
        them = Identity(cluster=b"lab", name=name.encode(), slot=1)
        server = PeerServer(listener, door, them, INSECURE, limits=SMALL, timing=TIMING)
        await self.nursery.start(server.run)
        road = await self._lay_road(address)
        self.hosts[name] = Host(name, door, road, server, address, zone)

    async def move(self, name: str) -> None:
        """Give it another address."""
        self.hosts[name].road = await self._lay_road(self.hosts[name].address)

    async def _lay_road(self, target: Address) -> Road:
        road = Road(target)
        await self.nursery.start(road.run)
        return road

    async def connected(self) -> None:
        """Wait until all members were reached."""
        for peer in self.peers.values():
            await peer.wait_healthy()
            await peer.stats(PATIENCE_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let others have their turn until it holds."""
        while not condition():
            await trio.lowlevel.checkpoint()

    def is_broken(self, name: str) -> bool:
        return self.peers[name].health is Health.BROKEN


@asynccontextmanager
async def cluster(
    *names: str, settings: RemoteSettings = PATIENT, zones: str = "", runs: bool = True
) -> AsyncIterator[Cluster]:
    """All are members, and connected. `zones`: a letter for each name, and at the end for us."""
    async with trio.open_nursery() as nursery:
        made = Cluster(settings, zones[-1:], nursery)
        try:
            for number, name in enumerate(names):
                await made.add(name, zones[number : number + 1])
            made.set_members(*names)
            if runs:
                await nursery.start(made.tier.run)
                await made.connected()
            with trio.fail_after(3 * PATIENCE_S):
                yield made
        finally:
            nursery.cancel_scope.cancel()
    for host in made.hosts.values():
        host.door.close()
