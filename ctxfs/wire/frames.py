"""One message, as it lies in the stream: a header of 24 bytes, then the body.

| offset | size | field |
|---|---|---|
| 0 | 4 | length of the body |
| 4 | 2 | type |
| 6 | 2 | flags: bit 0, who does not know the type skips the frame |
| 8 | 8 | request |
| 16 | 8 | XXH3-64 of the 16 bytes before and of the body |
"""

from dataclasses import dataclass
from struct import Struct
from typing import Final

import xxhash

from ctxfs.errors import BadValue, PeerProtocolError
from ctxfs.wire.fields import Bytes, Cursor, read, write
from ctxfs.wire.limits import BODY_BYTES_MAX
from ctxfs.wire.messages import NUMBERS, TYPES, Message, Stripe

PREFACE: Final = b"CTXPEER\n"  # before the first frame, from both sides
HEAD: Final = Struct("<IHHQ")
HEADER_BYTES: Final = 24
FLAG_OPTIONAL: Final = 1
_STRIPE: Final = Struct("<QI")
STRIPE_BYTES: Final = HEADER_BYTES + _STRIPE.size  # of a frame that a payload follows


@dataclass(frozen=True, slots=True)
class Head:
    """What the header of a frame says."""

    length: int
    type: int
    flags: int
    request: int
    checksum: bytes


def encode(request: int, message: Message) -> bytes:
    """Return the frame. Raises BadValue for what is too large to travel."""
    body = bytearray()
    write(body, message)
    if len(body) > BODY_BYTES_MAX:
        raise BadValue(f"a message of {len(body)} bytes, at most {BODY_BYTES_MAX} travel")
    return frame(NUMBERS[type(message)], 0, request, body)


def frame(kind: int, flags: int, request: int, body: Bytes) -> bytes:
    """Return the frame of a body that is encoded already."""
    head = HEAD.pack(len(body), kind, flags, request)
    return b"".join((head, _checksum(head, body), body))


def parse_head(data: Bytes, length_max: int) -> Head:
    """Return what the 24 bytes say. Raises PeerProtocolError where the body is too long."""
    length, kind, flags, request = HEAD.unpack_from(data)
    if length > length_max:
        raise PeerProtocolError(f"a frame of {length} bytes, at most {length_max} are legal")
    return Head(length, kind, flags, request, bytes(data[HEAD.size : HEADER_BYTES]))


def decode(head: Head, header: Bytes, body: Bytes) -> Message | None:
    """Return the message; None for one that this version does not know and may skip.

    `header` is what `head` was parsed from. Raises PeerProtocolError.
    """
    if _checksum(header[: HEAD.size], body) != head.checksum:
        raise PeerProtocolError("a frame's checksum does not match")
    kind = TYPES.get(head.type)
    if kind is None:
        if head.flags & FLAG_OPTIONAL:
            return None
        raise PeerProtocolError(f"a message of the unknown type {head.type}")
    message = read(kind, Cursor(body))
    if isinstance(message, Stripe) and not message.length:
        raise PeerProtocolError("a stripe without bytes")
    return message


def encode_stripe(request: int, stripe: Stripe) -> bytes:
    """Return what `encode` does, faster."""
    head = HEAD.pack(_STRIPE.size, NUMBERS[Stripe], 0, request)
    body = _STRIPE.pack(stripe.offset, stripe.length)
    return b"".join((head, _checksum(head, body), body))


def decode_stripe(data: Bytes) -> tuple[int, Stripe] | None:
    """Return request and stripe if `data` is just such a frame, and good; faster than `decode`."""
    if len(data) != STRIPE_BYTES:
        return None
    length, kind, flags, request = HEAD.unpack_from(data)
    if (length, kind, flags) != (_STRIPE.size, NUMBERS[Stripe], 0):
        return None
    offset, size = _STRIPE.unpack_from(data, HEADER_BYTES)
    checksum = _checksum(data[: HEAD.size], data[HEADER_BYTES:])
    if not size or checksum != data[HEAD.size : HEADER_BYTES]:
        return None
    return request, Stripe(offset, size)


def _checksum(head: Bytes, body: Bytes) -> bytes:
    state = xxhash.xxh3_64(head)
    state.update(body)
    return state.digest()[::-1]
