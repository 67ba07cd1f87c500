"""The mount table, and mounts that are stale, hung, live or somebody else's."""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ctxfs.errors import ConfigError, DeviceBusy
from mountd import mounts
from mountd.mounts import Answer

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
36 27 0:40 / /mnt/a\040b\134c rw,nosuid shared:1 master:2 - fuse.ctxfs kv\040name rw,user_id=0
37 27 0:41 / /ctx rw,relatime - tmpfs none rw
38 37 0:42 / /ctx rw,nosuid,nodev - fuse.sshfs host:/ rw
"""

Mounter = Callable[[str], int]

libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def point(tmp_path: Path) -> Path:
    path = tmp_path / "mount point"
    path.mkdir()
    return path


@pytest.fixture
def mounted(point: Path) -> Iterator[Mounter]:
    """Mounts FUSE at `point` with nobody answering; gives the daemon's descriptor."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    fds: list[int] = []

    def mount(fstype: str) -> int:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        fds.append(fd)
        data = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
        done = libc.mount(b"kv", os.fsencode(point), fstype.encode(), 0, data.encode())
        assert done == 0, os.strerror(ctypes.get_errno())
        return fd

    yield mount
    while mounts.mount_at(point) is not None:
        libc.umount2(os.fsencode(point), mounts.MNT_DETACH)
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue  # the test closed it: its daemon "died"


def test_the_table_is_read_with_its_escapes() -> None:
    mount = mounts.mount_at(Path("/mnt/a b\\c"), TABLE)
    assert mount == mounts.MountInfo(
        path=Path("/mnt/a b\\c"),
        fstype="fuse.ctxfs",
        source="kv name",
        options=frozenset({"rw", "nosuid"}),
        device="0:40",
        user_id=0,
    )
    assert mount.is_ours
    assert mount.is_fuse


def test_the_last_mount_at_a_place_is_the_one_seen() -> None:
    mount = mounts.mount_at(Path("/x/../ctx"), TABLE)
    assert mount is not None
    assert mount.fstype == "fuse.sshfs"
    assert not mount.is_ours


def test_no_mount_is_none() -> None:
    assert mounts.mount_at(Path("/nowhere"), TABLE) is None


def test_this_systems_table_is_read() -> None:
    proc = mounts.mount_at(Path("/proc"))
    assert proc is not None
    assert proc.fstype == "proc"


def test_an_empty_directory_is_no_obstacle(point: Path) -> None:
    assert mounts.obstacle(point) is None
    assert not mounts.is_stale(point)
    mounts.prepare(point)


def test_a_missing_mount_point_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; make it with: mkdir -p .*/none"):
        mounts.prepare(tmp_path / "none")


def test_a_file_is_no_mount_point(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        mounts.prepare(tmp_path / "file")


@pytest.mark.mount
def test_a_hung_mount_is_found_out_without_hanging(point: Path, mounted: Mounter) -> None:
    mounted("fuse.ctxfs")
    assert mounts.probe(point, seconds=0.2) is Answer.HUNG
    assert mounts.mount_at(point) is not None


@pytest.mark.mount
def test_a_stale_mount_is_recognised_and_cleared(point: Path, mounted: Mounter) -> None:
    os.close(mounted("fuse.ctxfs"))
    assert mounts.probe(point) is Answer.STALE
    assert mounts.is_stale(point)
    assert mounts.obstacle(point) is None
    mounts.prepare(point)
    assert mounts.mount_at(point) is None
    assert list(point.iterdir()) == []


@pytest.mark.mount
def test_a_stale_mount_of_another_user_is_an_obstacle(
    point: Path, mounted: Mounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(mounted("fuse.ctxfs"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = mounts.obstacle(point)
    assert isinstance(reason, ConfigError)
    assert "the stale fuse.ctxfs mount there is another user's" in str(reason)


@pytest.mark.mount
def test_stale_mounts_on_top_of_each_other_all_go(point: Path, mounted: Mounter) -> None:
    os.close(mounted("fuse.ctxfs"))
    os.close(mounted("fuse"))
    mounts.prepare(point)
    assert mounts.mount_at(point) is None


@pytest.mark.mount
@pytest.mark.parametrize(
    ("answer", "fstype", "message"),
    [
        (Answer.LIVE, "fuse.ctxfs", "ctxfs is mounted there already"),
        (Answer.LIVE, "fuse.sshfs", r"fuse.sshfs \(kv\) is mounted there"),
        (Answer.HUNG, "fuse.sshfs", "does not answer; end its daemon, then run: umount -l"),
    ],
)
def test_a_mount_with_a_daemon_is_never_touched(
    point: Path,
    mounted: Mounter,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
    fstype: str,
    message: str,
) -> None:
    os.close(mounted(fstype))
    monkeypatch.setattr(mounts, "probe", lambda path: answer)
    with pytest.raises(DeviceBusy, match=message):
        mounts.prepare(point)
    assert mounts.mount_at(point) is not None


@pytest.mark.mount
def test_clearing_what_is_not_mounted_says_why(point: Path, mounted: Mounter) -> None:
    with pytest.raises(ConfigError, match="cannot be cleared: Invalid argument"):
        mounts.clear_stale(point)
