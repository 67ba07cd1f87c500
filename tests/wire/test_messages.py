"""Messages as bytes, and back; what comes from later versions, and from nobody who means well."""

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxfs.errors import BadValue, CtxfsError, PeerProtocolError
from ctxfs.wire import frames, limits
from ctxfs.wire import messages as m
from ctxfs.wire.fields import codecs_of
from tests.wire import strategies
from tests.wire.talk import ATTRIBUTES


def decode(data: bytes) -> m.Message | None:
    head = frames.parse_head(data[: frames.HEADER_BYTES], limits.BODY_BYTES_MAX)
    return frames.decode(head, data[: frames.HEADER_BYTES], data[frames.HEADER_BYTES :])


def body_of(message: m.Message) -> bytes:
    return frames.encode(1, message)[frames.HEADER_BYTES :]


@given(strategies.messages)
def test_every_message_comes_back_as_it_was(message: m.Message) -> None:
    assert decode(frames.encode(3, message)) == message


@given(strategies.stripes, strategies.u64, st.integers(0, frames.STRIPE_BYTES * 8 - 1))
def test_the_short_way_for_stripes_is_the_same(stripe: m.Stripe, request: int, bit: int) -> None:
    frame = frames.encode(request, stripe)
    assert frames.encode_stripe(request, stripe) == frame
    assert frames.decode_stripe(frame) == (request, stripe)
    assert frames.decode_stripe(frame + b"x") is None
    changed = bytearray(frame)
    changed[bit // 8] ^= 1 << bit % 8
    assert frames.decode_stripe(changed) is None


def test_every_message_has_a_number_and_fields_that_travel() -> None:
    assert set(m.TYPES.values()) == set(m.Message.__args__)
    assert len(m.NUMBERS) == len(m.TYPES)
    for kind in m.TYPES.values():
        assert len(codecs_of(kind)) == len(dataclasses.fields(kind))


@given(strategies.messages, st.binary(min_size=1, max_size=40))
def test_what_a_later_version_appends_is_skipped(message: m.Message, more: bytes) -> None:
    number = m.NUMBERS[type(message)]
    assert decode(frames.frame(number, 0, 1, body_of(message) + more)) == message


def test_a_field_that_an_earlier_version_does_not_send_has_its_default() -> None:
    body = body_of(m.Refused(reason=m.Reason.BUSY, version=9))
    assert decode(frames.frame(m.NUMBERS[m.Refused], 0, 1, body[:9])) == m.Refused(
        reason=m.Reason.BUSY, version=9
    )
    with pytest.raises(PeerProtocolError):
        decode(frames.frame(m.NUMBERS[m.Refused], 0, 1, body[:8]))


def test_an_unknown_message_is_skipped_only_if_it_says_so() -> None:
    assert decode(frames.frame(0x7F, frames.FLAG_OPTIONAL, 1, b"news")) is None
    with pytest.raises(PeerProtocolError, match="unknown type 127"):
        decode(frames.frame(0x7F, 0, 1, b"news"))


def test_a_reason_of_a_later_version_is_trouble() -> None:
    body = bytearray(body_of(m.Refused(reason=m.Reason.BUSY)))
    body[0] = 200
    assert decode(frames.frame(m.NUMBERS[m.Refused], 0, 1, body)) == m.Refused(
        reason=m.Reason.TROUBLE
    )


@given(strategies.messages, st.data())
@example(m.Heartbeat(), None)
def test_a_flipped_bit_is_found(message: m.Message, data: st.DataObject | None) -> None:
    frame = bytearray(frames.encode(3, message))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1)) if data else 40
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PeerProtocolError):
        decode(bytes(frame))


@given(st.sampled_from(sorted(m.TYPES)), st.binary(max_size=200))
def test_a_body_of_any_bytes_is_a_message_or_the_named_error(number: int, body: bytes) -> None:
    try:
        message = decode(frames.frame(number, 0, 1, body))
    except PeerProtocolError:
        return
    assert isinstance(message, m.TYPES[number])


@given(strategies.messages, st.data())
def test_a_changed_body_is_a_message_or_the_named_error(
    message: m.Message, data: st.DataObject
) -> None:
    body = bytearray(body_of(message))
    for _ in range(data.draw(st.integers(1, 4)) if body else 0):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(frames.frame(m.NUMBERS[type(message)], 0, 1, body))
    except PeerProtocolError:
        return


@pytest.mark.parametrize("key", [b"", b"a//b", b"..", b"a/../b", b"/etc", b"a\0", b"k" * 256])
def test_a_key_that_is_none_is_refused_on_both_sides(key: bytes) -> None:
    with pytest.raises(CtxfsError, match="name"):
        frames.encode(1, m.Lookup((key,), 0))
    body = bytes([1, 0, 0, 0]) + len(key).to_bytes(4, "little") + key + bytes(4)
    with pytest.raises(PeerProtocolError):
        decode(frames.frame(m.NUMBERS[m.Lookup], 0, 1, body))


def test_counts_and_lengths_beyond_the_limits_are_refused_before_anything_is_kept() -> None:
    with pytest.raises(BadValue):
        frames.encode(1, m.Lookup((b"k",) * (limits.BATCH_MAX + 1), 0))
    with pytest.raises(BadValue):
        frames.encode(1, m.Lookup((), 0))
    large = dataclasses.replace(ATTRIBUTES, user=((b"user.x", bytes(60_000)),) * 20)
    with pytest.raises(BadValue):
        frames.encode(1, m.Offer(b"k", 1, 1, bytes(16), large, 0))
    with pytest.raises(BadValue):
        frames.encode(1, m.Release(2**64))
    with pytest.raises(PeerProtocolError):
        decode(frames.frame(m.NUMBERS[m.Forget], 0, 1, b"\xff\xff\xff\xff"))
    with pytest.raises(PeerProtocolError):
        frames.parse_head(frames.HEAD.pack(limits.BODY_BYTES_MAX + 1, 1, 0, 0) + bytes(8), 1 << 20)
