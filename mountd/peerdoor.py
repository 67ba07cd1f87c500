"""What this host answers its peers with: the store, behind limits, and leases that end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from ctxfs.core.tombstones import Tombstone
from ctxfs.device.door import Arrival, Opened
from ctxfs.errors import BadValue, PeerBusy, TierFull, TooManyOpen
from ctxfs.store.deletions import Deletions
from ctxfs.store.handle import Handle
from ctxfs.store.hotbytes import sendable
from ctxfs.store.receiving import Receiver
from ctxfs.store.serving import Serving
from ctxfs.store.store import Store
from ctxfs.wire.greeting import Identity
from ctxfs.wire.limits import BATCH_MAX
from ctxfs.wire.messages import (
    Answer,
    GoneKey,
    Lease,
    Leased,
    Offer,
    Read,
    Reason,
    Refused,
    Stats,
    Tombstones,
)

LOAD_MAX: Final = 255
HOLD_S_MAX: Final = 60.0  # a lease is for a transfer, not for keeps
LEASES_PER_PEER_MAX: Final = 256
BUSY_MS: Final = 200


@dataclass(slots=True, eq=False)
class _Held:
    """A lease. `peer` is the very object of the connection it was asked for on."""

    peer: Identity
    handle: Handle
    scope: trio.CancelScope


class PeerDoor:
    """Satisfies `ctxfs.device.door.Door`.

    `reads_max`, `offers_max`: how many are under way at once; more are asked to go elsewhere, or to
    come again.
    """

    def __init__(
        self,
        store: Store,
        serving: Serving,
        receiver: Receiver,
        deletions: Deletions,
        *,
        reads_max: int = 128,
        offers_max: int = 32,
    ) -> None:
        self.reads_max = reads_max
        self.offers_max = offers_max
        self.reading = 0
        self._store = store
        self._catalog = store.catalog
        self._serving = serving
        self._receiver = receiver
        self._deletions = deletions
        self._held: dict[int, _Held] = {}
        self._next_lease = 1
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """End leases in time, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    @property
    def load(self) -> int:
        """0 idle to 255: as many read as may."""
        return min(LOAD_MAX, self.reading * LOAD_MAX // self.reads_max)

    @property
    def leases(self) -> int:
        """How many are held."""
        return len(self._held)

    def stats(self) -> Stats:
        """How we are, at once. Room is that of the hot and of the cold tier."""
        hot, cold = self._catalog.hot, self._catalog.cold
        devices = cold.statistics() if cold is not None else ()
        return Stats(
            clock_ns=self._catalog.clock().wall_ns,
            load=self.load,
            capacity_bytes=hot.capacity_bytes + sum(each.capacity_bytes for each in devices),
            free_bytes=max(0, hot.room_bytes) + (cold.room_bytes if cold is not None else 0),
            blocks=self._catalog.block_count,
        )

    # -- bytes

    def lookup(self, peer: Identity, keys: Sequence[bytes]) -> Sequence[Answer]:
        """One answer for each key, in order."""
        return self._serving.lookup(keys, self.load)

    async def read(self, peer: Identity, request: Read) -> Opened:
        """Open a block of this version. Raises PeerBusy, BlockNotFound, BlockGone, BadValue."""
        if self.reading >= self.reads_max:
            raise PeerBusy("as many read here as may")
        self.reading += 1
        try:
            handle = await self._open(request.key, request.version)
            try:
                return self._opened(handle, request)
            except BaseException:
                self._store.release(handle)
                raise
        except BaseException:
            self.reading -= 1
            raise

    async def _open(self, key: bytes, version: int) -> Handle:
        try:
            return await self._serving.open(key, version)
        except (TooManyOpen, TierFull) as error:  # that passes, and another may have it, too
            raise PeerBusy(str(error)) from error

    def _opened(self, handle: Handle, request: Read) -> Opened:
        if request.offset + request.length > handle.block.size:
            raise BadValue(f"{request.length} bytes at {request.offset} go beyond the end")
        source = sendable(handle.file, request.offset, request.length)

        def release() -> None:
            if isinstance(source, memoryview):
                source.release()
            self.reading -= 1
            self._store.release(handle)

        return Opened(source, release)

    async def offer(self, peer: Identity, request: Offer) -> Arrival | Refused:
        """Make room for a block, or say why it is not wanted."""
        if self._receiver.arriving >= self.offers_max:
            return Refused(reason=Reason.BUSY, retry_ms=BUSY_MS)
        return await self._receiver.offer(request, peer.name.decode())

    # -- leases

    async def lease(self, peer: Identity, request: Lease) -> Leased:
        """Keep a block in memory for as long as asked, a minute at most. Raises PeerBusy."""
        if sum(held.peer.name == peer.name for held in self._held.values()) >= LEASES_PER_PEER_MAX:
            raise PeerBusy("too many leases")
        handle = await self._open(request.key, request.version)
        number, self._next_lease = self._next_lease, self._next_lease + 1
        hold_s = min(request.hold_ms / 1000, HOLD_S_MAX)
        scope = trio.CancelScope(deadline=trio.current_time() + hold_s)
        self._held[number] = _Held(peer, handle, scope)
        assert self._nursery is not None
        self._nursery.start_soon(self._hold, number, scope)
        return Leased(number, handle.block.size)

    async def _hold(self, number: int, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await trio.sleep_forever()
        finally:
            self._end(number)

    def _end(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            held.scope.cancel()
            self._store.release(held.handle)

    async def release(self, peer: Identity, lease: int) -> None:
        """End a lease of this peer; it may have ended."""
        held = self._held.get(lease)
        if held is not None and held.peer.name == peer.name:
            self._end(lease)

    def left(self, peer: Identity, session: bytes) -> None:
        """The leases that were asked for on this connection end with it."""
        ended = [number for number, held in self._held.items() if held.peer is peer]
        for number in ended:
            self._end(number)

    # -- deletions

    async def forget(self, peer: Identity, entries: Sequence[GoneKey]) -> None:
        """These are gone; on return a restart does not bring them back."""
        dead = [Tombstone(each.key, each.version, each.until_ns) for each in entries]
        await self._deletions.hear(dead)
        self._store.mover.moves.lease_ended()  # there may be room now

    async def tombstones(self, peer: Identity, known: dict[int, int], cursor: int) -> Tombstones:
        """A page of what is gone that a member which knows so much has not heard of."""
        page, more = self._deletions.page(known, cursor, BATCH_MAX)
        table = self._deletions.table
        return Tombstones(
            tuple(GoneKey(*each) for each in page),
            more,
            tuple(table.known.items()),
            tuple(table.forgotten.items()),
        )
