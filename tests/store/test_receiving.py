"""Blocks that other hosts send, and what they are told of those that are here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import trio
import trio.testing

from ctxfs.codec.digest import EMPTY, digest
from ctxfs.core.block import Directory, State
from ctxfs.core.meta import PIN_FOREVER
from ctxfs.core.tombstones import Tombstone, Tombstones
from ctxfs.core.versions import VersionAhead
from ctxfs.errors import (
    BlockGone,
    BlockNotFound,
    CopyCorrupt,
    NotDirectory,
    NotPermitted,
    TierFull,
)
from ctxfs.store.arriving import Arriving
from ctxfs.store.elsewhere import PREFIXES, Elsewhere
from ctxfs.store.store import NewOwner
from ctxfs.wire.messages import (
    FOREVER_NS,
    Attributes,
    Durability,
    Gone,
    Have,
    Miss,
    Reason,
    Refused,
)
from tests.store.clustered import ATTRIBUTES, Clustered, arrive, clustered, offer_of
from tests.store.world import MIB, OWNER, SECOND_NS, World, get, put

CONTENT = os.urandom(300_000)


async def test_a_block_that_arrives_is_found_under_its_key_with_all_that_travels(
    world: World,
) -> None:
    async with clustered(world) as host:
        attributes = replace(ATTRIBUTES, ttl_ns=60 * SECOND_NS, pin_ns=FOREVER_NS, dtype=b"bf16")
        offer = offer_of(b"k", CONTENT, host.version(), attributes)
        assert await arrive(host, offer, CONTENT) is Durability.MEMORY
        assert await get(host.store, "k") == CONTENT
        block = host.block(b"k")
        assert (block.version, block.digest, block.state) == (
            offer.version,
            offer.digest,
            State.SEALED,
        )
        assert (block.mode, block.uid, block.gid, block.mtime_ns) == (0o640, 1, 2, 4)
        assert block.expires_ns == world.clock.boot_ns + 60 * SECOND_NS
        assert block.extras is not None
        assert block.extras.pin_until_ns == PIN_FOREVER
        assert (block.dtype, block.extras.attributes) == (b"bf16", {b"user.kind": b"kv"})
        assert host.store.catalog.block_count == 1
        assert host.receiver.counters.received_bytes == len(CONTENT)


async def test_an_empty_block_arrives(world: World) -> None:
    async with clustered(world) as host:
        await arrive(host, offer_of(b"k", b"", host.version()), b"")
        assert await get(host.store, "k") == b""


async def test_directories_on_the_way_are_made_for_those_who_may_read_the_block(
    world: World,
) -> None:
    async with clustered(world) as host:
        await arrive(host, offer_of(b"a/b/k", CONTENT, host.version()), CONTENT)
        directory = host.block(b"a/b/k").directory
        assert (directory.mode, directory.uid, directory.gid) == (0o750, 1, 2)


async def test_what_arrived_is_found_again_after_the_daemon_was_killed(world: World) -> None:
    async with clustered(world) as host:
        version = host.version()
        await arrive(host, offer_of(b"a/k", CONTENT, version), CONTENT)
    async with clustered(world) as host:
        assert host.block(b"a/k").version == version


async def test_what_is_half_here_is_nowhere_and_leaves_nothing_behind(world: World) -> None:
    async with clustered(world) as host:
        used = host.store.catalog.hot.used_bytes
        arrival = await host.offer(offer_of(b"a/k", CONTENT, host.version()))
        assert isinstance(arrival, Arriving)
        assert host.serving.lookup([b"a/k"], 0) == [Miss()]
        assert host.store.catalog.hot.used_bytes > used
        arrival.abandon()
        assert host.store.catalog.hot.used_bytes == used
        assert not host.store.catalog.names.root.entries
        assert host.receiver.arriving == 0


async def test_bytes_that_do_not_match_the_digest_are_never_shown(world: World) -> None:
    async with clustered(world) as host:
        used = host.store.catalog.hot.used_bytes
        with pytest.raises(CopyCorrupt):
            await arrive(host, offer_of(b"k", CONTENT, host.version()), bytes(len(CONTENT)))
        assert host.store.catalog.hot.used_bytes == used
        assert host.receiver.counters.corrupt == 1
        with pytest.raises(BlockNotFound):
            host.block(b"k")


async def test_this_version_or_a_newer_one_is_not_taken_again(world: World) -> None:
    async with clustered(world) as host:
        version = host.version()
        await arrive(host, offer_of(b"k", CONTENT, version), CONTENT)
        have = Refused(reason=Reason.HAVE, version=version)
        for older in (version, version - 1):
            assert await host.offer(offer_of(b"k", CONTENT, older)) == have


async def test_a_newer_version_replaces_the_one_that_is_here(world: World) -> None:
    async with clustered(world) as host:
        await put(host.store, "k", b"old")
        used = host.store.catalog.hot.used_bytes
        await arrive(host, offer_of(b"k", b"new", host.version(after_s=1)), b"new")
        assert await get(host.store, "k") == b"new"
        assert host.store.catalog.hot.used_bytes == used
        assert host.store.catalog.block_count == 1


async def test_what_is_written_here_after_an_arrival_is_newer(world: World) -> None:
    async with clustered(world) as host:
        version = host.version(after_s=60)  # a clock that goes a minute fast
        await arrive(host, offer_of(b"k", CONTENT, version), CONTENT)
        assert (await put(host.store, "k", b"newer")).version > version


async def test_a_version_from_the_far_future_is_refused(world: World) -> None:
    async with clustered(world) as host:
        with pytest.raises(VersionAhead):
            await host.offer(offer_of(b"k", CONTENT, host.version(after_s=7200)))


async def test_a_program_that_writes_the_key_is_not_disturbed_and_has_the_last_word(
    world: World,
) -> None:
    async with clustered(world) as host:
        store, root = host.store, host.store.catalog.names.root
        handle = await store.create(root, b"k", NewOwner(0, 0, 0o644), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, b"mine")
        await arrive(host, offer_of(b"k", CONTENT, host.version()), CONTENT)
        assert await get(store, "k") == CONTENT
        store.publish_on_close(handle)
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)
        assert await get(store, "k") == b"mine"


async def test_a_newer_version_that_came_meanwhile_wins(world: World) -> None:
    async with clustered(world) as host:
        arrival = await host.offer(offer_of(b"k", CONTENT, host.version()))
        assert isinstance(arrival, Arriving)
        newer = await put(host.store, "k", b"newer")
        arrival.target[:] = CONTENT
        assert newer.version > host.version()
        await arrival.stored()
        assert host.block(b"k") is newer
        assert host.store.catalog.hot.used_bytes < len(CONTENT) + 8 * MIB


async def test_what_was_deleted_is_not_taken_nor_shown(world: World) -> None:
    async with clustered(world) as host:
        offer = offer_of(b"k", CONTENT, host.version())
        arrival = await host.offer(offer)
        assert isinstance(arrival, Arriving)
        arrival.target[:] = CONTENT
        dead = host.delete(b"k")
        with pytest.raises(BlockGone):
            await arrival.stored()
        gone = Refused(reason=Reason.GONE, version=dead.version, until_ns=dead.until_ns)
        assert await host.offer(offer) == gone
        assert host.serving.lookup([b"k"], 0) == [Gone(dead.version, dead.until_ns)]
        with pytest.raises(BlockGone):
            await host.serving.open(b"k", offer.version)


async def test_one_block_of_a_key_arrives_at_a_time(world: World) -> None:
    async with clustered(world) as host:
        await host.offer(offer_of(b"k", CONTENT, host.version()))
        second = await host.offer(offer_of(b"k", CONTENT, host.version(after_s=1)))
        assert isinstance(second, Refused)
        assert second.reason is Reason.BUSY


async def test_room_is_made_for_what_arrives_and_where_none_can_be_that_is_said(
    hot_world: World,
) -> None:
    async with clustered(hot_world) as host:
        for number in range(7):
            await put(host.store, f"old{number}", bytes(2 * MIB))
        content = os.urandom(6 * MIB)
        await arrive(host, offer_of(b"k", content, host.version(after_s=1)), content)
        assert await get(host.store, "k") == content
        assert host.store.catalog.counters.evicted > 0
        with pytest.raises(TierFull):
            await host.offer(offer_of(b"large", bytes(64 * MIB), host.version()))
        assert host.receiver.arriving == 0


async def test_a_lock_file_stays_on_its_host(world: World) -> None:
    async with clustered(world) as host:
        await put(host.store, "k.lock", b"")
        version = host.block(b"k.lock").version
        assert host.serving.lookup([b"k.lock"], 0) == [Miss()]
        with pytest.raises(NotPermitted):
            await host.offer(offer_of(b"k.lock", b"", host.version()))
        await host.deletions.hear([Tombstone(b"k.lock", version + 1, 2**63)])
        assert host.block(b"k.lock").version == version


async def test_a_block_in_the_place_of_a_directory_is_in_the_way(world: World) -> None:
    async with clustered(world) as host:
        await put(host.store, "a", b"")
        with pytest.raises(NotDirectory):
            await arrive(host, offer_of(b"a/k", CONTENT, host.version()), CONTENT)
        assert host.receiver.arriving == 0


async def test_a_block_is_on_the_medium_where_that_is_asked_for(world: World) -> None:
    async with clustered(world, to_medium=True) as host:
        offer = offer_of(b"k", CONTENT, host.version())
        assert await arrive(host, offer, CONTENT) is Durability.MEDIUM
    world.reboot()
    async with clustered(world) as host:
        assert await get(host.store, "k") == CONTENT
        assert host.block(b"k").version == offer.version


async def test_what_was_being_replaced_when_the_daemon_died_is_there_as_a_new_version(
    world: World,
) -> None:
    async with clustered(world) as host:
        store, root = host.store, host.store.catalog.names.root
        for name in ("k", "gone"):
            await put(store, name, b"old")
        store.unlink(root, b"gone", OWNER)
        handle = await store.create(root, b"new", NewOwner(0, 0, 0o644), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, b"new")
        store.rename(handle.block, root, b"k")
        known = host.deletions.table.snapshot()
    async with clustered(world) as host:
        table = host.deletions.table = Tombstones.restored(1, known, ())
        assert host.store.catalog.versions is not None
        host.store.catalog.versions.highest = table.highest
        assert table.beats(b"k", host.block(b"k").version)
        host.deletions.settle()
        assert await get(host.store, "k") == b"old"
        assert not table.beats(b"k", host.block(b"k").version)
        with pytest.raises(BlockNotFound):
            host.block(b"gone")


async def test_what_was_synced_and_took_a_name_before_the_daemon_died_is_there(
    world: World,
) -> None:
    async with clustered(world) as host:
        store, root = host.store, host.store.catalog.names.root
        await put(store, "k", b"old")
        flags = os.O_WRONLY | os.O_TRUNC
        handle = await store.create(root, b"k", NewOwner(0, 0, 0o644), OWNER, flags)
        await store.content.write(handle, 0, b"new")
        await store.sealing.sync(handle.block)
        assert store.publish_on_close(handle)
        known = host.deletions.table.snapshot()
    async with clustered(world) as host:
        table = host.deletions.table = Tombstones.restored(1, known, ())
        assert host.store.catalog.versions is not None
        host.store.catalog.versions.highest = table.highest
        host.deletions.settle()
        assert await get(host.store, "k") == b"new"
        assert not table.beats(b"k", host.block(b"k").version)


async def test_a_deletion_is_heard_though_who_told_of_it_gives_up(world: World) -> None:
    async def take_long(tombstones: Sequence[Tombstone]) -> None:
        await trio.sleep_forever()

    async with clustered(world) as host, trio.open_nursery() as nursery:
        offer = offer_of(b"k", CONTENT, host.version())
        await arrive(host, offer, CONTENT)
        host.deletions._keep = take_long
        tombstone = Tombstone(b"k", host.version(1), world.clock.wall_ns + SECOND_NS)
        nursery.start_soon(host.deletions.hear, [tombstone])
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with pytest.raises(BlockNotFound):
            host.block(b"k")


async def test_a_deletion_elsewhere_drops_what_it_beats_and_nothing_newer(world: World) -> None:
    async with clustered(world) as host:
        for key in (b"old", b"new"):
            await arrive(host, offer_of(key, CONTENT, host.version(after_s=1)), CONTENT)
        at = host.version(after_s=1)
        dead = [Tombstone(b"old", at, 2**63), Tombstone(b"new", at - 1024, 2**63)]
        await host.deletions.hear([*dead, Tombstone(b"far", host.version(9999), 2**63)])
        assert host.deletions.table.get(b"far") is None
        gone, have = host.serving.lookup([b"old", b"new"], 0)
        assert (gone, isinstance(have, Have)) == (Gone(at, 2**63), True)
        with pytest.raises(BlockNotFound):
            host.block(b"old")


async def test_others_are_told_of_what_is_sealed_and_here_and_not_expired(world: World) -> None:
    async with clustered(world) as host:
        store, root = host.store, host.store.catalog.names.root
        offer = offer_of(b"k", CONTENT, host.version(), replace(ATTRIBUTES, ttl_ns=SECOND_NS))
        await arrive(host, offer, CONTENT)
        handle = await store.create(root, b"new", NewOwner(0, 0, 0o644), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, b"half")
        have, *rest = host.serving.lookup([b"k", b"new", b"none", b"k/none"], 9)
        assert have == Have(
            version=offer.version,
            size=len(CONTENT),
            digest=offer.digest,
            tiers=1,
            load=9,
            attributes=offer.attributes,
        )
        assert rest == [Miss(), Miss(), Miss()]
        store.release(handle)
        world.clock.pass_s(2)
        assert host.serving.lookup([b"k"], 0) == [Miss()]


async def test_a_copy_that_is_only_elsewhere_is_taken_and_then_kept(world: World) -> None:
    async with clustered(world) as host:
        version = host.version()
        catalog = host.store.catalog
        await arrive(host, offer_of(b"k", CONTENT, version), CONTENT)
        catalog.elsewhere[host.block(b"k").generation] = ("other",)
        await host.offer(offer_of(b"k", CONTENT, version))
        assert not catalog.elsewhere, "who offered it counts on the copy that was a reader's"
        catalog.elsewhere[host.block(b"k").generation] = ("other",)
        catalog.drop_hot(host.block(b"k"))
        assert host.serving.lookup([b"k"], 0) == [Miss()]
        assert await arrive(host, offer_of(b"k", CONTENT, version), CONTENT) is Durability.MEMORY
        assert not catalog.elsewhere
        assert await get(host.store, "k") == CONTENT


async def test_a_leased_version_is_not_gone_on_with_by_its_writer(world: World) -> None:
    async with clustered(world) as host:
        block = await put(host.store, "k", CONTENT)
        assert host.store.goes_on(block, OWNER, os.O_WRONLY)
        handle = await host.serving.open(b"k", block.version)
        assert not host.store.goes_on(block, OWNER, os.O_WRONLY)
        host.store.release(handle)
        with pytest.raises(BlockNotFound):
            await host.serving.open(b"k", block.version - 1)


async def test_a_cold_block_is_promoted_for_others(world: World) -> None:
    async with clustered(world) as host:
        block = await put(host.store, "k", CONTENT)
        await host.store.mover.demoter.demote(block)
        assert not block.is_hot
        handle = await host.serving.open(b"k", block.version)
        assert bytes(host.store.content.read(handle, 0, len(CONTENT))) == CONTENT
        host.store.release(handle)


async def test_a_directory_is_told_of_taken_and_removed(world: World) -> None:
    async with clustered(world) as host:
        marker = PREFIXES + b"a/b"
        offer = offer_of(marker, b"", host.version(), replace(ATTRIBUTES, mode=0o2770))
        await arrive(host, offer, b"")
        directory = host.store.catalog.names.resolve(b"a/b")
        assert isinstance(directory, Directory)
        assert (directory.mode, directory.uid, directory.gid) == (0o2770, 1, 2)
        have = host.serving.lookup([marker], 0)[0]
        assert isinstance(have, Have)
        assert (have.digest, have.attributes.mode) == (EMPTY, 0o2770)
        again = await host.offer(offer)
        assert isinstance(again, Refused)
        assert again.reason is Reason.HAVE
        dead = Tombstone(marker, host.version(after_s=1), 2**63)
        await put_below(host, b"a/b", b"k")
        await host.deletions.hear([dead])
        assert host.store.catalog.names.resolve(b"a/b") is directory, "it is not empty"
        host.store.unlink(directory, b"k", OWNER)
        await host.deletions.hear([dead._replace(version=dead.version + 1024)])
        assert directory.removed


async def put_below(host: Clustered, path: bytes, name: bytes) -> None:
    key = path + b"/" + name
    await arrive(host, offer_of(key, CONTENT, host.version()), CONTENT)


async def test_a_cancelled_arrival_gives_back_its_room(world: World) -> None:
    async with clustered(world) as host:
        used = host.store.catalog.hot.used_bytes
        arrival = await host.offer(offer_of(b"k", CONTENT, host.version()))
        assert isinstance(arrival, Arriving)
        with trio.CancelScope() as scope:
            scope.cancel()
            await arrival.stored()
        assert scope.cancelled_caught
        assert host.store.catalog.hot.used_bytes == used
        assert host.receiver.arriving == 0


@dataclass
class Found:
    """What `Others` say. Satisfies `elsewhere.Found`."""

    version: int
    content: bytes
    attributes: Attributes = ATTRIBUTES
    holders: tuple[str, ...] = ("other",)

    @property
    def size(self) -> int:
        return len(self.content)

    @property
    def digest(self) -> bytes:
        return digest(self.content)


@dataclass
class Answer:
    """What others say of a key. Satisfies `elsewhere.Finding`."""

    found: Found | None

    async def wait(self) -> Found | None:
        return self.found


@dataclass
class Others:
    """Hosts that are asked for what is not here. Satisfies `elsewhere.Remote`."""

    found: dict[bytes, Found] = field(default_factory=dict)
    liars: list[str] = field(default_factory=list)
    lie: bytes = b""  # instead of the content
    gate: trio.Event = field(default_factory=trio.Event)
    came: trio.Event = field(default_factory=trio.Event)

    def is_missing(self, key: bytes) -> bool:
        return False

    def is_home(self, key: bytes, replicas: int | None = None) -> bool:
        return False

    def lied(self, name: str) -> None:
        self.liars.append(name)

    def begin(self, key: bytes) -> Answer:
        return Answer(self.found.get(key))

    async def find(self, key: bytes) -> Found | None:
        return self.found.get(key)

    async def fetch(
        self,
        key: bytes,
        version: int,
        holders: tuple[str, ...],
        into: memoryview,
        *,
        but: frozenset[str] = frozenset(),
    ) -> str:
        self.came.set()
        await self.gate.wait()
        into[:] = self.lie or self.found[key].content
        return "other"


def join(host: Clustered) -> Others:
    others = Others()
    host.store.join(Elsewhere(host.store.catalog, others, lambda key, version, member: True))
    return others


async def test_a_directory_on_the_way_is_as_other_hosts_have_it(world: World) -> None:
    async with clustered(world) as host:
        others = join(host)
        others.found[PREFIXES + b"a"] = Found(5, b"", replace(ATTRIBUTES, mode=0o2775, uid=9))
        await arrive(host, offer_of(b"a/k", CONTENT, host.version()), CONTENT)
        directory = host.block(b"a/k").directory
        assert (directory.mode, directory.uid) == (0o2775, 9)


async def test_a_reader_that_fetches_the_same_is_not_disturbed(world: World) -> None:
    async with clustered(world) as host:
        others = join(host)
        store, root = host.store, host.store.catalog.names.root
        offer = offer_of(b"k", CONTENT, host.version())
        early = await host.offer(offer)
        assert isinstance(early, Arriving)
        early.target[:] = CONTENT
        others.found[b"k"] = Found(offer.version, CONTENT)
        assert store.elsewhere is not None
        await store.elsewhere.search(root, b"k")
        block = host.block(b"k")
        read: list[bytes] = []

        async def reader() -> None:
            read.append(await get(store, "k"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            await others.came.wait()
            late = await host.offer(offer)
            assert isinstance(late, Refused)
            assert late.reason is Reason.BUSY
            nursery.start_soon(early.stored)
            await trio.testing.wait_all_tasks_blocked()
            others.gate.set()
        assert (read, host.block(b"k")) == ([CONTENT], block)
        assert not store.catalog.elsewhere, "the copy of the reader is to stay"
        assert host.receiver.arriving == 0


async def test_who_gave_wrong_bytes_is_counted_and_not_asked_for_that_block_again(
    world: World,
) -> None:
    async with clustered(world) as host:
        others = join(host)
        others.gate.set()
        version, root = host.version(), host.store.catalog.names.root
        others.found[b"k"], others.lie = Found(version, CONTENT), bytes(len(CONTENT))
        assert host.store.elsewhere is not None
        await host.store.elsewhere.search(root, b"k")
        with pytest.raises((CopyCorrupt, BlockNotFound)):
            await get(host.store, "k")
        assert (others.liars, host.store.catalog.counters.corrupt) == (["other"], 1)
        await host.store.elsewhere.search(root, b"k")
        assert root.entries.get(b"k") is None, "nobody else has it"
        others.found[b"k"], others.lie = Found(host.version(after_s=1), CONTENT), b""
        await host.store.elsewhere.search(root, b"k")
        assert await get(host.store, "k") == CONTENT
