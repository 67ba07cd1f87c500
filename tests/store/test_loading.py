"""What a start finds becomes blocks: all at once, by the same rules as one by one."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from ctxfs.core.block import Block, Directory
from ctxfs.core.columns import BlockColumns
from ctxfs.core.meta import PIN_FOREVER, BlockMeta, DirectoryMeta, Drop, Entry, Placement, Put
from ctxfs.store.catalog import Catalog
from ctxfs.store.counters import Counters
from ctxfs.store.events import Events
from ctxfs.store.recovery import recover
from ctxfs.tiers.cold import ColdTier, Recovered
from ctxfs.tiers.hot import HotTier
from tests.store.world import MIB, SECOND_NS, FakeClock


@dataclass
class FakeCold:
    """What recovery tells the cold tier."""

    blocks: set[int]
    dropped: list[int] = field(default_factory=list)
    noted: list[Entry] = field(default_factory=list)
    left: list[bytes] = field(default_factory=list)

    def holds(self, generation: int) -> bool:
        return generation in self.blocks

    def drop(self, generation: int, stamp: int) -> None:
        self.blocks.discard(generation)
        self.dropped.append(generation)

    def leaves_name(self, generation: int, name: bytes) -> None:
        self.left.append(name)

    def note(self, entry: Entry) -> None:
        self.noted.append(entry)


@dataclass
class Start:
    """A daemon that starts on a hot tier of its own."""

    hot: HotTier
    clock: FakeClock = field(default_factory=FakeClock)

    def meta(self, generation: int, key: bytes, *, used_s_ago: int = 10) -> BlockMeta:
        wall_ns = self.clock.wall_ns
        return BlockMeta(
            generation=generation,
            stamp=generation,
            key=key,
            size=3,
            digest=generation.to_bytes(16, "big"),
            mode=0o640,
            uid=1,
            gid=2,
            created_ns=wall_ns - 50 * SECOND_NS,
            mtime_ns=wall_ns - 40 * SECOND_NS,
            atime_ns=wall_ns - used_s_ago * SECOND_NS,
        )

    def hot_file(self, generation: int, content: bytes) -> None:
        file = self.hot.create(generation)
        self.hot.write(file, 0, content)
        self.hot.release(file)

    def recovered(
        self, metas: list[BlockMeta], directories: list[DirectoryMeta] | None = None
    ) -> tuple[Catalog, FakeCold]:
        cold = FakeCold({meta.generation for meta in metas})
        catalog = Catalog(self.clock, self.hot, cast(ColdTier, cold), Events(10), Counters())
        found = Recovered(
            columns=BlockColumns.from_metas(metas),
            directories=directories or [],
            dropped=[],
            highest_number=10_000,
            highest_stamp=10_000,
            records=0,
            torn=0,
            corrupt=0,
        )
        recover(catalog, found)
        return catalog, cold


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    hot = HotTier(path, 16 * MIB, huge=False)
    yield Start(hot)
    hot.close()


def keys(catalog: Catalog) -> set[bytes]:
    found: set[bytes] = set()
    folders: list[Directory] = [catalog.names.root]
    for folder in folders:
        for node in folder.entries.values():
            if isinstance(node, Directory):
                folders.append(node)
            else:
                found.add(catalog.names.key_of(node))
    return found


def block(catalog: Catalog, key: bytes) -> Block:
    node = catalog.names.resolve(key)
    assert isinstance(node, Block)
    return node


def test_a_block_is_what_was_written_down_of_it(start: Start) -> None:
    meta = replace(
        start.meta(1500, b"run/7/layer"),
        expires_ns=start.clock.wall_ns + 60 * SECOND_NS,
        pin_until_ns=start.clock.wall_ns + 30 * SECOND_NS,
        placement=Placement.COLD,
        parent=b"run/6/layer",
        dtype=b"bf16",
        attributes=((b"user.x", b"y"),),
    )
    catalog, _ = start.recovered([meta])
    found = block(catalog, meta.key)
    assert found.meta(meta.key, start.clock()) == meta
    assert found.expires_ns == start.clock.boot_ns + 60 * SECOND_NS
    assert found.used_ns == start.clock.boot_ns - 10 * SECOND_NS
    assert catalog.names.by_inode.get(1500) is found
    assert catalog.expiry.next_deadline_ns() == found.expires_ns
    assert catalog.block_count == 1


def test_a_pin_that_never_lapses_and_no_deadline_stay_so(start: Start) -> None:
    catalog, _ = start.recovered([replace(start.meta(1500, b"k"), pin_until_ns=PIN_FOREVER)])
    found = block(catalog, b"k")
    assert found.is_pinned(2**62)
    assert not found.expires_ns
    assert catalog.expiry.next_deadline_ns() is None


def test_a_time_before_the_machine_started_is_the_earliest_there_is(start: Start) -> None:
    long_ago = replace(start.meta(1500, b"k"), atime_ns=-(2**63), expires_ns=1)
    catalog, _ = start.recovered([long_ago])
    found = block(catalog, b"k")
    assert (found.used_ns, found.expires_ns) == (1, 1)


def test_the_least_recently_used_leaves_first(start: Start) -> None:
    metas = [start.meta(1500 + n, b"k%d" % n, used_s_ago=n * 7 % 10) for n in range(10)]
    catalog, _ = start.recovered(metas)
    leaving = [each.name for each in catalog.cold_order.leaving()]
    by_use = sorted(metas, key=lambda meta: (meta.atime_ns, meta.stamp))
    assert leaving == [meta.key for meta in by_use]
    assert not len(catalog.hot_order)


BAD = [b"", b"/k", b"k/", b"a//k", b".", b"..", b"d/..", b"./k", b"a\0b", b"n" * 256, b"d/" * 2040]


def test_what_has_no_possible_name_is_left_out_and_said(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    good = [b"k", b"d/k", b"ab", b"a", b"d/" * 2000 + b"k"]
    metas = [start.meta(1500 + n, key) for n, key in enumerate(BAD + good)]
    catalog, _ = start.recovered(metas)
    assert keys(catalog) == set(good)
    assert catalog.block_count == len(good)
    assert len(catalog.cold_order) == len(good)
    said = [each for each in caplog.messages if "cannot be found again" in each]
    assert len(said) == len(BAD)
    caplog.clear()


def test_a_block_gives_way_to_a_directory_of_its_name(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    metas = [start.meta(1500, b"a"), start.meta(1501, b"a/b"), start.meta(1502, b"c")]
    catalog, _ = start.recovered(metas)
    assert keys(catalog) == {b"a/b", b"c"}
    assert catalog.block_count == 2
    assert [each.name for each in catalog.cold_order.leaving()] == [b"b", b"c"]
    assert any("gives way" in message for message in caplog.messages)
    caplog.clear()


def test_of_two_with_one_key_the_later_is_right_and_the_other_is_dropped_when_that_is_cold(
    start: Start,
) -> None:
    old, new = start.meta(1500, b"k"), start.meta(1600, b"k")
    start.hot_file(1600, b"new")
    start.hot.record(Put(new))
    catalog, cold = start.recovered([old, start.meta(1501, b"other")])
    assert block(catalog, b"k").generation == 1600
    assert cold.dropped == []
    catalog.drop_shadow(block(catalog, b"k"))
    assert cold.dropped == [1500]
    assert 1500 not in catalog.names.by_inode
    assert catalog.block_count == 2


def test_what_the_journal_says_later_of_a_cold_block_holds(start: Start) -> None:
    metas = [start.meta(1500 + n, b"k%d" % n) for n in range(4)]
    renamed = replace(metas[1], stamp=2000, key=b"renamed")
    stale = replace(metas[2], stamp=1, key=b"stale")
    start.hot.record(Put(renamed))
    start.hot.record(Put(stale))
    start.hot.record(Drop(1503, 2001))
    catalog, cold = start.recovered(metas)
    assert keys(catalog) == {b"k0", b"renamed", b"k2"}
    assert (cold.left, cold.noted) == ([b"k1"], [Put(renamed)])
    assert cold.dropped == [1503]
    assert len(catalog.cold_order) == 3


def test_a_hot_file_is_claimed_by_its_block_if_it_has_the_size(start: Start) -> None:
    metas = [start.meta(1500, b"both"), start.meta(1501, b"short"), start.meta(1502, b"lost")]
    start.hot_file(1500, b"abc")
    start.hot_file(1501, b"a")
    start.hot_file(1502, b"ab")
    start.hot.record(Put(metas[2]))
    catalog, _ = start.recovered(metas[:2])
    assert keys(catalog) == {b"both", b"short"}
    assert [each.name for each in catalog.hot_order.leaving()] == [b"both"]
    assert block(catalog, b"both").is_hot
    assert not block(catalog, b"short").is_hot
    assert [found.generation for found in start.hot.scan()] == [1500]


def test_many_directories_are_made_with_the_blocks_in_them(start: Start) -> None:
    metas = [start.meta(1500 + n, b"d%d/e/k%d" % (n % 3, n)) for n in range(30)]
    catalog, _ = start.recovered(metas)
    assert keys(catalog) == {meta.key for meta in metas}
    assert catalog.names.directory_count == 1 + 3 + 3
    assert all(len(folder.entries) for folder in catalog.names.by_inode.directories.values())
