"""Fetching from and pushing to other members, and telling them what is gone, over real sockets."""

import os
from dataclasses import replace

import pytest
import trio

from ctxfs.codec.digest import digest
from ctxfs.device.links import FileSpan
from ctxfs.errors import (
    BlockGone,
    BlockNotFound,
    DeadlineExceeded,
    PeerRefused,
    PeerUnreachable,
)
from ctxfs.wire.limits import BATCH_MAX
from ctxfs.wire.messages import Durability, Gone, GoneKey, Offer, Reason, Refused, Stored
from tests.device.peering import ATTRIBUTES, PATIENCE_S, content_of, memory_file
from tests.tiers.remote_rig import PATIENT, Cluster, cluster

SIZE = 2_000_000
SHORT = replace(PATIENT, deadline_s=0.5, hedge_s=0.1)  # deadlines that are to be missed
EVER_BUSY = replace(SHORT, deadline_s=0.2, busy_pause_s=0.02)


def put(lab: Cluster, key: bytes, *names: str) -> bytes:
    """The same block on these."""
    content = content_of(SIZE)
    for name in names:
        lab.door(name).put(key, content)
    return content


async def test_a_block_is_fetched_from_a_holder_byte_for_byte() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        content = put(lab, key, "a", "b")
        target = bytearray(SIZE)
        assert await lab.tier.fetch(key, 1, ("b",), memoryview(target)) == "b"
        assert target == content
        counters = lab.tier.counters
        assert (counters.fetched, counters.fetched_bytes, counters.failed_over) == (1, SIZE, 0)
        assert lab.door("a").reads == []


async def test_the_least_loaded_holder_is_read_from() -> None:
    async with cluster("a", "b", "c") as lab:
        for name, load in (("a", 200), ("b", 30), ("c", 100)):
            lab.door(name).load = load
            await lab.peers[name].stats(PATIENCE_S)
        key = lab.key("a", "b", "c")
        put(lab, key, "a", "b", "c")
        target = memoryview(bytearray(SIZE))
        assert await lab.tier.fetch(key, 1, ("a", "b", "c"), target) == "b"


async def test_of_holders_alike_the_one_in_our_zone_and_then_the_one_with_less_under_way() -> None:
    async with cluster("a", "b", "c", zones="xyyy") as lab:
        key = lab.key("a", "b", "c")
        put(lab, key, "a", "b", "c")
        every = ("a", "b", "c")
        lab.road("b").close()
        target = memoryview(bytearray(SIZE))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lab.tier.fetch, key, 1, every, memoryview(bytearray(SIZE)))
            await lab.until(lambda: lab.tier.statistics()[1].in_flight_bytes == SIZE)
            assert await lab.tier.fetch(key, 1, every, target) == "c"
            lab.road("b").open()
        assert lab.door("a").reads == []


@pytest.mark.parametrize("is_told", [True, False], ids=["cut", "silent"])
async def test_another_holder_gives_what_one_that_died_in_the_middle_did_not(
    is_told: bool,
) -> None:
    async with cluster("a", "b", settings=replace(PATIENT, deadline_s=1.0, hedge_s=0.5)) as lab:
        key = lab.key("a", "b")
        content = put(lab, key, "a", "b")
        lab.road("a").close_after(SIZE // 2)
        target = bytearray(SIZE)
        givers: list[str] = []

        async def fetch() -> None:
            givers.append(await lab.tier.fetch(key, 1, ("a", "b"), memoryview(target)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            await lab.road("a").closed.wait()
            if is_told:
                lab.road("a").cut()
        assert givers == ["b"]
        assert target == content
        assert (lab.tier.counters.failed_over, lab.tier.counters.trouble) == (1, 1)
        assert lab.peers["a"].counters.missed == (not is_told)


async def test_a_member_that_leaves_in_the_middle_is_given_up_at_once() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        content = put(lab, key, "a", "b")
        lab.road("a").close_after(SIZE // 2)
        target = bytearray(SIZE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lab.tier.fetch, key, 1, ("a", "b"), memoryview(target))
            await lab.road("a").closed.wait()
            lab.set_members("b")
        assert target == content
        assert lab.peers["a"].counters.missed == 0
        assert lab.tier.counters.failed_over == 1


async def test_members_that_come_and_go_disturb_no_fetch() -> None:
    async with cluster("a", "b") as lab:
        blocks = {lab.key("a", "b"): content_of(50_000 + n, seed=n << 32) for n in range(100)}
        got: dict[bytes, bytes] = {}

        async def find_and_fetch(key: bytes) -> None:
            found = await lab.tier.find(key)
            assert found is not None
            target = bytearray(found.size)
            await lab.tier.fetch(key, found.version, found.holders, memoryview(target))
            got[key] = bytes(target)

        for key, content in blocks.items():
            for name in ("a", "b"):
                lab.door(name).put(key, content)
        async with trio.open_nursery() as nursery:
            for number, key in enumerate(blocks):
                nursery.start_soon(find_and_fetch, key)
                if number % 10 == 5:
                    await lab.until(lambda: len(got) > 0)
                    lab.set_members("b")
                elif number % 10 == 0:
                    lab.set_members("a", "b")
        assert got == blocks


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
async def test_nothing_is_written_after_a_fetch_that_was_given_up(how: str) -> None:
    settings = PATIENT if how == "cancelled" else SHORT
    async with cluster("a", settings=settings) as lab:
        key = lab.key("a")
        put(lab, key, "a")
        lab.road("a").close_after(SIZE // 2)
        target = bytearray(SIZE)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def fetch() -> None:
                    with pytest.raises(DeadlineExceeded):
                        await lab.tier.fetch(key, 1, ("a",), memoryview(target))

                nursery.start_soon(fetch)
                await lab.road("a").closed.wait()
                if how == "cancelled":
                    scope.cancel()
        assert any(target)
        target[:] = bytes(SIZE)
        before = lab.peers["a"].counters.traffic.spilled_bytes
        lab.road("a").open()
        # The rest comes, and is for nobody.
        await lab.until(lambda: lab.peers["a"].counters.traffic.spilled_bytes > before)
        await lab.until(lambda: lab.door("a").blocks[key].leases == 0)
        await lab.peers["a"].wait_healthy()
        assert not any(target)


async def test_a_busy_holder_sends_readers_to_another_one() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        put(lab, key, "a", "b")
        lab.door("a").busy_reads = 1
        target = memoryview(bytearray(SIZE))
        for _ in range(2):  # the next reader does not even try
            assert await lab.tier.fetch(key, 1, ("a", "b"), target) == "b"
        assert (lab.door("a").reads, lab.tier.counters.busy) == ([key], 1)


async def test_holders_that_are_all_busy_are_asked_again() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        content = put(lab, key, "a", "b")
        lab.door("a").busy_reads, lab.door("b").busy_reads = 99, 3
        target = bytearray(SIZE)
        assert await lab.tier.fetch(key, 1, ("a", "b"), memoryview(target)) == "b"
        assert target == content


async def test_holders_that_stay_busy_are_given_up() -> None:
    async with cluster("a", settings=EVER_BUSY) as lab:
        key = lab.key("a")
        put(lab, key, "a")
        lab.door("a").busy_reads = 1000
        with pytest.raises(DeadlineExceeded, match="busy"):
            await lab.tier.fetch(key, 1, ("a",), memoryview(bytearray(SIZE)))


async def test_who_gave_wrong_bytes_is_not_asked_again_and_the_next_is() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        lab.door("a").put(key, b"wrong")
        lab.door("b").put(key, b"right")
        target = bytearray(5)
        assert await lab.tier.fetch(key, 1, ("a",), memoryview(target)) == "a"
        lab.tier.lied("a")
        assert await lab.tier.fetch(key, 1, ("a",), memoryview(target), but=("a",)) == "b"
        assert target == b"right"
        assert [each.corrupt for each in lab.tier.statistics()] == [1, 0]
        with pytest.raises(BlockNotFound):
            await lab.tier.fetch(key, 1, ("a",), memoryview(target), but=("a", "b"))
        assert lab.tier.counters.corrupt == 1


async def test_a_block_that_nobody_has_any_more_is_not_found() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        lab.door("b").put(key, b"newer", version=2)
        target = memoryview(bytearray(5))
        with pytest.raises(BlockNotFound) as missed:
            await lab.tier.fetch(key, 1, ("a",), target)
        assert not isinstance(missed.value, BlockGone)
        assert lab.door("b").reads == [key]


async def test_a_block_that_was_deleted_is_not_taken_from_who_has_not_heard_of_it() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        lab.door("a").delete(key, 1)
        lab.door("b").put(key, b"stale", version=1)
        with pytest.raises(BlockGone):
            await lab.tier.fetch(key, 1, ("a", "b"), memoryview(bytearray(5)))
        assert lab.door("b").reads == []
        assert lab.tier.removed(key) == Gone(1, 9)
        later = lab.key("a", "b")
        lab.door("a").delete(later, 1)
        lab.door("b").put(later, b"alive", version=2)
        assert await lab.tier.fetch(later, 2, ("a",), memoryview(bytearray(5))) == "b"


async def test_trouble_is_told_apart_from_a_miss() -> None:
    async with cluster("a", "b", settings=SHORT) as lab:
        key = lab.key("a", "b")
        target = memoryview(bytearray(5))
        lab.road("a").close()
        with pytest.raises(DeadlineExceeded):
            await lab.tier.fetch(key, 1, ("a",), target)
        await lab.until(lambda: lab.is_broken("a"))
        with pytest.raises(PeerUnreachable):
            await lab.tier.fetch(key, 1, ("a",), target)
        with pytest.raises(PeerUnreachable):
            await lab.tier.fetch(key, 1, ("stranger",), target, but=("a", "b"))
        assert lab.peers["a"].counters.missed == 1


def offer(key: bytes, content: bytes, version: int = 1) -> Offer:
    return Offer(key, version, len(content), digest(content), ATTRIBUTES, 0)


async def test_a_block_is_pushed_where_it_is_not_and_counted() -> None:
    async with cluster("a", "b") as lab:
        key, content = lab.key("a", "b"), content_of(SIZE)
        fd = memory_file(content)
        span = FileSpan(fd, 0, SIZE)
        for name in lab.tier.homes(key):
            said = await lab.tier.push(name, offer(key, content), span)
            assert said == Stored(Durability.MEDIUM)
            assert os.pread(lab.door(name).blocks[key].fd, SIZE, 0) == content
        again = await lab.tier.push("a", offer(key, content), span)
        assert isinstance(again, Refused)
        assert (again.reason, again.version) == (Reason.HAVE, 1)
        counters = lab.tier.counters
        assert (counters.pushed, counters.pushed_bytes, counters.refused) == (2, 2 * SIZE, 1)
        assert [each.sent_bytes for each in lab.tier.statistics()] == [SIZE, SIZE]
        os.close(fd)


async def test_a_push_fails_with_what_is_wrong_with_the_member() -> None:
    async with cluster("a", "b") as lab:
        key, content = lab.key("a", "b"), content_of(SIZE)
        fd = memory_file(content)
        span = FileSpan(fd, 0, SIZE)
        with pytest.raises(PeerUnreachable, match="not a member"):
            await lab.tier.push("stranger", offer(key, content), span)
        with pytest.raises(PeerRefused, match="digest"):
            await lab.tier.push("a", replace(offer(key, content), digest=bytes(16)), span)
        lab.road("a").close()
        async with trio.open_nursery() as nursery:

            async def push() -> None:
                with pytest.raises(PeerUnreachable, match="not a member"):
                    await lab.tier.push("a", offer(key, content), span)

            nursery.start_soon(push)
            await lab.until(lambda: lab.tier.statistics()[0].in_flight_bytes == SIZE)
            lab.set_members("b")
        os.close(fd)


async def test_all_members_are_told_what_is_gone_and_who_was_not_is_named() -> None:
    async with cluster("a", "b", "c", settings=replace(SHORT, tell_at_once=2)) as lab:
        entries = [GoneKey(b"k%d" % number, number, 9) for number in range(BATCH_MAX + 1)]
        lab.road("b").close()
        assert await lab.tier.tell_gone(entries) == ("b",)
        for name in ("a", "c"):
            assert len(lab.door(name).gone) == len(entries)
        assert (lab.tier.counters.told, lab.tier.counters.untold) == (2, 1)


async def test_long_names_are_told_in_as_many_requests_as_it_takes() -> None:
    async with cluster("a") as lab:
        path = b"/x" * 2000
        entries = [GoneKey(b"%d" % number + path, number, 9) for number in range(300)]
        assert await lab.tier.tell_gone(entries) == ()
        assert len(lab.door("a").gone) == 300


async def test_there_is_something_to_tell_of_each_other_member() -> None:
    async with cluster("b", "a", zones="yxx") as lab:
        key = lab.key("a", "b")
        put(lab, key, "a")
        await lab.tier.fetch(key, 1, ("a",), memoryview(bytearray(SIZE)))
        await lab.peers["a"].stats(PATIENCE_S)
        here, there = lab.tier.statistics()
        assert (here.name, here.zone, here.state, here.health) == ("a", "x", "live", "healthy")
        assert (here.received_bytes, here.in_flight_bytes, here.blocks) == (SIZE, 0, 1)
        assert (here.free_bytes, here.capacity_bytes, here.trouble) == (50, 100, None)
        assert here.address == lab.hosts["a"].member().address
        assert here.round_trip_s is not None
        assert (there.name, there.received_bytes, there.ill_for_s) == ("b", 0, 0.0)
