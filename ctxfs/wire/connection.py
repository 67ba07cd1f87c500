"""The state of one connection, without its I/O: bytes in, messages out, and the other way round.

A `Connection` knows what may be said now. What the other side says out of order, or beyond a limit,
raises PeerProtocolError, and the connection is of no more use. What we say so is a bug of ours,
and raises LocalProtocolError. At most one frame is kept here, whatever comes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from ctxfs.errors import PeerProtocolError
from ctxfs.wire import frames
from ctxfs.wire.fields import Bytes
from ctxfs.wire.frames import HEADER_BYTES, PREFACE, STRIPE_BYTES, Head
from ctxfs.wire.limits import BODY_BYTES_MAX, HELLO_BYTES_MAX
from ctxfs.wire.messages import (
    REPLIES,
    Cancel,
    Credit,
    Ended,
    Found,
    Hello,
    Lookup,
    Message,
    Read,
    Refused,
    Rejected,
    Reply,
    Request,
    Role,
    Stored,
    Stripe,
    Wanted,
    Welcome,
)


class LocalProtocolError(Exception):
    """We were about to say what the protocol does not allow."""


class Side(Enum):
    """Who began."""

    DIALER = auto()
    LISTENER = auto()


class Phase(Enum):
    """How far a connection is, both ways taken together."""

    GREETING = auto()  # until the welcome
    OPEN = auto()
    CLOSED = auto()  # rejected, or the other side broke the rules


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the other side."""

    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes of the stripe that was received before, where they came through `feed`."""

    request: int
    data: bytes


Event = Received | Payload
_FOLLOWING: Final = (Credit, Cancel)
_ASKING: Final = tuple(REPLIES)


@dataclass(slots=True)
class _Open:
    """A request that is not ended."""

    kind: type[Message]
    keys_left: int = 0  # of a lookup: not told of yet
    is_cancelled: bool = False  # by us: answers are dropped
    is_wanted: bool = False  # of an offer


class Connection:
    """One connection of this side; the role is in the hello.

    Before `feed`, a reader that wants raw bytes of stripes elsewhere asks `payload_left`: so many
    bytes are next, of which `skip` is told in place of `feed`. It reads at most `wanted` bytes
    otherwise, so that no payload is fed.
    """

    def __init__(self, side: Side, requests_max: int) -> None:
        self.side = side
        self.role = Role.CONTROL
        self.phase = Phase.GREETING
        self.requests_max = requests_max
        self.payload_left = 0
        self.skipped = 0  # frames of a later version
        self._payload_request = 0
        self._buffer = bytearray()
        self._head: Head | None = None
        self._is_prefaced = False
        self._has_hello = False  # it went, or came
        self._last = 0  # request made, or received
        self._open: dict[int, _Open] = {}

    # -- receiving

    @property
    def wanted(self) -> int:
        """How many bytes to read next, so that none of a payload is among them; 0: payload is next.

        Where a stripe may come, its whole frame: none is shorter that a payload follows.
        """
        return STRIPE_BYTES if self._is_fresh else self._missing

    @property
    def _is_fresh(self) -> bool:
        """Whether a frame begins with the next byte, and may be a stripe."""
        return (
            self.role is Role.DATA
            and self.phase is Phase.OPEN
            and not (self.payload_left or self._buffer)
        )

    @property
    def _missing(self) -> int:
        """How many bytes complete what is being received; 0 while a payload is next."""
        if self.payload_left:
            return 0
        if not self._is_prefaced:
            return len(PREFACE) - len(self._buffer)
        whole = HEADER_BYTES + (self._head.length if self._head else 0)
        return whole - len(self._buffer)

    def feed(self, data: Bytes) -> list[Event]:
        """Take bytes of the other side, return what they complete. Raises PeerProtocolError."""
        if self.phase is Phase.CLOSED:
            raise PeerProtocolError("bytes after the end")
        try:
            if self._is_fresh and (found := frames.decode_stripe(data)):
                self._receive_stripe(*found)
                return [Received(*found)]
            return list(self._events(memoryview(data)))
        except PeerProtocolError:
            self.phase = Phase.CLOSED
            self._buffer.clear()
            raise

    def skip(self, length: int) -> None:
        """Take note of `length` bytes of payload that were read elsewhere."""
        if length > self.payload_left:
            raise LocalProtocolError("more payload than the stripe has")
        self.payload_left -= length

    def _events(self, data: memoryview) -> Iterator[Event]:
        while data:
            if self.payload_left:
                piece = data[: self.payload_left]
                self.payload_left -= len(piece)
                yield Payload(self._payload_request, bytes(piece))
            else:
                piece = data[: self._missing]
                self._buffer += piece
                if not self._missing:
                    yield from self._completed()
            data = data[len(piece) :]

    def _completed(self) -> Iterator[Event]:
        """What was missing is there: preface, header, or frame."""
        if not self._is_prefaced:
            if self._buffer != PREFACE:
                raise PeerProtocolError("whoever this is, it is no member")
            self._is_prefaced = True
            self._buffer.clear()
            return
        if self._head is None:
            greeting = self.phase is Phase.GREETING
            self._head = frames.parse_head(
                self._buffer, HELLO_BYTES_MAX if greeting else BODY_BYTES_MAX
            )
            if self._head.length:
                return
        head, self._head = self._head, None
        whole = bytes(self._buffer)
        self._buffer.clear()
        message = frames.decode(head, whole[:HEADER_BYTES], whole[HEADER_BYTES:])
        if message is None:
            self.skipped += 1
        elif self._receive(head.request, message):
            yield Received(head.request, message)

    def _receive(self, request: int, message: Message) -> bool:
        """Check that it may come now; whether anybody is to hear of it."""
        if self.phase is Phase.GREETING:
            self._greeted(message)
            return True
        if self.role is Role.DATA:
            return self._receive_stripe(request, message)
        if self.side is Side.DIALER:
            return self._receive_reply(request, message)
        return self._receive_request(request, message)

    def _greeted(self, message: Message) -> None:
        if self.side is Side.LISTENER and isinstance(message, Hello) and not self._has_hello:
            self._has_hello = True
            self.role = message.role
        elif self.side is Side.DIALER and isinstance(message, Welcome) and self._has_hello:
            self.phase = Phase.OPEN
            self.requests_max = min(self.requests_max, message.requests_max)
        elif self.side is Side.DIALER and isinstance(message, Rejected):
            self.phase = Phase.CLOSED
        else:
            raise PeerProtocolError(f"{type(message).__name__} before the hello is through")

    def _receive_stripe(self, request: int, message: Message) -> bool:
        if not isinstance(message, Stripe):
            raise PeerProtocolError(f"{type(message).__name__} on a data connection")
        self._payload_request = request
        self.payload_left = message.length
        return True

    def _receive_reply(self, request: int, message: Message) -> bool:
        found = self._open.get(request)
        if found is None:
            # It may have been sent before the end of the request was known there.
            if 0 < request <= self._last and isinstance(message, Credit | Ended | Refused):
                return False
            raise PeerProtocolError(f"{type(message).__name__} for no request of ours")
        if type(message) not in REPLIES[found.kind]:
            raise PeerProtocolError(f"{type(message).__name__} in answer to {found.kind.__name__}")
        heard = not found.is_cancelled
        self._follow(request, found, message, PeerProtocolError)
        return heard

    def _receive_request(self, request: int, message: Message) -> bool:
        if isinstance(message, _FOLLOWING):
            if not 0 < request <= self._last:
                raise PeerProtocolError(f"{type(message).__name__} for what was never asked")
            return isinstance(message, Cancel) or request in self._open
        if not isinstance(message, _ASKING):
            raise PeerProtocolError(f"{type(message).__name__} from who dialed")
        if request <= self._last:
            raise PeerProtocolError("a request's number is not above that of the one before")
        if len(self._open) >= self.requests_max:
            raise PeerProtocolError(f"more than {self.requests_max} requests at a time")
        self._last = request
        self._open[request] = _opened(message)
        return True

    # -- sending

    def greet(self, message: Hello | Welcome | Rejected) -> bytes:
        """Return preface and hello, or the answer to one."""
        asks = isinstance(message, Hello)
        due = self.phase is Phase.GREETING and self._has_hello is not asks
        if asks is not (self.side is Side.DIALER) or not due:
            raise LocalProtocolError(f"{type(message).__name__} now")
        if isinstance(message, Hello):
            self._has_hello = True
            self.role = message.role
        elif isinstance(message, Welcome):
            self.requests_max = message.requests_max
            self.phase = Phase.OPEN
        else:
            self.phase = Phase.CLOSED
        return PREFACE + frames.encode(0, message)

    @property
    def open_requests(self) -> int:
        """How many requests are not ended."""
        return len(self._open)

    def is_open(self, request: int) -> bool:
        """Whether the request is not ended."""
        return request in self._open

    def was_asked(self, request: int) -> bool:
        """Whether there ever was a request of this number."""
        return 0 < request <= self._last

    def ask(self, message: Request) -> tuple[int, bytes]:
        """Return the number of a new request, and its frame. Raises BadValue."""
        self._check_sending(Side.DIALER, Role.CONTROL)
        if len(self._open) >= self.requests_max:
            raise LocalProtocolError("too many requests at a time")
        request = self._last + 1
        data = frames.encode(request, message)
        self._last = request
        self._open[request] = _opened(message)
        return request, data

    def cancel(self, request: int) -> bytes:
        """Return the frame that ends a request of ours; empty where it has ended."""
        self._check_sending(Side.DIALER, Role.CONTROL)
        found = self._open.get(request)
        if found is None or found.is_cancelled:
            return b""
        found.is_cancelled = True
        return frames.encode(request, Cancel())

    def give(self, request: int, amount: int) -> bytes:
        """Return the frame that gives credit; empty where the request has ended."""
        return frames.encode(request, Credit(amount)) if request in self._open else b""

    def reply(self, request: int, message: Reply) -> bytes:
        """Return the frame of an answer; empty where the request has ended. Raises BadValue."""
        self._check_sending(Side.LISTENER, Role.CONTROL)
        found = self._open.get(request)
        if found is None:
            return frames.encode(request, message) if isinstance(message, Ended) else b""
        if type(message) not in REPLIES[found.kind]:
            raise LocalProtocolError(f"{type(message).__name__} to {found.kind.__name__}")
        data = frames.encode(request, message)
        self._follow(request, found, message, LocalProtocolError)
        return data

    def finish(self, request: int) -> None:
        """End a read, whose end is the last of its stripes."""
        found = self._open.pop(request, None)
        if found is not None and found.kind is not Read:
            raise LocalProtocolError(f"{found.kind.__name__} ends with an answer")

    def stripe(self, request: int, stripe: Stripe) -> bytes:
        """Return the frame that its raw bytes are to follow."""
        if self.role is not Role.DATA or self.phase is not Phase.OPEN:
            raise LocalProtocolError("a stripe here, or now")
        return frames.encode_stripe(request, stripe)

    def _check_sending(self, side: Side, role: Role) -> None:
        if self.side is not side or self.role is not role or self.phase is not Phase.OPEN:
            raise LocalProtocolError("that is not for this side to say, or not now")

    def _follow(self, request: int, found: _Open, message: Message, error: type[Exception]) -> None:
        """Note what an answer means for its request; `error` where it is the wrong moment."""
        match message:
            case Wanted():
                if found.is_wanted:
                    raise error("Wanted twice")
                found.is_wanted = True
            case Credit():
                if not found.is_wanted:
                    raise error("Credit for what is not wanted")
            case Found(answers):
                found.keys_left -= len(answers)
                if found.keys_left < 0 or not answers:
                    raise error("Found tells of more keys than were asked for, or of none")
                if not found.keys_left:
                    del self._open[request]
            case Stored() if not found.is_wanted:
                raise error("Stored before Wanted")
            case Ended():
                if self.side is Side.DIALER and not found.is_cancelled:
                    raise error("Ended, and nobody cancelled")
                # The answer that crossed the cancellation did not end it for who cancelled.
                del self._open[request]
            case _ if found.is_cancelled:
                pass
            case _:
                del self._open[request]


def _opened(message: Message) -> _Open:
    keys = len(message.keys) if isinstance(message, Lookup) else 0
    return _Open(type(message), keys)
