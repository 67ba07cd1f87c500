"""An ordinary user mounts, uses and ends ctxfs, without root anywhere but in fusermount3."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.harness import Daemon, is_mounted

NOBODY = 65534
FUSE = Path("/dev/fuse")


def as_nobody() -> list[str]:
    """The start of a command that runs as an ordinary user.

    Where the interpreter lies in a directory of root's alone, the right to read files anywhere
    is kept; fusermount3 drops it, and the daemon behaves by its user id.
    """
    command = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    # Twice, since setpriv may start what the user it becomes may not.
    twice = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    plain = subprocess.run(
        [*command, sys.executable, "-c", twice], capture_output=True, check=False
    )
    if plain.returncode:
        command += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return command


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A directory of the ordinary user's, and /dev/fuse as distributions have it."""
    if os.getuid() != 0:
        yield tmp_path
        return
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is missing")
    mode = stat.S_IMODE(FUSE.stat().st_mode)
    directory = Path("/var/tmp") / f"ctxfs-test-{os.getpid()}"
    directory.mkdir(mode=0o755)
    os.chown(directory, NOBODY, NOBODY)
    FUSE.chmod(0o666)
    try:
        yield directory
    finally:
        FUSE.chmod(mode)
        shutil.rmtree(directory)


def owned(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        if os.getuid() == 0 and not is_mounted(each):
            os.chown(each, NOBODY, NOBODY)


def run(*command: str) -> str:
    prefix = as_nobody() if os.getuid() == 0 else []
    done = subprocess.run([*prefix, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_ordinary_user_mounts_uses_and_ends_it(base: Path, channel: str) -> None:
    prefix = as_nobody() if os.getuid() == 0 else []
    daemon = Daemon(base, hot="16MiB", cold="32MiB", channel=channel)
    daemon.command = [*prefix, *daemon.command]
    owned(base)
    with daemon:
        key = str(daemon.mount / "k")
        run("sh", "-c", f"head -c 3000000 /dev/urandom > {key} && cp {key} {key}2")
        run("cmp", key, key + "2")
        run("setfattr", "-n", "user.ctx.tier", "-v", "cold", key)
        assert "cold" in run("getfattr", "--only-values", "-n", "user.ctx.copies", key)
        run("cmp", key, key + "2")
        owner = run("stat", "-c", "%u", key).strip()
        assert owner == str(NOBODY if os.getuid() == 0 else os.getuid())
        assert not is_mounted(daemon.state / "hot")
        rooms = list(Path("/dev/shm").glob(f"ctxfs-{owner}-*"))
        assert len(rooms) == 1
        assert stat.S_IMODE(rooms[0].stat().st_mode) == 0o700
        assert daemon.stop() == 0, daemon.log()
        assert not is_mounted(daemon.mount)
        assert not rooms[0].exists()


def test_an_ordinary_user_mounts_again_after_a_crash(base: Path, channel: str) -> None:
    prefix = as_nobody() if os.getuid() == 0 else []
    daemon = Daemon(base, hot="16MiB", channel=channel)
    daemon.command = [*prefix, *daemon.command]
    owned(base)
    with daemon:
        key = str(daemon.mount / "k")
        run("sh", "-c", f"head -c 3000000 /dev/urandom > {key} && cp {key} {base}/kept")
        run("sh", "-c", f"while ! getfattr -n user.ctx.state {key} | grep -q sealed; do :; done")
        daemon.kill()
        assert is_mounted(daemon.mount)
        checked = subprocess.run(
            [*daemon.command, "--check"], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
        daemon.start()
        run("cmp", key, f"{base}/kept")
        assert daemon.stop() == 0, daemon.log()
        assert not is_mounted(daemon.mount)


def test_a_mount_point_that_a_crash_hid_is_looked_at_once_it_is_seen(
    base: Path, channel: str
) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to take a directory from its owner")
    daemon = Daemon(base, hot="16MiB", channel=channel)
    daemon.command = [*as_nobody(), *daemon.command]
    owned(base)
    with daemon:
        daemon.kill()
        hidden = daemon.mount
        # Seen beneath the mount, as from a file system mounted a second time.
        other = base / "other"
        other.mkdir()
        subprocess.run(["mount", "--bind", str(base), str(other)], check=True)
        try:
            os.chown(other / hidden.name, 0, 0)
        finally:
            subprocess.run(["umount", str(other)], check=True)
        done = subprocess.run(daemon.command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        *_, last = done.stderr.splitlines()
        assert last == f"ctx-mountd: {hidden}: an ordinary user mounts only where it may write"


def test_allow_other_is_refused_with_the_line_that_would_permit_it(
    base: Path, channel: str
) -> None:
    conf = Path("/etc/fuse.conf")
    if conf.exists() and "\nuser_allow_other" in "\n" + conf.read_text():
        pytest.skip("/etc/fuse.conf permits it here")
    prefix = as_nobody() if os.getuid() == 0 else []
    daemon = Daemon(base, arguments=("-o", "allow_other"), channel=channel)
    owned(base)
    done = subprocess.run(
        [*prefix, *daemon.command], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "user_allow_other" in done.stderr
    assert "/etc/fuse.conf" in done.stderr


def test_others_do_not_see_a_mount_without_allow_other(base: Path, channel: str) -> None:
    if os.getuid() != 0:
        pytest.skip("needs a second user: run as root")
    daemon = Daemon(base, channel=channel)
    daemon.command = [*as_nobody(), *daemon.command]
    owned(base)
    conf = Path("/etc/fuse.conf")
    if conf.exists() and "\nuser_allow_other" in "\n" + conf.read_text():
        pytest.skip("/etc/fuse.conf permits others here")
    with daemon:
        with pytest.raises(PermissionError):
            os.listdir(daemon.mount)
        assert daemon.stop() == 0
