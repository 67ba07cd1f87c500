"""Several users on one mount: what one cannot do to the blocks of another, by whatever way."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.mount.harness import (
    MIB,
    Actor,
    Daemon,
    elsewhere,
    noise,
    run_as,
    together,
    wait_until,
)

T = TypeVar("T")

ALICE, BOB = 65534, 65533
GROUP = 65000

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act for several users")


@pytest.fixture(scope="module")
def one(channel: str) -> Iterator[Daemon]:
    """A daemon with both tiers, below directories that everybody may enter."""
    base = Path("/var/tmp") / f"ctxfs-permissions-{os.getpid()}"
    base.mkdir(mode=0o755)
    try:
        options = ("-o", "allow_other")
        with Daemon(base, cold="128MiB", arguments=options, channel=channel) as daemon:
            yield daemon
            assert "Traceback" not in daemon.log(), daemon.log()
    finally:
        shutil.rmtree(base)


@pytest.fixture
def place(one: Daemon, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory for one test, with the root's mode: everybody's, and sticky."""
    path = one.mount / request.node.name[:200]
    path.mkdir()
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def as_member(uid: int, groups: list[int], action: Callable[[], T]) -> T:
    """Run `action` in another process as a user with supplementary groups."""

    def as_them() -> T:
        os.setgroups(groups)
        os.setgid(uid)
        os.setuid(uid)
        return action()

    return elsewhere(as_them)


def error_of(uid: int, action: Callable[[], object]) -> int:
    """The errno a user gets; 0 if it went well."""

    def attempt() -> int:
        try:
            action()
        except OSError as error:
            return error.errno or -1
        return 0

    return run_as(uid, attempt)


def put_as(uid: int, path: Path, mode: int, *, flags: int = os.O_EXCL) -> Path:
    """A sealed block of a user's, with that mode."""

    def put() -> None:
        os.umask(0)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode)
        os.write(fd, b"content")
        os.close(fd)

    run_as(uid, put)
    wait_until(lambda: os.getxattr(path, "user.ctx.state") == b"sealed")
    return path


def owner_and_mode(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


# -- the sticky root


def test_root_of_the_mount_is_everybodys_and_sticky(one: Daemon) -> None:
    assert owner_and_mode(one.mount) == (0, 0, 0o1777)
    path = put_as(ALICE, one.mount / "sticky", 0o666)
    own = put_as(BOB, one.mount / "bobs", 0o666)
    assert error_of(BOB, path.unlink) == errno.EPERM
    assert error_of(BOB, lambda: path.rename(one.mount / "away")) == errno.EPERM
    assert error_of(BOB, lambda: own.rename(path)) == errno.EPERM
    assert path.read_bytes() == b"content"
    assert error_of(ALICE, lambda: path.rename(one.mount / "mine")) == 0
    assert error_of(ALICE, (one.mount / "mine").unlink) == 0
    own.unlink()


def test_nobody_replaces_anothers_block_with_one_begun_before_it(place: Path, one: Daemon) -> None:
    # Names are hashes of prompts: who could replace a block could answer for somebody else.
    path = place / "poisoned"

    def begin() -> Iterator[int]:
        os.setgid(BOB)
        os.setuid(BOB)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        os.write(fd, b"poison")
        yield 0
        try:
            os.close(fd)
        except OSError as error:
            yield error.errno or -1
        yield 0

    with Actor(begin) as bob:
        bob.step()
        put_as(ALICE, path, 0o644, flags=0)
        assert bob.step() == errno.EACCES
    assert elsewhere(path.read_bytes) == b"content"
    assert owner_and_mode(path) == (ALICE, ALICE, 0o644)
    assert elsewhere(lambda: os.listdir(place)) == ["poisoned"]


def test_opening_a_name_as_it_comes_and_goes_gives_nobody_anothers_bytes(place: Path) -> None:
    # The kernel finds no such name, asks for a new file, and by then another's block is there.
    path = place / "contended"

    def act_as(uid: int, action: Callable[[], bool]) -> int:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        found = 0
        for _ in range(1500):
            try:
                found += action()
                path.unlink()
            except OSError:
                continue  # another was faster: of no matter here
        return found

    def put() -> bool:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, b"secret")
        os.close(fd)
        return False

    def peek() -> bool:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        content = os.pread(fd, 100, 0)
        with contextlib.suppress(PermissionError):
            os.close(fd)
        return content != b""

    assert together([lambda: act_as(ALICE, put), *[lambda: act_as(BOB, peek)] * 2]) == [0, 0, 0]


# -- who reads and writes


@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_private_block_is_closed_to_others_in_every_tier(place: Path, tier: str) -> None:
    path = put_as(ALICE, place / "private", 0o600)
    os.setxattr(path, "user.ctx.tier", tier.encode())
    copies = os.getxattr(path, "user.ctx.copies")
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        assert error_of(BOB, lambda flags=flags: os.open(path, flags)) == errno.EACCES  # type: ignore[misc]
    assert error_of(BOB, lambda: os.truncate(path, 0)) == errno.EACCES
    assert error_of(BOB, lambda: os.utime(path)) == errno.EACCES
    assert os.getxattr(path, "user.ctx.copies") == copies  # nothing was brought up for them
    assert error_of(ALICE, path.read_bytes) == 0
    assert path.read_bytes() == b"content"  # root


def test_block_that_others_may_read_is_not_theirs_to_steer(place: Path) -> None:
    # LMCache#2757: anybody could move and clear
    path = put_as(ALICE, place / "readable", 0o644)
    assert error_of(BOB, path.read_bytes) == 0
    assert error_of(BOB, lambda: os.getxattr(path, "user.ctx.story")) == 0
    for attribute, value in (
        ("user.ctx.tier", b"cold"), ("user.ctx.ttl", b"1"), ("user.ctx.pin", b"1"),
        ("user.ctx.prefetch", b"1"), ("user.ctx.verify", b"1"), ("user.ctx.parent", b"p"),
        ("user.mine", b"1"),
    ):  # fmt: skip
        assert error_of(BOB, lambda: os.setxattr(path, attribute, value)) == errno.EACCES  # noqa: B023
        assert error_of(BOB, lambda: os.removexattr(path, attribute)) == errno.EACCES  # noqa: B023
    assert error_of(BOB, path.unlink) == errno.EPERM
    assert os.getxattr(path, "user.ctx.ttl") == b"none"
    assert os.getxattr(path, "user.ctx.tier") == b"hot"
    for attribute, value in (("tier", b"cold"), ("ttl", b"1h"), ("pin", b"1")):
        assert error_of(ALICE, lambda: os.setxattr(path, f"user.ctx.{attribute}", value)) == 0  # noqa: B023


def test_attributes_of_a_block_one_may_not_read_stay_closed(place: Path) -> None:
    path = put_as(ALICE, place / "closed", 0o600)
    os.setxattr(path, "user.secret", b"1")
    for attribute in ("user.ctx.digest", "user.ctx.story", "user.ctx.tier", "user.secret"):
        assert error_of(BOB, lambda: os.getxattr(path, attribute)) == errno.EACCES  # noqa: B023
        assert error_of(ALICE, lambda: os.getxattr(path, attribute)) == 0  # noqa: B023


def test_directorys_attributes_are_its_owners(place: Path, one: Daemon) -> None:
    for path in (one.mount, place):
        for attribute, value in (("user.ctx.ttl", b"1"), ("user.ctx.together", b"1")):
            answer = error_of(BOB, lambda: os.setxattr(path, attribute, value))  # noqa: B023
            assert answer in (errno.EPERM, errno.EACCES)
        assert os.listxattr(path) == []
    run_as(BOB, (place / "bobs").mkdir)
    assert error_of(BOB, lambda: os.setxattr(place / "bobs", "user.ctx.ttl", b"1h")) == 0
    assert error_of(ALICE, lambda: os.setxattr(place / "bobs", "user.ctx.ttl", b"1")) == (
        errno.EACCES
    )


# -- who sees


def test_listing_shows_only_what_one_may_read(place: Path) -> None:
    put_as(ALICE, place / "public", 0o644)
    put_as(ALICE, place / "private", 0o600)
    put_as(ALICE, place / "nobodys", 0o000)
    put_as(ALICE, place / "others-only", 0o604)
    put_as(ALICE, place / "groups", 0o640)
    os.chown(place / "groups", ALICE, GROUP)
    for name, mode in (("open", 0o755), ("shut", 0o700), ("blind", 0o711)):
        run_as(ALICE, lambda: (place / name).mkdir())  # noqa: B023
        (place / name).chmod(mode)

    def listing() -> set[str]:
        found = set(os.listdir(place))
        with os.scandir(place) as entries:
            assert {entry.name for entry in entries} == found
        return found

    everything = {
        "public", "private", "nobodys", "others-only", "groups", "open", "shut", "blind",
    }  # fmt: skip
    assert run_as(ALICE, listing) == everything
    assert listing() == everything
    assert run_as(BOB, listing) == {"public", "others-only", "open", "blind"}
    member = as_member(BOB, [GROUP], listing)
    assert member == {"public", "others-only", "groups", "open", "blind"}
    # Alice's group has less than all others where its bits say so.
    assert as_member(BOB, [ALICE], listing) == {"public", "open", "blind"}


# -- what lies behind the mount


def test_backing_store_is_private_whatever_the_umask(tmp_path: Path) -> None:
    # SynapseKit#1024: a world-readable cache directory
    daemon = Daemon(tmp_path, cold="64MiB", run_as=["sh", "-c", 'umask 0 && exec "$@"', "sh"])
    daemon.state.rmdir()  # the daemon makes it
    with daemon:
        for key in ("hot", "both"):
            daemon.put(key, noise(1, MIB))
        daemon.set("both", "tier", "cold")
        daemon.set("both", "tier", "hot")
        (daemon.mount / "folder").mkdir()
        assert owner_and_mode(daemon.state) == (0, 0, 0o700)
        assert owner_and_mode(daemon.cold_path) == (0, 0, 0o600)
        inside = [daemon.state / "hot", *(daemon.state / "hot").rglob("*")]
        assert len(inside) >= 5  # two directories, the journal, two blocks
        for path in inside:
            expected = 0o700 if path.is_dir() else 0o600
            assert owner_and_mode(path) == (0, 0, expected), path
        for path in daemon.state.iterdir():
            assert not path.stat().st_mode & 0o022, path
        assert error_of(BOB, lambda: os.listdir(daemon.state)) == errno.EACCES
