"""The kernel caches names and attributes, and nobody ever sees what is no longer so."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.calls import RENAME_EXCHANGE, rename
from tests.mount.harness import (
    MIB,
    Actor,
    Daemon,
    elsewhere,
    noise,
    read_or_none,
    together,
    wait_until,
)

Start = Callable[..., Daemon]

EPOCH_SINCE = (6, 16)  # what names cannot be taken back without; before, they are not cached
caches_names = pytest.mark.skipif(
    tuple(int(number) for number in os.uname().release.split(".")[:2]) < EPOCH_SINCE,
    reason="needs Linux 6.16 or later",
)

pytestmark = pytest.mark.channel("direct")


@pytest.fixture
def direct(start: Start) -> Daemon:
    """A daemon with 64 MiB of hot tier."""
    return start(hot="64MiB")


def misses(daemon: Daemon) -> int:
    return int(daemon.stats()["counters"]["misses"])


def exists(path: Path) -> bool:
    """Whether it is there, by a lookup that the kernel may answer."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def watcher(look: Callable[[], Any]) -> Actor:
    """Another process that looks at each step."""

    def play() -> Iterator[Any]:
        while True:
            yield look()

    return Actor(play)


@caches_names
def test_lookups_of_a_name_that_is_missing_reach_the_daemon_once(direct: Daemon) -> None:
    path = direct.mount / "missing"
    assert not exists(path)
    before = misses(direct)
    for _ in range(100):
        assert not exists(path)
    assert not elsewhere(lambda: exists(path))
    assert misses(direct) == before


def test_a_block_that_takes_another_s_place_is_seen_at_once(direct: Daemon) -> None:
    path = direct.put("k", b"first")
    with watcher(path.read_bytes) as other:
        assert other.step() == b"first"
        for number in range(50):
            content = b"%d" % number
            direct.put("k", content)
            assert other.step() == content
            assert path.stat().st_size == len(content)


@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
def test_a_block_is_seen_at_once_though_its_name_was_given_away_while_it_was_written(
    direct: Daemon, flags: int
) -> None:
    path, other = direct.put("k", b"old"), direct.put("other", b"other")
    with watcher(path.read_bytes) as reader, watcher(other.read_bytes) as before:
        assert (reader.step(), before.step()) == (b"old", b"other")
        with open(path, "r+b") as file:
            file.write(b"new")
            elsewhere(lambda: rename(other, path, flags))
            assert reader.step() == b"other"
            assert path.read_bytes() == b"old"  # its writer's own still, which is not flushed yet
        assert reader.step() == path.read_bytes() == b"new"


def test_a_block_is_seen_at_once_by_who_missed_it_just_before(direct: Daemon) -> None:
    path = direct.mount / "k"
    with watcher(lambda: read_or_none(path)) as other:
        for number in range(50):
            assert other.step() is None
            direct.put("k", b"%d" % number)
            assert other.step() == b"%d" % number
            path.unlink()


def test_a_name_that_others_miss_is_its_writer_s_own_until_it_is_closed(direct: Daemon) -> None:
    path = direct.mount / "k"
    with watcher(lambda: exists(path)) as other:
        assert not other.step()
        assert not exists(path)
        with open(path, "wb") as file:
            for _ in range(3):
                assert not other.step()
                assert exists(path)
            file.write(b"content")
        assert other.step()


def test_a_writer_that_leaves_nothing_leaves_no_name_behind(direct: Daemon) -> None:
    path = direct.put("k", b"old")
    with watcher(path.read_bytes) as other:
        assert other.step() == b"old"
        with open(path, "r+b"):
            assert other.step() == b"old"
        assert other.step() == b"old"
    assert path.read_bytes() == b"old"


def test_an_expired_block_is_missing_at_once(direct: Daemon) -> None:
    path = direct.put("k", b"content")
    with watcher(lambda: exists(path)) as other:
        assert other.step()
        direct.set("k", "ttl", "0.2")
        wait_until(lambda: bool(direct.events("expired")))
        assert not other.step()
        assert not exists(path)


def test_an_evicted_block_is_missing_once_the_write_that_took_its_room_is_done(
    direct: Daemon,
) -> None:
    def keys() -> set[str]:
        return {name for name in names if exists(direct.mount / name)}

    names = [f"k{number}" for number in range(20)]
    for name in names:
        direct.put(name, noise(1, 2 * MIB))
        direct.wait_sealed(name)
    with watcher(keys) as other:
        assert keys() == other.step() == set(names)
        for number in range(20):
            direct.put(f"new{number}", noise(2, 2 * MIB))
            evicted = {event["key"] for event in direct.events("evicted")}
            assert not other.step() & evicted
            assert not keys() & evicted
        assert evicted


def test_creating_goes_on_while_blocks_beside_it_have_to_go(start: Start) -> None:
    # The kernel holds the directory's lock until a create is answered.
    direct = start(hot="16MiB")
    path = direct.mount / "d"
    path.mkdir()
    for number in range(30):
        for name in os.listdir(path):
            exists(path / name)
        (path / f"k{number}").write_bytes(noise(number, MIB))
        assert exists(path / f"k{number}")
    assert direct.events("evicted")


def test_a_truncated_block_is_seen_at_once(direct: Daemon) -> None:
    path = direct.put("k", noise(3, 100_000))
    direct.wait_sealed("k")
    with watcher(lambda: (path.stat().st_size, len(path.read_bytes()))) as other:
        assert other.step() == (100_000, 100_000)
        for size in (70_000, 3, 90_000):
            os.truncate(path, size)
            assert other.step() == (size, size)


def test_names_that_change_elsewhere_are_seen_at_once(direct: Daemon) -> None:
    a, b, c = (direct.mount / name for name in "abc")

    def there() -> list[bytes | None]:
        return [read_or_none(path) for path in (a, b, c)]

    with watcher(there) as other:
        for _ in range(20):
            assert other.step() == there() == [None, None, None]
            a.write_bytes(b"1")
            assert other.step() == [b"1", None, None]
            a.rename(b)
            assert other.step() == [None, b"1", None]
            c.write_bytes(b"2")
            assert other.step() == [None, b"1", b"2"]
            c.rename(b)
            assert other.step() == [None, b"2", None]
            b.unlink()


def test_directories_that_come_and_go_elsewhere_are_seen_at_once(direct: Daemon) -> None:
    outer, inner = direct.mount / "outer", direct.mount / "outer/inner"
    with watcher(lambda: (exists(outer), exists(inner))) as other:
        for _ in range(20):
            assert other.step() == (False, False)
            inner.mkdir(parents=True)
            assert other.step() == (True, True)
            inner.rename(direct.mount / "outer/moved")
            assert other.step() == (True, False)
            os.rmdir(direct.mount / "outer/moved")
            outer.rmdir()


def test_a_directory_that_goes_with_its_blocks_is_missing_at_once(direct: Daemon) -> None:
    directory = direct.mount / "d"
    directory.mkdir()
    direct.set("d", "together", "1")
    direct.put("d/k", b"content")
    with watcher(lambda: (exists(directory), exists(directory / "k"))) as other:
        assert other.step() == (True, True)
        direct.set("d/k", "ttl", "0.2")
        wait_until(lambda: bool(direct.events("expired")))
        assert other.step() == (False, False)


def test_a_directory_s_time_moves_at_once_with_what_is_beneath(direct: Daemon) -> None:
    directory = direct.mount / "d"
    directory.mkdir()
    with watcher(lambda: directory.stat().st_mtime_ns) as other:
        times = [other.step()]
        for number in range(5):
            with open(directory / f"k{number}", "wb") as file:
                file.write(b"content")
                other.step()
            times.append(other.step())
        direct.set("d/k1", "ttl", "0.2")
        wait_until(lambda: bool(direct.events("expired")))
        times.append(other.step())
    assert times == sorted(set(times))


def test_attributes_that_change_elsewhere_are_seen_at_once(start: Start) -> None:
    daemon = start(cold="256MiB")
    path = daemon.put("k", noise(4, MIB))
    daemon.wait_sealed("k")

    def facts() -> tuple[int, int]:
        about = path.stat()
        return about.st_blocks * 512, about.st_ctime_ns

    with watcher(facts) as other, open(path, "rb") as file:
        physical, changed = other.step()
        assert physical == MIB
        os.fsync(file.fileno())  # now there is a cold copy
        assert other.step()[0] >= 2 * MIB
        os.setxattr(path, "user.mine", b"1")
        assert other.step()[1] > changed
        path.chmod(0o600)
        assert elsewhere(lambda: path.stat().st_mode & 0o777) == 0o600


def test_who_works_in_a_directory_stays_in_it_when_names_are_taken_back(direct: Daemon) -> None:
    directory = direct.mount / "d"
    directory.mkdir()
    path = direct.put("k", b"content")

    def play() -> Iterator[Any]:
        os.chdir(directory)
        while True:
            Path("here").write_bytes(b"mine")
            yield os.getcwd(), Path("here").read_bytes()

    with Actor(play) as inside:
        for size in range(1, 5):
            assert inside.step() == (str(directory), b"mine")
            exists(path)
            os.truncate(path, size)
            assert exists(directory)


def test_open_finds_the_block_that_the_name_leads_to_now(direct: Daemon) -> None:
    path = direct.put("k", b"0")

    def read_all() -> list[int]:
        seen: list[int] = []
        while not seen or seen[-1] < 200:
            seen.append(int(path.read_bytes()))
        return seen

    def write_all() -> None:
        for number in range(1, 201):
            path.write_bytes(b"%d" % number)

    seen, _, again = together([read_all, write_all, read_all])
    assert seen == sorted(seen)
    assert again == sorted(again)


@pytest.mark.slow
def test_a_storm_of_changing_names_and_lookups_neither_hangs_nor_lies(start: Start) -> None:
    direct = start(hot="16MiB")
    place = direct.mount / "d"
    place.mkdir()
    names = [place / f"k{number}" for number in range(24)]

    def act(number: int) -> Callable[[], int]:
        def storm() -> int:
            chance = random.Random(number)
            done = 0
            for _ in range(400):
                path, other = chance.sample(names, 2)
                with contextlib.suppress(FileNotFoundError, FileExistsError, OSError):
                    change(chance.randrange(8), path, other)
                    done += 1
            return done

        return storm

    def change(what: int, path: Path, other: Path) -> None:
        match what:
            case 0 | 1:
                path.write_bytes(noise(what, MIB))
            case 2:
                path.rename(other)
            case 3:
                os.setxattr(path, "user.ctx.ttl", b"0.05")
            case 4:
                path.unlink()
            case 5:
                below = path.with_suffix(".d")
                below.mkdir()
                below.rmdir()
            case _:
                for each in names:
                    exists(each)

    assert all(together([act(number) for number in range(4)]))
    wait_until(lambda: not any(exists(path.with_suffix(".d")) for path in names))

    def look() -> set[str]:
        return {path.name for path in names if exists(path)}

    with watcher(look) as one:
        here: set[str] = set()
        thread = threading.Thread(target=lambda: here.update(look()))
        thread.start()
        thread.join()
        assert one.step() == here == set(os.listdir(place))
