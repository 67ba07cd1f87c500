"""The same content under several keys: stored once on cold, never taken for another one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from ctxfs.codec.keyring import KeyRing
from ctxfs.core.contentindex import ContentIndex
from ctxfs.errors import TierFull
from ctxfs.store.coding import CodingSettings
from ctxfs.store.store import NewOwner, Store
from tests.fakes import MemoryEngine
from tests.store.world import MIB, OWNER, World, get, get_attribute, put

SIZE = 300_000
SLACK_BYTES = 4096  # notes


def ring(*letters: bytes) -> KeyRing:
    lines = b"\n".join(letter + b" " + letter.hex().encode() * 32 for letter in letters)
    return KeyRing.parse(lines, random.Random(1).randbytes, "test")


def compressible(seed: int, size: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(size // 16) * 16


async def put_cold(store: Store, name: str, content: bytes) -> None:
    block = await put(store, name, content)
    await store.mover.demoter.demote(block)


def live_bytes(store: Store) -> int:
    cold = store.catalog.cold
    assert cold is not None
    return cold.statistics()[0].live_bytes


def shared(store: Store) -> int:
    cold = store.catalog.cold
    assert cold is not None
    return cold.statistics()[0].aliases


def unlink(store: Store, name: str) -> None:
    store.catalog.drop(store.catalog.names.resolve(name.encode()))  # type: ignore[arg-type]


SETTINGS: dict[str, Callable[[], CodingSettings]] = {
    "as it is": CodingSettings,
    "compressed": lambda: CodingSettings(compress=True),
    "encrypted": lambda: CodingSettings(compress=True, keys=ring(b"a")),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_two_keys_share_a_content_until_both_are_gone(
    world: World, settings: Callable[[], CodingSettings]
) -> None:
    world.coding = settings()
    content = compressible(1)
    async with world.store() as store:
        empty = live_bytes(store)
        await put_cold(store, "one", content)
        alone = live_bytes(store) - empty
        await put_cold(store, "two", content)
        await put_cold(store, "three", content)
        assert shared(store) == 2
        assert live_bytes(store) - empty <= alone + SLACK_BYTES
        stored = [int(get_attribute(store, name, "stored")) for name in ("one", "two", "three")]
        assert abs(sum(stored) - live_bytes(store)) < SLACK_BYTES
        assert get_attribute(store, "one", "codec") == get_attribute(store, "two", "codec")
        unlink(store, "one")
        assert await get(store, "two") == content
        assert store.catalog.cold is not None
        await store.catalog.cold.sync()
    world.reboot()
    async with world.store() as store:
        assert await get(store, "three") == await get(store, "two") == content
        await put_cold(store, "four", content)
        assert shared(store) >= 2
        for name in ("two", "three", "four"):
            unlink(store, name)
        assert live_bytes(store) < SLACK_BYTES
        assert store.catalog.cold is not None
        assert store.catalog.cold.statistics()[0].saved_bytes == 0


async def test_blocks_with_one_digest_and_other_bytes_are_both_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_size(self: ContentIndex, digest: bytes, size: int) -> int:
        return size

    monkeypatch.setattr(ContentIndex, "_sum", by_size)
    contents = {f"k{seed}": compressible(seed) for seed in range(3)}
    async with world.store() as store:
        for name, content in contents.items():
            await put_cold(store, name, content)
        assert shared(store) == 0
        assert store.mover.demoter.sharer.not_same == 2
        for name, content in contents.items():
            assert await get(store, name) == content


async def test_blocks_that_come_at_once_are_written_once(world: World) -> None:
    content = os.urandom(SIZE)
    async with world.store() as store:
        blocks = [await put(store, f"k{number}", content) for number in range(8)]
        async with trio.open_nursery() as nursery:
            for block in blocks:
                nursery.start_soon(store.mover.demoter.demote, block)
        assert shared(store) == 7
        assert live_bytes(store) < SIZE + 4 * SLACK_BYTES


async def test_nothing_is_shared_where_that_is_not_wanted_or_saves_nothing(world: World) -> None:
    async with world.store() as store:
        for name in ("one", "two"):
            await put_cold(store, name, b"short" * 100)
        store.mover.coding.settings = replace(store.mover.coding.settings, share=False)
        for name in ("three", "four"):
            await put_cold(store, name, compressible(1))
        assert shared(store) == 0


async def test_a_new_key_encrypts_what_was_stored_without_it_or_with_an_older_one(
    world: World,
) -> None:
    content = compressible(1)
    async with world.store() as store:
        for name, keys in (("a", None), ("b", ring(b"k")), ("c", ring(b"k", b"l"))):
            store.mover.coding.settings = CodingSettings(compress=True, keys=keys)
            await put_cold(store, f"{name}1", content)
            await put_cold(store, f"{name}2", content)
        assert shared(store) == 3
        for name in ("a1", "a2", "b1", "b2", "c1", "c2"):
            assert await get(store, name) == content
        assert "aes" in get_attribute(store, "c2", "codec")
        assert "aes" not in get_attribute(store, "a2", "codec")


async def test_what_was_synced_while_it_was_written_is_not_written_again(world: World) -> None:
    content = compressible(1)
    async with world.store() as store:
        who = NewOwner(0, 0, 0o644)
        root = store.catalog.names.root
        handle = await store.create(root, b"block", who, OWNER, os.O_WRONLY | os.O_TRUNC)
        await store.content.write(handle, 0, content)
        handle.wrote = True
        await store.sealing.sync(handle.block)
        alone = live_bytes(store)
        assert alone > SIZE
        assert world.engine is not None
        reads = world.engine.statistics().read_bytes
        store.publish_on_close(handle)
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)
        await store.mover.demoter.demote(handle.block)
        assert shared(store) == 1
        assert live_bytes(store) <= alone + SLACK_BYTES
        assert world.engine.statistics().read_bytes == reads  # nor compared
        assert await get(store, "block") == content


async def test_a_full_cold_tier_makes_room_among_blocks_that_share(path: Path) -> None:
    world = World(path, MemoryEngine(24 * MIB))
    async with world.store() as store:
        for number in range(120):
            content = random.Random(number // 3).randbytes(MIB)
            try:
                await put_cold(store, f"k{number}", content)
            except TierFull:
                pytest.fail("what shares its content may go, too")
        last = random.Random(39).randbytes(MIB)
        assert await get(store, "k119") == await get(store, "k117") == last
        assert store.catalog.counters.evicted
