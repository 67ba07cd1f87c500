"""Opens that are sent to look their name up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxfs.core.block import Block, Writing
from ctxfs.store.store import Store
from mountd.redirects import Redirects, RetryLookup
from mountd.session import SENT_BACK, Agreed, Session
from mountd.values import Caller
from tests.store.world import OWNER, World, put

THREAD, OTHER = 11, 12


def caller(request: int) -> Caller:
    return Caller(0, 0, THREAD, request)


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
        redirects.begin(caller(1), old, new)
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
        taken = redirects.take(caller(2), new)
        assert taken is not None
        assert taken.instead is new
        assert redirects.take(caller(2), new) is None


async def test_the_open_is_recognised_however_long_the_second_lookup_took(world: World) -> None:
    async with world.store() as store:
        redirects = Redirects(store)
        new = await redirected(store, redirects, "k")
        world.clock.pass_s(3)
        redirects.looked_up(THREAD, (store.catalog.names.root, b"k"), new)
        assert redirects.take(caller(2), new) is not None


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
        taken = redirects.take(caller(2), new)
        assert taken is not None
        assert not new.is_gone


async def test_a_thread_that_opens_something_else_leaves_nothing(world: World) -> None:
    async with world.store() as store:
        redirects = Redirects(store)
        new = await redirected(store, redirects, "k")
        redirects.end(THREAD)
        assert new.is_gone


def taken_over(session: Session, path: Path) -> Session:
    """What a successor reads."""
    session.agreed(Agreed(minor=41, max_write=1 << 20, passthrough=True))
    session.close()
    return Session(path)


async def test_a_successor_knows_whom_its_predecessor_sent_back(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "session"
    async with world.store() as store:
        session = Session(path)
        new = await redirected(store, Redirects(store, session), "k")
        redirects = Redirects(store, taken_over(session, path))
        redirects.resume()
        taken = redirects.take(caller(2), new)
        assert taken is not None
        assert taken.instead is new
        assert redirects.take(caller(2), new) is None


async def test_an_answer_that_was_not_read_is_given_again(world: World, tmp_path: Path) -> None:
    path = tmp_path / "session"
    async with world.store() as store:
        session = Session(path)
        new = await redirected(store, Redirects(store, session), "k")
        redirects = Redirects(store, taken_over(session, path))
        redirects.resume()
        with pytest.raises(RetryLookup):
            redirects.take(caller(1), new)
        assert redirects.take(caller(2), new) is not None


async def test_what_was_looked_up_before_a_restart_lasts_until_the_open(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "session"
    async with world.store() as store:
        root = store.catalog.names.root
        session = Session(path)
        first = Redirects(store, session)
        old = await put(store, "k", b"old")
        with pytest.raises(RetryLookup):
            first.begin(caller(1), old)
        found = await put(store, "k", b"found")
        first.looked_up(THREAD, (root, b"k"), found)
        (noted,) = session.redirects()
        assert noted.held == found.generation
        await put(store, "k", b"newest")
        assert found.is_gone
        redirects = Redirects(store, taken_over(session, path))
        redirects.resume()
        taken = redirects.take(caller(2), found)
        assert taken is not None
        assert taken.held is not None
        assert store.content.read(taken.held, 0, 10) == b"found"
        redirects.end(THREAD)


async def test_what_the_kernel_has_from_a_daemon_before_is_looked_up_again(world: World) -> None:
    async with world.store() as store:
        redirects = Redirects(store)
        with pytest.raises(RetryLookup):
            redirects.begin(caller(1), None)
        assert redirects.take(caller(2), await put(store, "k", b"new")) is not None


async def test_more_at_once_than_can_be_noted_are_known_all_the_same(
    world: World, tmp_path: Path
) -> None:
    async with world.store() as store:
        session = Session(tmp_path / "session")
        redirects = Redirects(store, session)
        old = await put(store, "k", b"old")
        callers = [Caller(0, 0, thread, thread) for thread in range(1, 200)]
        for each in callers:
            with pytest.raises(RetryLookup):
                redirects.begin(each, old)
        assert len(session.redirects()) == SENT_BACK
        for each in callers:
            assert redirects.take(each._replace(request=0), old) is not None
        assert session.redirects() == []
        session.close()
