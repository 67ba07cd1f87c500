"""The engine that sends NVMe commands, against a kernel and a drive that do as the test says."""

import contextlib
import errno
import os
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing

from ctxfs.device.engine import Span
from ctxfs.device.mapping import bytes_at
from ctxfs.device.nvme import (
    COMMAND,
    FLUSH,
    READ,
    RETRIES_MAX,
    URING_CMD_IO,
    URING_CMD_IO_VEC,
    WRITE,
    NvmeCommands,
    status_text,
)
from ctxfs.device.nvmedrive import command_bytes_max, parse_namespace, partitions
from ctxfs.device.requests import Target
from ctxfs.device.ringengine import UringEngine
from ctxfs.device.uring import OP_URING_CMD, Ring
from ctxfs.errors import ConfigError, DeviceError, DeviceLost
from tests.device.fake_liburing import FakeLiburing, Request, vectors_at
from tests.device.places import MIB, Memory, pattern

SIZE = 32 * MIB
ENTRIES = 8
NAMESPACE = 7


@dataclass(frozen=True, slots=True)
class Command:
    """One command as the drive gets it; `first` and `count` in blocks."""

    opcode: int
    namespace: int
    address: int
    length: int
    first: int
    count: int


def decoded(request: Request) -> Command:
    fields = COMMAND.unpack_from(request.command)
    opcode, _, _, namespace, _, _, _, address, _, length, low, high, blocks, *_ = fields
    return Command(opcode, namespace, address, length, low | high << 32, blocks + 1)


@dataclass
class Drive:
    """A namespace in a file. `results`: what the next commands get instead of being carried out."""

    fd: int
    block_bytes: int
    results: list[int]

    def __call__(self, kernel: FakeLiburing, request: Request) -> None:
        if self.results:
            kernel.complete(request, result=self.results.pop(0))
            return
        assert request.opcode == OP_URING_CMD
        command = decoded(request)
        assert command.namespace == NAMESPACE
        if command.opcode != FLUSH:
            self.move(request.offset, command)
        kernel.complete(request, result=0)

    def move(self, kind: int, command: Command) -> None:
        whole = Span(command.address, command.length)
        if kind == URING_CMD_IO:
            vectors = [bytes_at(whole)]
        else:
            assert kind == URING_CMD_IO_VEC
            vectors = vectors_at(command.address, command.length)
        call = {READ: os.preadv, WRITE: os.pwritev}[command.opcode]
        moved = call(self.fd, vectors, command.first * self.block_bytes)
        assert moved == command.count * self.block_bytes


@dataclass
class Bench:
    """An engine that runs, and the drive at its other end."""

    engine: UringEngine
    kernel: FakeLiburing
    drive: Drive

    @property
    def commands(self) -> list[Command]:
        return [decoded(request) for request in self.kernel.seen]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "namespace"
    path.write_bytes(pattern(9, SIZE))
    number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    yield number
    os.close(number)


@contextlib.asynccontextmanager
async def running(fd: int, block_bytes: int = 512, limit: int = 512 << 10) -> AsyncIterator[Bench]:
    drive = Drive(fd, block_bytes, [])
    kernel = FakeLiburing(automatic=drive)
    target = Target(fd, "/dev/ng0n1", SIZE, 4096, is_block_device=True)
    commands = NvmeCommands(target, NAMESPACE, block_bytes, limit)
    engine = UringEngine(target, Ring(kernel, ENTRIES, wide=True), commands)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        yield Bench(engine, kernel, drive)
        nursery.cancel_scope.cancel()
    engine.close()


@pytest.mark.parametrize("block_bytes", [512, 4096])
async def test_commands_name_blocks_of_the_namespace(fd: int, block_bytes: int) -> None:
    async with running(fd, block_bytes) as bench:
        memory = Memory(8192)
        await bench.engine.read(12288, memory.span)
        assert memory.view == pattern(9, SIZE)[12288:20480]
        memory.view[:] = pattern(1, 8192)
        await bench.engine.write(MIB, [memory.span])
        await bench.engine.sync()
        assert os.pread(fd, 8192, MIB) == memory.view
        where, count = memory.span.address, 8192 // block_bytes
        assert bench.commands == [
            Command(READ, NAMESPACE, where, 8192, 12288 // block_bytes, count),
            Command(WRITE, NAMESPACE, where, 8192, MIB // block_bytes, count),
            Command(FLUSH, NAMESPACE, 0, 0, 0, 1),
        ]
        assert bench.engine.name == "nvme"


async def test_a_block_beyond_what_32_bits_count_is_named_in_two_words(fd: int) -> None:
    target = Target(fd, "large", 4 << 40, 4096, is_block_device=True)
    kernel = FakeLiburing(automatic=lambda kernel, request: kernel.complete(request, result=0))
    ring = Ring(kernel, ENTRIES, wide=True)
    engine = UringEngine(target, ring, NvmeCommands(target, 1, 512, MIB))
    memory = Memory(4096)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.read(3 << 40, memory.span)
        nursery.cancel_scope.cancel()
    engine.close()
    assert decoded(kernel.seen[0]).first == (3 << 40) // 512


async def test_no_command_is_larger_than_allowed_and_all_are_about_equal(fd: int) -> None:
    async with running(fd, limit=1020 << 10) as bench:
        memory = Memory(2 * MIB + 4096)
        memory.view[:] = pattern(2, 2 * MIB + 4096)
        await bench.engine.write(4096, [memory.span])
        assert os.pread(fd, 2 * MIB + 4096, 4096) == memory.view
        lengths = [command.length for command in bench.commands]
        assert sum(lengths) == 2 * MIB + 4096
        assert len(lengths) == 3
        assert max(lengths) <= 700 << 10


async def test_neighbours_share_a_command(fd: int) -> None:
    async with running(fd) as bench:
        memory = Memory(256 << 10)
        memory.view[:] = content = pattern(3, 256 << 10)
        spans = [memory.at(n * 4096, 4096) for n in reversed(range(64))]
        await bench.engine.write(8192, spans)
        pages = [content[n * 4096 : (n + 1) * 4096] for n in reversed(range(64))]
        assert os.pread(fd, 256 << 10, 8192) == b"".join(pages)
        (command,) = bench.commands
        assert (command.length, command.count) == (64, 512)
        assert bench.kernel.seen[0].offset == URING_CMD_IO_VEC


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (0x4281, DeviceError, "unrecovered read error"),
        (0x6006, DeviceError, "internal error of the drive"),
        (0x4080, DeviceError, "beyond the end"),
        (0x4020, DeviceError, "write protected"),
        (0x41FF, DeviceError, r"refused the command \(NVMe status 0x41ff\)"),
        (0x400B, DeviceLost, "the namespace is gone"),
        (0x000B, DeviceLost, "the namespace is gone"),
        (-errno.ENODEV, DeviceLost, "No such device"),
        (-errno.EIO, DeviceError, "Input/output error"),
        (-errno.EOPNOTSUPP, DeviceError, "not supported"),
    ],
)
async def test_what_the_drive_answers_is_told(
    fd: int, result: int, kind: type[DeviceError], text: str
) -> None:
    async with running(fd) as bench:
        memory = Memory(4096)
        bench.drive.results = [result]
        with pytest.raises(DeviceError, match=text) as caught:
            await bench.engine.read(4096, memory.span)
        assert caught.type is kind
        assert "/dev/ng0n1: read of 4096 bytes at 4096: " in str(caught.value)
        await bench.engine.read(4096, memory.span)
        assert bench.engine.statistics().errors == 1


@pytest.mark.parametrize("result", [0x370, 0x371, 0x303, 0x082, 0x021, -errno.EINTR])
async def test_what_passes_is_tried_again_after_a_moment(
    fd: int, result: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(fd) as bench:
        memory = Memory(4096)
        bench.drive.results = [result] * 3
        await bench.engine.read(4096, memory.span)
        assert memory.view == pattern(9, SIZE)[4096:8192]
        assert len(bench.kernel.seen) == 4
        assert 0.2 < trio.current_time() < 1


async def test_what_does_not_pass_for_long_is_an_error(
    fd: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(fd) as bench:
        bench.drive.results = [0x370] * (RETRIES_MAX + 1)
        with pytest.raises(DeviceError, match="no way to the controller"):
            await bench.engine.sync()
        assert not bench.drive.results


async def test_what_the_drive_advises_against_is_not_tried_again(fd: int) -> None:
    async with running(fd) as bench:
        bench.drive.results = [0x4021]
        with pytest.raises(DeviceError, match="interrupted"):
            await bench.engine.sync()


async def test_a_caller_that_waits_for_another_try_can_leave(fd: int) -> None:
    async with running(fd) as bench:
        memory = Memory(4096)
        bench.drive.results = [0x370] * 1000
        with trio.move_on_after(0.01) as scope:
            await bench.engine.read(0, memory.span)
        assert scope.cancelled_caught
        bench.drive.results = []
        await bench.engine.sync()
        assert bench.engine.statistics().inflight == 0


async def test_an_engine_that_ends_fails_what_waits_for_another_try(fd: int) -> None:
    outcomes: list[str] = []
    memory = Memory(4096)

    async def read() -> None:
        try:
            await bench.engine.read(0, memory.span)
        except DeviceError as error:
            outcomes.append(str(error))

    async with trio.open_nursery() as callers, running(fd) as bench:
        bench.drive.results = [0x370] * 1000
        callers.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
    assert outcomes == ["/dev/ng0n1: the engine takes no requests: its run() has ended"]


def identify_page(blocks: int, chosen: int, formats: dict[int, tuple[int, int]]) -> bytes:
    """An answer to Identify Namespace; formats by index: bytes of metadata, log2 of the block."""
    page = bytearray(4096)
    struct.pack_into("<QQQ", page, 0, blocks, blocks, 1)
    page[26] = chosen
    for index, (metadata, exponent) in formats.items():
        struct.pack_into("<HBB", page, 128 + 4 * index, metadata, exponent, 0)
    return bytes(page)


@pytest.mark.parametrize(
    ("chosen", "block_bytes", "metadata_bytes"),
    [(0, 512, 0), (1, 4096, 0), (0x12, 4096, 8), (0x23, 1024, 0)],
)
def test_the_format_in_use_gives_the_size_of_blocks(
    chosen: int, block_bytes: int, metadata_bytes: int
) -> None:
    # Bits 5 and 6 are the upper ones of the index: 0x23 names format 19.
    formats = {0: (0, 9), 1: (0, 12), 2: (8, 12), 19: (0, 10)}
    found = parse_namespace(3, identify_page(1 << 20, chosen, formats))
    assert (found.number, found.block_bytes) == (3, block_bytes)
    assert found.metadata_bytes == metadata_bytes
    assert found.size_bytes == block_bytes << 20


@pytest.mark.parametrize(
    ("kib", "segments", "block_bytes", "limit"),
    [
        (512, 256, 512, 512 << 10),
        (1020, 127, 512, 127 * 4096),
        (1 << 30, 1 << 20, 512, 32 * MIB),
        (1021, 256, 4096, 1020 << 10),
    ],
)
def test_a_command_is_as_large_as_the_queue_allows(
    tmp_path: Path, kib: int, segments: int, block_bytes: int, limit: int
) -> None:
    queue = tmp_path / "queue"
    queue.mkdir()
    (queue / "max_hw_sectors_kb").write_text(f"{kib}\n")
    (queue / "max_segments").write_text(f"{segments}\n")
    assert command_bytes_max(Path("/dev/ng0n1"), tmp_path, block_bytes) == limit
    (queue / "max_segments").unlink()
    with pytest.raises(ConfigError, match="max_segments does not say"):
        command_bytes_max(Path("/dev/ng0n1"), tmp_path, block_bytes)


def test_partitions_are_known_by_name(tmp_path: Path) -> None:
    assert list(partitions(tmp_path)) == []
    for name in ("nvme0n1p2", "nvme0n1p1", "queue"):
        (tmp_path / name).mkdir()
    (tmp_path / "nvme0n1p1/partition").write_text("1")
    (tmp_path / "nvme0n1p2/partition").write_text("2")
    assert list(partitions(tmp_path)) == ["nvme0n1p1", "nvme0n1p2"]


def test_a_status_is_told_in_words_and_as_number() -> None:
    assert status_text(0x4281) == "unrecovered read error (NVMe status 0x4281)"
