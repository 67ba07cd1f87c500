"""Both engines, on a real file and a real block device: the same behaviour."""

import os
import random
from pathlib import Path

import pytest
import trio

from ctxfs.device.blockfile import OpenedDevice
from ctxfs.device.engine import Engine, Span
from ctxfs.device.mapping import Mapping
from ctxfs.errors import DeviceError, DeviceLost
from tests.device.places import MIB, Memory, opened, pattern


async def test_what_was_written_is_read(device: OpenedDevice) -> None:
    engine: Engine = device.engine
    source, target = Memory(5 * MIB + 4096), Memory(5 * MIB + 4096)
    source.view[:] = pattern(1, 5 * MIB + 4096)
    await engine.write(8192, [source.span])
    await engine.sync()
    await engine.read(8192, target.span)
    assert target.view == source.view


async def test_several_sources_are_written_end_to_end(device: OpenedDevice) -> None:
    source, target = Memory(4 * MIB), Memory(3 * MIB)
    source.view[:] = content = pattern(2, 4 * MIB)
    spans = [source.at(0, 4096), source.at(2 * MIB, 2 * MIB), source.at(MIB, MIB - 4096)]
    await device.engine.write(4096, spans)
    await device.engine.read(4096, target.span)
    assert target.view == content[:4096] + content[2 * MIB :] + content[MIB : 2 * MIB - 4096]


async def test_more_sources_than_one_call_takes_are_written(device: OpenedDevice) -> None:
    count = 1500
    source, target = Memory(count * 4096), Memory(count * 4096)
    source.view[:] = content = pattern(3, count * 4096)
    spans = [source.at(n * 4096, 4096) for n in reversed(range(count))]
    await device.engine.write(0, spans)
    await device.engine.read(0, target.span)
    pages = [content[n * 4096 : (n + 1) * 4096] for n in reversed(range(count))]
    assert target.view == b"".join(pages)


async def test_many_tasks_at_once_get_their_own_bytes(device: OpenedDevice) -> None:
    slots, length = 64, 64 << 10

    async def work(slot: int) -> None:
        source, target = Memory(length), Memory(length)
        for turn in range(5):
            source.view[:] = pattern(slot * 100 + turn, length)
            await device.engine.write(slot * length, [source.span])
            await device.engine.read(slot * length, target.span)
            assert target.view == source.view

    async with trio.open_nursery() as nursery:
        for slot in range(slots):
            nursery.start_soon(work, slot)
    counted = device.engine.statistics()
    assert counted.reads == counted.writes == slots * 5
    assert counted.read_bytes == counted.written_bytes == slots * 5 * length
    assert (counted.errors, counted.inflight) == (0, 0)


async def test_reads_land_in_the_mapping_of_a_tmpfs_file(device: OpenedDevice) -> None:
    source = Memory(12288)
    source.view[:9000] = content = pattern(4, 9000)
    await device.engine.write(0, [source.span])
    fd = os.memfd_create("hot", os.MFD_CLOEXEC)
    os.ftruncate(fd, 9000)
    with Mapping(fd, 9000) as mapping:
        await device.engine.read(0, mapping.span())
    assert os.pread(fd, 20000, 0) == content
    os.close(fd)


async def test_unaligned_requests_are_refused(device: OpenedDevice) -> None:
    memory = Memory(8192)
    for offset, span in [
        (512, memory.at(0, 4096)),
        (0, memory.at(512, 4096)),
        (0, memory.at(0, 512)),
        (-4096, memory.at(0, 4096)),
    ]:
        with pytest.raises(ValueError, match=r"is not aligned|bytes at"):
            await device.engine.read(offset, span)
        with pytest.raises(ValueError, match=r"is not aligned|bytes at"):
            await device.engine.write(offset, [memory.at(0, 4096), span])


async def test_requests_beyond_the_end_are_refused(device: OpenedDevice) -> None:
    memory = Memory(8192)
    end = device.size_bytes
    await device.engine.read(end - 8192, memory.span)
    with pytest.raises(ValueError, match="8192 bytes at"):
        await device.engine.read(end - 4096, memory.span)
    with pytest.raises(ValueError, match="a span of -4096"):
        await device.engine.read(0, Span(memory.span.address, -4096))


async def test_no_bytes_are_no_work(device: OpenedDevice) -> None:
    await device.engine.write(0, [])
    memory = Memory(4096)
    await device.engine.read(0, memory.at(0, 0))
    assert device.engine.statistics().written_bytes == 0


async def test_memory_of_a_cancelled_request_is_left_alone(device: OpenedDevice) -> None:
    """Once the caller has its memory back, nothing writes there any more."""
    length = 4 * MIB
    source, target, other = Memory(length), Memory(length), Memory(length)
    source.view[:] = pattern(5, length)
    await device.engine.write(0, [source.span])
    dice = random.Random(5)
    for _ in range(30):
        with trio.move_on_after(dice.random() * 0.004) as scope:
            await device.engine.read(0, target.span)
        if not scope.cancelled_caught:
            assert target.view == source.view
        target.view[:] = bytes(length)
        await device.engine.read(length, other.span)
        assert not any(target.view[:: 1 << 12])
    assert device.engine.statistics().inflight == 0


async def test_a_file_cut_short_is_a_lost_device(tmp_path: Path, engine_name: str) -> None:
    path = tmp_path / "device"
    async with opened(path, engine=engine_name) as device:
        memory = Memory(8192)
        os.truncate(path, 32 * MIB + 4096)
        await device.engine.read(32 * MIB, memory.at(0, 4096))
        with pytest.raises(DeviceLost, match="read"):
            await device.engine.read(32 * MIB, memory.span)
        os.truncate(path, 32 * MIB + 100)
        with pytest.raises(DeviceLost, match="read"):
            await device.engine.read(32 * MIB, memory.span)
        assert device.engine.statistics().errors == 2


async def test_a_failing_medium_is_a_device_error(
    loop: Path, tmp_path: Path, engine_name: str
) -> None:
    async with opened(loop, None, engine=engine_name) as device:
        os.truncate(tmp_path / "backing", 0)
        memory = Memory(4096)
        with pytest.raises(DeviceError, match=str(loop)):
            await device.engine.read(0, memory.span)
        assert device.engine.statistics().errors == 1


async def test_a_flush_of_a_device_that_shrank_is_no_success(
    loop: Path, tmp_path: Path, engine_name: str
) -> None:
    """As a drive that was pulled: it has no bytes left, and yet flushes."""
    async with opened(loop, None, engine=engine_name) as device:
        await device.engine.sync()
        os.truncate(tmp_path / "backing", 32 * MIB)
        await trio.run_process(["losetup", "-c", str(loop)])
        with pytest.raises(DeviceLost, match="flush"):
            await device.engine.sync()
        assert device.engine.statistics().syncs == 1


async def test_a_closed_engine_refuses(tmp_path: Path, engine_name: str) -> None:
    async with opened(tmp_path / "device", engine=engine_name) as device:
        await device.engine.sync()
    device.engine.close()
    with pytest.raises(DeviceError):
        await device.engine.sync()
