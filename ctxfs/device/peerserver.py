"""Lets peers in: who dials is greeted, and then answered by the door until it goes."""

import logging
import socket
from collections import OrderedDict
from dataclasses import dataclass

import trio

from ctxfs.device.door import Door
from ctxfs.device.lanes import LaneCounters
from ctxfs.device.links import Link
from ctxfs.device.peeranswers import Answering
from ctxfs.device.peersession import reason_of
from ctxfs.device.tcp import Listener
from ctxfs.device.timing import Timing
from ctxfs.device.tls import Security
from ctxfs.errors import PeerError, PeerProtocolError, PeerRejected, PeerUnreachable
from ctxfs.wire.connection import Connection, Received, Side
from ctxfs.wire.greeting import Identity, answer
from ctxfs.wire.limits import LANES_MAX, Limits
from ctxfs.wire.messages import Hello, Reason, Rejected, Role, Welcome

log = logging.getLogger(__name__)

STRANGERS_MAX = 128  # connections that have not said who they are; the oldest makes room
SESSIONS_MAX = 2048
SESSIONS_PER_PEER_MAX = 4  # the one in use, and others whose end we have not heard of


@dataclass(slots=True)
class ServerCounters:
    """What came in, since the start."""

    accepted: int = 0  # connections
    strangers: int = 0  # that never were greeted: garbage, a wrong certificate, silence
    rejected: int = 0  # that spoke well and were turned away
    violations: int = 0  # of the protocol, by peers that were let in


@dataclass(slots=True, eq=False)
class _Session:
    answering: Answering
    scope: trio.CancelScope
    lanes: int = 0


class PeerServer:
    """All sessions of peers that dialed us."""

    def __init__(
        self,
        listener: Listener,
        door: Door,
        me: Identity,
        security: Security,
        *,
        limits: Limits | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`listener` is closed at the end of `run`."""
        self.counters = ServerCounters()
        self._traffic = LaneCounters()  # of sessions that ended
        self._listener = listener
        self._door = door
        self._me = me
        self._security = security
        self._limits = limits or Limits()
        self._timing = timing or Timing()
        self._sessions: OrderedDict[tuple[bytes, bytes], _Session] = OrderedDict()
        self._strangers: OrderedDict[trio.CancelScope, None] = OrderedDict()

    @property
    def traffic(self) -> LaneCounters:
        """Bytes of blocks that peers read and pushed, since the start."""
        total = LaneCounters()
        lanes = [each.answering.lanes.counters for each in self._sessions.values()]
        for each in (self._traffic, *lanes):
            total.add(each)
        return total

    @property
    def peers(self) -> set[bytes]:
        """Names of those who are connected."""
        return {name for name, _ in self._sessions}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Let peers in until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    sock = await self._listener.accept()
                    self.counters.accepted += 1
                    if len(self._strangers) >= STRANGERS_MAX:
                        next(iter(self._strangers)).cancel()
                    nursery.start_soon(self._serve, sock)
        finally:
            self._listener.close()

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, from its first byte to its end. What the peer does ends nothing else."""
        greeted: tuple[Link, Connection, Hello] | None = None
        with trio.move_on_after(self._timing.dial_s) as scope:
            self._strangers[scope] = None
            try:
                greeted = await self._meet(sock)
            except PeerError as error:
                log.debug("a stranger was turned away: %s", error)
            finally:
                del self._strangers[scope]
        if greeted is None:
            self.counters.strangers += 1
            return
        link, connection, hello = greeted
        try:
            await self._admit(link, connection, hello)
        except* PeerRejected as group:
            self.counters.rejected += 1
            log.warning("%r was turned away: %s", hello.name, reason_of(group))
        except* PeerProtocolError as group:
            self.counters.violations += 1
            log.warning("%r broke the protocol: %s", hello.name, reason_of(group))
        except* PeerError as group:
            log.info("%r went: %s", hello.name, reason_of(group))
        finally:
            link.close()

    async def _meet(self, sock: socket.socket) -> tuple[Link, Connection, Hello]:
        """Have it say who it is. Closes the socket where that fails."""
        link = await self._listener.secure(sock, self._security)
        try:
            connection = Connection(Side.LISTENER, self._limits.requests_max)
            while True:
                for event in connection.feed(await link.receive(connection.wanted)):
                    if isinstance(event, Received) and isinstance(event.message, Hello):
                        return link, connection, event.message
        except BaseException:
            link.close()
            raise

    def _decide(self, link: Link, hello: Hello) -> Welcome | Rejected:
        """What to say to a hello, by what the certificate says."""
        if link.names is not None and hello.name not in link.names:
            return Rejected(Reason.NAME, f"the certificate is not for {hello.name!r}")
        said = answer(hello, self._me, self._limits)
        if isinstance(said, Welcome) and hello.role is Role.DATA:
            session = self._sessions.get((hello.name, hello.session))
            if session is None or session.lanes >= LANES_MAX:
                return Rejected(Reason.SESSION, "there is no session for this data connection")
        elif isinstance(said, Welcome):
            if (hello.name, hello.session) in self._sessions:
                return Rejected(Reason.SESSION, "there is a session of this token")
            if len(self._sessions) >= SESSIONS_MAX:
                return Rejected(Reason.BUSY, "too many sessions")
        return said

    async def _admit(self, link: Link, connection: Connection, hello: Hello) -> None:
        """Answer the hello and use the connection to its end. Raises PeerError."""
        said = self._decide(link, hello)
        if isinstance(said, Rejected):
            await self._say(link, connection, said)
            raise PeerRejected(said.text)
        if hello.role is Role.CONTROL:
            await self._serve_control(link, connection, hello, said)
        else:
            session = self._sessions[hello.name, hello.session]
            session.lanes += 1
            await self._say(link, connection, said)
            await session.answering.run_lane(link, connection)

    async def _say(self, link: Link, connection: Connection, said: Welcome | Rejected) -> None:
        with trio.move_on_after(self._timing.dial_s):
            await link.send_all(connection.greet(said))
            return
        raise PeerUnreachable("the peer takes nothing")

    async def _serve_control(
        self, link: Link, connection: Connection, hello: Hello, welcome: Welcome
    ) -> None:
        peer = Identity(
            cluster=hello.cluster,
            name=hello.name,
            slot=hello.slot,
            zone=hello.zone,
            capabilities=hello.capabilities,
        )
        answering = Answering(
            link,
            connection,
            peer,
            self._door,
            unit=welcome.stripe_bytes,
            limits=self._limits,
            timing=self._timing,
        )
        key = (hello.name, hello.session)
        with trio.CancelScope() as scope:
            self._make_room(hello.name)
            # Before the welcome, upon which the data connections come.
            self._sessions[key] = _Session(answering, scope)
            try:
                await self._say(link, connection, welcome)
                await answering.run()
            finally:
                del self._sessions[key]
                self._traffic.add(answering.lanes.counters)
                self._door.left(peer, hello.session)

    def _make_room(self, name: bytes) -> None:
        """End the oldest session of a peer that has too many."""
        theirs = [each for (who, _), each in self._sessions.items() if who == name]
        if len(theirs) >= SESSIONS_PER_PEER_MAX:
            theirs[0].scope.cancel()


async def serve(
    listener: Listener,
    door: Door,
    me: Identity,
    security: Security,
    *,
    limits: Limits | None = None,
    timing: Timing | None = None,
    task_status: trio.TaskStatus[PeerServer] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer peers by the door until cancelled; the server object is what `start` returns."""
    server = PeerServer(listener, door, me, security, limits=limits, timing=timing)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        task_status.started(server)
