"""The membership service, against a real etcd and without one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ctxfs.addresses import parse_member, preferred_slot
from ctxfs.core.members import Membership, MemberState
from ctxfs.device.etcd import Etcd, EtcdSettings
from ctxfs.device.etcd_values import encoded
from ctxfs.device.etcd_watch import Watch
from ctxfs.errors import ConfigError
from ctxfs.settings import ClusterConfig
from ctxfs.units import SECOND_NS
from mountd import memberfile
from mountd.membership import MembershipService
from tests.etcd_server import EtcdServer

WALL_NS = 1_796_000_000 * SECOND_NS
Start = Callable[..., AbstractAsyncContextManager[MembershipService]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def start(server: EtcdServer, tmp_path: Path) -> Start:
    """`async with start("n1") as service`: a member of this test's cluster, with its own state."""

    @asynccontextmanager
    async def started(
        name: str, directory: str = "", **settings: Any
    ) -> AsyncIterator[MembershipService]:
        given: dict[str, Any] = {"etcd": (server.endpoint,), "id": f"{tmp_path.name:.60}.x"}
        given |= {"lease_ns": SECOND_NS, "etcd_deadline_ns": 10 * SECOND_NS}
        cluster = ClusterConfig(name=name, **(given | settings))
        state = tmp_path / (directory or name)
        state.mkdir(exist_ok=True)
        service = MembershipService(cluster, state, weight_bytes=100, wall_ns=lambda: WALL_NS)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            yield service
            nursery.cancel_scope.cancel()

    return started


async def until(
    service: MembershipService, holds: Callable[[dict[str, MemberState]], bool]
) -> Membership:
    """The first snapshot for which this holds of the states by name."""
    membership = service.membership
    while not holds({each.name: each.state for each in membership}):
        membership = await service.wait_newer(membership.epoch)
    return membership


async def is_reachable(service: MembershipService, wanted: bool) -> dict[str, Any]:
    """What is said of the source, once it can be reached, or cannot."""
    while True:
        source: dict[str, Any] = service.as_dict()["source"]
        if source["reachable"] is wanted:
            return source
        await service.view.wait_changed()


def names(membership: Membership) -> list[str]:
    return [member.name for member in membership]


async def test_members_find_each_other_and_agree(start: Start) -> None:
    async with start("n1", zone="a") as one, start("n2", zone="b", weight_bytes=7) as two:
        here = await until(one, lambda states: len(states) == 2)
        there = await until(two, lambda states: len(states) == 2)
        assert here == there
        assert here.fingerprint == there.fingerprint
        told = here.get("n2")
        assert told is not None
        assert (told.zone, told.weight, told.address) == ("b", 7, "n2:7440")
        assert one.me.slot != two.me.slot
        assert one.view.slot_claimed


async def test_who_ends_is_missed_at_once_and_gone_after_the_wait(start: Start) -> None:
    # A lease of an hour: it is not what tells.
    async with start("n1", absent_wait_ns=SECOND_NS // 5) as one:
        async with start("n2", lease_ns=3600 * SECOND_NS):
            await until(one, lambda states: len(states) == 2)
        await until(one, lambda states: states.get("n2") is not MemberState.LIVE)
        assert names(await until(one, lambda states: len(states) == 1)) == ["n1"]


async def test_who_dies_is_missed_when_its_lease_ends(start: Start) -> None:
    async with start("n1") as one:
        async with start("n2") as two:
            await until(one, lambda states: len(states) == 2)
            assert two._etcd is not None
            two._etcd._lease = 0  # it will not say goodbye
        await until(one, lambda states: states["n2"] is MemberState.SUSPECT)
        assert one.view.members_as_list()[1]["away_s"] >= 0


async def test_a_restart_keeps_slot_and_instance_and_is_a_new_incarnation(start: Start) -> None:
    async with start("n1") as one:
        async with start("n2"):
            first = (await until(one, lambda states: len(states) == 2)).get("n2")
        async with start("n2"):
            second = (
                await until(one, lambda states: one.membership.get("n2") not in (None, first)
                            and states["n2"] is MemberState.LIVE)
            ).get("n2")  # fmt: skip
    assert first is not None
    assert second is not None
    assert (second.slot, second.instance) == (first.slot, first.instance)
    assert second.incarnation > first.incarnation


async def test_a_registration_of_an_earlier_life_is_replaced(start: Start) -> None:
    async with start("n1", lease_ns=3600 * SECOND_NS) as first:
        assert first._etcd is not None
        first._etcd._lease = 0
    async with start("n1") as second:
        assert (await is_reachable(second, True))["why"] is None


async def test_a_slot_that_another_has_is_passed_over(start: Start, server: EtcdServer) -> None:
    wanted = preferred_slot("n1")
    async with start("n0") as other, Etcd(EtcdSettings(endpoints=(server.endpoint,))) as etcd:
        assert other._etcd is not None
        await etcd.put(other._etcd._slot_key(wanted), b'{"name":"x","instance":"x"}')
        await etcd.put(other._etcd._slot_key((wanted + 1) % 1024), b"rubbish")
        async with start("n1") as one:
            assert one.me.slot == (wanted + 2) % 1024
            assert (await until(other, lambda states: "n1" in states)).get("n1") == one.me


async def test_a_member_that_lost_its_state_gets_another_slot(start: Start, tmp_path: Path) -> None:
    async with start("n1") as first:
        slot, instance = first.me.slot, first.me.instance
    (tmp_path / "n1" / memberfile.LIST_FILE).unlink()
    async with start("n1") as second:
        assert second.me.instance != instance
        assert second.me.slot != slot


async def test_when_all_slots_are_taken_one_whose_owner_is_gone_is_taken_over(
    start: Start, server: EtcdServer
) -> None:
    async with start("n0") as other, Etcd(EtcdSettings(endpoints=(server.endpoint,))) as etcd:
        assert other._etcd is not None
        puts = [
            {
                "request_put": {
                    "key": encoded(other._etcd._slot_key(number)),
                    "value": encoded(b"{}"),
                }
            }
            for number in range(1024)
            if number != other.me.slot
        ]
        for at in range(0, len(puts), 100):
            await etcd.call("kv/txn", {"success": puts[at : at + 100]})
        async with start("n1") as one:
            assert one.view.slot_claimed
            assert one.me.slot != other.me.slot


async def test_two_daemons_of_one_name_are_told_and_the_first_stays(
    start: Start,
) -> None:
    async with start("n1") as first:
        async with start("n1", "elsewhere", etcd_deadline_ns=SECOND_NS // 10) as second:
            source = await is_reachable(second, False)
            assert "another member is called n1" in source["why"]
        assert names(first.membership) == ["n1"]
        assert (await is_reachable(first, True))["why"] is None


async def test_a_key_of_ours_that_somebody_deletes_is_made_again(
    start: Start, server: EtcdServer
) -> None:
    async with start("n1", lease_ns=3600 * SECOND_NS) as one:
        assert one._etcd is not None
        key = one._etcd._own_key
        async with Etcd(EtcdSettings(endpoints=(server.endpoint,))) as etcd:
            found = await etcd.list(key)
            await etcd.delete(key)
            async with Watch(etcd, key, found.revision + 1) as watch:
                changes = list(await watch.next())
                while changes[-1].value is None:
                    changes += await watch.next()
    assert changes[0].value is None
    assert changes[-1].value == one.me.to_record()


async def test_rubbish_among_the_members_is_passed_over(
    start: Start, server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with start("n1") as one, Etcd(EtcdSettings(endpoints=(server.endpoint,))) as etcd:
        assert one._etcd is not None
        await etcd.put(one._etcd._members + b"odd", b"{}")
        await etcd.put(one._etcd._members + b"odder", one.me.to_record())
        async with start("n2"):
            assert names(await until(one, lambda states: len(states) == 2)) == ["n1", "n2"]
    assert "is no member" in caplog.text


async def test_after_a_compaction_the_list_is_read_again(
    start: Start, server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def late(etcd: Etcd, prefix: bytes, revision: int) -> Watch:
        """A watch; the first one begins at a revision that is compacted away."""
        begun.append(revision)
        return Watch(etcd, prefix, revision if len(begun) > 1 else 1)

    async with Etcd(EtcdSettings(endpoints=(server.endpoint,))) as etcd:
        await etcd.put(b"/other", b"1")
        await etcd.put(b"/other", b"2")
        revision = (await etcd.list(b"/other")).revision
        await etcd.call("kv/compaction", {"revision": str(revision)})
    monkeypatch.setattr("mountd.members_etcd.Watch", late)
    async with start("n1") as one, start("n2"):
        await until(one, lambda states: len(states) == 2)
    assert len(begun) >= 3


async def test_while_etcd_is_away_the_last_known_members_stay(start: Start, tmp_path: Path) -> None:
    base = tmp_path / "own-etcd"
    base.mkdir()
    with EtcdServer(base) as server:
        here = {"etcd": (server.endpoint,), "lease_ns": 2 * SECOND_NS}
        async with start("n1", **here) as one:
            async with start("n2", **here) as two:
                await until(one, lambda states: len(states) == 2)
                known = await until(two, lambda states: len(states) == 2)
                server.stop()
                source = await is_reachable(one, False)
                assert "Connection refused" in source["why"]
                assert source["since"] == "2026-11-30T00:53:20.000Z"
                assert one.membership == known
                # One that is started meanwhile knows them too, and its slot.
            async with start("n2", **here, etcd_deadline_ns=SECOND_NS // 10) as again:
                await is_reachable(again, False)
                assert names(again.membership) == ["n1", "n2"]
                assert again.view.slot_claimed
                assert again.me.slot == two.me.slot
                server.start()
                await is_reachable(again, True)
                await is_reachable(one, True)
                await until(one, lambda states: states["n2"] is MemberState.LIVE)
                told = json.loads(again.as_json())
                assert [each["state"] for each in told["members"]] == ["live", "live"]


# ---- without etcd


LIST = tuple(map(parse_member, ("n1=h1:1,zone=a,slot=3", "n2=h2:1,zone=b,weight=5KiB")))


def plain(tmp_path: Path, **settings: Any) -> MembershipService:
    cluster = ClusterConfig(id="c", **settings)
    return MembershipService(cluster, tmp_path, weight_bytes=100, wall_ns=lambda: WALL_NS)


async def test_a_fixed_list_is_who_there_is(tmp_path: Path) -> None:
    service = plain(tmp_path, name="n1", members=LIST)
    assert [(m.name, m.slot, m.zone, m.weight) for m in service.membership] == [
        ("n1", 3, "a", 1),
        ("n2", preferred_slot("n2"), "b", 5 << 10),
    ]
    assert service.me.slot == 3
    told = json.loads(service.as_json())
    assert told["source"] == {
        "kind": "list", "endpoints": [], "reachable": None, "since": None, "why": None
    }  # fmt: skip
    assert told["members"][0]["self"] is True


async def test_of_a_fixed_list_who_is_doubted_is_suspect_then_gone_or_back(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    service = plain(tmp_path, name="n1", members=LIST)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        service.doubt("n1")
        service.doubt("n2")
        assert [each.state.value for each in service.membership] == ["live", "suspect"]
        service.vouch("n2")
        assert [each.state.value for each in service.membership] == ["live", "live"]
        service.doubt("n2")
        await until(service, lambda states: len(states) == 1)
        nursery.cancel_scope.cancel()


async def test_a_daemon_without_list_and_etcd_is_alone(tmp_path: Path) -> None:
    service = plain(tmp_path, name="n1")
    assert names(service.membership) == ["n1"]
    assert service.as_dict()["source"]["kind"] == "none"


def test_a_host_that_is_not_in_the_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not among them"):
        plain(tmp_path, name="n3", members=LIST)


def test_each_start_is_a_new_incarnation_also_when_the_clock_was_set_back(tmp_path: Path) -> None:
    first, second = plain(tmp_path, name="n1"), plain(tmp_path, name="n1")
    assert first.me.instance == second.me.instance
    assert second.me.incarnation == first.me.incarnation + 1


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"cluster":"c","members":3}'])
def test_what_was_written_down_and_is_damaged_begins_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / memberfile.LIST_FILE).write_bytes(content)
    assert names(plain(tmp_path, name="n1").membership) == ["n1"]


def test_members_of_another_cluster_are_not_taken_over(tmp_path: Path) -> None:
    saved = memberfile.read(tmp_path, "c")
    memberfile.write(tmp_path, "c", saved)
    assert memberfile.read(tmp_path, "c") == saved
    assert memberfile.read(tmp_path, "d").instance != saved.instance
