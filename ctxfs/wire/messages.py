"""What members say to each other, as frozen dataclasses. The numbers are those of docs/wire.md.

Names are bytes, as in the store. Times that end in `_ns` without more said are nanoseconds of wall
clock since 1970; what remains of a lifetime is a duration, since clocks differ.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Annotated, Final

from ctxfs.core.key import KEY_BYTES_MAX, split_key
from ctxfs.wire import limits
from ctxfs.wire.fields import Blob, Choice, Fixed, Many, Nested, OneOf, Pair, Text, Whole
from ctxfs.wire.fields import key_or_nothing as may_be_empty

U8 = Annotated[int, Whole(1)]
U16 = Annotated[int, Whole(2)]
U32 = Annotated[int, Whole(4)]
U64 = Annotated[int, Whole(8)]
# By slot of a member: a version.
Vector = Annotated[tuple[tuple[int, int], ...], Many(Pair(Whole(2), Whole(8)), limits.SLOTS)]
Name = Annotated[bytes, Blob(limits.NAME_BYTES_MAX)]
Key = Annotated[bytes, Blob(KEY_BYTES_MAX, split_key)]
KeyOrNothing = Annotated[bytes, Blob(KEY_BYTES_MAX, may_be_empty)]
Digest = Annotated[bytes, Fixed(16)]
Token = Annotated[bytes, Fixed(16)]
Words = Annotated[str, Text(limits.TEXT_BYTES_MAX)]

FOREVER_NS: Final = 2**64 - 1  # of a lifetime or a pin: it does not end


class Role(IntEnum):
    """What a connection is for."""

    CONTROL = 0
    DATA = 1


class Reason(IntEnum):
    """Why something was not done."""

    TROUBLE = 0  # theirs; also what a later version may say
    GONE = 1  # this version and older ones were removed
    MISS = 2  # they do not have it (any more); nobody removed it that they know of
    BUSY = 3  # ask another holder
    NO_ROOM = 4
    HAVE = 5  # of an offer: they have this version or a newer one
    FORBIDDEN = 6
    VERSION = 7  # of a hello: no version in common
    CLUSTER = 8  # of a hello: another cluster
    NAME = 9  # of a hello: not who the certificate says, or not who was looked for
    SESSION = 10  # of a hello: no control connection that this data connection belongs to


class Durability(IntEnum):
    """Where a block is safe."""

    MEMORY = 0  # until the machine ends
    MEDIUM = 1  # on the cold tier's medium


class Tiers(IntFlag):
    """Tiers that hold a copy."""

    HOT = 1
    WARM = 2
    COLD = 4


# -- hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame of who dials."""

    oldest: U16  # versions of the protocol that it speaks, both included
    newest: U16
    minor: U16  # of the newest
    role: Annotated[Role, Choice(Role)]
    cluster: Name
    name: Name
    slot: U16
    zone: Name
    capabilities: U64
    session: Token  # ties data connections to their control connection
    requests_max: U32
    stripe_bytes: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The first frame of who listens."""

    version: U16  # spoken from here on
    minor: U16
    cluster: Name
    name: Name
    slot: U16
    zone: Name
    capabilities: U64
    requests_max: U32  # not above what was offered
    stripe_bytes: U32


@dataclass(frozen=True, slots=True)
class Rejected:
    """Instead of a welcome; the connection ends."""

    reason: Annotated[Reason, Choice(Reason, Reason.TROUBLE)]
    text: Words


# -- blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What travels with a block beside its bytes."""

    mode: U32
    uid: U32
    gid: U32
    created_ns: U64
    mtime_ns: U64
    ttl_ns: U64 = FOREVER_NS  # what remains
    pin_ns: U64 = 0  # what remains; 0: not pinned
    parent: KeyOrNothing = b""
    dtype: Name = b""
    user: Annotated[
        tuple[tuple[bytes, bytes], ...],
        Many(
            Pair(Blob(limits.NAME_BYTES_MAX), Blob(limits.VALUE_BYTES_MAX)), limits.ATTRIBUTES_MAX
        ),
    ] = ()
    revision: U64 = 0  # version of these, where they changed after the content was there
    replicas: U16 = 0  # members that are to hold the block; 0: as many as the cluster says


@dataclass(frozen=True, slots=True)
class Miss:
    """They do not have the key."""


@dataclass(frozen=True, slots=True)
class Gone:
    """This version of the key and all before it were removed."""

    version: U64
    until_ns: U64  # when this may be forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Have:
    """They can be asked for the bytes of this version."""

    version: U64
    size: U64
    digest: Digest  # XXH3-128 of the content, big-endian
    tiers: U8  # of Tiers
    load: U8  # 0 idle to 255: better read from another holder
    attributes: Annotated[Attributes, Nested(Attributes)]


Answer = Miss | Gone | Have


@dataclass(frozen=True, slots=True)
class GoneKey:
    """A tombstone."""

    key: Key
    version: U64
    until_ns: U64


GoneKeys = Annotated[tuple[GoneKey, ...], Many(Nested(GoneKey), limits.BATCH_MAX)]


# -- requests


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which of these keys do you have? Answered by Found, one or more."""

    keys: Annotated[tuple[bytes, ...], Many(Blob(KEY_BYTES_MAX, split_key), limits.BATCH_MAX, 1)]
    budget_ms: U32  # after which nobody waits for the answer any more


@dataclass(frozen=True, slots=True)
class Read:
    """Send these bytes. Answered by stripes on the data connections, or Refused."""

    key: Key
    version: U64
    offset: U64
    length: U64
    credit: U64  # bytes that may be sent before more is given
    budget_ms: U32


@dataclass(frozen=True, slots=True)
class Offer:
    """I would send you this block. Answered by Wanted and, after the bytes, Stored; or Refused.

    With `held_only`, I would not: if you have it, these are its attributes. Answered by Refused.
    """

    key: Key
    version: U64
    size: U64
    digest: Digest
    attributes: Annotated[Attributes, Nested(Attributes)]
    budget_ms: U32
    held_only: U8 = 0  # to those alone who know of it: MINOR_HELD_ONLY


@dataclass(frozen=True, slots=True)
class Lease:
    """Keep these bytes where they are for so long. Answered by Leased, or Refused."""

    key: Key
    version: U64
    hold_ms: U32
    budget_ms: U32


@dataclass(frozen=True, slots=True)
class Release:
    """I have done with it. Answered by Acknowledged, also where it has ended by itself."""

    lease: U64


@dataclass(frozen=True, slots=True)
class Forget:
    """These are gone. Answered by Acknowledged when that will be remembered."""

    entries: GoneKeys


@dataclass(frozen=True, slots=True)
class Sync:
    """I know of all deletions up to these; what else is gone? Answered by Tombstones."""

    known: Vector
    cursor: U64  # 0, or what the page before said


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Are you there, and how are you? Answered by Stats, before anything else is done."""


Request = Lookup | Read | Offer | Lease | Release | Forget | Sync | Heartbeat


# -- about a request that was sent


@dataclass(frozen=True, slots=True)
class Credit:
    """So many bytes more of this read, or of this offer, may be sent. From either side."""

    amount: U64


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for the answer any more. Answered by Ended; all other answers are dropped."""


# -- answers


@dataclass(frozen=True, slots=True)
class Found:
    """For keys of the lookup, in its order, those not told of yet."""

    answers: Annotated[
        tuple[Answer, ...], Many(OneOf({0: Miss, 1: Gone, 2: Have}), limits.BATCH_MAX)
    ]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Send the bytes of what you offered."""

    credit: U64


@dataclass(frozen=True, slots=True)
class Stored:
    """The block arrived whole, its digest is right, and it is there to be read."""

    durability: Annotated[Durability, Choice(Durability, Durability.MEMORY)]


@dataclass(frozen=True, slots=True)
class Leased:
    """The bytes stay. At the end of the connection, too, the lease ends."""

    lease: U64
    size: U64


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Done."""


@dataclass(frozen=True, slots=True)
class Tombstones:
    """What is gone, as was asked, by version. What they know themselves, when the first page was
    asked for, and what they have forgotten (docs/cluster.md)."""

    entries: GoneKeys
    cursor: U64  # of the next page; 0: there is none
    known: Vector
    forgotten: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How a member is."""

    clock_ns: U64
    load: U8  # as in Have
    capacity_bytes: U64
    free_bytes: U64
    blocks: U64


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request is not done, and this is why."""

    reason: Annotated[Reason, Choice(Reason, Reason.TROUBLE)]
    version: U64 = 0  # GONE, HAVE: of which one
    until_ns: U64 = 0  # GONE
    retry_ms: U32 = 0  # BUSY, NO_ROOM: when to ask again; 0: that is not known
    text: Words = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A cancelled request: no more will come for it on this connection."""


Reply = Found | Wanted | Stored | Leased | Acknowledged | Tombstones | Stats | Refused | Ended


# -- on data connections


@dataclass(frozen=True, slots=True)
class Stripe:
    """`length` raw bytes follow the frame; they belong at `offset` of what the request is about."""

    offset: U64
    length: U32


Message = Hello | Welcome | Rejected | Request | Credit | Cancel | Reply | Stripe

TYPES: Final[dict[int, type[Message]]] = {
    0x01: Hello,
    0x02: Welcome,
    0x03: Rejected,
    0x10: Lookup,
    0x11: Read,
    0x12: Offer,
    0x13: Lease,
    0x14: Release,
    0x15: Forget,
    0x16: Sync,
    0x17: Heartbeat,
    0x20: Credit,
    0x21: Cancel,
    0x30: Found,
    0x31: Wanted,
    0x32: Stored,
    0x33: Leased,
    0x34: Acknowledged,
    0x35: Tombstones,
    0x36: Stats,
    0x37: Refused,
    0x38: Ended,
    0x40: Stripe,
}
NUMBERS: Final = {kind: number for number, kind in TYPES.items()}

# Of each request, what may be answered. All but Wanted, and Found while keys remain, end it.
REPLIES: Final[dict[type[Message], frozenset[type[Message]]]] = {
    Lookup: frozenset({Found, Refused, Ended}),
    Read: frozenset({Refused, Ended}),  # and stripes: the last one ends it
    Offer: frozenset({Wanted, Credit, Stored, Refused, Ended}),
    Lease: frozenset({Leased, Refused, Ended}),
    Release: frozenset({Acknowledged, Refused, Ended}),
    Forget: frozenset({Acknowledged, Refused, Ended}),
    Sync: frozenset({Tombstones, Refused, Ended}),
    Heartbeat: frozenset({Stats, Refused, Ended}),
}
