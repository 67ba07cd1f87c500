"""Another member, to be asked: one object while it is a member, whatever its connections do.

All calls take `within_s`, after which they raise DeadlineExceeded. They raise PeerUnreachable at
once where the peer was silent lately (ctxfs/wire/breaker.py), and PeerRefused, PeerBusy, BlockGone
or BlockNotFound for what it answers.
"""

import logging
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import trio

from ctxfs.device.lanes import Incoming, LaneCounters, Outgoing, Source
from ctxfs.device.peersession import Pending, Session, connect, reason_of
from ctxfs.device.tcp import Address
from ctxfs.device.timing import Timing
from ctxfs.device.tls import Security
from ctxfs.errors import (
    BlockGone,
    BlockNotFound,
    CtxfsError,
    DeadlineExceeded,
    PeerBusy,
    PeerError,
    PeerProtocolError,
    PeerRefused,
    PeerUnreachable,
)
from ctxfs.wire.breaker import Breaker, Health
from ctxfs.wire.greeting import MINOR_HELD_ONLY, Identity
from ctxfs.wire.limits import Limits
from ctxfs.wire.messages import (
    Acknowledged,
    Answer,
    Credit,
    Forget,
    Found,
    GoneKey,
    Lease,
    Leased,
    Lookup,
    Message,
    Offer,
    Read,
    Reason,
    Refused,
    Release,
    Request,
    Stats,
    Stored,
    Sync,
    Tombstones,
    Wanted,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
TOKEN_BYTES = 16
BUDGET_MS_MAX = 2**32 - 1


@dataclass(slots=True)
class PeerCounters:
    """What came of it, since the start."""

    requests: int = 0
    missed: int = 0  # deadlines
    unreachable: int = 0  # answered at once, without asking
    broken: int = 0  # sessions that ended by themselves
    connected: int = 0  # sessions that began
    traffic: LaneCounters = field(default_factory=LaneCounters)


class Peer:
    """One other member. `run` keeps the connections; the calls may be made by any task."""

    def __init__(
        self,
        me: Identity,
        name: bytes,
        address: Address,
        security: Security,
        *,
        lanes: int = 4,
        limits: Limits | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`lanes`: data connections beside the one for control."""
        self.name = name
        self.address = address
        self.trouble: str | None = None  # why there is no session, in words
        self.last_stats: Stats | None = None
        self.round_trip_s: float | None = None  # of the last heartbeat
        self.clock_ahead_s: float | None = None  # its wall clock, then
        self._me = me
        self._security = security
        self._lanes = lanes
        self._limits = limits or Limits()
        self._timing = timing or Timing()
        self._breaker = Breaker()
        self._counters = PeerCounters()
        self._session: Session | None = None
        self._tried = trio.Event()  # the first attempt to connect is over
        self._doubt = trio.Event()  # a deadline was missed: see whether it lives
        self._doubted_s = 0.0  # when that was last
        self._patience = trio.CancelScope()  # of the heartbeat that is under way
        self._missed_s: float | None = None  # the first deadline since it was as it should be
        self._told: bool | None = None  # whether the log says that it is asked
        self._better = trio.lowlevel.ParkingLot()

    # -- what it is

    @property
    def health(self) -> Health:
        """Whether it is worth asking. A peer that was not tried yet is healthy."""
        return self._breaker.health

    @property
    def protocol(self) -> str | None:
        """What it speaks, as version.minor; None without a connection."""
        if self._session is None:
            return None
        return f"{self._session.welcome.version}.{self._session.welcome.minor}"

    @property
    def ill_for_s(self) -> float:
        """For how long it is not healthy; 0 where it is."""
        if self._breaker.health is Health.HEALTHY:
            return 0.0
        return trio.current_time() - self._breaker.since_ns / 1e9

    @property
    def counters(self) -> PeerCounters:
        """Counters, those of the session that lives included."""
        total = replace(self._counters, traffic=replace(self._counters.traffic))
        if self._session is not None:
            total.traffic.add(self._session.lanes.counters)
        return total

    async def wait_healthy(self) -> None:
        """Wait until there is a session whose peer answers."""
        while self._session is None or self._breaker.health is not Health.HEALTHY:
            await self._better.park()

    # -- what can be asked

    async def lookup(self, keys: Sequence[bytes], within_s: float) -> list[Answer]:
        """Return what the peer has of at most BATCH_MAX keys, in their order."""
        answers: list[Answer] = []
        budget_ms = _budget(within_s)
        async with self._asking(within_s) as session:
            with _asked(session, Lookup(tuple(keys), budget_ms)) as pending:
                while len(answers) < len(keys):
                    answers += _expect(await pending.next(), Found).answers
        return answers

    async def read(
        self, key: bytes, version: int, into: memoryview, within_s: float, *, offset: int = 0
    ) -> None:
        """Fill `into` with the block's bytes from `offset` on, which are not verified here.

        Whatever becomes of it, nothing is written to `into` after the return.
        """
        if not into:
            return
        async with self._asking(within_s) as session:
            pending = Pending()
            incoming = Incoming(
                into,
                session.welcome.stripe_bytes,
                self._limits.window_bytes,
                give=lambda amount: session.give(pending, amount),
                on_complete=pending.complete,
            )
            credit, budget_ms = incoming.first_credit, _budget(within_s)
            session.ask(Read(key, version, offset, len(into), credit, budget_ms), pending)
            session.lanes.expect(pending.request, incoming)
            try:
                if (answer := await pending.arrived()) is not None:
                    raise _error_of(answer)
            finally:
                session.lanes.forget(pending.request)
                session.end(pending)

    async def push(self, offer: Offer, source: Source, within_s: float) -> Stored | Refused:
        """Offer a block and send its bytes if they are wanted. `source` must stay until then.

        Refused is returned for HAVE, GONE, NO_ROOM and BUSY, which are no errors of a push.
        """
        offered = replace(offer, budget_ms=_budget(within_s))
        async with self._asking(within_s) as session:
            with _asked(session, offered) as pending:
                answer = await pending.next()
                if isinstance(answer, Refused) and answer.reason in _NOT_WANTED:
                    return answer
                credit = _expect(answer, Wanted).credit
                outgoing = Outgoing(source, offer.size, session.welcome.stripe_bytes, credit)
                try:
                    return await _pushed(session, pending, outgoing)
                finally:
                    outgoing.withdraw()

    async def amend(self, offer: Offer, within_s: float) -> Refused:
        """Tell the attributes of a block, for one who has this version of it.

        Returns HAVE where it does, MISS, GONE or BUSY; MISS, too, where it is of an earlier version
        of the protocol and could not understand.
        """
        told = replace(offer, budget_ms=_budget(within_s), held_only=1)
        async with self._asking(within_s) as session:
            if session.welcome.minor < MINOR_HELD_ONLY:  # it could not understand
                return Refused(reason=Reason.MISS)
            with _asked(session, told) as pending:
                answer = await pending.next()
                if isinstance(answer, Refused) and answer.reason in _HEARD:
                    return answer
                raise _error_of(answer)

    async def lease(self, key: bytes, version: int, hold_s: float, within_s: float) -> Leased:
        """Have the bytes stay where they are for `hold_s`, or until `release`."""
        request = Lease(key, version, _budget(hold_s), _budget(within_s))
        return _expect(await self._call(request, within_s), Leased)

    async def release(self, lease: int, within_s: float) -> None:
        """End a lease."""
        _expect(await self._call(Release(lease), within_s), Acknowledged)

    async def forget(self, entries: Sequence[GoneKey], within_s: float) -> None:
        """Tell what is gone, at most BATCH_MAX; on return the peer will not forget it."""
        _expect(await self._call(Forget(tuple(entries)), within_s), Acknowledged)

    async def tombstones(self, known: Mapping[int, int], within_s: float) -> Tombstones:
        """Return all that is gone there, for one who knows so much, as one page."""
        asked = tuple(known.items())
        entries: list[GoneKey] = []
        async with self._asking(within_s) as session:  # of one life of the peer
            first = page = await self._page(session, Sync(asked, 0))
            entries += page.entries
            while page.cursor:
                page = await self._page(session, Sync(asked, page.cursor))
                entries += page.entries
        # What was forgotten between two pages is in none of them.
        return Tombstones(tuple(entries), 0, first.known, page.forgotten)

    async def _page(self, session: Session, request: Sync) -> Tombstones:
        with _asked(session, request) as pending:
            return _expect(await pending.next(), Tombstones)

    async def stats(self, within_s: float) -> Stats:
        """Ask how the peer is; `last_stats` is what the last heartbeat said."""
        async with self._asking(within_s) as session:
            return await self._ask_stats(session)

    async def _call(self, request: Request, within_s: float) -> Message:
        async with self._asking(within_s) as session:
            with _asked(session, request) as pending:
                return await pending.next()

    @asynccontextmanager
    async def _asking(self, within_s: float) -> AsyncIterator[Session]:
        """A session to ask one thing of, within the deadline; what comes of it is noted."""
        sent_ns = now_ns()
        self._counters.requests += 1
        with trio.move_on_after(within_s) as patience:
            session = await self._ready()
            try:
                yield session
            except (BlockNotFound, PeerBusy, PeerRefused):
                self._answered()
                raise
            except PeerUnreachable as error:
                self._broke(str(error))
                raise
        if patience.cancelled_caught:
            self._missed(sent_ns, within_s)
            raise DeadlineExceeded(f"{self.name!r} did not answer within {within_s} s")
        self._answered()

    async def _ready(self) -> Session:
        if self._breaker.health is Health.HEALTHY:  # and then, to begin with, not connected yet
            await self._tried.wait()
        session = self._session
        if session is None or not self._breaker.admits(now_ns()):
            self._counters.unreachable += 1
            await trio.lowlevel.checkpoint()
            raise PeerUnreachable(f"{self.name!r}: {self.trouble or 'it was silent lately'}")
        await session.room()
        return session

    # -- how it is

    def _answered(self) -> None:
        self._missed_s = None
        self._breaker.answered()
        self._tell()

    def _heard(self) -> None:
        self._missed_s = None
        self._breaker.heard(now_ns())
        self._better.unpark_all()
        self._tell("it has missed several deadlines")

    def _broke(self, why: str) -> None:
        self._breaker.broke(now_ns())
        self._tell(why)

    def _missed(self, sent_ns: int, within_s: float) -> None:
        """A request was not answered in time. Who was heard of meanwhile may be alive: that is
        seen to at once.
        """
        self._counters.missed += 1
        now_s, heard_s = trio.current_time(), self._session.heard_s if self._session else 0.0
        if self._missed_s is None:
            self._missed_s = now_s
        self._breaker.missed(sent_ns, now_ns(), heard_ns=int(heard_s * 1e9))
        self._tell(f"it did not answer within {within_s:.3f} s")
        self._doubted_s = now_s
        self._doubt.set()
        self._patience.deadline = min(self._patience.deadline, now_s + self._doubt_s)

    @property
    def _doubt_s(self) -> float:
        """For how long a peer that missed a deadline may take to give a sign of life."""
        usual_s = 2 * (self.round_trip_s or 0.0)
        return min(max(self._timing.doubt_s, usual_s), self._timing.beat_deadline_s)

    def _tell(self, why: str = "") -> None:
        """Say in the log that it is asked no more, and that it is asked again."""
        is_asked = self._breaker.health is Health.HEALTHY
        if is_asked == self._told:
            return
        self._told = is_asked
        if is_asked:
            log.info("%s is asked from now on", self.name.decode())
            return
        late_ms = 0.0
        if self._missed_s is not None:
            late_ms = (trio.current_time() - self._missed_s) * 1000
        log.info(
            "%s is not asked, %.0f ms after its first missed deadline: %s",
            self.name.decode(), late_ms, why,
        )  # fmt: skip

    # -- its life

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect, and again whenever that is lost, until cancelled. Starts at once."""
        task_status.started()
        pause_s = self._timing.backoff_min_s
        while True:
            began_s = trio.current_time()
            try:
                await self._live()
            except* PeerError as group:
                self.trouble = reason_of(group)
            self._broke(self.trouble or "the connection is closed")
            self._tried.set()
            if trio.current_time() - began_s > self._timing.backoff_max_s:
                pause_s = self._timing.backoff_min_s
            # Members that lost the same one do not come back to it all at once.
            await trio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._timing.backoff_max_s)

    async def _live(self) -> None:
        session = await connect(
            self.address,
            self.name,
            self._me,
            self._security,
            token=os.urandom(TOKEN_BYTES),
            lanes=self._lanes,
            limits=self._limits,
            timing=self._timing,
        )
        self._counters.connected += 1
        self._session, self.trouble = session, None
        self._heard()
        self._tried.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.run)
                nursery.start_soon(self._beat, session)
        finally:
            self._session = None
            self._broke(self.trouble or "the connection broke")
            self._counters.broken += 1
            self._counters.traffic.add(session.lanes.counters)
            session.close()

    async def _beat(self, session: Session) -> None:
        """Ask for a sign of life regularly, and at once where there is doubt."""
        while True:
            sent_s = trio.current_time()
            patience_s = self._doubt_s if self._doubt.is_set() else self._timing.beat_deadline_s
            self._doubt = trio.Event()
            with trio.move_on_after(patience_s) as self._patience:
                await self._ask_stats(session)
            is_silent = session.heard_s <= max(sent_s, self._doubted_s)
            if self._patience.cancelled_caught and is_silent:
                self.trouble = "its heartbeats stay away"
                self._broke(self.trouble)
            else:
                self._heard()
            if trio.current_time() - session.heard_s > self._timing.silence_s:
                raise PeerUnreachable("the peer is silent")
            if self._breaker.health is not Health.BROKEN:  # else the next sign of life mends it
                with trio.move_on_after(self._timing.beat_s):
                    await self._doubt.wait()

    async def _ask_stats(self, session: Session) -> Stats:
        sent_s = trio.current_time()
        stats = self.last_stats = _expect(await session.beat(), Stats)
        self.round_trip_s = trio.current_time() - sent_s
        self.clock_ahead_s = stats.clock_ns / 1e9 + self.round_trip_s / 2 - time.time()
        return stats


_NOT_WANTED = (Reason.HAVE, Reason.GONE, Reason.NO_ROOM, Reason.BUSY)
_HEARD = (Reason.HAVE, Reason.GONE, Reason.MISS, Reason.BUSY)


def now_ns() -> int:
    """The loop's clock, in nanoseconds."""
    return int(trio.current_time() * 1e9)


def _budget(within_s: float) -> int:
    return min(int(within_s * 1000), BUDGET_MS_MAX)


@contextmanager
def _asked(session: Session, request: Request) -> Iterator[Pending]:
    """A request that is cancelled at the end if it was not answered."""
    pending = Pending()
    session.ask(request, pending)
    try:
        yield pending
    finally:
        session.end(pending)


async def _pushed(session: Session, pending: Pending, outgoing: Outgoing) -> Stored | Refused:
    """Send as there is credit, until the peer says what became of it."""
    while True:
        session.lanes.send(pending.request, outgoing)
        answer = await pending.next()
        if isinstance(answer, Credit):
            outgoing.dispatch.give(answer.amount)
        elif isinstance(answer, Refused) and answer.reason in _NOT_WANTED:
            return answer
        else:
            return _expect(answer, Stored)


def _expect(answer: Message, kind: type[T]) -> T:
    if isinstance(answer, kind):
        return answer
    raise _error_of(answer)


def _error_of(answer: Message) -> CtxfsError:
    match answer:
        case Refused(reason=Reason.GONE):
            return BlockGone("the block was removed", answer.version, answer.until_ns)
        case Refused(reason=Reason.MISS):
            return BlockNotFound("the peer does not have the block any more")
        case Refused(reason=Reason.BUSY):
            return PeerBusy("the peer asks to read from another holder")
        case Refused():
            return PeerRefused(f"the peer refuses ({answer.reason.name.lower()}): {answer.text}")
    return PeerProtocolError(f"{type(answer).__name__} is no answer to that")
