"""One state directory, one daemon."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ctxfs.device import mounts, shm
from ctxfs.errors import ConfigError, DeviceBusy, NoRoom
from ctxfs.units import MIB
from mountd.statedir import PARENT_FILE, claim, default_state, named, owner

HOLD = """
import sys
from pathlib import Path
from mountd.statedir import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_pid_file_is_there_while_the_directory_is_claimed(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    with claim(state) as pid_file:
        assert pid_file == state / "daemon.pid"
        assert pid_file.read_text() == f"{os.getpid()}\n"
        assert state.stat().st_mode & 0o777 == 0o700
    assert list(state.iterdir()) == []


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with claim(tmp_path):
        refused = pytest.raises(DeviceBusy, match=f"to the daemon with pid {os.getpid()};")
        with refused, claim(tmp_path):
            pass
        assert (tmp_path / "daemon.pid").exists()
    with claim(tmp_path):
        pass


def test_a_parent_and_its_child_share_a_directory(tmp_path: Path) -> None:
    with claim(tmp_path, PARENT_FILE):
        with claim(tmp_path):
            assert owner(tmp_path) == owner(tmp_path, PARENT_FILE) == os.getpid()
            assert named(tmp_path) == os.getpid()
            with pytest.raises(DeviceBusy), claim(tmp_path, PARENT_FILE):
                pass
        assert (owner(tmp_path), owner(tmp_path, PARENT_FILE)) == (None, os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_nobody_holds_has_no_owner(tmp_path: Path) -> None:
    assert (owner(tmp_path), named(tmp_path)) == (None, None)
    (tmp_path / "daemon.pid").write_text("77\n")
    assert (owner(tmp_path), named(tmp_path)) == (None, 77)


def test_a_failed_daemon_gives_the_directory_back(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died"), claim(tmp_path):
        raise RuntimeError("died")
    with claim(tmp_path):
        pass


def test_a_killed_daemon_leaves_a_file_that_binds_nobody(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DeviceBusy, match=f"pid {holder.pid};"), claim(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / "daemon.pid").exists()
    with claim(tmp_path) as pid_file:
        assert pid_file.read_text() == f"{os.getpid()}\n"


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(ConfigError, match=r"state directory .*/file/x: Not a directory")
    with refused, claim(tmp_path / "file" / "x"):
        pass


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these limits."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    point = tmp_path / "small"
    point.mkdir()

    def mount(limits: str) -> Path:
        mounts.mount_tmpfs(point, "ctxfs-test", limits)
        return point

    yield mount
    if mounts.mount_at(point):
        mounts.unmount(point)


@pytest.mark.mount
def test_a_full_state_file_system_is_told_and_nothing_is_left(
    small: Callable[[str], Path],
) -> None:
    room = small("size=64k")
    (room / "filler").write_bytes(bytes(64 << 10))
    full = pytest.raises(NoRoom, match=r"state directory .*/a/b: No space left on device")
    with full, claim(room / "a" / "b"):
        pass
    assert os.listdir(room) == ["filler"]
    assert NoRoom.exit_code == 4


@pytest.mark.mount
@pytest.mark.parametrize("inodes", [1, 2, 3])
def test_too_few_inodes_for_the_state_are_told_and_nothing_is_left(
    small: Callable[[str], Path], inodes: int
) -> None:
    room = small(f"nr_inodes={inodes}")
    with pytest.raises(NoRoom, match="No space left on device"), claim(room / "a" / "b"):
        pass
    assert os.listdir(room) == []


@pytest.mark.mount
def test_too_few_inodes_for_the_hot_room_are_told_and_nothing_is_left(
    small: Callable[[str], Path],
) -> None:
    room = small("nr_inodes=4")
    with pytest.raises(NoRoom, match="No space left on device"), claim(room / "a" / "b") as pid:
        shm.prepare(pid.parent, 16 * MIB)
    assert os.listdir(room) == []


def test_a_failed_start_keeps_a_directory_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(RuntimeError), claim(tmp_path / "a" / "b"):
        raise RuntimeError
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == []


def test_default_state_is_the_systems_for_root_and_the_users_own_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert default_state(0, {"XDG_STATE_HOME": "/s"}) == Path("/var/lib/ctxfs")
    assert default_state(1000, {"XDG_STATE_HOME": "/s"}) == Path("/s/ctxfs")
    assert default_state(1000, {"XDG_STATE_HOME": "rel"}) == Path("/home/u/.local/state/ctxfs")
    assert default_state(1000, {}) == Path("/home/u/.local/state/ctxfs")
