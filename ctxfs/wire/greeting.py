"""Who may talk to whom, and in which version: what is decided on a hello and on a welcome."""

from dataclasses import dataclass
from typing import Final

from ctxfs.errors import PeerProtocolError, PeerRejected
from ctxfs.wire.limits import REQUESTS_MIN, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN, Limits
from ctxfs.wire.messages import Hello, Reason, Rejected, Role, Welcome

OLDEST: Final = 1  # versions that are spoken here, both included
NEWEST: Final = 1
MINOR: Final = 1  # of the newest
MINOR_HELD_ONLY: Final = 1  # from here on an offer may be of attributes alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A member, as it tells others of itself."""

    cluster: bytes
    name: bytes
    slot: int = 0
    zone: bytes = b""
    capabilities: int = 0


def hello(me: Identity, role: Role, session: bytes, limits: Limits) -> Hello:
    """Return what `me` begins with. `session` is 16 bytes that nobody can guess."""
    return Hello(
        oldest=OLDEST,
        newest=NEWEST,
        minor=MINOR,
        role=role,
        cluster=me.cluster,
        name=me.name,
        slot=me.slot,
        zone=me.zone,
        capabilities=me.capabilities,
        session=session,
        requests_max=limits.requests_max,
        stripe_bytes=limits.stripe_bytes,
    )


def answer(hello: Hello, me: Identity, limits: Limits) -> Welcome | Rejected:
    """Return what a listener says to a hello whose name is known to be true."""
    if hello.cluster != me.cluster:
        return Rejected(Reason.CLUSTER, "this is a member of another cluster")
    version = min(hello.newest, NEWEST)
    if version < max(hello.oldest, OLDEST):
        text = f"versions {OLDEST} to {NEWEST} are spoken here, there {hello.oldest} and later"
        return Rejected(Reason.VERSION, text)
    if not hello.name:
        return Rejected(Reason.NAME, "a member has a name")
    return Welcome(
        version=version,
        minor=MINOR if version == NEWEST else 0,
        cluster=me.cluster,
        name=me.name,
        slot=me.slot,
        zone=me.zone,
        capabilities=me.capabilities & hello.capabilities,
        requests_max=max(REQUESTS_MIN, min(limits.requests_max, hello.requests_max)),
        stripe_bytes=_stripe(min(limits.stripe_bytes, hello.stripe_bytes)),
    )


def check(hello: Hello, welcome: Welcome, name: bytes) -> None:
    """Raise PeerRejected where that is not the member `name`, PeerProtocolError for nonsense."""
    if welcome.cluster != hello.cluster:
        raise PeerRejected("the peer is a member of another cluster")
    if welcome.name != name:
        raise PeerRejected(f"the peer at this address is {welcome.name!r}, not {name!r}")
    versions = hello.oldest <= welcome.version <= hello.newest
    requests = REQUESTS_MIN <= welcome.requests_max <= hello.requests_max
    stripe = welcome.stripe_bytes <= hello.stripe_bytes
    if not (
        versions and requests and stripe and welcome.stripe_bytes == _stripe(welcome.stripe_bytes)
    ):
        raise PeerProtocolError("a welcome that goes beyond the hello")


def _stripe(wanted: int) -> int:
    return max(STRIPE_BYTES_MIN, min(wanted, STRIPE_BYTES_MAX))
