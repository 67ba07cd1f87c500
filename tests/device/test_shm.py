"""The hot tier's room, mounted and not."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxfs.device import mounts, shm
from ctxfs.device.shm import prepare
from ctxfs.errors import ConfigError, DeviceBusy
from tests.device.places import MIB

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "state"
    path.mkdir()
    yield path
    if mounts.mount_at(path / "hot"):
        mounts.unmount(path / "hot", lazily=True)


@pytest.fixture
def no_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container: root, and no right to mount. /dev/shm is left as it was."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mounts, "mount_tmpfs", refuse)


@needs_root
def test_root_gets_a_tmpfs_of_that_size(state: Path) -> None:
    room = prepare(state, 64 * MIB)
    assert room.mounted
    assert not room.is_adopted
    assert room.path == state / "hot"
    assert room.size_bytes == 64 * MIB
    assert os.fstat(room.dirfd).st_mode & 0o7777 == 0o700
    found = mounts.mount_at(room.path)
    assert found is not None
    assert (found.kind, found.source) == ("tmpfs", "ctxfs-hot")
    options = mount_options(room.path)
    assert {"nosuid", "nodev", "noexec", "noatime"} <= options
    assert room.huge == ("huge=within_size" in options)
    room.remove()
    assert os.listdir(state) == []
    assert mounts.mount_at(state / "hot") is None


@needs_root
def test_the_next_life_adopts_the_room_and_what_is_in_it(state: Path) -> None:
    room = prepare(state, 64 * MIB)
    (room.path / "block").write_bytes(b"hot")
    room.close()
    room.close()
    for size in (128 * MIB, 32 * MIB):
        again = prepare(state, size)
        assert again.is_adopted
        assert again.mounted
        assert again.size_bytes == size
        assert (again.path / "block").read_bytes() == b"hot"
        again.close()
    assert [mount.point for mount in mounts.mounts()].count(str(state / "hot")) == 1
    prepare(state, 64 * MIB).remove()


@needs_root
def test_a_room_fuller_than_the_new_size_keeps_its_size(state: Path) -> None:
    room = prepare(state, 64 * MIB)
    (room.path / "block").write_bytes(bytes(40 * MIB))
    room.close()
    again = prepare(state, 32 * MIB)
    assert again.size_bytes == 64 * MIB
    assert (again.path / "block").stat().st_size == 40 * MIB
    again.remove()


@needs_root
def test_a_room_in_use_is_busy_and_keeps_its_size(state: Path) -> None:
    room = prepare(state, 64 * MIB)
    with pytest.raises(DeviceBusy, match=str(room.path)):
        prepare(state, 128 * MIB)
    assert os.statvfs(room.path).f_blocks * 4096 == 64 * MIB
    room.remove()


@needs_root
def test_a_room_is_removed_while_somebody_has_a_file_of_it_open(state: Path) -> None:
    room = prepare(state, 64 * MIB)
    with (room.path / "block").open("w+b") as file:
        file.write(b"still here")
        file.flush()
        room.remove()
        assert not room.path.exists()
        file.seek(0)
        assert file.read() == b"still here"


@needs_root
def test_huge_pages_can_be_declined(state: Path) -> None:
    room = prepare(state, 64 * MIB, huge="never")
    assert not room.huge
    assert not any(option.startswith("huge=") for option in mount_options(room.path))
    room.remove()


@needs_root
def test_options_that_the_kernel_does_not_know_are_left_out(state: Path) -> None:
    room = prepare(state, 64 * MIB, huge="as_it_likes")
    assert room.mounted
    assert not room.huge
    room.remove()


@needs_root
def test_a_mount_of_somebody_else_is_refused(state: Path) -> None:
    (state / "hot").mkdir()
    mounts.mount_tmpfs(state / "hot", "other", "size=1m")
    with pytest.raises(ConfigError, match=r"a tmpfs \(other\) is mounted"):
        prepare(state, 64 * MIB)


def test_without_a_state_directory_there_is_no_room(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(tmp_path / "nowhere", 64 * MIB)


@pytest.mark.usefixtures("no_mounts")
def test_without_mounts_the_room_is_in_shared_memory(state: Path) -> None:
    room = prepare(state, 16 * MIB)
    assert not room.mounted
    assert not room.is_adopted
    assert room.path.parent == Path("/dev/shm")
    assert room.path.stat().st_mode & 0o7777 == 0o700
    assert mounts.is_tmpfs(room.path)
    assert os.listdir(state) == []
    with pytest.raises(DeviceBusy, match="in use"):
        prepare(state, 16 * MIB)
    (room.path / "block").write_bytes(b"hot")
    room.close()
    again = prepare(state, 16 * MIB)
    assert again.is_adopted
    assert again.path == room.path
    again.remove()
    assert not room.path.exists()


@pytest.mark.usefixtures("no_mounts")
def test_each_state_directory_has_its_own_room_however_it_is_named(
    state: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(state)
    first, second = prepare(state, 16 * MIB), prepare(tmp_path / "other", 16 * MIB)
    assert first.path != second.path
    first.close()
    third = prepare(tmp_path / "link", 16 * MIB)
    assert third.path == first.path
    third.remove()
    second.remove()


@pytest.mark.usefixtures("no_mounts")
def test_what_lies_in_the_rooms_place_must_be_ours_and_private(state: Path, tmp_path: Path) -> None:
    room = prepare(state, 16 * MIB)
    room.remove()
    room.path.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="remove what is there"):
        prepare(state, 16 * MIB)
    room.path.unlink()
    room.path.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="not private"):
        prepare(state, 16 * MIB)
    room.path.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(room.path, 12345, 12345)
        with pytest.raises(ConfigError, match="not private"):
            prepare(state, 16 * MIB)
    room.path.rmdir()


@pytest.mark.usefixtures("no_mounts")
def test_a_place_that_cannot_hold_the_tier_is_refused(state: Path) -> None:
    with pytest.raises(ConfigError, match="shm-size"):
        prepare(state, 1 << 60)


@pytest.mark.usefixtures("no_mounts")
def test_a_machine_without_shared_memory_is_told_so(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (state, state / "nowhere"):
        monkeypatch.setattr(shm, "SHARED_MEMORY", place)
        with pytest.raises(ConfigError, match="no tmpfs"):
            prepare(state, 16 * MIB)


@needs_root
def test_an_ordinary_user_gets_a_room_of_his_own() -> None:
    where = Path("/dev/shm") / f"ctxfs-test-{os.getpid()}"
    where.mkdir(mode=0o755)
    os.chown(where, 65534, 65534)

    os.seteuid(65534)
    try:
        room = prepare(where, 16 * MIB)
        assert not room.mounted
        assert room.path == where / "hot"  # the state directory is on a tmpfs
        assert room.path.stat().st_uid == 65534
        (room.path / "block").write_bytes(b"x")
        room.remove()
        assert os.listdir(where) == []
    finally:
        os.seteuid(0)
        where.rmdir()


def mount_options(point: Path) -> set[str]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, _, options, *_ = line.split(" ")
        if where == str(point):
            return set(options.split(","))
    raise AssertionError(f"nothing is mounted on {point}")
