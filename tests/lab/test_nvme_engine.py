"""NVMe commands on a drive: who may, what a command may be, and what becomes of a lost drive."""

import contextlib
import os
import struct
import subprocess
from pathlib import Path

import pytest
import trio

from ctxfs.device import nvmedrive
from ctxfs.device.blockfile import open_engine
from ctxfs.errors import ConfigError, DeviceBusy, DeviceError, DeviceLost
from tests.device.places import MIB, Memory, opened, pattern
from tests.lab.drives import Drive

SIZE = 64 * MIB


def command(*words: str | Path) -> None:
    """Run a program that is to succeed."""
    subprocess.run(words, check=True)


def succeeds(*words: str | Path) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


async def test_a_drive_is_what_its_block_device_says(any_drive: Drive) -> None:
    sectors = int((Path("/sys/class/block") / any_drive.block.name / "size").read_text())
    async with opened(any_drive.command, None) as device:
        assert device.size_bytes == device.engine.size_bytes == sectors * 512 == SIZE
        unit = Path("/sys/class/block") / any_drive.block.name / "queue/logical_block_size"
        assert device.logical_block_size == int(unit.read_text())
        assert device.is_block_device
        assert device.direct


async def test_the_block_device_shows_what_commands_wrote_and_the_other_way(
    any_drive: Drive,
) -> None:
    written = Memory(3 * MIB)
    written.view[:] = pattern(1, 3 * MIB)
    async with opened(any_drive.command, None) as device:
        await device.engine.write(8192, [written.span])
        await device.engine.sync()
    found = Memory(3 * MIB)
    async with opened(any_drive.block, None, engine="io_uring") as device:
        await device.engine.read(8192, found.span)
        assert found.view == written.view
        written.view[:] = pattern(2, 3 * MIB)
        await device.engine.write(MIB, [written.span])
    async with opened(any_drive.block, None, engine="nvme") as device:
        assert device.engine.name == "nvme"
        await device.engine.read(MIB, found.span)
        assert found.view == written.view


async def test_no_command_is_larger_than_the_drive_takes(any_drive: Drive) -> None:
    memory = Memory(16 * MIB)
    memory.view[:] = pattern(3, 16 * MIB)
    async with opened(any_drive.command, None) as device:
        assert device.drive is not None
        limit = min(device.drive.command_bytes_max, 8 * MIB)
        assert limit >= 4096
        for length in (limit - 4096, limit, limit + 4096, 16 * MIB):
            target = Memory(length)
            await device.engine.write(4096, [memory.at(0, length)])
            await device.engine.read(4096, target.span)
            assert target.view == memory.view[:length]


async def test_only_the_asked_for_part_of_a_drive_is_used(one_drive: Drive) -> None:
    async with opened(one_drive.command, 32 * MIB) as device:
        assert device.size_bytes == 32 * MIB
    with pytest.raises(ConfigError, match="were asked for, the device has"):
        await open_engine(one_drive.command, 65 * MIB)


async def test_a_mounted_drive_is_refused(one_drive: Drive, tmp_path: Path) -> None:
    command("mkfs.ext4", "-q", one_drive.block)
    command("mount", one_drive.block, tmp_path)
    try:
        with pytest.raises(DeviceBusy, match=f"is mounted on {tmp_path}"):
            await open_engine(one_drive.command, None)
    finally:
        command("umount", tmp_path)


async def test_while_commands_are_sent_nobody_mounts_the_drive_or_sends_others(
    one_drive: Drive, tmp_path: Path
) -> None:
    command("mkfs.ext4", "-q", one_drive.block)
    mount = ("mount", one_drive.block, tmp_path)
    async with opened(one_drive.command, None):
        assert not succeeds(*mount)
        with pytest.raises(DeviceBusy, match="used by another program"):
            await open_engine(one_drive.command, None)
        with pytest.raises(DeviceBusy, match="used by another program"):
            await open_engine(one_drive.block, None)
    command(*mount)
    command("umount", tmp_path)


async def test_a_drive_in_use_as_a_block_device_is_refused(one_drive: Drive) -> None:
    async with opened(one_drive.block, None, engine="threads"):
        with pytest.raises(DeviceBusy, match="used by another program"):
            await open_engine(one_drive.command, None)


async def test_other_engines_have_nothing_to_do_with_a_command_device(one_drive: Drive) -> None:
    for engine in ("io_uring", "threads"):
        with pytest.raises(ConfigError, match="takes NVMe commands only"):
            await open_engine(one_drive.command, None, engine=engine)


async def test_bad_blocks_are_an_error_that_says_what_the_drive_said(one_drive: Drive) -> None:
    one_drive.spoil(2048, 2055)
    memory = Memory(8192)
    async with opened(one_drive.command, None) as device:
        for request in (
            device.engine.read(MIB, memory.span),
            device.engine.write(MIB, [memory.span]),
        ):
            with pytest.raises(DeviceError, match="NVMe status 0x") as caught:
                await request
            assert not isinstance(caught.value, DeviceLost)
            assert str(one_drive.command) in str(caught.value)
        await device.engine.read(MIB + 4096, memory.at(0, 4096))
        assert device.engine.statistics().errors == 2


@pytest.mark.parametrize("engine", ["nvme", "io_uring", "threads"])
async def test_a_drive_that_was_pulled_is_lost(one_drive: Drive, engine: str) -> None:
    memory = Memory(8192)
    async with opened(one_drive.block, None, engine=engine) as device:
        await device.engine.write(0, [memory.span])
        await trio.to_thread.run_sync(one_drive.lose)
        with pytest.raises(DeviceLost):
            await device.engine.read(0, memory.span)
        with pytest.raises(DeviceLost):
            await device.engine.write(0, [memory.span])
        with pytest.raises(DeviceLost):
            await device.engine.sync()


@pytest.mark.parametrize("engine", ["nvme", "io_uring", "threads"])
async def test_a_namespace_that_is_taken_back_is_lost(one_drive: Drive, engine: str) -> None:
    memory = Memory(8192)

    async def write_is_lost() -> bool:
        try:
            await device.engine.write(0, [memory.span])
        except DeviceLost:
            return True
        except DeviceError:
            return False
        return False

    async with opened(one_drive.block, None, engine=engine) as device:
        await device.engine.write(0, [memory.span])
        await trio.to_thread.run_sync(one_drive.disable)
        # The kernel hears of it in its own time: until then, writes through it are errors.
        while not await write_is_lost():
            assert engine != "nvme"  # whom the drive tells why


async def test_requests_in_flight_when_a_drive_is_pulled_all_end(one_drive: Drive) -> None:
    memories = [Memory(4 * MIB) for _ in range(8)]
    ended = 0

    async def read_until_lost(memory: Memory) -> None:
        nonlocal ended
        with contextlib.suppress(DeviceError):
            while True:
                await device.engine.read(0, memory.span)
        ended += 1

    async with opened(one_drive.command, None) as device:
        async with trio.open_nursery() as nursery:
            for memory in memories:
                nursery.start_soon(read_until_lost, memory)
            await trio.to_thread.run_sync(one_drive.lose)
        with pytest.raises(DeviceLost):
            await device.engine.sync()
        assert device.engine.statistics().inflight == 0
    assert ended == len(memories)


async def test_a_partitioned_drive_is_refused_by_the_names_of_its_partitions(
    one_drive: Drive,
) -> None:
    table = bytearray(512)
    table[446:462] = struct.pack("<B3sB3sII", 0, bytes(3), 0x83, bytes(3), 2048, 8192)
    table[510:] = b"\x55\xaa"
    one_drive.block.write_bytes(table)
    command("blockdev", "--rereadpt", one_drive.block)
    name = f"{one_drive.block.name}p1"
    try:
        with pytest.raises(ConfigError, match=f"is partitioned \\({name}\\)"):
            await open_engine(one_drive.command, None)
        with pytest.raises(ConfigError, match="is a partition"):
            await open_engine(Path(f"/dev/{name}"), None, engine="nvme")
    finally:
        command("wipefs", "-qa", one_drive.block)
        command("blockdev", "--rereadpt", one_drive.block)
    async with opened(one_drive.command, None):
        pass


def test_a_drive_goes_by_any_name(one_drive: Drive, tmp_path: Path) -> None:
    link = tmp_path / "drive"
    link.symlink_to(one_drive.command)
    assert nvmedrive.is_command_device(link)
    assert not nvmedrive.is_command_device(one_drive.block)
    assert not nvmedrive.is_command_device(Path("/dev/null"))
    assert not nvmedrive.is_command_device(tmp_path / "missing")
    assert nvmedrive.size_bytes(link) == SIZE
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.close(fd)
    with pytest.raises(ConfigError, match="is no NVMe namespace"):
        nvmedrive.open_drive(tmp_path / "file")


async def test_a_controller_that_resets_costs_a_moment_and_no_error(any_drive: Drive) -> None:
    memories = [Memory(MIB) for _ in range(4)]
    turns = 0
    enough = trio.Event()

    async def work(slot: int) -> None:
        nonlocal turns
        target = Memory(MIB)
        while not enough.is_set():
            memories[slot].view[:] = pattern(turns, MIB)
            await device.engine.write(slot * MIB, [memories[slot].span])
            await device.engine.read(slot * MIB, target.span)
            assert target.view == memories[slot].view
            turns += 1

    async with opened(any_drive.command, None) as device:
        async with trio.open_nursery() as nursery:
            for slot in range(len(memories)):
                nursery.start_soon(work, slot)
            for _ in range(3):
                await trio.to_thread.run_sync(any_drive.reset)
            enough.set()
        await device.engine.sync()
        assert device.engine.statistics().errors == 0
    assert turns
