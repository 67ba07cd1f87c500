"""The data connections of one session: stripes of many requests, both ways, over any of them.

Bytes are received right into memory that a caller lent, and only while it is lent: from the moment
of `withdraw`, what still arrives for it is read into a buffer of the lane's own. A stripe that
began to be sent is sent to its end, since the other side counts on it, or the session ends.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from ctxfs.device.links import FileSpan, Link
from ctxfs.errors import BadValue, PeerProtocolError, PeerUnreachable
from ctxfs.wire.connection import Connection, Received
from ctxfs.wire.limits import BODY_BYTES_MAX, STRIPE_BYTES_MAX
from ctxfs.wire.messages import Stripe
from ctxfs.wire.transfer import Dispatch, Reception

SPILL_BYTES = 256 << 10  # at a time, of what nobody wants any more
TURN_BYTES = 1 << 20  # received or sent before others in the loop get their turn
LONG_BYTES = 2 << 20  # of a stripe, where there are more requests than lanes


Source = memoryview | FileSpan  # what is sent; memory must be dense: holes would be filled
_ZEROS = memoryview(bytes(SPILL_BYTES))


class Incoming:
    """Bytes that are awaited into `target`, which is touched no more once this is withdrawn."""

    def __init__(
        self,
        target: memoryview,
        unit: int,
        window: int,
        *,
        give: Callable[[int], None],
        on_complete: Callable[[], None],
    ) -> None:
        """`give`: tell the sender of more credit. `on_complete`: the last byte is there."""
        self._target: memoryview | None = target
        self._reception = Reception(len(target), unit, window)
        self._give = give
        self._on_complete = on_complete

    @property
    def first_credit(self) -> int:
        """What the other side may send at once."""
        return self._reception.first_credit

    def withdraw(self) -> None:
        """The target is the caller's alone from now on."""
        self._target = None

    def accept(self, offset: int, length: int) -> None:
        """A stripe begins. Raises PeerProtocolError."""
        self._reception.accept(offset, length)

    def receive_nowait(self, link: Link, offset: int, length: int) -> int | None:
        """Receive up to `length` bytes to `offset`; None: nothing yet; -1: they are not wanted."""
        if self._target is None:
            return -1
        # No slice outlives the call: the target's owner may unmap it during any await of ours.
        with self._target[offset : offset + length] as piece:
            got = link.receive_nowait(piece)
        if got:
            if credit := self._reception.add(got):
                self._give(credit)
            if self._reception.is_complete:
                self._on_complete()
        return got


class Outgoing:
    """Bytes of `source` that are sent as there is credit for them; untouched after `withdraw`.

    Memory is copied by the kernel in the call that sends it, so that it may be used again as soon
    as `on_sent` was called: in the same step as the last byte goes, unless withdrawn before. Pages
    of a file go without a copy, and may still be on their way then.
    """

    def __init__(
        self,
        source: Source,
        length: int,
        unit: int,
        credit: int,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """`length` is to be that of `source`. Raises BadValue."""
        if length != (source.length if isinstance(source, FileSpan) else len(source)):
            raise BadValue(f"a source of another length than the {length} bytes to send")
        self.dispatch = Dispatch(length, unit, credit)
        self._source: Source | None = source
        self._on_sent = on_sent
        self._under_way = 0

    @property
    def is_ready(self) -> bool:
        """Whether a stripe can be sent now."""
        return self.dispatch.is_ready and self._source is not None

    def begin(self, size_max: int) -> Stripe:
        """Take the next stripe, one unit or up to `size_max`; `end` is to be called afterwards."""
        self._under_way += 1
        return Stripe(*self.dispatch.take(size_max))

    def send_nowait(self, link: Link, offset: int, length: int) -> int:
        """Send up to `length` bytes from `offset` on, and return how many. Raises PeerUnreachable.

        A stripe that began before `withdraw` goes on with zeros, which nobody awaits.
        """
        match self._source:
            case None:
                return link.send_nowait(_ZEROS[:length])
            case FileSpan(fd, start, _):
                return link.send_file_nowait(FileSpan(fd, start + offset, length))
            case memory:
                with memory[offset : offset + length] as piece:
                    return link.send_nowait(piece)

    def end(self) -> None:
        """A stripe that was begun is sent, or its connection is over."""
        self._under_way -= 1
        is_sent = self.dispatch.is_done and not self._under_way and self._source is not None
        if is_sent and self._on_sent is not None:
            self._on_sent()

    def withdraw(self) -> None:
        """Begin no more stripes, and let go of the source."""
        self._source = None


@dataclass(slots=True)
class LaneCounters:
    """Bytes of blocks that went over the lanes."""

    received_bytes: int = 0
    sent_bytes: int = 0
    spilled_bytes: int = 0  # received for nobody

    def add(self, other: "LaneCounters") -> None:
        """Add those of another session."""
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes
        self.spilled_bytes += other.spilled_bytes


class Lanes:
    """What is to be sent and received over all data connections of a session."""

    def __init__(self, unit: int, stall_s: float, was_asked: Callable[[int], bool]) -> None:
        """`unit`: bytes of a stripe. `stall_s`: a connection that takes nothing for so long is
        over. `was_asked`: whether a request of this number was ever made.
        """
        self.unit = unit
        self.counters = LaneCounters()
        self.heard_s = 0.0  # when bytes last came
        self._stall_s = stall_s
        self._was_asked = was_asked
        self._incoming: dict[int, Incoming] = {}
        self._ready: deque[tuple[int, Outgoing]] = deque()  # each with a stripe to send
        self._idle = trio.lowlevel.ParkingLot()
        self._spill = bytearray(SPILL_BYTES)

    def expect(self, request: int, incoming: Incoming) -> None:
        """Stripes of the request go there from now on."""
        self._incoming[request] = incoming

    def forget(self, request: int) -> None:
        """Stripes of the request are wanted no more."""
        incoming = self._incoming.pop(request, None)
        if incoming is not None:
            incoming.withdraw()

    def forget_all(self) -> None:
        """As `forget`, of every request: the session is over."""
        for request in list(self._incoming):
            self.forget(request)

    def send(self, request: int, outgoing: Outgoing) -> None:
        """Send as much of it as there is credit for; call again after more was given."""
        if outgoing.is_ready and not any(each is outgoing for _, each in self._ready):
            self._ready.append((request, outgoing))
            self._idle.unpark_all()

    async def run_receiver(self, link: Link, connection: Connection) -> None:
        """Receive what comes on one of the connections, until cancelled.

        Raises PeerProtocolError and PeerUnreachable, upon which the session is to end.
        """
        frame = bytearray(BODY_BYTES_MAX)
        view = memoryview(frame)
        while True:
            wanted = connection.wanted
            while (got := link.receive_nowait(view[:wanted])) is None:
                await link.wait_to_receive(1)
            for event in connection.feed(view[:got]):
                if isinstance(event, Received) and isinstance(event.message, Stripe):
                    await self._receive(link, connection, event.request, event.message)

    async def _receive(
        self, link: Link, connection: Connection, request: int, stripe: Stripe
    ) -> None:
        incoming = self._incoming.get(request)
        if incoming is not None:
            incoming.accept(stripe.offset, stripe.length)
        elif not self._was_asked(request) or stripe.length > STRIPE_BYTES_MAX:
            raise PeerProtocolError("a stripe of a request that was never made, or too long")
        turn = TURN_BYTES
        while left := connection.payload_left:
            at = stripe.offset + stripe.length - left
            got = -1 if incoming is None else incoming.receive_nowait(link, at, left)
            if got == -1:
                got = self._receive_spill(link, left)
            if got is None:
                await link.wait_to_receive(left)
                turn = TURN_BYTES
                continue
            connection.skip(got)
            self.counters.received_bytes += got
            self.heard_s = trio.current_time()
            turn -= got
            if turn < 0:
                await trio.lowlevel.checkpoint()
                turn = TURN_BYTES

    def _receive_spill(self, link: Link, length: int) -> int | None:
        with memoryview(self._spill)[:length] as piece:
            got = link.receive_nowait(piece)
        self.counters.spilled_bytes += got or 0
        return got

    async def run_sender(self, link: Link, connection: Connection) -> None:
        """Send stripes over one of the connections, until cancelled. Raises PeerUnreachable."""
        turn = TURN_BYTES
        while True:
            while not self._ready:
                await self._idle.park()
                turn = TURN_BYTES
            request, outgoing = self._ready.popleft()
            if not outgoing.is_ready:
                continue
            # While others wait, all lanes are busy, and long stripes cost less.
            stripe = outgoing.begin(LONG_BYTES if self._ready else self.unit)
            if outgoing.is_ready:  # the next lane takes another of it, after those of others
                self._ready.append((request, outgoing))
            try:
                await self._send(link, connection.stripe(request, stripe), outgoing, stripe)
            finally:
                outgoing.end()
            turn -= stripe.length
            if turn < 0:
                await trio.lowlevel.checkpoint()
                turn = TURN_BYTES

    async def _send(self, link: Link, frame: bytes, outgoing: Outgoing, stripe: Stripe) -> None:
        at, end = stripe.offset, stripe.offset + stripe.length
        while frame:
            sent = link.send_nowait(frame, more=True)
            frame = frame[sent:]
            if frame:
                await self._wait_to_send(link)
        while at < end:
            sent = outgoing.send_nowait(link, at, end - at)
            at += sent
            self.counters.sent_bytes += sent
            if not sent:
                await self._wait_to_send(link)

    async def _wait_to_send(self, link: Link) -> None:
        with trio.move_on_after(self._stall_s):
            await link.wait_to_send()
            return
        raise PeerUnreachable("a data connection takes nothing")
