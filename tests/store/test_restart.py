"""What survives a killed daemon, and a machine that lost its memory."""

import os
import random
import shutil
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxfs.core.block import State
from ctxfs.core.meta import Drop
from ctxfs.errors import BlockNotFound, CtxfsError
from ctxfs.store import upkeep
from ctxfs.store.handle import Handle
from ctxfs.store.recovery import fold
from ctxfs.store.store import NewOwner, Store
from tests.fakes import MemoryEngine
from tests.store.world import (
    MIB,
    OWNER,
    World,
    get,
    get_attribute,
    put,
    set_attribute,
)


def keys(store: Store) -> set[bytes]:
    return set(store.catalog.names.root.entries)


async def test_hot_blocks_are_found_again_with_their_attributes(world: World) -> None:
    async with world.store() as store:
        block = await put(store, "k", b"x" * 5000)
        await set_attribute(store, "k", "pin", "1")
        await set_attribute(store, "k", "parent", "the one before")
        block.more().attributes[b"user.mine"] = b"\0\xff"
        store.catalog.record(block)
        used = store.catalog.hot.used_bytes
    async with world.store() as store:
        assert await get(store, "k") == b"x" * 5000
        assert get_attribute(store, "k", "pin") == "1"
        assert get_attribute(store, "k", "parent") == "the one before"
        assert get_attribute(store, "k", "generation") == str(block.generation)
        assert store.catalog.hot.used_bytes == used  # LMCache#4564


async def test_what_was_unsealed_is_dropped(world: World) -> None:
    async with world.store() as store:
        root = store.catalog.names.root
        handle = await store.create(root, b"half", NewOwner(0, 0, 0o600), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, b"x" * 100_000)
        store.publish_on_close(handle)
        assert await get(store, "half") == b"x" * 100_000
    async with world.store() as store:
        assert keys(store) == set()
        assert list((world.path / "blocks").iterdir()) == []
        assert store.catalog.hot.used_bytes <= 2 * MIB


async def test_a_block_that_was_being_written_again_is_dropped(world: World) -> None:
    async with world.store() as store:
        block = await put(store, "k", b"x" * 5000)
        assert store.goes_on(block, OWNER, os.O_RDWR)
        handle = await store.open_for_write(block, OWNER, os.O_RDWR)
        await store.content.write(handle, 0, b"y")
    async with world.store() as store:
        assert keys(store) == set()


async def test_after_a_reboot_the_cold_blocks_are_there_and_no_others(world: World) -> None:
    async with world.store() as store:
        await put(store, "hot", b"h")
        block = await put(store, "cold", b"c" * 70_000)
        await store.sealing.sync(block)
    world.reboot()
    async with world.store() as store:
        assert keys(store) == {b"cold"}
        assert await get(store, "cold") == b"c" * 70_000


async def test_a_removed_block_does_not_come_back_after_a_reboot(world: World) -> None:
    async with world.store() as store:
        block = await put(store, "k", b"c")
        await store.sealing.sync(block)
        store.unlink(store.catalog.names.root, b"k", 0)
    async with world.store() as store:
        assert keys(store) == set()
        cold = store.catalog.cold
        assert cold is not None
        await cold.sync()
    world.reboot()
    async with world.store() as store:
        assert keys(store) == set()


async def test_a_renamed_cold_block_keeps_its_new_name(world: World) -> None:
    async with world.store() as store:
        block = await put(store, "old", b"c")
        await store.sealing.sync(block)
        store.rename(block, store.catalog.names.root, b"new")
        await store.sealing.sync(block)
    world.reboot()
    async with world.store() as store:
        assert keys(store) == {b"new"}


async def test_fsync_before_close_is_kept_over_a_reboot(world: World) -> None:
    async with world.store() as store:
        root = store.catalog.names.root
        handle = await store.create(root, b"k", NewOwner(0, 0, 0o600), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, b"first" * 1000)
        await store.sealing.sync(handle.block)
        await store.content.write(handle, 0, b"later" * 1000)
    world.reboot()
    async with world.store() as store:
        assert await get(store, "k") == b"first" * 1000


async def test_the_sealed_block_replaces_what_fsync_had_kept(world: World) -> None:
    async with world.store() as store:
        root = store.catalog.names.root
        handle = await store.create(root, b"k.tmp", NewOwner(0, 0, 0o600), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, b"first" * 1000)
        await store.sealing.sync(handle.block)
        await store.content.write(handle, 0, b"later" * 1000)
        store.rename(handle.block, root, b"k")
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)
        await store.sealing.sync(handle.block)
        assert store.catalog.shadows == {}
    world.reboot()
    async with world.store() as store:
        assert keys(store) == {b"k"}
        assert await get(store, "k") == b"later" * 1000


@pytest.mark.parametrize("is_written", [True, False])
async def test_what_was_synced_and_sealed_is_kept_over_a_crash_and_a_reboot(
    world: World, is_written: bool
) -> None:
    async with world.store() as store:
        root = store.catalog.names.root
        handle = await store.create(root, b"k", NewOwner(0, 0, 0o600), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, b"first" * 1000)
        await store.sealing.sync(handle.block)
        assert world.engine is not None
        world.engine.fail_write = lambda offset: True  # it dies before it has written more
        store.publish_on_close(handle)
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)
        await trio.testing.wait_all_tasks_blocked(0.01)
        world.engine.fail_write = lambda offset: False
        assert store.catalog.shadows
    async with world.store() as store:
        cold = store.catalog.cold
        assert cold is not None
        if is_written:
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert store.catalog.shadows == {}
        await cold.sync()
    world.reboot()
    async with world.store() as store:
        assert keys(store) == {b"k"}
        assert await get(store, "k") == b"first" * 1000


async def test_a_writer_that_died_takes_its_shadow_along(world: World) -> None:
    async with world.store() as store:
        root = store.catalog.names.root
        handle = await store.create(root, b"k", NewOwner(0, 0, 0o600), OWNER, os.O_WRONLY)
        await store.content.write(handle, 0, b"half")
        await store.sealing.sync(handle.block)
        store.release(handle)
        cold = store.catalog.cold
        assert cold is not None
        await cold.sync()
    world.reboot()
    async with world.store() as store:
        assert keys(store) == set()


async def test_directories_and_their_defaults_are_found_again(world: World) -> None:
    async with world.store() as store:
        directory = store.make_directory(store.catalog.names.root, b"d", NewOwner(1, 2, 0o750))
        directory.default_ttl_ns = 10**12
        store.catalog.record_directory(directory)
        cold = store.catalog.cold
        assert cold is not None
        await cold.sync()
    for _ in range(2):  # a killed daemon, then a reboot
        async with world.store() as store:
            found = store.catalog.names.resolve(b"d")
            assert (found.uid, found.gid, found.mode) == (1, 2, 0o750)
            assert store.catalog.names.default_ttl_ns(found) == 10**12  # type: ignore[arg-type]
        world.reboot()


async def test_a_rewritten_journal_says_the_same(world: World) -> None:
    async with world.store() as store:
        for number in range(50):
            await put(store, f"k{number}", b"%d" % number)
        for number in range(25):
            store.unlink(store.catalog.names.root, b"k%d" % number, 0)
        await set_attribute(store, "k30", "tier", "cold")
        await store.upkeep.rewrite_journal()
        await set_attribute(store, "k31", "pin", "1")
    async with world.store() as store:
        assert keys(store) == {b"k%d" % number for number in range(25, 50)}
        assert get_attribute(store, "k31", "pin") == "1"
        for number in range(25, 50):
            assert await get(store, f"k{number}") == b"%d" % number


async def test_what_happens_while_the_journal_is_rewritten_is_in_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "REWRITTEN_AT_ONCE", 1)
    async with world.store() as store:
        for number in range(30):
            await put(store, f"k{number}", b"%d" % number)
        rewritten = trio.Event()

        async def rewrite() -> None:
            await store.upkeep.rewrite_journal()
            rewritten.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rewrite)
            changes = 0
            while not rewritten.is_set():
                await trio.lowlevel.checkpoint()
                changes += 1
                if changes < 10:
                    store.unlink(store.catalog.names.root, b"k%d" % changes, 0)
                    await set_attribute(store, f"k{30 - changes}", "pin", "1")
                    await put(store, f"new{changes}", b"new")
        assert changes > 10
    async with world.store() as store:
        left = {b"k0", *(b"k%d" % number for number in range(10, 30))}
        assert keys(store) == left | {b"new%d" % number for number in range(1, 10)}
        assert {get_attribute(store, f"k{number}", "pin") for number in range(21, 30)} == {"1"}
        assert await get(store, "new9") == b"new"


async def test_a_journal_that_is_rewritten_when_the_daemon_dies_is_the_one_before(
    world: World,
) -> None:
    async with world.store() as store:
        await put(store, "k", b"content")
        with store.catalog.hot.journal.rewriting() as add:
            add(())
            await put(store, "l", b"content")
            content = (world.path / "journal").read_bytes()
        assert keys(store) == {b"k", b"l"}
    (world.path / "journal").write_bytes(content)
    (world.path / "journal.new").write_bytes(content[:10])
    async with world.store() as store:
        assert keys(store) == {b"k", b"l"}
        await store.upkeep.rewrite_journal()
        assert not (world.path / "journal.new").exists()


async def test_a_torn_journal_loses_only_its_tail(world: World) -> None:
    async with world.store() as store:
        for number in range(10):
            await put(store, f"k{number}", b"%d" % number)
    journal = world.path / "journal"
    journal.write_bytes(journal.read_bytes()[:-3])
    async with world.store() as store:
        assert keys(store) == {b"k%d" % number for number in range(9)}
        await put(store, "more", b"m")
    async with world.store() as store:
        assert b"more" in keys(store)


async def test_drain_saves_every_hot_block(world: World) -> None:
    async with world.store() as store:
        for number in range(10):
            await put(store, f"k{number}", b"%d" % number * 1000)
        assert await store.upkeep.drain() == 0
        cold = store.catalog.cold
        assert cold is not None
        await cold.close()
    world.reboot()
    async with world.store() as store:
        assert len(keys(store)) == 10


def test_folding_a_journal_takes_the_last_word_on_each_block() -> None:
    state = fold([])
    assert (state.blocks, state.highest_stamp) == ({}, 0)
    state = fold([Drop(7, 3), Drop(5, 2)])
    assert state.dropped == {7: 3, 5: 2}
    assert state.highest_number == 7


class Model:
    """What must be true: content by name, and which names were promised to last."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.durable: set[str] = set()


async def play(world: World, seed: int, steps: int) -> None:
    """Random puts, reads, moves, renames, unlinks, fsyncs, crashes and reboots."""
    choice = random.Random(seed)
    model = Model()
    left = steps
    while left > 0:
        async with world.store() as store:
            await check(store, model)
            for _ in range(choice.randrange(1, 25)):
                left -= 1
                await step(store, model, choice)
        if choice.random() < 0.5:
            world.reboot()
            model.content = {k: v for k, v in model.content.items() if k in model.durable}
            lasting = set(model.content)
        else:
            lasting = set(model.content)
        model.durable &= lasting


async def step(store: Store, model: Model, choice: random.Random) -> None:
    name = f"k{choice.randrange(8)}"
    root = store.catalog.names.root
    match choice.randrange(7):
        case 0 | 1:
            content = b"%s %d " % (name.encode(), choice.randrange(10**9))
            content *= choice.choice([0, 1, 100, 5000])
            block = await put(store, name, content)
            model.content[name] = content
            model.durable.discard(name)
            if choice.random() < 0.3:
                await store.sealing.sync(block)
                model.durable = set(model.content) & (model.durable | {name})
        case 2 if name in model.content:
            assert await get(store, name) == model.content[name]
        case 3 if name in model.content:
            await set_attribute(store, name, "tier", choice.choice(["cold", "hot", "auto"]))
        case 4 if name in model.content:
            block = store.catalog.names.resolve(name.encode())  # type: ignore[assignment]
            await store.sealing.sync(block)
            model.durable.add(name)
        case 5 if name in model.content:
            store.unlink(root, name.encode(), 0)
            cold = store.catalog.cold
            assert cold is not None
            await cold.sync()
            del model.content[name]
            model.durable.discard(name)
        case 6 if name in model.content:
            target = f"k{choice.randrange(8)}"
            block = store.catalog.names.resolve(name.encode())  # type: ignore[assignment]
            store.rename(block, root, target.encode())
            model.content[target] = model.content.pop(name)
            await store.sealing.sync(block)
            model.durable.discard(name)
            model.durable.add(target)


async def check(store: Store, model: Model) -> None:
    for name, content in model.content.items():
        assert await get(store, name) == content
    for key in list(keys(store)):  # others may be there, if they were written; never wrong
        block = store.catalog.names.resolve(key)
        name = key.decode()
        if name in model.content:
            continue
        assert block.state is State.SEALED  # type: ignore[union-attr]
        try:
            found = await get(store, name)
        except (BlockNotFound, CtxfsError):
            continue
        assert found == b"" or found.startswith(b"k")
        model.content[name] = found
        model.durable.discard(name)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 2**32))
async def test_every_promise_survives_random_crashes_and_reboots(path: Path, seed: int) -> None:
    for leftover in (path / "blocks").glob("*"):
        leftover.unlink()
    (path / "journal").unlink(missing_ok=True)
    await play(World(path, MemoryEngine(32 * MIB, seed=seed)), seed, steps=80)


async def overwrite_unsealed(store: Store, name: bytes) -> Handle:
    """Publish a new generation under a name, whose writer goes on."""
    root = store.catalog.names.root
    handle = await store.create(root, name, NewOwner(0, 0, 0o600), OWNER, os.O_WRONLY | os.O_TRUNC)
    await store.content.write(handle, 0, b"new" * 1000)
    handle.wrote = True
    store.publish_on_close(handle)
    return handle


@pytest.mark.parametrize("rewritten", [False, True])
async def test_a_name_leads_to_the_old_block_until_the_new_one_is_sealed(
    world: World, rewritten: bool
) -> None:
    async with world.store() as store:
        await put(store, "k", b"old" * 1000)
        await overwrite_unsealed(store, b"k")
        assert await get(store, "k") == b"new" * 1000
        assert store.catalog.block_count == 1
        if rewritten:
            await store.upkeep.rewrite_journal()
    async with world.store() as store:
        assert await get(store, "k") == b"old" * 1000
        handle = await overwrite_unsealed(store, b"k")
        store.release(handle)
        await store.sealing.wait_sealed(handle.block)
    async with world.store() as store:
        assert await get(store, "k") == b"new" * 1000
        assert len(list(store.catalog.hot.scan())) == 1


async def test_what_was_replaced_does_not_hold_its_room_for_long(world: World) -> None:
    async with world.store() as store:
        await put(store, "k", b"x" * (6 * MIB))
        await overwrite_unsealed(store, b"k")
        assert store.catalog.hot.used_bytes > 6 * MIB
        await put(store, "large", b"y" * (14 * MIB))
        assert store.catalog.counters.evicted == 0
        await put(store, "small", b"old")
        await overwrite_unsealed(store, b"small")
        world.clock.pass_s(3)
        await trio.sleep(1.2)
        assert len(list(store.catalog.hot.scan())) == 3


async def test_a_directory_that_is_no_longer_empty_cannot_lose_its_blocks(world: World) -> None:
    async with world.store() as store:
        directory = store.make_directory(store.catalog.names.root, b"d", NewOwner(0, 0, 0o755))
        block = await put(store, "k", b"x")
        store.rename(block, directory, b"k")
        with pytest.raises(CtxfsError):
            store.remove_directory(store.catalog.names.root, b"d")
    async with world.store() as store:
        assert store.catalog.names.resolve(b"d/k")


async def test_a_synced_overwrite_wins_over_an_old_block_that_was_still_being_sealed(
    world: World,
) -> None:
    async with world.store() as store:
        root = store.catalog.names.root
        who = NewOwner(0, 0, 0o600)
        handles = []
        for content in (b"old" * 100_000, b"new" * 100_000):
            handle = await store.create(root, b"k", who, OWNER, os.O_WRONLY | os.O_TRUNC)
            await store.content.write(handle, 0, content)
            await store.sealing.sync(handle.block)
            store.publish_on_close(handle)
            store.release(handle)  # sealing begins, and is not waited for
            handles.append(handle)
        assert handles[0].block.is_gone
    world.reboot()
    async with world.store() as store:
        assert await get(store, "k") == b"new" * 100_000


async def test_half_a_copy_that_a_promotion_left_is_not_taken_for_the_block(
    world: World, tmp_path: Path
) -> None:
    content = random.Random(1).randbytes(300_000)
    moment = tmp_path / "moment"
    async with world.store() as store:
        await put(store, "k", content)
        await set_attribute(store, "k", "tier", "cold")
        assert world.engine is not None
        world.engine.gate = gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get, store, "k")
            await trio.testing.wait_all_tasks_blocked(0.02)
            shutil.copytree(world.path, moment)  # as a kill would leave it now
            gate.set()
    shutil.rmtree(world.path)
    shutil.copytree(moment, world.path)
    async with world.store() as store:
        assert await get(store, "k") == content
    assert list((world.path / "blocks").iterdir()) == []  # it is to be kept cold
