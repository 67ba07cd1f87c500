"""Two ends of a connection, greeted, without a wire between them."""

from ctxfs.wire.connection import Connection, Event, Side
from ctxfs.wire.greeting import Identity, answer, hello
from ctxfs.wire.limits import Limits
from ctxfs.wire.messages import Attributes, Have, Hello, Role, Welcome

ME = Identity(cluster=b"lab", name=b"one", slot=1, zone=b"a")
YOU = Identity(cluster=b"lab", name=b"two", slot=2, zone=b"b")
SESSION = bytes(range(16))
LIMITS = Limits()
ATTRIBUTES = Attributes(mode=0o640, uid=1000, gid=1000, created_ns=1, mtime_ns=2)


def have(version: int = 7, size: int = 100) -> Have:
    return Have(
        version=version, size=size, digest=bytes(16), tiers=1, load=0, attributes=ATTRIBUTES
    )


def greeting(role: Role = Role.CONTROL) -> tuple[Connection, bytes, Connection, bytes]:
    """Dialer and what it said, listener and what it said."""
    dialer = Connection(Side.DIALER, LIMITS.requests_max)
    listener = Connection(Side.LISTENER, LIMITS.requests_max)
    asked = dialer.greet(hello(ME, role, SESSION, LIMITS))
    (event,) = listener.feed(asked)
    message = message_of(event)
    assert isinstance(message, Hello)
    welcome = answer(message, YOU, LIMITS)
    assert isinstance(welcome, Welcome)
    answered = listener.greet(welcome)
    dialer.feed(answered)
    return dialer, asked, listener, answered


def pair(role: Role = Role.CONTROL) -> tuple[Connection, Connection]:
    """Dialer and listener, open."""
    dialer, _, listener, _ = greeting(role)
    return dialer, listener


def message_of(event: Event) -> object:
    return getattr(event, "message", None)


def messages_of(events: list[Event]) -> list[object]:
    return [message_of(event) for event in events]
