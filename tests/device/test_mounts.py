"""What is mounted where."""

from pathlib import Path

from ctxfs.device.mounts import Mount, is_tmpfs, mount_at, parse_mountinfo

TEXT = (
    "22 1 254:0 / / rw,noatime shared:1 - ext4 /dev/vda rw\n"
    "40 22 0:35 / /a\\040b\\134c rw - tmpfs ctxfs-hot rw,size=1024k\n"
    "41 22 0:36 / /x rw master:3 - fuse.ctx\\011fs some\\040where rw\n"
)


def test_mountinfo_is_read_with_its_escapes() -> None:
    assert parse_mountinfo(TEXT) == [
        Mount("254:0", "/", "ext4", "/dev/vda"),
        Mount("0:35", "/a b\\c", "tmpfs", "ctxfs-hot"),
        Mount("0:36", "/x", "fuse.ctx\\011fs", "some where"),
    ]


def test_the_running_machine_has_its_mounts() -> None:
    found = mount_at(Path("/proc"))
    assert found is not None
    assert found.kind == "proc"
    assert mount_at(Path("/proc/self")) is None
    assert not is_tmpfs(Path("/proc"))
