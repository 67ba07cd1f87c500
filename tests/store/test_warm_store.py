"""The warm tier and the codec under the store: real codec, real files, a cold tier in memory."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ctxfs.codec import stream
from ctxfs.codec.keyring import KeyRing
from ctxfs.core.block import Block
from ctxfs.core.worth import PROBE_EVERY
from ctxfs.errors import BlockNotFound, CopyCorrupt, TierFull, UnknownKey
from ctxfs.store.coding import CodingSettings
from ctxfs.store.store import Store
from tests.fakes import MemoryEngine
from tests.store.world import LIMITS, MIB, World, get, get_attribute, put, set_attribute

COMPRESS = CodingSettings(compress=True)


def values(seed: int, size: int = MIB) -> bytes:
    """bf16 numbers of one scale, as keys and values are: their exponents compress."""
    numbers = np.random.default_rng(seed).normal(size=size // 2).astype("<f4")
    return (numbers.view("<u4") >> 16).astype("<u2").tobytes()


def ring(*letters: bytes) -> KeyRing:
    lines = b"\n".join(b"%s %s" % (each, each.hex().encode() * 32) for each in letters)
    return KeyRing.parse(lines, random.Random(1).randbytes, "test")


def world(path: Path, *, warm: int = 8 * MIB, cold: bool = True, hot: int = 8 * MIB) -> World:
    engine = MemoryEngine(64 * MIB) if cold else None
    return World(path, engine, hot_bytes=hot, warm_bytes=warm, coding=COMPRESS)


def copies(store: Store, name: str) -> str:
    return get_attribute(store, name, "copies")


async def test_a_block_leaves_hot_for_warm_and_comes_back_whole(tmp_path: Path) -> None:
    async with world(tmp_path).store() as store:
        block = await put(store, "k", values(1))
        await set_attribute(store, "k", "tier", "warm")
        assert copies(store, "k") == "warm"
        assert get_attribute(store, "k", "codec") == "zstd+planes2"
        assert int(get_attribute(store, "k", "stored")) < 0.8 * block.size
        await set_attribute(store, "k", "tier", "auto")
        assert await get(store, "k") == values(1)
        assert copies(store, "k") == "hot,warm"
        assert store.catalog.counters.hits_warm == 1


@pytest.mark.parametrize("cold", [True, False])
async def test_what_does_not_fit_hot_is_compressed_before_it_goes_further(
    tmp_path: Path, cold: bool
) -> None:
    async with world(tmp_path, cold=cold).store() as store:
        for number in range(12):
            await put(store, f"k{number}", values(number))
        warm = store.catalog.warm
        assert warm is not None
        assert len(warm) >= 3
        assert warm.used_bytes <= warm.capacity_bytes
        for number in range(12):
            assert await get(store, f"k{number}") == values(number)
        assert store.catalog.counters.hits_cold == 0
        assert store.catalog.counters.evicted == 0


async def test_a_full_warm_tier_passes_on_to_cold_what_it_holds_as_it_is(tmp_path: Path) -> None:
    async with world(tmp_path, warm=4 * MIB).store() as store:
        for number in range(30):
            await put(store, f"k{number}", values(number))
        warm, cold = store.catalog.warm, store.catalog.cold
        assert warm is not None
        assert cold is not None
        assert warm.used_bytes <= warm.capacity_bytes
        first = store.catalog.names.resolve(b"k0")
        assert isinstance(first, Block)
        assert copies(store, "k0") == "cold"
        assert cold.method(first.generation) == 3
        assert cold.encoded_bytes(first.generation) < 0.8 * first.size
        for number in range(30):
            assert await get(store, f"k{number}") == values(number)


async def test_without_a_cold_tier_the_least_recently_used_is_evicted_last(tmp_path: Path) -> None:
    async with world(tmp_path, warm=4 * MIB, cold=False).store() as store:
        await put(store, "pinned", values(99))
        await set_attribute(store, "pinned", "pin", "1")
        for number in range(30):
            await put(store, f"k{number}", values(number))
        assert await get(store, "pinned") == values(99)
        assert await get(store, "k29") == values(29)
        assert store.catalog.counters.evicted >= 10
        with pytest.raises(BlockNotFound):
            store.catalog.names.resolve(b"k0")


async def test_noise_is_not_kept_warm(tmp_path: Path) -> None:
    async with world(tmp_path).store() as store:
        noise = random.Random(1).randbytes(MIB)
        await put(store, "k", noise)
        with pytest.raises(TierFull):
            await set_attribute(store, "k", "tier", "warm")
        assert copies(store, "k") == "hot"
        for number in range(12):
            await put(store, f"k{number}", random.Random(number).randbytes(MIB))
        assert store.catalog.counters.warmed == 0
        assert await get(store, "k") == noise


async def test_a_block_that_the_user_wants_warm_stays_there(tmp_path: Path) -> None:
    async with world(tmp_path, warm=4 * MIB).store() as store:
        await put(store, "k", values(0))
        await set_attribute(store, "k", "tier", "warm")
        for number in range(1, 20):
            await put(store, f"k{number}", values(number))
        assert "warm" in copies(store, "k")


async def test_the_next_daemon_finds_warm_blocks_and_a_reboot_loses_them(tmp_path: Path) -> None:
    place = world(tmp_path, cold=False)
    async with place.store() as store:
        await put(store, "k", values(1))
        await put(store, "other", values(2))
        await set_attribute(store, "k", "tier", "warm")
        store.unlink(store.catalog.names.root, b"other", 0)
    async with place.store() as store:
        assert copies(store, "k") == "warm"
        assert store.catalog.warm_content_bytes == MIB
        assert await get(store, "k") == values(1)
        for file in (tmp_path / "warm").iterdir():
            file.unlink()
    place.reboot()
    async with place.store() as store:
        assert store.catalog.block_count == 0


async def test_a_writer_that_goes_on_leaves_no_old_warm_copy(tmp_path: Path) -> None:
    async with world(tmp_path).store() as store:
        block = await put(store, "k", values(1))
        await set_attribute(store, "k", "tier", "warm")
        await set_attribute(store, "k", "tier", "hot")
        store.unlink(store.catalog.names.root, b"k", 0)
        assert store.catalog.warm is not None
        assert store.catalog.warm.used_bytes == 0
        assert store.catalog.warm_content_bytes == 0
        assert block.is_gone


@pytest.mark.parametrize("cold", [True, False])
async def test_a_warm_copy_with_a_flipped_bit_is_never_served(tmp_path: Path, cold: bool) -> None:
    async with world(tmp_path, cold=cold).store() as store:
        await put(store, "k", values(1))
        await set_attribute(store, "k", "tier", "warm")
        if cold:
            block = store.catalog.names.resolve(b"k")
            assert isinstance(block, Block)
            await store.mover.demoter.demote(block, keep_hot=True)
        (file,) = (tmp_path / "warm").iterdir()
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 16
        file.write_bytes(damaged)
        if cold:
            assert await get(store, "k") == values(1)
            assert copies(store, "k") == "hot,cold"
        else:
            with pytest.raises(CopyCorrupt):
                await get(store, "k")
            assert store.catalog.block_count == 0
        assert store.catalog.counters.corrupt == 1


async def test_verify_looks_at_the_warm_copy_too(tmp_path: Path) -> None:
    async with world(tmp_path).store() as store:
        await put(store, "k", values(1))
        await set_attribute(store, "k", "tier", "warm")
        await set_attribute(store, "k", "verify", "1")
        await set_attribute(store, "k", "tier", "hot")
        (file,) = (tmp_path / "warm").iterdir()
        file.write_bytes(b"\0" * file.stat().st_size)
        with pytest.raises(CopyCorrupt):
            await set_attribute(store, "k", "verify", "1")
        assert copies(store, "k") == "hot"
        assert await get(store, "k") == values(1)


# -- the codec on the cold tier


async def test_cold_copies_are_compressed_where_that_pays_and_raw_elsewhere(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, warm=0).store() as store:
        noise = random.Random(7).randbytes(MIB)
        await put(store, "numbers", values(1))
        await put(store, "noise", noise)
        for name in ("numbers", "noise"):
            await set_attribute(store, name, "tier", "cold")
            assert copies(store, name) == "cold"
        assert int(get_attribute(store, "numbers", "stored")) < 0.8 * MIB
        assert get_attribute(store, "noise", "codec") == "raw"
        assert await get(store, "numbers") == values(1)
        assert await get(store, "noise") == noise


def secret_world(path: Path, keys: KeyRing | None) -> World:
    place = world(path, warm=0)
    place.coding = CodingSettings(compress=True, keys=keys)
    return place


async def test_with_a_key_nothing_readable_reaches_the_device(tmp_path: Path) -> None:
    place = secret_world(tmp_path, ring(b"a"))
    text = b"the quick brown fox " * 5000
    noise = random.Random(5).randbytes(100_000)
    async with place.store() as store:
        for name, content in (("text", text), ("noise", noise)):
            await put(store, name, content)
            await set_attribute(store, name, "tier", "cold")
        assert get_attribute(store, "text", "codec") == "zstd+aes256gcm"
        assert get_attribute(store, "noise", "codec") == "raw+aes256gcm"
        assert await get(store, "text") == text
        assert await get(store, "noise") == noise
    assert place.engine is not None
    image = bytes(place.engine.medium)
    assert b"quick brown" not in image
    assert noise[1000:1032] not in image


async def test_what_fsync_writes_of_a_block_being_written_is_encrypted_too(tmp_path: Path) -> None:
    place = secret_world(tmp_path, ring(b"a"))
    async with place.store() as store:
        block = await put(store, "k", b"the quick brown fox " * 5000)
        await store.sealing.sync(block)
    assert place.engine is not None
    assert b"quick brown" not in bytes(place.engine.medium)


async def test_keys_are_rotated_by_adding_one_and_a_lost_key_loses_no_block(
    tmp_path: Path,
) -> None:
    place = secret_world(tmp_path, ring(b"a"))
    async with place.store() as store:
        await put(store, "old", values(1))
        await set_attribute(store, "old", "tier", "cold")
    place.coding = CodingSettings(compress=True, keys=ring(b"a", b"b"))
    async with place.store() as store:
        await put(store, "new", values(2))
        await set_attribute(store, "new", "tier", "cold")
        assert await get(store, "old") == values(1)
    place.coding = CodingSettings(compress=True, keys=ring(b"b"))
    async with place.store() as store:
        await set_attribute(store, "old", "tier", "auto")
        store.catalog.drop_hot(block_of(store, b"old"))
        with pytest.raises(UnknownKey):
            await get(store, "old")
        assert copies(store, "old") == "cold"
        assert await get(store, "new") == values(2)
        assert store.catalog.counters.corrupt == 0
    place.coding = CodingSettings(compress=True, keys=ring(b"a", b"b"))
    async with place.store() as store:
        assert await get(store, "old") == values(1)


def block_of(store: Store, key: bytes) -> Block:
    block = store.catalog.names.resolve(key)
    assert isinstance(block, Block)
    return block


async def test_a_used_up_write_budget_evicts_and_still_writes_what_was_asked_for(
    tmp_path: Path,
) -> None:
    place = world(tmp_path, warm=0)
    place.coding = CodingSettings()
    place.limits = replace(LIMITS, cold_bytes_per_day=24 * 2 * MIB)
    async with place.store() as store:
        for number in range(20):
            await put(store, f"k{number}", values(number))
        cold = store.catalog.cold
        assert cold is not None
        assert len(store.catalog.cold_order) <= 4
        assert store.catalog.counters.not_admitted >= 5
        assert store.catalog.counters.evicted == store.catalog.counters.not_admitted
        await set_attribute(store, "k19", "tier", "cold")
        assert copies(store, "k19") == "cold"
        await set_attribute(store, "k18", "pin", "1")
        for number in range(20, 30):
            await put(store, f"k{number}", values(number))
        assert await get(store, "k18") == values(18)
        place.clock.pass_s(24 * 3600)
        written = cold.written_bytes
        for number in range(30, 40):
            await put(store, f"k{number}", values(number))
        assert cold.written_bytes > written + 4 * MIB


async def test_what_was_compressed_before_there_was_a_key_is_encrypted_on_its_way_down(
    tmp_path: Path,
) -> None:
    place = world(tmp_path)
    text = b"the quick brown fox " * 5000
    async with place.store() as store:
        await put(store, "k", text)
        await set_attribute(store, "k", "tier", "warm")
        store.mover.coding.settings = CodingSettings(compress=True, keys=ring(b"a"))
        await set_attribute(store, "k", "tier", "cold")
        assert get_attribute(store, "k", "codec") == "zstd+aes256gcm"
        assert await get(store, "k") == text


async def test_a_bad_warm_copy_of_a_hot_block_is_not_what_goes_down(tmp_path: Path) -> None:
    async with world(tmp_path).store() as store:
        await put(store, "k", values(1))
        await set_attribute(store, "k", "tier", "warm")
        await set_attribute(store, "k", "tier", "hot")
        (file,) = (tmp_path / "warm").iterdir()
        file.unlink()
        await set_attribute(store, "k", "tier", "cold")
        assert copies(store, "k") == "cold"
        assert await get(store, "k") == values(1)


async def test_a_block_that_goes_while_it_is_inflated_is_a_miss(tmp_path: Path) -> None:
    async with world(tmp_path, cold=False).store() as store:
        block = await put(store, "k", values(1))
        await set_attribute(store, "k", "tier", "warm")
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(BlockNotFound):
                    await get(store, "k")

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked(0)
            store.unlink(store.catalog.names.root, b"k", 0)
        assert block.is_gone
        assert store.catalog.warm is not None
        assert store.catalog.warm.used_bytes == 0


async def test_what_never_pays_is_not_sampled_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = []
    plan = stream.plan

    def counted(source: memoryview, *rest: Any, **more: Any) -> Any:
        sampled.append(len(source))
        return plan(source, *rest, **more)

    monkeypatch.setattr(stream, "plan", counted)
    async with world(tmp_path, warm=0).store() as store:
        for number in range(2 * PROBE_EVERY):
            await put(store, "noise", random.Random(number).randbytes(128 << 10))
            await set_attribute(store, "noise", "tier", "cold")
        assert 2 <= len(sampled) <= 4
        await put(store, "numbers", values(1))
        await set_attribute(store, "numbers", "dtype", "bf16")
        await set_attribute(store, "numbers", "tier", "cold")
        assert get_attribute(store, "numbers", "codec") == "zstd+planes2"
