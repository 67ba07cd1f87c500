"""Whose a block is: owner, group and mode hold, and nobody learns of what is not theirs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.mount.harness import Daemon, elsewhere, run_as, wait_until

NOBODY = 65534
OTHER = 12345


@pytest.fixture
def room(place: Path) -> Path:
    """A directory where everybody may do everything."""
    os.chmod(place, 0o777)
    # The directories above it, which pytest made, are root's alone.
    for parent in place.parents:
        if parent == Path("/"):
            break
        mode = stat.S_IMODE(parent.stat().st_mode)
        if not mode & 0o001:
            os.chmod(parent, mode | 0o011)
    return place


def error_of(action: Callable[[], object]) -> int:
    """Return the errno of what must fail."""
    try:
        action()
    except OSError as error:
        return error.errno or 0
    raise AssertionError("it did not fail")


def refused(uid: int, action: Callable[..., object], *arguments: object) -> int:
    """Return the errno with which another user fails."""
    return run_as(uid, lambda: error_of(lambda: action(*arguments)))


def open_as(path: Path, mode: str) -> None:
    open(path, mode).close()


def put_as(uid: int, path: Path, mode: int = 0o600) -> None:
    def put() -> None:
        os.umask(0)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        os.write(fd, b"secret")
        os.close(fd)

    run_as(uid, put)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_block_belongs_to_its_writer_with_the_mode_that_the_mask_leaves(
    room: Path, mask: int
) -> None:
    path = room / "block"

    def put() -> None:
        os.umask(mask)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        os.write(fd, b"x")
        os.close(fd)
        os.mkdir(room / "directory", 0o777)

    run_as(OTHER, put)
    for made, mode in ((path, 0o666), (room / "directory", 0o777)):
        facts = made.stat()
        assert (facts.st_uid, facts.st_gid) == (OTHER, OTHER)
        assert stat.S_IMODE(facts.st_mode) == mode & ~mask


def test_others_get_eacces_for_what_is_not_theirs(room: Path) -> None:
    # SynapseKit#1024: a world-readable cache
    path = room / "private"
    put_as(OTHER, path)
    assert refused(NOBODY, path.read_bytes) == errno.EACCES
    assert refused(NOBODY, open_as, path, "r+b") == errno.EACCES
    assert refused(NOBODY, os.truncate, path, 0) == errno.EACCES
    assert refused(NOBODY, os.getxattr, path, "user.ctx.tier") == errno.EACCES
    assert run_as(OTHER, path.read_bytes) == b"secret"
    assert path.read_bytes() == b"secret"


def test_group_may_read_what_its_mode_says(room: Path) -> None:
    path = room / "shared"
    put_as(OTHER, path, 0o640)
    os.chown(path, OTHER, NOBODY)
    assert run_as(NOBODY, path.read_bytes) == b"secret"
    assert refused(NOBODY, open_as, path, "r+b") == errno.EACCES
    assert refused(54321, path.read_bytes) == errno.EACCES


def test_listing_shows_only_what_the_caller_may_read(room: Path) -> None:
    put_as(OTHER, room / "others-private", 0o600)
    put_as(OTHER, room / "others-public", 0o644)
    put_as(NOBODY, room / "own-private", 0o600)
    put_as(OTHER, room / "group", 0o640)
    os.chown(room / "group", OTHER, 777)

    def list_with_group() -> list[str]:
        os.setgroups([777])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        return sorted(os.listdir(room))

    assert sorted(run_as(NOBODY, lambda: os.listdir(room))) == ["others-public", "own-private"]
    assert elsewhere(list_with_group) == ["group", "others-public", "own-private"]
    assert len(os.listdir(room)) == 4


def test_attributes_are_set_by_those_who_may_write(room: Path) -> None:
    # LMCache#2757: anybody could move and clear
    path = room / "block"
    put_as(OTHER, path, 0o644)
    for name, value in (("tier", b"hot"), ("ttl", b"1h"), ("pin", b"1"), ("parent", b"p")):
        setting = partial(os.setxattr, path, f"user.ctx.{name}", value)
        assert refused(NOBODY, setting) == errno.EACCES
        run_as(OTHER, setting)
    assert refused(NOBODY, os.removexattr, path, "user.ctx.ttl") == errno.EACCES
    assert run_as(NOBODY, lambda: os.getxattr(path, "user.ctx.pin")) == b"1"


def test_mode_and_owner_are_changed_by_the_owner_alone(room: Path) -> None:
    path = room / "block"
    put_as(OTHER, path, 0o666)
    assert refused(NOBODY, os.chmod, path, 0o777) == errno.EPERM
    assert refused(NOBODY, os.chown, path, NOBODY, -1) == errno.EPERM
    assert refused(OTHER, os.chown, path, NOBODY, -1) == errno.EPERM
    run_as(OTHER, lambda: os.chmod(path, 0o600))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_root_of_the_mount_lets_everybody_put_and_only_owners_remove(shared: Daemon) -> None:
    root = shared.mount
    assert stat.S_IMODE(root.stat().st_mode) == 0o1777
    for parent in root.parents:
        if parent != Path("/") and not parent.stat().st_mode & 0o001:
            os.chmod(parent, stat.S_IMODE(parent.stat().st_mode) | 0o011)
    path = root / "put-by-another"
    put_as(OTHER, path, 0o644)
    assert refused(NOBODY, path.unlink) == errno.EPERM
    assert refused(NOBODY, os.rename, path, root / "n") == errno.EPERM
    run_as(OTHER, path.unlink)
    assert not path.exists()


def test_set_group_directory_hands_its_group_on(room: Path) -> None:
    directory = room / "team"
    directory.mkdir()
    os.chown(directory, 0, 777)
    os.chmod(directory, 0o2777)
    put_as(OTHER, directory / "block", 0o640)
    run_as(OTHER, (directory / "sub").mkdir)
    assert (directory / "block").stat().st_gid == 777
    assert (directory / "sub").stat().st_gid == 777
    assert (directory / "sub").stat().st_mode & stat.S_ISGID


def test_closed_directory_tells_nothing_of_what_is_in_it(room: Path) -> None:
    # CVE-2025-46570: whether a block exists is itself a secret
    directory = room / "tenant"

    def fill() -> None:
        directory.mkdir(mode=0o700)
        (directory / "present").write_bytes(b"x")

    run_as(OTHER, fill)
    for name in ("present", "absent"):
        path = directory / name
        answers = {
            refused(NOBODY, path.read_bytes),
            refused(NOBODY, path.stat),
            refused(NOBODY, path.unlink),
            refused(NOBODY, path.mkdir),
            refused(NOBODY, os.rename, room / "nothing", path),
            refused(NOBODY, os.getxattr, path, "user.ctx.tier"),
            refused(NOBODY, open_as, path, "wb"),
        }
        assert answers == {errno.EACCES}
    assert refused(NOBODY, os.listdir, directory) == errno.EACCES


def test_events_are_for_the_user_of_the_daemon_alone(room: Path, shared: Daemon) -> None:
    for name in ("events", "events.recent"):
        path = shared.mount / ".ctx" / name
        assert refused(NOBODY, open_as, path, "rb") == errno.EACCES
    assert run_as(NOBODY, (shared.mount / ".ctx/stats").read_bytes)


def test_overwritten_block_keeps_its_owner_and_mode(room: Path) -> None:
    path = room / "block"
    put_as(OTHER, path, 0o666)
    run_as(NOBODY, lambda: path.write_bytes(b"new"))
    facts = path.stat()
    assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (OTHER, 0o666)
    assert path.read_bytes() == b"new"


def test_nobody_overwrites_what_they_may_not_write(room: Path) -> None:
    path = room / "block"
    put_as(OTHER, path, 0o644)
    assert refused(NOBODY, path.write_bytes, b"x") == errno.EACCES
    assert path.read_bytes() == b"secret"


def test_hot_room_and_state_are_closed_to_others(shared: Daemon) -> None:
    for path in (shared.state, shared.state / "hot", shared.state / "hot/blocks"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    wait_until(lambda: (shared.state / "hot/journal").exists())
    assert stat.S_IMODE((shared.state / "hot/journal").stat().st_mode) == 0o600


def test_backing_files_are_private(start: Callable[..., Daemon]) -> None:
    daemon = start(cold="64MiB")
    daemon.put("block", b"x")
    for path in (*(daemon.state / "hot/blocks").iterdir(), daemon.cold_path):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
