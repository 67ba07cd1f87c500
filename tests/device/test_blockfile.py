"""Opening devices and files."""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ctxfs.device import blockfile, uring
from ctxfs.device.blockfile import SIZE_MIN, open_engine
from ctxfs.errors import ConfigError, DeviceBusy
from tests.device.places import (
    MIB,
    Memory,
    loop_device,
    mounted_ext4,
    opened,
    why_no_loop_devices,
)


async def test_a_missing_file_is_made_private_and_preallocated(tmp_path: Path) -> None:
    path = tmp_path / "device"
    async with opened(path, 20 * MIB + 100) as device:
        found = path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_blocks * 512 >= 20 * MIB
        assert (device.size_bytes, device.alignment) == (20 * MIB, 4096)
        assert device.engine.size_bytes == 20 * MIB
        assert not device.is_block_device
        assert device.path == path
        assert os.get_inheritable(device.fd) is False


async def test_an_existing_file_is_used_as_large_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "device"
    async with opened(path, 40 * MIB):
        pass
    async with opened(path, 20 * MIB) as device:
        assert device.size_bytes == 40 * MIB
    async with opened(path, None) as device:
        assert device.size_bytes == 40 * MIB


async def test_a_smaller_file_grows_and_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.write_bytes(b"old" * 100)
    async with opened(path, 20 * MIB) as device:
        assert device.size_bytes == path.stat().st_size == 20 * MIB
        memory = Memory(4096)
        await device.engine.read(0, memory.span)
        assert memory.view == b"old" * 100 + bytes(3796)


@pytest.mark.parametrize("size", [None, SIZE_MIN - 1])
async def test_what_cannot_hold_a_log_is_refused(tmp_path: Path, size: int | None) -> None:
    path = tmp_path / "device"
    path.write_bytes(bytes(MIB))
    with pytest.raises(ConfigError, match="too few"):
        await open_engine(path, size)
    assert path.stat().st_size == MIB


async def test_a_missing_file_needs_a_size_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give it a size"):
        await open_engine(tmp_path / "device", None)
    with pytest.raises(ConfigError, match=r"the directory .*nowhere does not exist"):
        await open_engine(tmp_path / "nowhere" / "device", SIZE_MIN)
    with pytest.raises(ConfigError, match="too few"):
        await open_engine(tmp_path / "device", SIZE_MIN - 1)
    assert os.listdir(tmp_path) == []


async def test_a_file_without_room_is_refused_and_not_left_behind(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    with pytest.raises(ConfigError, match="no room"):
        await open_engine(tmp_path / "device", (room.f_bavail + 1000) * room.f_frsize)
    assert os.listdir(tmp_path) == []


async def test_a_preallocation_that_fails_leaves_things_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fill)
    path = tmp_path / "device"
    with pytest.raises(ConfigError, match="no room"):
        await open_engine(path, SIZE_MIN)
    assert not path.exists()
    path.write_bytes(b"old")
    with pytest.raises(ConfigError, match="no room"):
        await open_engine(path, SIZE_MIN)
    assert path.read_bytes() == b"old"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is busy is refused at once."""
    monkeypatch.setattr(blockfile, "_BUSY_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
async def test_a_file_in_use_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "device"
    async with opened(path):
        with pytest.raises(DeviceBusy, match=str(path)):
            await open_engine(path, None)
    async with opened(path):
        pass


async def test_a_file_that_a_killed_daemon_still_holds_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "device"
    path.write_bytes(bytes(SIZE_MIN))
    really_open = blockfile._open
    refusals = []
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def open_and_let_go(path: Path, size_bytes: int | None) -> blockfile._Opened:
            try:
                return really_open(path, size_bytes)
            except DeviceBusy as error:
                refusals.append(error)
                held.close()  # the last of its requests has ended
                raise

        monkeypatch.setattr(blockfile, "_open", open_and_let_go)
        async with opened(path):
            assert len(refusals) == 1


async def test_neither_directories_nor_pipes_are_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigError, match="neither a file nor a block device"):
            await open_engine(path, SIZE_MIN)


async def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "device")
    async with opened(tmp_path / "device", SIZE_MIN):
        pass
    async with opened(tmp_path / "link", None) as device:
        assert device.size_bytes == SIZE_MIN


@pytest.mark.parametrize("sector", [512, 4096])
async def test_a_block_device_is_used_whole_or_in_part(tmp_path: Path, sector: int) -> None:
    if why := why_no_loop_devices():
        pytest.skip(why)
    with loop_device(tmp_path / "backing", 32 * MIB + 8192, sector) as path:
        async with opened(path, None) as device:
            assert device.is_block_device
            assert device.direct
            assert device.size_bytes == 32 * MIB + 8192
            assert (device.alignment, device.logical_block_size) == (4096, sector)
        async with opened(path, 20 * MIB) as device:
            assert device.size_bytes == 20 * MIB
        with pytest.raises(ConfigError, match="the device has"):
            await open_engine(path, 64 * MIB)


async def test_a_block_device_that_is_too_small_is_refused(tmp_path: Path) -> None:
    if why := why_no_loop_devices():
        pytest.skip(why)
    with (
        loop_device(tmp_path / "backing", SIZE_MIN - 4096) as path,
        pytest.raises(ConfigError, match="too few"),
    ):
        await open_engine(path, None)


@pytest.mark.usefixtures("impatient")
async def test_a_mounted_device_is_busy_and_left_alone(loop: Path, tmp_path: Path) -> None:
    point = tmp_path / "a point"
    with mounted_ext4(loop, point), pytest.raises(DeviceBusy, match=f"mounted on {point}"):
        await open_engine(loop, None)
    async with opened(loop, None):
        with pytest.raises(DeviceBusy, match="used by another program"):
            await open_engine(loop, None)


async def test_sectors_larger_than_a_page_are_refused(
    loop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockfile, "_direct_alignment", lambda fd: (4, 8192))
    with pytest.raises(ConfigError, match="8192"):
        await open_engine(loop, None)


async def test_without_direct_io_the_page_cache_is_used_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def old_open(path: Any, flags: int, *more: Any, **options: Any) -> int:
        """As tmpfs was before Linux 6.6: the file is made, then O_DIRECT refused."""
        direct = flags & os.O_DIRECT
        fd = real_open(path, flags & ~os.O_DIRECT, *more, **options)
        if direct:
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    monkeypatch.setattr(os, "open", old_open)
    async with opened(tmp_path / "device", SIZE_MIN) as device:
        assert not device.direct
        source, target = Memory(8192), Memory(8192)
        source.view[:] = b"x" * 8192
        await device.engine.write(0, [source.span])
        await device.engine.read(0, target.span)
        assert target.view == source.view


async def test_where_io_uring_is_refused_threads_are_chosen_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring, "probe", lambda: "a good reason")
    async with opened(tmp_path / "device", SIZE_MIN) as device:
        assert device.engine.name == "threads"
        assert device.why_not_uring == "a good reason"
    with pytest.raises(ConfigError, match="a good reason"):
        await open_engine(tmp_path / "device", None, engine="io_uring")
    async with opened(tmp_path / "device", None):  # the refusal let go of it
        pass


async def test_a_ring_refused_after_the_probe_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> uring.Binding:
        raise uring.UringUnavailable("too late")

    monkeypatch.setattr(uring, "probe", lambda: None)
    monkeypatch.setattr(uring, "load_binding", refuse)
    async with opened(tmp_path / "device", SIZE_MIN) as device:
        assert (device.engine.name, device.why_not_uring) == ("threads", "too late")


async def test_the_engine_can_be_asked_for(tmp_path: Path, engine_name: str) -> None:
    async with opened(tmp_path / "device", SIZE_MIN, engine=engine_name) as device:
        assert device.engine.name == engine_name
        assert (device.why_not_uring is None) == (engine_name == "io_uring")
    with pytest.raises(ConfigError, match='"io_uring", "threads" or "nvme"'):
        await open_engine(tmp_path / "device", None, engine="libaio")
