"""What a daemon finds that takes over a living mount: unsealed blocks, and gone ones in use."""

from __future__ import annotations

import os

import pytest
import trio.testing

from ctxfs.core.block import Block, State
from ctxfs.store.handle import Handle, Way
from ctxfs.store.store import NewOwner, Store
from tests.store.world import MIB, OWNER, World, get, put, set_attribute

WHO = NewOwner(12, 34, 0o640)


@pytest.fixture
def lasting(world: World) -> World:
    world.still_open = set()
    return world


async def begin(store: Store, name: str, content: bytes) -> Handle:
    root = store.catalog.names.root
    handle = await store.create(root, name.encode(), WHO, OWNER, os.O_WRONLY | os.O_TRUNC)
    await store.content.write(handle, 0, content)
    return handle


def resume(store: Store, generation: int, *, writable: bool = True) -> Handle:
    block = store.catalog.names.by_inode[generation]
    assert isinstance(block, Block)
    handle = store.resume(block, OWNER, writable=writable, wrote=writable, way=Way.KEPT)
    assert handle is not None
    return handle


async def test_a_writer_goes_on_where_it_was(lasting: World) -> None:
    async with lasting.store() as store:
        handle = await begin(store, "k", b"first ")
        handle.block.more().attributes[b"user.mine"] = b"1"
        store.catalog.record_change(handle.block)
        lasting.still_open = {handle.block.generation}
    async with lasting.store() as store:
        again = resume(store, handle.block.generation)
        store.sealing.settle_resumed()
        assert again.block.size == 6
        assert (again.block.mode, again.block.uid, again.block.gid) == (0o640, 12, 34)
        assert again.block.more().attributes == {b"user.mine": b"1"}
        root = store.catalog.names.root
        assert store.look(root, b"k", OWNER) is again.block
        assert store.look(root, b"k", OWNER + 1) is None
        await store.content.write(again, 6, b"second")
        store.publish_on_close(again)
        store.release(again)
        await store.sealing.wait_sealed(again.block)
        assert await get(store, "k") == b"first second"


async def test_what_was_published_and_closed_is_sealed(lasting: World) -> None:
    async with lasting.store() as store:
        handle = await begin(store, "k", b"content")
        store.publish_on_close(handle)
    async with lasting.store() as store:
        store.sealing.settle_resumed()
        block = store.catalog.names.root.entries[b"k"]
        assert isinstance(block, Block)
        await store.sealing.wait_sealed(block)
        assert block.state is State.SEALED
        assert await get(store, "k") == b"content"


async def test_what_lacks_refused_bytes_is_still_not_shown(lasting: World) -> None:
    async with lasting.store() as store:
        handle = await begin(store, "k", b"x" * MIB)
        assert handle.block.writing is not None
        handle.block.writing.refused_at = MIB
        store.catalog.record_transient(handle.block)
        lasting.still_open = {handle.block.generation}
    async with lasting.store() as store:
        again = resume(store, handle.block.generation)
        store.sealing.settle_resumed()
        store.publish_on_close(again)
        store.release(again)
        assert not store.catalog.names.root.entries
        assert list((lasting.path / "blocks").iterdir()) == []


async def test_a_gone_block_lasts_until_it_is_closed(lasting: World) -> None:
    async with lasting.store() as store:
        block = await put(store, "k", b"old")
        await store.open_for_read(block, owner=1)
        store.unlink(store.catalog.names.root, b"k", OWNER)
        lasting.still_open = {block.generation}
    async with lasting.store() as store:
        assert not store.catalog.names.root.entries
        again = resume(store, block.generation, writable=False)
        assert again.block.is_gone
        assert bytes(store.content.read(again, 0, 100)) == b"old"
        store.release(again)
        assert list((lasting.path / "blocks").iterdir()) == []
        assert block.generation not in store.catalog.names.by_inode
        assert store.catalog.hot.used_bytes <= 2 * MIB


async def test_a_gone_block_that_nobody_has_open_any_more_is_removed(lasting: World) -> None:
    async with lasting.store() as store:
        block = await put(store, "k", b"old")
        await store.open_for_read(block, owner=1)
        store.unlink(store.catalog.names.root, b"k", OWNER)
    async with lasting.store() as store:
        assert list((lasting.path / "blocks").iterdir()) == []
        assert store.catalog.block_count == 0


async def test_what_was_made_for_an_open_that_was_not_noted_is_dropped(lasting: World) -> None:
    async with lasting.store() as store:
        await put(store, "k", b"old")
        root = store.catalog.names.root
        await store.create(root, b"k", WHO, OWNER, os.O_WRONLY | os.O_TRUNC)
    async with lasting.store() as store:
        store.sealing.settle_resumed()
        root = store.catalog.names.root
        assert store.look(root, b"k", OWNER) is root.entries[b"k"]
        assert len(list((lasting.path / "blocks").iterdir())) == 1


async def test_what_was_made_for_a_thread_that_is_sent_back_waits_for_it(lasting: World) -> None:
    async with lasting.store() as store:
        root = store.catalog.names.root
        new = await store.new_generation(root, b"k", OWNER)
        assert new.writing is not None
        new.writing.opener = 5
        store.catalog.record_transient(new)
    async with lasting.store() as store:
        store.sealing.settle_resumed()
        root = store.catalog.names.root
        found = store.look(root, b"k", OWNER, 5)
        assert isinstance(found, Block)
        assert found.generation == new.generation
        assert store.look(root, b"k", OWNER, 6) is None


async def test_replacing_a_block_that_is_written_leaves_one(lasting: World) -> None:
    async with lasting.store() as store:
        first = await begin(store, "k", b"first")
        store.publish_on_close(first)
        second = await begin(store, "k", b"second")
        store.publish_on_close(second)
        lasting.still_open = {first.block.generation, second.block.generation}
    async with lasting.store() as store:
        assert resume(store, first.block.generation).block.is_gone
        again = resume(store, second.block.generation)
        store.sealing.settle_resumed()
        assert store.catalog.names.root.entries[b"k"] is again.block
        store.release(again)
        await store.sealing.wait_sealed(again.block)
        assert await get(store, "k") == b"second"


async def test_a_rewritten_journal_keeps_what_is_open(lasting: World) -> None:
    async with lasting.store() as store:
        handle = await begin(store, "k", b"content")
        gone = await put(store, "gone", b"bytes")
        await store.open_for_read(gone, owner=1)
        store.unlink(store.catalog.names.root, b"gone", OWNER)
        await store.upkeep.rewrite_journal()
        lasting.still_open = {handle.block.generation, gone.generation}
    async with lasting.store() as store:
        assert resume(store, handle.block.generation).block.size == 7
        again = resume(store, gone.generation, writable=False)
        assert bytes(store.content.read(again, 0, 10)) == b"bytes"


async def test_an_unsealed_block_is_written_on(lasting: World) -> None:
    async with lasting.store() as store:
        block = await put(store, "k", b"sealed")
        handle = await store.open_for_write(block, OWNER, os.O_WRONLY)
        await store.content.write(handle, 6, b" and more")
        lasting.still_open = {block.generation}
    async with lasting.store() as store:
        again = resume(store, block.generation)
        store.sealing.settle_resumed()
        store.release(again)
        await store.sealing.wait_sealed(again.block)
        assert await get(store, "k") == b"sealed and more"


async def test_another_mount_begins_without_what_was_open(lasting: World) -> None:
    async with lasting.store() as store:
        await begin(store, "unpublished", b"x")
        published = await begin(store, "published", b"y")
        store.publish_on_close(published)
        await put(store, "sealed", b"z")
        await set_attribute(store, "sealed", "pin", "1")
    lasting.still_open = None
    async with lasting.store() as store:
        assert set(store.catalog.names.root.entries) == {b"sealed"}
        assert await get(store, "sealed") == b"z"
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(list((lasting.path / "blocks").iterdir())) == 1


@pytest.mark.parametrize("published", [True, False])
async def test_what_was_synced_while_it_is_written_is_no_block_of_its_own(
    lasting: World, published: bool
) -> None:
    async with lasting.store() as store:
        handle = await begin(store, "k", b"synced ")
        if published:
            store.publish_on_close(handle)
        await store.sealing.sync(handle.block)
        await store.content.write(handle, 7, b"and more")
        await store.sealing.sync(handle.block)
        lasting.still_open = {handle.block.generation}
    async with lasting.store() as store:
        again = resume(store, handle.block.generation)
        store.sealing.settle_resumed()
        assert again.block.published is published
        root = store.catalog.names.root
        assert store.look(root, b"k", OWNER + 1) is (again.block if published else None)
        assert store.catalog.cold is not None
        assert len(store.catalog.shadows) == 1
        await store.content.write(again, 15, b" still")
        store.publish_on_close(again)
        store.release(again)
        await store.sealing.wait_sealed(again.block)
        assert await get(store, "k") == b"synced and more still"


async def test_what_was_synced_of_an_open_block_outlives_restart_and_power_cut(
    lasting: World,
) -> None:
    async with lasting.store() as store:
        handle = await begin(store, "k", b"synced")
        store.publish_on_close(handle)
        await store.sealing.sync(handle.block)
        lasting.still_open = {handle.block.generation}
    async with lasting.store() as store:
        resume(store, handle.block.generation)
        store.sealing.settle_resumed()
        assert store.catalog.cold is not None
        await store.catalog.cold.sync()
    lasting.still_open = None
    lasting.reboot()
    async with lasting.store() as store:
        assert await get(store, "k") == b"synced"


async def replace_open(store: Store, *, rewritten: bool) -> tuple[Handle, Handle]:
    """Have what was synced under another name take the name of a synced block that is open.

    Returns the writer, which goes on, and who reads what was there before.
    """
    root = store.catalog.names.root
    old = await put(store, "k", b"old")
    await store.sealing.sync(old)
    reader = await store.open_for_read(old, owner=1)
    writer = await begin(store, "early", b"new")
    await store.sealing.sync(writer.block)
    store.publish_on_close(writer)
    store.rename(writer.block, root, b"k")
    if rewritten:
        await store.upkeep.rewrite_journal()
    return writer, reader


@pytest.mark.parametrize("rewritten", [True, False])
async def test_a_rename_over_a_block_that_is_open_leaves_the_old_or_the_new_one(
    lasting: World, rewritten: bool
) -> None:
    async with lasting.store() as store:
        await replace_open(store, rewritten=rewritten)
    lasting.still_open = None
    async with lasting.store() as store:
        assert await get(store, "k") in (b"old", b"new")


@pytest.mark.parametrize("rewritten", [True, False])
async def test_who_reads_what_was_replaced_goes_on_after_a_restart(
    lasting: World, rewritten: bool
) -> None:
    async with lasting.store() as store:
        writer, reader = await replace_open(store, rewritten=rewritten)
        lasting.still_open = {writer.block.generation, reader.block.generation}
    async with lasting.store() as store:
        new = resume(store, writer.block.generation)
        old = resume(store, reader.block.generation, writable=False)
        store.sealing.settle_resumed()
        assert bytes(store.content.read(old, 0, 10)) == b"old"
        assert await get(store, "k") == b"new"
        store.release(new)
        await store.sealing.wait_sealed(new.block)
        assert bytes(store.content.read(old, 0, 10)) == b"old"
        store.release(old)
        assert await get(store, "k") == b"new"
        assert len(list((lasting.path / "blocks").iterdir())) == 1


async def test_what_is_kept_for_an_unsealed_block_is_kept_for_the_one_that_replaces_it(
    lasting: World,
) -> None:
    async with lasting.store() as store:
        await store.sealing.sync(await put(store, "k", b"old"))
        for content in (b"second", b"third"):
            store.publish_on_close(await begin(store, "k", content))
    lasting.still_open = None
    async with lasting.store() as store:
        assert await get(store, "k") == b"old"


async def test_the_new_name_is_on_the_medium_before_what_had_it_goes(lasting: World) -> None:
    async with lasting.store() as store:
        await replace_open(store, rewritten=False)
        lasting.clock.pass_s(3)
        await trio.sleep(1.2)
        assert not store.catalog.replaced_before(1 << 63)
    lasting.still_open = None
    async with lasting.store() as store:
        assert await get(store, "k") == b"new"


async def test_what_a_synced_block_replaced_is_not_there_again_when_that_one_is_replaced(
    lasting: World,
) -> None:
    async with lasting.store() as store:
        await store.sealing.sync(await put(store, "k", b"first"))
        second = await begin(store, "k", b"second")
        await store.sealing.sync(second.block)
        store.publish_on_close(second)
        store.publish_on_close(await begin(store, "k", b"third"))
        assert store.catalog.cold is not None
        await store.catalog.cold.sync()
    lasting.still_open = None
    lasting.reboot()
    async with lasting.store() as store:
        root = store.catalog.names.root
        assert b"k" not in root.entries or await get(store, "k") != b"first"
