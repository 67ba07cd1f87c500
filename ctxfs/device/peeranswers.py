"""One session on the side that is asked: requests of one peer, answered by the door."""

from collections.abc import Awaitable, Sequence
from typing import TypeVar, assert_never

import trio

from ctxfs.device.door import Arrival, Door
from ctxfs.device.lanes import Incoming, Lanes, Outgoing
from ctxfs.device.links import Link
from ctxfs.device.outbox import Outbox
from ctxfs.device.timing import Timing
from ctxfs.errors import (
    BlockGone,
    BlockNotFound,
    CtxfsError,
    DeadlineExceeded,
    NoRoom,
    NotPermitted,
    NotYours,
    PeerBusy,
    PeerError,
    PeerUnreachable,
    TierFull,
)
from ctxfs.wire.connection import Connection, Received
from ctxfs.wire.greeting import Identity
from ctxfs.wire.limits import Limits
from ctxfs.wire.messages import (
    Acknowledged,
    Answer,
    Cancel,
    Credit,
    Ended,
    Forget,
    Found,
    Have,
    Heartbeat,
    Lease,
    Lookup,
    Offer,
    Read,
    Reason,
    Refused,
    Release,
    Reply,
    Request,
    Stored,
    Sync,
    Wanted,
)

T = TypeVar("T")
RECEIVE_BYTES = 64 << 10
FOUND_BYTES = 256 << 10  # about what one frame of answers holds
ENTRY_BYTES = 128  # of an answer, beside names and attributes
_REASONS: tuple[tuple[type[CtxfsError], Reason], ...] = (
    (BlockNotFound, Reason.MISS),
    (PeerBusy, Reason.BUSY),
    (TierFull, Reason.NO_ROOM),
    (NoRoom, Reason.NO_ROOM),
    (NotPermitted, Reason.FORBIDDEN),
    (NotYours, Reason.FORBIDDEN),
)


class Answering:
    """The control connection of a peer that dialed, and the lanes that it added."""

    def __init__(
        self,
        link: Link,
        connection: Connection,
        peer: Identity,
        door: Door,
        *,
        unit: int,
        limits: Limits,
        timing: Timing,
    ) -> None:
        self.peer = peer
        self.lanes = Lanes(unit, timing.stall_s, connection.was_asked)
        self._link = link
        self._connection = connection
        self._door = door
        self._limits = limits
        self._timing = timing
        self._outbox = Outbox(link, timing.stall_s)
        self._scopes: dict[int, trio.CancelScope] = {}  # of requests that are being answered
        self._outgoing: dict[int, Outgoing] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Answer until cancelled. Raises PeerUnreachable, PeerProtocolError, in a group."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._outbox.run)
                try:
                    await self._receive(nursery)
                finally:
                    self._nursery = None  # before it is closed to lanes that come now
        finally:
            self.lanes.forget_all()

    async def run_lane(self, link: Link, connection: Connection) -> None:
        """Use a data connection until the session ends. Raises PeerUnreachable where it has."""
        if self._nursery is None:
            raise PeerUnreachable("the session is over")
        over = trio.Event()
        self._nursery.start_soon(self._lane, link, connection, over)
        # The socket may be closed when the lane is done with it, and both end with the session.
        with trio.CancelScope(shield=True):
            await over.wait()

    async def _lane(self, link: Link, connection: Connection, over: trio.Event) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.lanes.run_receiver, link, connection)
                nursery.start_soon(self.lanes.run_sender, link, connection)
        finally:
            over.set()

    async def _receive(self, nursery: trio.Nursery) -> None:
        while True:
            with trio.move_on_after(self._timing.idle_s) as patience:
                data = await self._link.receive(RECEIVE_BYTES)
            if patience.cancelled_caught:
                raise PeerUnreachable("the peer is silent")
            for event in self._connection.feed(data):
                if isinstance(event, Received):
                    await self._take(nursery, event)
            await trio.lowlevel.checkpoint()

    async def _take(self, nursery: trio.Nursery, event: Received) -> None:
        request = event.request
        match event.message:
            case Heartbeat():
                self._reply(request, self._door.stats())
            case Lookup() as message:
                await self._answer_lookup(request, message)
            case Credit(amount):
                if outgoing := self._outgoing.get(request):
                    outgoing.dispatch.give(amount)
                    self.lanes.send(request, outgoing)
            case Cancel():
                if scope := self._scopes.get(request):
                    scope.cancel()
                else:
                    self._reply(request, Ended())
            case Read() | Offer() | Lease() | Release() | Forget() | Sync() as message:
                scope = self._scopes[request] = trio.CancelScope()
                nursery.start_soon(self._answer, request, message, scope)
        # Who asks and does not listen is asked to listen first.
        await self._outbox.room()

    def _reply(self, request: int, reply: Reply) -> None:
        if frame := self._connection.reply(request, reply):
            self._outbox.put(frame)

    async def _answer_lookup(self, request: int, message: Lookup) -> None:
        try:
            for some in portions(self._door.lookup(self.peer, message.keys)):
                self._reply(request, Found(some))
                await self._outbox.room()
        except PeerError:
            raise
        except CtxfsError as error:
            self._reply(request, refusal(error))

    async def _answer(self, request: int, message: Request, scope: trio.CancelScope) -> None:
        """Answer in a task of its own, until it is cancelled or the session ends."""
        with scope:
            try:
                await self._answer_by_kind(request, message)
            except CtxfsError as error:
                self._reply(request, refusal(error))
        del self._scopes[request]
        # Also where the cancellation came too late for the answer: who cancelled waits for this.
        if scope.cancel_called:
            self._reply(request, Ended())

    async def _answer_by_kind(self, request: int, message: Request) -> None:
        door, peer = self._door, self.peer
        match message:
            case Read():
                await self._answer_read(request, message)
            case Offer():
                await self._answer_offer(request, message)
            case Lease():
                leased = await _within(message.budget_ms, door.lease(peer, message))
                self._reply(request, leased)
            case Release(lease):
                await door.release(peer, lease)
                self._reply(request, Acknowledged())
            case Forget(entries):
                await door.forget(peer, entries)
                self._reply(request, Acknowledged())
            case Sync(known, cursor):
                self._reply(request, await door.tombstones(peer, dict(known), cursor))
            case Lookup() | Heartbeat():
                pass  # answered where they are received
            case _:
                assert_never(message)

    async def _answer_read(self, request: int, message: Read) -> None:
        opened = await _within(message.budget_ms, self._door.read(self.peer, message))
        try:
            sent = trio.Event()

            def finished() -> None:
                # In one step with the last byte: the peer may ask for more as soon as it has it.
                self._connection.finish(request)
                sent.set()

            outgoing = Outgoing(
                opened.source, message.length, self.lanes.unit, message.credit, finished
            )
            try:
                self._outgoing[request] = outgoing
                self.lanes.send(request, outgoing)
                if message.length:
                    await sent.wait()
                else:
                    self._connection.finish(request)
            finally:
                del self._outgoing[request]
                outgoing.withdraw()
        finally:
            opened.release()

    async def _answer_offer(self, request: int, message: Offer) -> None:
        arrival = await _within(message.budget_ms, self._door.offer(self.peer, message))
        if isinstance(arrival, Refused):
            self._reply(request, arrival)
            return
        try:
            await self._take_in(request, arrival)
        except BaseException:
            arrival.abandon()
            raise
        durability = await arrival.stored()
        self._reply(request, Stored(durability))

    async def _take_in(self, request: int, arrival: Arrival) -> None:
        """Receive the bytes of an offered block. Nothing touches its target afterwards."""
        complete = trio.Event()

        def give(amount: int) -> None:
            if frame := self._connection.give(request, amount):
                self._outbox.put(frame)

        incoming = Incoming(
            arrival.target,
            self.lanes.unit,
            self._limits.window_bytes,
            give=give,
            on_complete=complete.set,
        )
        self.lanes.expect(request, incoming)
        try:
            self._reply(request, Wanted(incoming.first_credit))
            if incoming.first_credit:
                await complete.wait()
        finally:
            self.lanes.forget(request)


async def _within(budget_ms: int, work: Awaitable[T]) -> T:
    """Wait for it as long as the peer does. Raises DeadlineExceeded."""
    with trio.move_on_after(budget_ms / 1000):
        return await work
    raise DeadlineExceeded("it took longer than there was time")


def refusal(error: CtxfsError) -> Refused:
    """How an error is told to a peer."""
    if isinstance(error, BlockGone):
        return Refused(reason=Reason.GONE, version=error.version, until_ns=error.until_ns)
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return Refused(reason=reason, text=str(error))
    return Refused(reason=Reason.TROUBLE, text=str(error))


def portions(answers: Sequence[Answer]) -> list[tuple[Answer, ...]]:
    """Cut answers to a lookup so that each part fits a frame."""
    parts: list[list[Answer]] = [[]]
    room = FOUND_BYTES
    for answer in answers:
        size = ENTRY_BYTES
        if isinstance(answer, Have):
            user = answer.attributes.user
            size += len(answer.attributes.parent) + sum(len(n) + len(v) + 8 for n, v in user)
        if size > room and parts[-1]:
            parts.append([])
            room = FOUND_BYTES
        parts[-1].append(answer)
        room -= size
    return [tuple(part) for part in parts]
