"""What may be said when, and what comes of it when somebody says something else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.errors import PeerProtocolError, PeerRejected
from ctxfs.wire import frames
from ctxfs.wire import messages as m
from ctxfs.wire.connection import (
    Connection,
    Event,
    LocalProtocolError,
    Payload,
    Phase,
    Received,
    Side,
)
from ctxfs.wire.greeting import MINOR, answer, check, hello
from ctxfs.wire.limits import HELLO_BYTES_MAX, Limits
from tests.wire import strategies
from tests.wire.talk import (
    LIMITS,
    ME,
    SESSION,
    YOU,
    greeting,
    have,
    message_of,
    messages_of,
    pair,
)

KEYS = (b"a", b"b", b"c")


def joined(events: list[Event]) -> list[Event]:
    """With pieces of one payload together, however they were cut."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, Payload) and out and isinstance(out[-1], Payload):
            out[-1] = Payload(event.request, out[-1].data + event.data)
        else:
            out.append(event)
    return out


def a_days_talk() -> tuple[Connection, bytes, Connection, bytes]:
    """A dialer and all that it says to a listener after the greeting, and what that answers."""
    dialer, listener = pair()
    asked, answered = b"", b""
    for request in (
        m.Lookup(KEYS, 100),
        m.Heartbeat(),
        m.Offer(b"k", 1, 10, bytes(16), have().attributes, 100),
        m.Sync(((5, 1),), 0),
    ):
        _, data = dialer.ask(request)
        asked += data
    listener.feed(asked)
    for number, reply in (
        (2, m.Stats(clock_ns=1, load=0, capacity_bytes=9, free_bytes=8, blocks=3)),
        (1, m.Found((m.Miss(), have()))),
        (3, m.Wanted(10)),
        (1, m.Found((m.Gone(4, 5),))),
        (3, m.Stored(m.Durability.MEDIUM)),
        (4, m.Tombstones((m.GoneKey(b"x", 1, 2),), 0, ((1, 3),), ())),
    ):
        answered += listener.reply(number, reply)
    return dialer, asked, listener, answered


def test_a_stream_cut_anywhere_says_the_same() -> None:
    dialer, asked, _, answered = a_days_talk()
    whole = dialer.feed(answered)
    assert len(whole) == 6
    for cut in range(len(answered) + 1):
        again, _, _, _ = a_days_talk()
        assert again.feed(answered[:cut]) + again.feed(answered[cut:]) == whole
    _, first, listener, _ = greeting()
    _, _, fresh, _ = greeting()
    events = listener.feed(asked)
    assert [event for byte in asked for event in fresh.feed(bytes([byte]))] == events
    by_byte = Connection(Side.LISTENER, 8)
    (greeted,) = [event for byte in first for event in by_byte.feed(bytes([byte]))]
    assert isinstance(message_of(greeted), m.Hello)


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4), st.data())
def test_stripes_cut_anywhere_say_the_same(payloads: list[bytes], data: st.DataObject) -> None:
    dialer, listener = pair(m.Role.DATA)
    stream = b"".join(
        listener.stripe(9, m.Stripe(at, len(each))) + each for at, each in enumerate(payloads)
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    events: list[Event] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events += dialer.feed(stream[start:end])
    assert joined(events) == [
        each
        for at, payload in enumerate(payloads)
        for each in (Received(9, m.Stripe(at, len(payload))), Payload(9, payload))
    ]


def test_who_reads_only_what_is_wanted_gets_payload_apart() -> None:
    dialer, listener = pair(m.Role.DATA)
    stream = memoryview(
        listener.stripe(1, m.Stripe(0, 5)) + b"bytes" + listener.stripe(2, m.Stripe(0, 3)) + b"end"
    )
    seen = []
    while stream:
        if dialer.payload_left:
            length = dialer.payload_left
            seen.append(bytes(stream[:length]))
            dialer.skip(length)
        else:
            length = dialer.wanted
            assert not any(isinstance(each, Payload) for each in dialer.feed(stream[:length]))
        stream = stream[length:]
    assert seen == [b"bytes", b"end"]


@given(st.binary(max_size=300), st.sampled_from(["new", "control", "data"]))
def test_garbage_costs_the_connection_and_nothing_else(garbage: bytes, kind: str) -> None:
    for side in Side:
        connection = Connection(side, 8)
        if kind != "new":
            role = m.Role.CONTROL if kind == "control" else m.Role.DATA
            connection = pair(role)[side is Side.LISTENER]
        try:
            connection.feed(garbage)
        except PeerProtocolError:
            assert connection.phase is Phase.CLOSED
            with pytest.raises(PeerProtocolError):
                connection.feed(b"more")


@given(st.lists(st.tuples(st.integers(0, 5), strategies.messages), max_size=6))
def test_messages_in_any_order_raise_nothing_but_the_named_error(
    said: list[tuple[int, m.Message]],
) -> None:
    for side in Side:
        for role in m.Role:
            connection = pair(role)[side is Side.LISTENER]
            try:
                for request, message in said:
                    connection.feed(frames.encode(request, message))
            except PeerProtocolError:
                assert connection.phase is Phase.CLOSED


@given(st.data())
def test_a_changed_byte_in_a_stream_raises_the_named_error(data: st.DataObject) -> None:
    dialer, _, _, answered = a_days_talk()
    at = data.draw(st.integers(0, len(answered) - 1))
    changed = bytearray(answered)
    changed[at] ^= data.draw(st.integers(1, 255))
    # After a length that grew, the frame is still awaited: with no more than one frame is kept.
    with pytest.raises(PeerProtocolError):
        dialer.feed(bytes(changed) + bytes(1 << 20))


def test_before_the_hello_a_frame_is_short() -> None:
    listener = Connection(Side.LISTENER, 8)
    head = frames.HEAD.pack(HELLO_BYTES_MAX + 1, 1, 0, 0) + bytes(8)
    with pytest.raises(PeerProtocolError, match="at most 4096"):
        listener.feed(frames.PREFACE + head)


def test_nothing_is_asked_before_the_welcome() -> None:
    listener = Connection(Side.LISTENER, 8)
    with pytest.raises(PeerProtocolError, match="Heartbeat before the hello"):
        listener.feed(frames.PREFACE + frames.encode(1, m.Heartbeat()))
    dialer = Connection(Side.DIALER, 8)
    with pytest.raises(LocalProtocolError):
        dialer.ask(m.Heartbeat())
    with pytest.raises(PeerProtocolError, match="Welcome before"):
        dialer.feed(frames.PREFACE + frames.encode(0, a_welcome()))


def a_welcome() -> m.Welcome:
    welcome = answer(hello(ME, m.Role.CONTROL, SESSION, LIMITS), YOU, LIMITS)
    assert isinstance(welcome, m.Welcome)
    return welcome


def test_a_second_hello_is_refused() -> None:
    dialer, asked, listener, _ = greeting()
    with pytest.raises(PeerProtocolError):
        listener.feed(asked[len(frames.PREFACE) :])
    with pytest.raises(LocalProtocolError):
        dialer.greet(hello(ME, m.Role.CONTROL, SESSION, LIMITS))


def test_the_newest_common_version_is_spoken_and_none_is_a_rejection() -> None:
    later = hello(ME, m.Role.CONTROL, SESSION, LIMITS)
    both = replace(later, newest=9, minor=4)
    welcome = answer(both, YOU, LIMITS)
    assert isinstance(welcome, m.Welcome)
    assert (welcome.version, welcome.minor) == (1, MINOR)
    only_later = replace(later, oldest=2, newest=9)
    rejected = answer(only_later, YOU, LIMITS)
    assert isinstance(rejected, m.Rejected)
    assert rejected.reason is m.Reason.VERSION


def test_another_cluster_or_another_member_is_no_peer() -> None:
    theirs = replace(hello(ME, m.Role.CONTROL, SESSION, LIMITS), cluster=b"prod")
    rejected = answer(theirs, YOU, LIMITS)
    assert isinstance(rejected, m.Rejected)
    assert rejected.reason is m.Reason.CLUSTER
    ours = hello(ME, m.Role.CONTROL, SESSION, LIMITS)
    check(ours, a_welcome(), b"two")
    with pytest.raises(PeerRejected, match="not b'three'"):
        check(ours, a_welcome(), b"three")


def test_a_welcome_beyond_the_hello_is_refused() -> None:
    ours = hello(ME, m.Role.CONTROL, SESSION, Limits(requests_max=4))
    with pytest.raises(PeerProtocolError):
        check(ours, a_welcome(), b"two")


def test_more_requests_at_a_time_than_agreed_end_the_connection() -> None:
    _, listener = pair()
    listener.requests_max = 2
    listener.feed(frames.encode(1, m.Heartbeat()) + frames.encode(2, m.Heartbeat()))
    with pytest.raises(PeerProtocolError, match="more than 2"):
        listener.feed(frames.encode(3, m.Heartbeat()))


def test_a_request_number_comes_once() -> None:
    _, listener = pair()
    listener.feed(frames.encode(5, m.Heartbeat()))
    with pytest.raises(PeerProtocolError, match="number"):
        listener.feed(frames.encode(5, m.Heartbeat()))


def test_an_answer_to_nothing_or_of_another_kind_ends_the_connection() -> None:
    for request, reply in ((2, m.Acknowledged()), (1, m.Stored(m.Durability.MEMORY))):
        dialer, _ = pair()
        dialer.ask(m.Heartbeat())
        with pytest.raises(PeerProtocolError):
            dialer.feed(frames.encode(request, reply))


def test_more_answers_than_keys_end_the_connection() -> None:
    dialer, _ = pair()
    dialer.ask(m.Lookup((b"k",), 0))
    with pytest.raises(PeerProtocolError, match="more keys"):
        dialer.feed(frames.encode(1, m.Found((m.Miss(), m.Miss()))))


def test_nothing_is_stored_that_was_not_wanted() -> None:
    dialer, _ = pair()
    dialer.ask(m.Offer(b"k", 1, 1, bytes(16), have().attributes, 0))
    with pytest.raises(PeerProtocolError, match="before Wanted"):
        dialer.feed(frames.encode(1, m.Stored(m.Durability.MEMORY)))


def test_a_cancelled_request_counts_until_it_is_ended_and_its_answer_is_dropped() -> None:
    dialer, listener = pair()
    _, asked = dialer.ask(m.Lease(b"k", 1, 10, 10))
    listener.feed(asked)
    crossing = listener.reply(1, m.Leased(1, 10))
    cancel = dialer.cancel(1)
    assert dialer.cancel(1) == b""
    assert messages_of(dialer.feed(crossing)) == []
    assert dialer.open_requests == 1
    assert messages_of(listener.feed(cancel)) == [m.Cancel()]
    assert messages_of(dialer.feed(listener.reply(1, m.Ended()))) == []
    assert dialer.open_requests == listener.open_requests == 0


def test_a_cancelled_lookup_may_be_answered_in_full_first() -> None:
    dialer, listener = pair()
    listener.feed(dialer.ask(m.Lookup(KEYS, 0))[1])
    first = listener.reply(1, m.Found((m.Miss(),)))
    cancel = dialer.cancel(1)
    rest = listener.reply(1, m.Found((m.Miss(), m.Miss())))
    listener.feed(cancel)
    assert dialer.feed(first + rest + listener.reply(1, m.Ended())) == []


def test_what_is_said_of_a_request_that_was_never_made_ends_the_connection() -> None:
    for message in (m.Cancel(), m.Credit(5)):
        _, listener = pair()
        with pytest.raises(PeerProtocolError, match="never asked"):
            listener.feed(frames.encode(1, message))


def test_credit_for_a_read_that_has_ended_is_dropped() -> None:
    dialer, listener = pair()
    listener.feed(dialer.ask(m.Read(b"k", 1, 0, 5, 5, 0))[1])
    more = dialer.give(1, 5)
    listener.finish(1)
    assert listener.feed(more) == []
    dialer.finish(1)
    assert dialer.give(1, 5) == b""


def test_messages_of_a_later_version_do_not_disturb() -> None:
    dialer, listener = pair()
    news = frames.frame(0x99, frames.FLAG_OPTIONAL, 77, b"what nobody here knows")
    (event,) = listener.feed(news + dialer.ask(m.Heartbeat())[1] + news)
    assert event == Received(1, m.Heartbeat())
    assert listener.skipped == 2


def test_control_messages_do_not_go_over_data_connections_nor_stripes_over_control() -> None:
    _, listener = pair(m.Role.DATA)
    with pytest.raises(PeerProtocolError, match="on a data connection"):
        listener.feed(frames.encode(1, m.Heartbeat()))
    for end in pair():
        with pytest.raises(PeerProtocolError):
            end.feed(frames.encode(1, m.Stripe(0, 5)))
