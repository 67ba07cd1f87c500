"""A member that answers from files in memory, and what it takes to talk to it."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from ctxfs.codec.digest import digest
from ctxfs.device.door import Arrival, Opened
from ctxfs.device.lanes import Source
from ctxfs.device.links import FileSpan
from ctxfs.device.mapping import Mapping
from ctxfs.device.peer import Peer
from ctxfs.device.peerserver import PeerServer, serve
from ctxfs.device.tcp import Listener
from ctxfs.device.timing import Timing
from ctxfs.device.tls import Insecure, Security
from ctxfs.errors import BlockGone, BlockNotFound, CopyCorrupt, PeerBusy
from ctxfs.wire.greeting import Identity
from ctxfs.wire.limits import Limits
from ctxfs.wire.messages import (
    Answer,
    Attributes,
    Durability,
    Gone,
    GoneKey,
    Have,
    Lease,
    Leased,
    Miss,
    Offer,
    Read,
    Reason,
    Refused,
    Stats,
    Tombstones,
)

ME = Identity(cluster=b"lab", name=b"one", slot=1)
YOU = Identity(cluster=b"lab", name=b"two", slot=2)
ATTRIBUTES = Attributes(
    mode=0o640, uid=1, gid=2, created_ns=3, mtime_ns=4, user=((b"user.kind", b"kv"),)
)
SMALL = Limits(stripe_bytes=64 << 10, window_bytes=128 << 10)
INSECURE = Insecure()
PATIENCE_S = 20.0  # for what is to be answered


def memory_file(content: bytes) -> int:
    fd = os.memfd_create("block")
    os.write(fd, content)
    return fd


@dataclass(slots=True)
class Stored:
    """A block of the member."""

    fd: int
    size: int
    version: int
    leases: int = 0
    mapping: Mapping | None = None

    def memory(self) -> memoryview:
        if self.mapping is None:
            self.mapping = Mapping(self.fd, self.size)
        return self.mapping.view

    def close(self) -> None:
        if self.mapping is not None:
            self.mapping.close()  # raises BufferError if somebody still uses it
        os.close(self.fd)


class Landing:
    """Where an offered block arrives. Satisfies `Arrival`."""

    def __init__(self, door: "MemoryDoor", offer: Offer) -> None:
        self._door = door
        self._offer = offer
        self._fd = memory_file(b"")
        os.ftruncate(self._fd, offer.size)
        self._mapping = Mapping(self._fd, offer.size)

    @property
    def target(self) -> memoryview:
        return self._mapping.view

    async def stored(self) -> Durability:
        with self._mapping.view[: self._offer.size] as view:
            good = digest(view) == self._offer.digest
        self._mapping.close()
        if not good:
            raise CopyCorrupt("the digest differs")
        self._door.blocks[self._offer.key] = Stored(self._fd, self._offer.size, self._offer.version)
        self._door.offers.append(self._offer)
        return Durability.MEDIUM

    def abandon(self) -> None:
        self._mapping.close()
        os.close(self._fd)
        self._door.abandoned += 1
        self._door.changed.set()


@dataclass
class MemoryDoor:
    """Satisfies `Door`."""

    blocks: dict[bytes, Stored] = field(default_factory=dict)
    gone: dict[bytes, GoneKey] = field(default_factory=dict)
    offers: list[Offer] = field(default_factory=list)
    leases: dict[int, bytes] = field(default_factory=dict)
    abandoned: int = 0
    busy: bool = False
    full: bool = False
    gate: trio.Event | None = None  # reads and offers wait for it
    waiting: trio.Event = field(default_factory=trio.Event)  # somebody came to the gate
    changed: trio.Event = field(default_factory=trio.Event)
    lends_memory: bool = True
    gone_peers: list[bytes] = field(default_factory=list)

    def put(self, key: bytes, content: bytes, version: int = 1) -> bytes:
        self.blocks[key] = Stored(memory_file(content), len(content), version)
        return content

    def close(self) -> None:
        for block in self.blocks.values():
            block.close()

    async def _pass(self) -> None:
        if self.gate is not None:
            self.waiting.set()
            await self.gate.wait()

    def stats(self) -> Stats:
        return Stats(clock_ns=5, load=7, capacity_bytes=100, free_bytes=50, blocks=len(self.blocks))

    def lookup(self, peer: Identity, keys: Sequence[bytes]) -> Sequence[Answer]:
        return [self._look(key) for key in keys]

    def _look(self, key: bytes) -> Answer:
        if key in self.gone:
            return Gone(self.gone[key].version, self.gone[key].until_ns)
        if key not in self.blocks:
            return Miss()
        block = self.blocks[key]
        return Have(
            version=block.version,
            size=block.size,
            digest=digest(os.pread(block.fd, block.size, 0)),
            tiers=1,
            load=0,
            attributes=ATTRIBUTES,
        )

    async def read(self, peer: Identity, request: Read) -> Opened:
        await self._pass()
        if self.busy:
            raise PeerBusy("read elsewhere")
        if request.key in self.gone:
            raise BlockGone("gone", self.gone[request.key].version, 9)
        block = self.blocks.get(request.key)
        if block is None or block.version != request.version:
            raise BlockNotFound("no such block")
        block.leases += 1
        source: Source = FileSpan(block.fd, request.offset, request.length)
        if self.lends_memory:
            source = block.memory()[request.offset : request.offset + request.length]
        return Opened(source, self._releasing(block, source))

    def _releasing(self, block: Stored, source: Source) -> Callable[[], None]:
        def release() -> None:
            if isinstance(source, memoryview):
                source.release()
            block.leases -= 1
            self.changed.set()

        return release

    async def offer(self, peer: Identity, request: Offer) -> Arrival | Refused:
        await self._pass()
        if self.full:
            return Refused(reason=Reason.NO_ROOM, retry_ms=100)
        block = self.blocks.get(request.key)
        if block is not None and block.version >= request.version:
            return Refused(reason=Reason.HAVE, version=block.version)
        return Landing(self, request)

    async def lease(self, peer: Identity, request: Lease) -> Leased:
        if request.key not in self.blocks:
            raise BlockNotFound("no such block")
        number = len(self.leases) + 1
        self.leases[number] = request.key
        return Leased(number, self.blocks[request.key].size)

    async def release(self, peer: Identity, lease: int) -> None:
        self.leases.pop(lease, None)

    async def forget(self, peer: Identity, entries: Sequence[GoneKey]) -> None:
        self.gone.update({each.key: each for each in entries})

    async def tombstones(self, peer: Identity, known: dict[int, int], cursor: int) -> Tombstones:
        entries = list(self.gone.values())
        more = cursor + 1 if cursor + 1 < len(entries) else 0
        vector = tuple(known.items())
        return Tombstones(tuple(entries[cursor : cursor + 1]), more, vector, ((9, cursor),))

    def left(self, peer: Identity, session: bytes) -> None:
        self.gone_peers.append(peer.name)
        self.changed.set()


@dataclass
class Lab:
    """A member that listens, and one that asks it."""

    door: MemoryDoor
    server: PeerServer
    peer: Peer
    listener: Listener
    nursery: trio.Nursery

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the door to be touched until the condition holds."""
        while not condition():
            self.door.changed = trio.Event()
            await self.door.changed.wait()


@asynccontextmanager
async def lab(
    *,
    security: Security = INSECURE,
    theirs: Security | None = None,
    limits: Limits | None = None,
    timing: Timing | None = None,
    lanes: int = 2,
) -> AsyncIterator[Lab]:
    """Over loopback, with real sockets. `theirs`: how the other side secures, if not alike."""
    door = MemoryDoor()
    listener = Listener(("127.0.0.1", 0))
    peer = Peer(ME, b"two", listener.address, security, lanes=lanes, limits=limits, timing=timing)
    async with trio.open_nursery() as nursery:
        try:
            server: PeerServer = await nursery.start(
                _serving, listener, door, theirs or security, limits, timing
            )
            await nursery.start(peer.run)
            yield Lab(door, server, peer, listener, nursery)
        finally:
            nursery.cancel_scope.cancel()
            door.close()


async def _serving(
    listener: Listener,
    door: MemoryDoor,
    security: Security,
    limits: Limits | None,
    timing: Timing | None,
    *,
    task_status: trio.TaskStatus[PeerServer],
) -> None:
    await serve(
        listener, door, YOU, security, limits=limits, timing=timing, task_status=task_status
    )


def content_of(size: int, seed: int = 0) -> bytes:
    """Bytes that differ from stripe to stripe."""
    return b"".join((at + seed).to_bytes(8, "little") for at in range(size // 8 + 1))[:size]


def offer_of(key: bytes, content: bytes, version: int = 1) -> Offer:
    return Offer(key, version, len(content), digest(content), ATTRIBUTES, 0)
