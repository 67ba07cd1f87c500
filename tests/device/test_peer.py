"""Members that talk over real sockets: what is asked, what is answered, and what goes wrong."""

import os
from collections.abc import AsyncIterator

import pytest
import trio

from ctxfs.device.links import FileSpan
from ctxfs.device.mapping import Mapping
from ctxfs.device.peersession import Session
from ctxfs.device.timing import Timing
from ctxfs.errors import (
    BadValue,
    BlockGone,
    BlockNotFound,
    DeadlineExceeded,
    PeerBusy,
    PeerRefused,
)
from ctxfs.wire.breaker import Health
from ctxfs.wire.greeting import MINOR, NEWEST
from ctxfs.wire.limits import BATCH_MAX, Limits
from ctxfs.wire.messages import Durability, Gone, GoneKey, Have, Miss, Reason, Refused, Stored
from tests.device.peering import (
    ATTRIBUTES,
    PATIENCE_S,
    SMALL,
    Lab,
    content_of,
    lab,
    memory_file,
    offer_of,
)

STRIPES = (0, 1, 65_535, 65_536, 65_537, 1_000_000)


@pytest.fixture
async def pair() -> AsyncIterator[Lab]:
    """Two members, with stripes so small that there are many."""
    async with lab(limits=SMALL) as made:
        yield made


async def test_a_lookup_tells_of_each_key(pair: Lab) -> None:
    pair.door.put(b"a/b", b"content", version=5)
    pair.door.gone[b"old"] = GoneKey(b"old", 3, 9)
    found, gone, miss = await pair.peer.lookup([b"a/b", b"old", b"none"], PATIENCE_S)
    assert isinstance(found, Have)
    assert (found.version, found.size, found.attributes) == (5, 7, ATTRIBUTES)
    assert (gone, miss) == (Gone(3, 9), Miss())


async def test_a_lookup_of_as_many_keys_as_there_may_be_is_answered_in_order(pair: Lab) -> None:
    keys = [b"key%d" % number for number in range(BATCH_MAX)]
    for number in range(0, BATCH_MAX, 100):
        pair.door.put(keys[number], b"x", version=number + 1)
    answers = await pair.peer.lookup(keys, PATIENCE_S)
    assert [at for at, each in enumerate(answers) if isinstance(each, Have)] == list(
        range(0, BATCH_MAX, 100)
    )


@pytest.mark.parametrize("size", STRIPES)
async def test_a_block_is_read_byte_for_byte(pair: Lab, size: int) -> None:
    content = pair.door.put(b"k", content_of(size))
    target = bytearray(size)
    await pair.peer.read(b"k", 1, memoryview(target), PATIENCE_S)
    assert target == content
    await pair.until(lambda: pair.door.blocks[b"k"].leases == 0)


async def test_a_part_of_a_block_is_read(pair: Lab) -> None:
    content = pair.door.put(b"k", content_of(300_000))
    target = bytearray(100_000)
    await pair.peer.read(b"k", 1, memoryview(target), PATIENCE_S, offset=150_001)
    assert target == content[150_001:250_001]


async def test_many_reads_at_once_do_not_mix(pair: Lab) -> None:
    targets = {}
    async with trio.open_nursery() as nursery:
        for number in range(40):
            key = b"k%d" % number
            pair.door.put(key, content_of(200_000 + number, seed=number << 32))
            targets[key] = bytearray(200_000 + number)
            nursery.start_soon(pair.peer.read, key, 1, memoryview(targets[key]), PATIENCE_S)
    for number, target in enumerate(targets.values()):
        assert target == content_of(200_000 + number, seed=number << 32)
    assert pair.peer.counters.traffic.received_bytes == sum(map(len, targets.values()))
    assert pair.server.traffic.sent_bytes == pair.peer.counters.traffic.received_bytes


async def test_more_requests_than_may_be_open_wait_for_their_turn() -> None:
    async with lab(limits=Limits(requests_max=4)) as pair:
        pair.door.put(b"k", b"content")
        targets = [bytearray(7) for _ in range(50)]
        async with trio.open_nursery() as nursery:
            for target in targets:
                nursery.start_soon(pair.peer.read, b"k", 1, memoryview(target), PATIENCE_S)
        assert all(target == b"content" for target in targets)


@pytest.mark.parametrize("size", STRIPES)
async def test_a_pushed_block_arrives_with_what_belongs_to_it(pair: Lab, size: int) -> None:
    content = content_of(size)
    fd = memory_file(b"before" + content + b"behind")
    said = await pair.peer.push(offer_of(b"k", content, 8), FileSpan(fd, 6, size), PATIENCE_S)
    os.close(fd)
    assert said == Stored(Durability.MEDIUM)
    block = pair.door.blocks[b"k"]
    assert os.pread(block.fd, size + 1, 0) == content
    assert (block.version, pair.door.offers[0].attributes) == (8, ATTRIBUTES)


async def test_a_block_that_is_there_or_has_no_room_is_not_sent(pair: Lab) -> None:
    pair.door.put(b"k", b"newer", version=9)
    fd = memory_file(b"older")
    said = await pair.peer.push(offer_of(b"k", b"older", 3), FileSpan(fd, 0, 5), PATIENCE_S)
    assert isinstance(said, Refused)
    assert (said.reason, said.version) == (Reason.HAVE, 9)
    pair.door.full = True
    said = await pair.peer.push(offer_of(b"n", b"older", 3), FileSpan(fd, 0, 5), PATIENCE_S)
    assert isinstance(said, Refused)
    assert said.reason is Reason.NO_ROOM
    assert pair.peer.counters.traffic.sent_bytes == 0
    os.close(fd)


async def test_attributes_alone_are_told_to_who_can_understand(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.door.put(b"k", b"content", version=8)
    said = await pair.peer.amend(offer_of(b"k", b"content", 8), PATIENCE_S)
    assert (said.reason, said.version) == (Reason.HAVE, 8)
    assert pair.peer.protocol == f"{NEWEST}.{MINOR}"
    monkeypatch.setattr("ctxfs.device.peer.MINOR_HELD_ONLY", MINOR + 1)
    assert (
        await pair.peer.amend(offer_of(b"new", b"content", 8), PATIENCE_S)
    ).reason is Reason.MISS
    assert pair.door.offers == [], "one that would take it for an offer is not told"


async def test_a_block_whose_bytes_are_not_those_offered_is_refused(pair: Lab) -> None:
    fd = memory_file(b"bytes")
    with pytest.raises(PeerRefused, match="digest"):
        await pair.peer.push(offer_of(b"k", b"other"), FileSpan(fd, 0, 5), PATIENCE_S)
    os.close(fd)
    assert b"k" not in pair.door.blocks
    with pytest.raises(BadValue):
        await pair.peer.push(offer_of(b"k", b"other"), memoryview(b"too long"), PATIENCE_S)


async def test_what_is_refused_is_told_by_kind(pair: Lab) -> None:
    target = memoryview(bytearray(5))
    with pytest.raises(BlockNotFound):
        await pair.peer.read(b"none", 1, target, PATIENCE_S)
    pair.door.gone[b"old"] = GoneKey(b"old", 3, 9)
    with pytest.raises(BlockGone) as gone:
        await pair.peer.read(b"old", 1, target, PATIENCE_S)
    assert (gone.value.version, gone.value.until_ns) == (3, 9)
    pair.door.put(b"short", b"1234")
    with pytest.raises(PeerRefused, match="another length"):
        await pair.peer.read(b"short", 1, target, PATIENCE_S)
    assert pair.door.blocks[b"short"].leases == 0
    pair.door.busy = True
    with pytest.raises(PeerBusy):
        await pair.peer.read(b"none", 1, target, PATIENCE_S)
    assert pair.peer.health is Health.HEALTHY


async def test_what_is_gone_is_told_and_asked_for_page_by_page(pair: Lab) -> None:
    entries = [GoneKey(b"k%d" % number, number, 100) for number in range(3)]
    await pair.peer.forget(entries, PATIENCE_S)
    page = await pair.peer.tombstones({3: 4}, PATIENCE_S)
    assert list(page.entries) == entries
    assert page.known == ((3, 4),)
    assert page.forgotten == ((9, 2),)  # as the last page has it


async def test_a_lease_is_taken_and_let_go(pair: Lab) -> None:
    pair.door.put(b"k", b"content")
    leased = await pair.peer.lease(b"k", 1, 10, PATIENCE_S)
    assert (leased.size, pair.door.leases) == (7, {leased.lease: b"k"})
    await pair.peer.release(leased.lease, PATIENCE_S)
    assert pair.door.leases == {}


async def test_heartbeats_tell_how_the_peer_is(pair: Lab) -> None:
    stats = await pair.peer.stats(PATIENCE_S)
    assert (stats.free_bytes, stats.load) == (50, 7)
    assert pair.peer.last_stats == stats
    assert pair.peer.round_trip_s is not None


async def test_a_read_that_was_given_up_leaves_its_target_alone_and_the_connection_usable(
    pair: Lab,
) -> None:
    content = pair.door.put(b"k", content_of(4_000_000))
    for _ in range(20):
        fd = memory_file(bytes(len(content)))
        before = pair.peer.counters.traffic.received_bytes
        with Mapping(fd, len(content)) as mapping:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pair.peer.read, b"k", 1, mapping.view, PATIENCE_S)
                    while pair.peer.counters.traffic.received_bytes == before:
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            # What a late byte would be written over.
            mapping.view[:] = bytes(len(content))
            await pair.peer.lookup([b"k"], PATIENCE_S)
            target = bytearray(100_000)
            await pair.peer.read(b"k", 1, memoryview(target), PATIENCE_S)
            assert target == content[:100_000]
            assert bytes(mapping.view) == bytes(len(content))
        os.close(fd)
    assert pair.peer.counters.connected == 1
    await pair.until(lambda: pair.door.blocks[b"k"].leases == 0)


async def test_a_push_that_was_given_up_is_abandoned_there(pair: Lab) -> None:
    content = content_of(4_000_000)
    fd = memory_file(content)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                pair.peer.push, offer_of(b"k", content), FileSpan(fd, 0, len(content)), PATIENCE_S
            )
            while not pair.peer.counters.traffic.sent_bytes:
                await trio.lowlevel.checkpoint()
            scope.cancel()
    os.close(fd)
    await pair.until(lambda: pair.door.abandoned == 1)
    fd = memory_file(content)
    said = await pair.peer.push(offer_of(b"k", content), FileSpan(fd, 0, 4_000_000), PATIENCE_S)
    os.close(fd)
    assert said == Stored(Durability.MEDIUM)
    assert pair.peer.counters.connected == 1


async def test_a_deadline_ends_the_wait_and_the_work_there(pair: Lab) -> None:
    pair.door.put(b"k", b"content")
    pair.door.gate = trio.Event()
    with pytest.raises(DeadlineExceeded):
        await pair.peer.read(b"k", 1, memoryview(bytearray(7)), 0.05)
    pair.door.gate = None
    target = bytearray(7)
    # Its heartbeat says that it lives, and then it is asked again.
    while pair.peer.health is not Health.HEALTHY:
        await trio.lowlevel.checkpoint()
    await pair.peer.read(b"k", 1, memoryview(target), PATIENCE_S)
    assert target == b"content"
    assert pair.door.blocks[b"k"].leases == 0
    assert pair.peer.counters.missed == 1


async def test_a_store_that_never_answers_costs_a_few_deadlines_and_then_nothing(
    pair: Lab,
) -> None:
    pair.door.put(b"k", b"content")
    pair.door.gate = trio.Event()
    while pair.peer.health is not Health.SLOW:
        if pair.peer.health is Health.HEALTHY:
            with pytest.raises(DeadlineExceeded):
                await pair.peer.read(b"k", 1, memoryview(bytearray(7)), 0.02)
        await trio.lowlevel.checkpoint()
    assert pair.peer.counters.missed == 3
    pair.door.gate.set()


async def test_a_key_or_attributes_that_do_not_travel_are_refused_here(pair: Lab) -> None:
    with pytest.raises(BadValue):
        await pair.peer.lookup([b"../etc/passwd"], PATIENCE_S)
    await pair.peer.stats(PATIENCE_S)
    assert pair.peer.counters.connected == 1


async def test_who_says_nothing_is_hung_up_on() -> None:
    quiet = Timing(dial_s=0.3)
    async with lab(timing=quiet) as pair:
        await pair.peer.stats(PATIENCE_S)
        link = trio.socket.socket()
        await link.connect(pair.listener.address)
        assert await link.recv(10) == b""  # it said nothing, and the other side hung up
        link.close()
        assert pair.server.counters.strangers == 1
        assert pair.server.peers == {b"one"}


async def test_a_peer_that_was_heard_of_and_then_fell_silent_is_avoided_soon_after_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = Timing(beat_s=60, beat_deadline_s=60, silence_s=200, idle_s=200, doubt_s=0.01)
    async with lab(timing=calm) as it:
        it.door.put(b"k", b"content")
        it.door.gate = trio.Event()

        async def read() -> None:
            with pytest.raises(DeadlineExceeded):
                await it.peer.read(b"k", 1, memoryview(bytearray(7)), 0.2)

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await it.door.waiting.wait()
                await it.peer.stats(PATIENCE_S)
                heard_s = trio.current_time()
                monkeypatch.setattr(Session, "beat", never)
                monkeypatch.setattr(Session, "heard_s", heard_s)
            while it.peer.health is Health.HEALTHY:  # noqa: ASYNC110
                await trio.sleep(0.001)


async def never(session: Session) -> None:
    """No heartbeat is answered."""
    await trio.sleep_forever()
