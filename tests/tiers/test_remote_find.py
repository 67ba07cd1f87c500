"""Looking for keys among other members, over real sockets."""

from dataclasses import replace

import pytest
import trio

from ctxfs.codec.digest import digest
from ctxfs.tiers.remote_facts import Found, RemoteSettings
from ctxfs.tiers.remote_missing import MissingKeys
from ctxfs.wire.limits import BATCH_MAX
from ctxfs.wire.messages import Gone
from tests.device.peering import ATTRIBUTES, PATIENCE_S
from tests.tiers.remote_rig import PATIENT, Cluster, cluster

FORGETS_NOTHING = replace(PATIENT, negative_s=1e6)
HEDGING = replace(PATIENT, hedge_s=0.01)
SHORT = replace(PATIENT, deadline_s=0.5, hedge_s=0.4)  # deadlines that are to be missed


async def check_found(lab: Cluster, key: bytes, *holders: str) -> None:
    found = await lab.tier.find(key)
    assert found is not None
    assert found.holders == holders


async def test_a_block_is_found_at_its_home_with_all_that_is_said_of_it() -> None:
    async with cluster("a", "b", "c") as lab:
        key = lab.key("a", "b", "c")
        lab.door("a").put(key, b"content", version=5)
        assert lab.tier.homes(key) == ("a", "b")
        assert not lab.tier.is_home(key)
        assert await lab.tier.find(key) == Found(
            version=5,
            size=7,
            digest=digest(b"content"),
            attributes=ATTRIBUTES,
            holders=("a",),
        )
        assert lab.door("b").lookups == lab.door("c").lookups == []
        assert (lab.tier.counters.lookups, lab.tier.counters.found) == (1, 1)


async def test_what_lies_on_the_next_in_rank_is_found_there() -> None:
    async with cluster("a", "b", "c", "d") as lab:
        key = lab.key("a", "b", "c", "d")
        lab.door("c").put(key, b"content")
        lab.door("d").put(key, b"content")
        await check_found(lab, key, "c")
        assert lab.door("d").lookups == []


async def test_a_key_that_nobody_has_is_asked_for_once() -> None:
    async with cluster("a", "b", settings=FORGETS_NOTHING) as lab:
        key = lab.key("a", "b")
        for _ in range(3):
            assert await lab.tier.find(key) is None
        assert lab.door("a").lookups == lab.door("b").lookups == [[key]]
        assert (lab.tier.counters.missed, lab.tier.counters.remembered) == (1, 2)


async def test_a_key_that_nobody_had_is_asked_for_again_when_that_is_forgotten() -> None:
    async with cluster("a", "b", settings=replace(PATIENT, negative_s=0.05)) as lab:
        key = lab.key("a", "b")
        assert await lab.tier.find(key) is None
        lab.door("b").put(key, b"content")
        await lab.until(lambda: not lab.tier.is_missing(key))
        await check_found(lab, key, "b")


async def test_a_key_that_came_is_asked_for_at_once() -> None:
    async with cluster("a", settings=FORGETS_NOTHING) as lab:
        key = lab.key("a")
        assert await lab.tier.find(key) is None
        lab.door("a").put(key, b"content")
        assert await lab.tier.find(key) is None
        assert lab.tier.counters.remembered == 1
        lab.tier.came(key)
        await check_found(lab, key, "a")


async def test_a_miss_is_not_remembered_if_the_key_came_while_it_was_asked_for() -> None:
    async with cluster("a") as lab:
        key = lab.key("a")
        lab.road("a").close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lab.tier.find, key)
            await lab.until(lambda: lab.tier.counters.lookups == 1)
            lab.tier.came(key)
            lab.road("a").open()
        assert lab.tier.counters.missed == 1
        assert not lab.tier.is_missing(key)


async def test_one_question_is_asked_however_many_want_to_know() -> None:
    async with cluster("a") as lab:
        key = lab.key("a")
        lab.door("a").put(key, b"content")
        lab.road("a").close()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(check_found, lab, key, "a")
            await lab.until(lambda: lab.tier.counters.shared == 19)
            lab.road("a").open()
        assert lab.door("a").lookups == [[key]]


async def test_who_waits_for_the_same_question_gets_its_answer_when_the_first_gives_up() -> None:
    async with cluster("a") as lab:
        key = lab.key("a")
        lab.door("a").put(key, b"content")
        lab.road("a").close()
        async with trio.open_nursery() as nursery:
            first = trio.CancelScope()

            async def give_up() -> None:
                with first:
                    await lab.tier.find(key)

            nursery.start_soon(give_up)
            await lab.until(lambda: lab.tier.counters.lookups == 1)
            nursery.start_soon(check_found, lab, key, "a")
            await lab.until(lambda: lab.tier.counters.shared == 1)
            first.cancel()
            lab.road("a").open()
        assert lab.door("a").lookups == [[key]]


async def test_what_is_asked_while_a_question_is_under_way_goes_together() -> None:
    async with cluster("a") as lab:
        keys = [lab.key("a") for _ in range(51)]
        lab.road("a").close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lab.tier.find, keys[0])
            await lab.until(lambda: lab.peers["a"].counters.requests == 2)
            for key in keys[1:]:
                nursery.start_soon(lab.tier.find, key)
            await lab.until(lambda: lab.tier.counters.lookups == 51)
            lab.road("a").open()
        assert [len(each) for each in lab.door("a").lookups] == [1, 50]
        assert sorted(key for each in lab.door("a").lookups for key in each) == sorted(keys)


@pytest.mark.parametrize(("count", "length"), [(BATCH_MAX + 1, 20), (300, 4000)])
async def test_more_keys_than_a_request_holds_are_asked_for_in_several(
    count: int, length: int
) -> None:
    async with cluster("a") as lab:
        path = b"/x" * (length // 2)
        keys = [b"%d" % number + path for number in range(count)]
        lab.door("a").put(keys[-1], b"content")
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(lab.tier.find, key)
        assert len(lab.door("a").lookups) > 1
        assert lab.tier.counters.trouble == 0
        assert (lab.tier.counters.found, lab.tier.counters.missed) == (1, count - 1)


async def test_a_key_that_cannot_travel_is_nobodys_and_spoils_nothing() -> None:
    async with cluster("a") as lab:
        for key in (b"x" * 256, b"../x", b"/".join([b"x" * 255] * 20)):
            assert await lab.tier.find(key) is None
        assert lab.door("a").lookups == []


async def test_the_next_home_is_asked_when_the_first_takes_its_time() -> None:
    async with cluster("a", "b", settings=HEDGING) as lab:
        key = lab.key("a", "b")
        lab.door("b").put(key, b"content")
        lab.road("a").close()
        await check_found(lab, key, "b")
        assert lab.tier.counters.hedged >= 1
        # The first one's answer comes late, and harms nobody.
        lab.road("a").open()
        await lab.until(lambda: lab.door("a").lookups == [[key]])
        await lab.peers["a"].stats(PATIENCE_S)


async def test_when_the_first_home_has_it_not_all_others_are_asked_at_once() -> None:
    async with cluster("a", "b", "c") as lab:
        key = lab.key("a", "b", "c")
        lab.door("c").put(key, b"content")
        lab.road("b").close()
        await check_found(lab, key, "c")
        assert lab.tier.counters.hedged == 0


async def test_one_dead_peer_costs_one_deadline_and_then_nothing() -> None:
    async with cluster("a", "b", settings=SHORT) as lab:
        lab.road("a").close()
        keys = [lab.key("a", "b") for _ in range(50)]
        for key in keys:
            lab.door("b").put(key, b"content")
        await lab.tier.find(keys[0])
        await lab.until(lambda: lab.is_broken("a"))
        trouble = lab.tier.counters.trouble
        for key in keys:
            await check_found(lab, key, "b")
        assert lab.peers["a"].counters.missed == 1
        assert lab.tier.counters.trouble == trouble  # it is not even asked: it comes last
        # A miss needs its word, and gets its silence at once.
        missed = [lab.key("a", "b") for _ in range(50)]
        for key in missed:
            assert await lab.tier.find(key) is None
        assert lab.peers["a"].counters.missed == 1
        assert not lab.tier.is_missing(missed[0])


async def test_a_peer_that_comes_back_is_asked_again() -> None:
    async with cluster("a", settings=SHORT) as lab:
        key = lab.key("a")
        lab.door("a").put(key, b"content")
        lab.road("a").close()
        assert await lab.tier.find(key) is None
        await lab.until(lambda: lab.is_broken("a"))
        lab.road("a").open()
        lab.road("a").cut()
        await lab.peers["a"].wait_healthy()
        found = None
        while found is None:  # as often as it takes on a busy machine
            found = await lab.tier.find(key)
        assert found.holders == ("a",)


async def test_a_deletion_beats_what_another_member_still_has() -> None:
    async with cluster("a", "b") as lab:
        old, new = lab.key("a", "b"), lab.key("a", "b")
        for key in (old, new):
            lab.door("a").delete(key, 5)
        lab.door("b").put(old, b"stale", version=5)
        lab.door("b").put(new, b"content", version=6)
        assert await lab.tier.find(old) is None
        assert lab.tier.is_missing(old)
        assert lab.tier.removed(old) == Gone(5, 9)
        assert lab.tier.removed(b"other") is None
        await check_found(lab, new, "b")


async def test_a_holder_under_load_makes_others_be_asked_and_read_from() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        lab.door("a").load = 250
        for name in ("a", "b"):
            lab.door(name).put(key, b"content")
        await check_found(lab, key, "b", "a")
        alone = lab.key("a", "b")
        lab.door("a").put(alone, b"content")
        await check_found(lab, alone, "a")


async def test_a_holder_under_load_is_taken_when_nobody_else_speaks_in_time() -> None:
    async with cluster("a", "b", settings=HEDGING) as lab:
        key = lab.key("a", "b")
        lab.door("a").load = 250
        lab.door("a").put(key, b"content")
        lab.road("b").close()
        await check_found(lab, key, "a")


async def test_of_two_versions_the_newer_one_is_taken_where_both_are_known() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        lab.door("a").load = lab.door("b").load = 250
        lab.door("a").put(key, b"older", version=1)
        lab.door("b").put(key, b"newer", version=2)
        await check_found(lab, key, "b")


async def test_a_home_in_our_zone_is_asked_first() -> None:
    async with cluster("a", "b", zones="xyy") as lab:
        key = lab.key("a", "b")
        for name in ("a", "b"):
            lab.door(name).put(key, b"content")
        await check_found(lab, key, "b")
        assert lab.door("a").lookups == []


async def test_a_member_that_leaves_while_it_is_asked_makes_room_for_the_next() -> None:
    async with cluster("a", "b") as lab:
        key = lab.key("a", "b")
        lab.door("b").put(key, b"content")
        lab.road("a").close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_found, lab, key, "b")
            await lab.until(lambda: lab.peers["a"].counters.requests == 2)
            lab.set_members("b")
        assert lab.peers["a"].counters.missed == 0
        lab.road("a").open()
        await lab.until(lambda: not lab.hosts["a"].server.peers)


async def test_a_member_that_joins_is_asked_and_what_was_missing_is_asked_for_again() -> None:
    async with cluster("a", "b", settings=FORGETS_NOTHING) as lab:
        lab.set_members("a")
        key = lab.key("b", "a")
        lab.door("b").put(key, b"content")
        assert await lab.tier.find(key) is None
        assert lab.tier.is_missing(key)
        lab.set_members("a", "b")
        await check_found(lab, key, "b")
        assert lab.peers["a"].counters.connected == 1


async def test_a_member_that_moved_is_asked_at_its_new_address() -> None:
    async with cluster("a") as lab:
        key = lab.key("a")
        lab.door("a").put(key, b"content")
        former = lab.peers["a"]
        lab.road("a").close()
        await lab.move("a")
        lab.set_members("a")
        await check_found(lab, key, "a")
        assert lab.peers["a"] is not former


async def test_nobody_has_anything_before_the_tier_runs() -> None:
    async with cluster("a", runs=False) as lab:
        key = lab.key("a")
        lab.door("a").put(key, b"content")
        assert await lab.tier.find(key) is None
        assert not lab.tier.is_missing(key)


async def test_who_waits_when_the_tier_ends_is_told_that_there_is_nothing() -> None:
    async with cluster("a", runs=False) as lab, trio.open_nursery() as outer:
        running = await outer.start(_run_within_a_scope, lab)
        await lab.connected()
        lab.road("a").close()
        outer.start_soon(lab.tier.find, lab.key("a"))
        await lab.until(lambda: lab.tier.counters.lookups == 1)
        running.cancel()


async def _run_within_a_scope(
    lab: Cluster, *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(lab.tier.run)
            task_status.started(scope)


def test_missing_keys_expire_and_are_bounded() -> None:
    missing = MissingKeys(keep_s=10, entries_max=3)
    for number in range(5):
        missing.add(b"%d" % number, Gone(number, 7), now_s=number)
    assert [number for number in range(5) if missing.is_missing(b"%d" % number, 5)] == [2, 3, 4]
    assert missing.gone(b"4", 5) == Gone(4, 7)
    assert not missing.is_missing(b"2", 12)
    missing.add(b"2", None, 12.5)  # again, with a deadline of its own
    assert (missing.is_missing(b"2", 22), missing.gone(b"2", 22)) == (True, None)
    missing.add(b"5", None, 30)
    assert len(missing) == 1


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="replicas"):
        RemoteSettings(replicas=0)
    with pytest.raises(ValueError, match="hedge_s"):
        RemoteSettings(hedge_s=2.0, deadline_s=1.0)
    with pytest.raises(ValueError, match="pace"):
        RemoteSettings(pace_bytes_per_s=0)


async def test_how_others_are_asked_may_change_while_they_are() -> None:
    async with cluster("a", "b", "c", settings=FORGETS_NOTHING) as lab:
        key = lab.key("a", "b", "c")
        assert await lab.tier.find(key) is None
        lab.tier.apply(replace(FORGETS_NOTHING, replicas=1))
        assert (lab.tier.homes(key), lab.tier.homes(key, 2)) == (("a",), ("a", "b"))
        assert not lab.tier.is_missing(key), "others may be asked now"
        lab.door("b").put(key, b"content")
        await check_found(lab, key, "b")
        assert len(lab.door("c").lookups) == 1, "it is not among the home and one more"
