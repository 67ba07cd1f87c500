"""One life of the connections to a peer, on the side that asks."""

from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import trio

from ctxfs.device.lanes import Lanes
from ctxfs.device.links import Link
from ctxfs.device.outbox import Outbox
from ctxfs.device.tcp import Address, dial
from ctxfs.device.timing import Timing
from ctxfs.device.tls import Security
from ctxfs.errors import PeerRejected, PeerUnreachable
from ctxfs.wire.connection import Connection, Received, Side
from ctxfs.wire.greeting import Identity, check, hello
from ctxfs.wire.limits import Limits
from ctxfs.wire.messages import Heartbeat, Message, Rejected, Request, Role, Welcome

RECEIVE_BYTES = 64 << 10
BEATS = 2  # of the requests that may be open, kept for heartbeats


class Pending:
    """Answers to one request that nobody has looked at yet."""

    __slots__ = ("_came", "_failure", "_messages", "is_complete", "request")

    def __init__(self) -> None:
        self.request = 0  # its number, once it was sent
        self.is_complete = False  # all bytes of a read arrived
        self._messages: deque[Message] = deque()
        self._came = trio.Event()
        self._failure: PeerUnreachable | None = None

    def add(self, message: Message) -> None:
        """Another answer came."""
        self._messages.append(message)
        self._came.set()

    def fail(self, error: PeerUnreachable) -> None:
        """No more will come."""
        self._failure = error
        self._came.set()

    def complete(self) -> None:
        """All bytes of a read arrived."""
        self.is_complete = True
        self._came.set()

    async def next(self) -> Message:
        """Wait for the next answer. Raises PeerUnreachable where the session is over."""
        while not self._messages:
            await self._more()
        return self._messages.popleft()

    async def arrived(self) -> Message | None:
        """Wait until all bytes are there: None; or for what the peer says instead."""
        while not self.is_complete:
            if self._messages:
                return self._messages.popleft()
            await self._more()
        return None

    async def _more(self) -> None:
        if self._failure is not None:
            raise PeerUnreachable(str(self._failure))
        self._came = trio.Event()
        await self._came.wait()


class Session:
    """A control connection and its data connections, greeted. Ends with the first that breaks."""

    def __init__(
        self,
        control: tuple[Link, Connection],
        lanes: Sequence[tuple[Link, Connection]],
        welcome: Welcome,
        timing: Timing,
    ) -> None:
        self.welcome = welcome
        self.lanes = Lanes(welcome.stripe_bytes, timing.stall_s, control[1].was_asked)
        self._link, self._connection = control
        self._lane_links = lanes
        self._outbox = Outbox(self._link, timing.stall_s)
        self._pending: dict[int, Pending] = {}
        self._freed = trio.lowlevel.ParkingLot()
        self._failure: PeerUnreachable | None = None
        self._heard_s = trio.current_time()

    @property
    def heard_s(self) -> float:
        """When anything last came, over any of the connections."""
        return max(self._heard_s, self.lanes.heard_s)

    async def run(self) -> None:
        """Serve until cancelled, or something breaks: raises PeerUnreachable, PeerProtocolError.

        Whoever waits for an answer then gets PeerUnreachable, and no byte reaches memory that was
        lent for one.
        """
        failure = PeerUnreachable("the connection is closed")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive)
                nursery.start_soon(self._outbox.run)
                for link, connection in self._lane_links:
                    nursery.start_soon(self.lanes.run_receiver, link, connection)
                    nursery.start_soon(self.lanes.run_sender, link, connection)
        except BaseException as error:
            if not isinstance(error, trio.Cancelled):
                failure = PeerUnreachable(f"the connection broke: {reason_of(error)}")
            raise
        finally:
            self._failure = failure
            self.lanes.forget_all()
            for pending in self._pending.values():
                pending.fail(failure)
            self._freed.unpark_all()

    def close(self) -> None:
        """Close the sockets, when `run` has returned."""
        self._link.close()
        for link, _ in self._lane_links:
            link.close()

    async def room(self) -> None:
        """Wait until another request may be made, `BEATS` being kept. Raises PeerUnreachable."""
        await self._outbox.room()
        while self._connection.open_requests + BEATS >= self._connection.requests_max:
            self._check()
            await self._freed.park()
            await self._outbox.room()

    def ask(self, message: Request, pending: Pending) -> None:
        """Send a request; answers go to `pending`. Raises PeerUnreachable, BadValue."""
        self._check()
        pending.request, frame = self._connection.ask(message)
        self._pending[pending.request] = pending
        self._outbox.put(frame)

    def end(self, pending: Pending) -> None:
        """Nobody looks at its answers any more."""
        self._pending.pop(pending.request, None)
        if self._failure is not None:
            return
        if pending.is_complete:
            self._connection.finish(pending.request)
            self._freed.unpark_all()
        elif frame := self._connection.cancel(pending.request):
            self._put(frame)

    def give(self, pending: Pending, amount: int) -> None:
        """Give credit for a read."""
        if self._failure is None and (frame := self._connection.give(pending.request, amount)):
            self._put(frame)

    async def beat(self) -> Message:
        """Ask for a heartbeat and return the answer. Raises PeerUnreachable."""
        while self._connection.open_requests >= self._connection.requests_max:
            self._check()
            await self._freed.park()  # former heartbeats are not answered
        pending = Pending()
        self.ask(Heartbeat(), pending)
        try:
            return await pending.next()
        finally:
            self.end(pending)

    def _put(self, frame: bytes) -> None:
        # Where that fails the receiver meets the same, and ends the session; this caller goes on.
        with suppress(PeerUnreachable):
            self._outbox.put(frame)

    def _check(self) -> None:
        if self._failure is not None:
            raise PeerUnreachable(str(self._failure))

    async def _receive(self) -> None:
        while True:
            data = await self._link.receive(RECEIVE_BYTES)
            self._heard_s = trio.current_time()
            for event in self._connection.feed(data):
                if isinstance(event, Received):
                    pending = self._pending.get(event.request)
                    if pending is not None:
                        pending.add(event.message)
            if self._freed:
                self._freed.unpark_all()
            # Where more is there at once, those who were answered get their turn first.
            await trio.lowlevel.checkpoint()


async def connect(
    address: Address,
    name: bytes,
    me: Identity,
    security: Security,
    *,
    token: bytes,
    lanes: int,
    limits: Limits,
    timing: Timing,
) -> Session:
    """Dial a peer, `lanes` data connections and one for control.

    Raises PeerUnreachable, PeerRejected, PeerProtocolError. Nothing stays open then.
    """
    async with AsyncExitStack() as stack:
        made = []
        for number in range(lanes + 1):
            role = Role.DATA if number else Role.CONTROL
            with trio.move_on_after(timing.dial_s) as patience:
                link = await dial(address, security)
                stack.callback(link.close)
                connection, welcome = await _greet(link, name, me, role, token, limits)
                made.append((link, connection, welcome))
            if patience.cancelled_caught:
                raise PeerUnreachable(f"{address[0]} does not answer")
        stack.pop_all()
    control, *others = [(link, connection) for link, connection, _ in made]
    return Session(control, others, made[0][2], timing)


async def _greet(
    link: Link, name: bytes, me: Identity, role: Role, token: bytes, limits: Limits
) -> tuple[Connection, Welcome]:
    if link.names is not None and name not in link.names:
        raise PeerRejected(f"the certificate is for {link.names}, not for {name!r}")
    connection = Connection(Side.DIALER, limits.requests_max)
    said = hello(me, role, token, limits)
    await link.send_all(connection.greet(said))
    while True:
        for event in connection.feed(await link.receive(connection.wanted)):
            if isinstance(event, Received) and isinstance(event.message, Rejected):
                raise PeerRejected(f"{name!r} says: {event.message.text}")
            if isinstance(event, Received) and isinstance(event.message, Welcome):
                check(said, event.message, name)
                return connection, event.message


def reason_of(error: BaseException) -> str:
    """What to say of an error, or of the first in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
