"""Opens that are sent to look their name up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxfs.core.block import Block, Writing
from ctxfs.store.store import Store
from mountd.redirects import Redirects, RetryLookup
from tests.store.world import OWNER, World, put

THREAD, OTHER = 11, 12


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, None)


async def redirected(store: Store, redirects: Redirects, name: str) -> Block:
    """Have a thread sent on from a sealed block to a new generation of that name."""
    root = store.catalog.names.root
    old = await put(store, name, b"old")
    new = await store.new_generation(root, name.encode(), OWNER)
    assert isinstance(new.writing, Writing)
    new.writing.opener = THREAD
    with pytest.raises(RetryLookup):
        redirects.begin(THREAD, old, new)
    return new


async def test_what_was_made_for_an_open_is_found_by_its_thread_alone(world: World) -> None:
    async with world.store() as store:
        new = await redirected(store, Redirects(store), "k")
        root = store.catalog.names.root
        assert store.look(root, b"k", OWNER, THREAD) is new
        assert store.look(root, b"k", OWNER, OTHER) is root.entries[b"k"]


async def test_a_block_renamed_while_it_is_opened_leaves_nothing_under_its_new_name(
    world: World,
) -> None:
    async with world.store() as store:
        redirects = Redirects(store)
        new = await redirected(store, redirects, "new-name")
        root = store.catalog.names.root
        redirects.looked_up(THREAD, (root, b"old-name"), None)
        assert new.is_gone
        assert store.look(root, b"new-name", OWNER, THREAD) is root.entries[b"new-name"]


async def test_the_open_that_was_waited_for_is_recognised_once(world: World) -> None:
    async with world.store() as store:
        redirects = Redirects(store)
        new = await redirected(store, redirects, "k")
        redirects.looked_up(THREAD, (store.catalog.names.root, b"k"), new)
        taken = redirects.take(THREAD, new)
        assert taken is not None
        assert taken.instead is new
        assert redirects.take(THREAD, new) is None


async def test_the_open_is_recognised_though_the_old_block_has_another_name_by_now(
    world: World,
) -> None:
    async with world.store() as store:
        redirects = Redirects(store)
        new = await redirected(store, redirects, "k")
        root = store.catalog.names.root
        old = root.entries[b"k"]
        assert isinstance(old, Block)
        store.rename(old, root, b"elsewhere")
        redirects.looked_up(THREAD, (root, b"k"), new)
        taken = redirects.take(THREAD, new)
        assert taken is not None
        assert not new.is_gone


async def test_a_thread_that_opens_something_else_leaves_nothing(world: World) -> None:
    async with world.store() as store:
        redirects = Redirects(store)
        new = await redirected(store, redirects, "k")
        redirects.end(THREAD)
        assert new.is_gone
