"""What registered files and buffers, vectors, parts and engines are worth on one device.

    python -m tests.device.measuring PATH [ENGINE...]

PATH is a device that may be overwritten, or a file, which is made where it is missing. Everything
is measured in turns within one run; only ratios mean anything. docs/devices.md has what was found.
"""

import select
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import trio

from ctxfs.device import uring
from ctxfs.device.blockfile import open_engine
from ctxfs.device.dialects import Plain
from ctxfs.device.engine import Engine
from ctxfs.device.requests import Target
from ctxfs.device.ringengine import UringEngine
from ctxfs.device.transfers import Part, Transfer, Verb, cut
from ctxfs.device.uring import ENTRY, OP_READ, OP_WRITE, Ring
from tests.device.places import MIB, Memory, opened

SIZE = 64 * MIB
TURNS = 7
OP_READ_FIXED, OP_WRITE_FIXED, FIXED_FILE = 4, 5, 1  # linux/io_uring.h


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def told(what: str, spent: dict[str, list[tuple[float, float]]]) -> None:
    """One line: how much less time, and time of the processor, each kind took than the first."""
    medians = {
        kind: [statistics.median(each) for each in zip(*turns, strict=True)]
        for kind, turns in spent.items()
    }
    first = next(iter(medians.values()))
    ratios = [
        f"{kind} {first[0] / max(wall, 1e-9):.2f} ({first[1] / max(cpu, 1e-9):.2f})"
        for kind, (wall, cpu) in medians.items()
    ]
    say(f"{what:34} {first[0] * 1e6:7.0f} us  " + "  ".join(ratios))


class Registered(Ring):
    """A ring that has registered one file and one stretch of memory."""

    def __init__(self, fd: int, memory: Memory) -> None:
        lib = uring.load_binding()
        super().__init__(lib)
        lib.io_uring_register_files(self._ring, lib.FileIndex([fd]))  # type: ignore[attr-defined]
        lib.io_uring_register_buffers(  # type: ignore[attr-defined]
            self._ring,
            lib.Iovec([memory.view]),  # type: ignore[attr-defined]
        )
        self._fd = fd

    def ask(self, kind: str, verb: Verb, offset: int, address: int, length: int) -> None:
        fixed = kind in ("buffer", "both")
        opcode = {
            ("read", False): OP_READ,
            ("read", True): OP_READ_FIXED,
            ("write", False): OP_WRITE,
            ("write", True): OP_WRITE_FIXED,
        }[verb, fixed]
        fd, flags = (0, FIXED_FILE) if kind in ("file", "both") else (self._fd, 0)
        self._lib.io_uring_get_sqe(self._ring)
        place = (self._taken & (self.entries - 1)) * ENTRY.size
        self._taken += 1
        # fmt: off
        ENTRY.pack_into(
            self._sqes, place, opcode, flags, 0, fd, offset, address, length, 0, 1, 0, 0, 0, 0, 0
        )
        # fmt: on


def wait(ring: Ring, count: int) -> None:
    """Submit, and return when `count` requests are done."""
    ring.submit()
    while count:
        done = ring.reap()
        assert all(result > 0 for _, result in done), done
        count -= len(done)
        if not done:
            select.select([ring.eventfd], [], [])
            ring.clear_eventfd()


def compare(what: str, kinds: Iterable[str], work: Callable[[str], None], rounds: int) -> None:
    spent: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(TURNS):
        for kind, turns in spent.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(rounds):
                work(kind)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            turns.append((wall / rounds, cpu / rounds))
    told(what, spent)


def registration(target: Target) -> None:
    """Plain requests beside a registered file, registered memory, and both."""
    memory = Memory(8 * MIB)
    memory.view[:] = bytes(8 * MIB)
    ring = Registered(target.fd, memory)
    verbs: tuple[Verb, ...] = ("read", "write")
    for verb in verbs:
        for length, depth, rounds in ((4096, 1, 200), (4096, 32, 20), (MIB, 2, 15)):

            def work(
                kind: str, verb: Verb = verb, length: int = length, depth: int = depth
            ) -> None:
                for slot in range(depth):
                    address = memory.span.address + slot * length
                    ring.ask(kind, verb, slot * length, address, length)
                wait(ring, depth)

            kinds = ("plain", "file", "buffer", "both")
            compare(f"{verb} {length >> 10} KiB, {depth} at once", kinds, work, rounds)
    ring.close()


def submission(target: Target) -> None:
    """32 reads handed to the kernel by one call, and each by a call of its own."""
    memory = Memory(32 * 4096)
    memory.view[:] = bytes(32 * 4096)
    ring = Ring(uring.load_binding())

    def work(kind: str) -> None:
        for slot in range(32):
            address, offset = memory.span.address + slot * 4096, slot * 65536
            ring.put(OP_READ, 1, fd=target.fd, offset=offset, address=address, length=4096)
            if kind == "apart":
                ring.submit()
        wait(ring, 32)

    compare("submission of 32 reads of 4 KiB", ("apart", "together"), work, 20)
    ring.close()


def vectors(target: Target) -> None:
    """Neighbouring spans as requests of their own, and as one with vectors."""
    memory = Memory(4 * MIB)
    memory.view[:] = bytes(4 * MIB)
    ring, dialect = Ring(uring.load_binding()), Plain(target)
    for count in (2, 8, 64):

        def work(kind: str, count: int = count) -> None:
            spans = [memory.at(n * 4096, 4096) for n in reversed(range(count))]
            transfer = Transfer()
            if kind == "vectors":
                cut(transfer, "write", 0, spans, MIB)
            else:
                for n, span in enumerate(spans):
                    transfer.unsent.append(Part(transfer, "write", n * 4096, [span], 4096))
            parts = list(transfer.unsent)
            for part in parts:
                dialect.put(ring, 1, part)
            wait(ring, len(parts))

        compare(f"write of {count} spans of 4 KiB", ("apart", "vectors"), work, 20)
    ring.close()


def cases(
    engine: Engine, memory: Memory
) -> dict[str, tuple[Callable[[int], Awaitable[None]], int]]:
    """By name: one request, by its slot, and how many are made at once."""

    async def read_small(slot: int) -> None:
        await engine.read(slot * 65536, memory.at(slot * 4096, 4096))

    async def read_block(slot: int) -> None:
        await engine.read(slot * 2 * MIB, memory.at(slot * 2 * MIB, 2 * MIB))

    async def write_block(slot: int) -> None:
        header, block = memory.at(16 * MIB, 4096), memory.at(slot * 2 * MIB, 2 * MIB)
        await engine.write(slot * 4 * MIB, [header, block])

    async def write_records(slot: int) -> None:
        await engine.write(slot * MIB, [memory.at(n * 8192, 4096) for n in range(128)])

    return {
        "read 4 KiB": (read_small, 1),
        "read 4 KiB, 32 at once": (read_small, 32),
        "read 2 MiB": (read_block, 1),
        "read 2 MiB, 4 at once": (read_block, 4),
        "write 2 MiB and its header": (write_block, 1),
        "the same, 2 at once": (write_block, 2),
        "write 128 spans of 4 KiB": (write_records, 1),
    }


async def time_case(
    path: Path, name: str, case: str, memory: Memory, part_bytes: int | None = None
) -> tuple[float, float]:
    """Seconds, and seconds of the processor, that one request takes."""
    async with opened(path, _size_of(path), engine=name) as device:
        if part_bytes is not None:
            assert isinstance(device.engine, UringEngine)
            device.engine.dialect.part_bytes = part_bytes
        request, depth = cases(device.engine, memory)[case]
        rounds = 100 // depth if "4 KiB" in case and "spans" not in case else 12
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            async with trio.open_nursery() as nursery:
                for slot in range(depth):
                    nursery.start_soon(request, slot)
        count = rounds * depth
        return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


async def parts(path: Path) -> None:
    """One engine whose requests are cut into pieces of several sizes."""
    memory = Memory(20 * MIB)
    memory.view[:] = bytes(20 * MIB)
    for case in ("read 2 MiB", "read 2 MiB, 4 at once", "write 2 MiB and its header"):
        spent: dict[str, list[tuple[float, float]]] = {
            f"{kib} KiB": [] for kib in (1024, 1016, 512, 256)
        }
        for _ in range(TURNS):
            for kind, turns in spent.items():
                part_bytes = int(kind.split()[0]) << 10
                turns.append(await time_case(path, "io_uring", case, memory, part_bytes))
        told(f"{case}, in parts", spent)


async def engines(path: Path, names: list[str]) -> None:
    """The same requests through several engines on one device."""
    memory = Memory(20 * MIB)
    memory.view[:] = bytes(20 * MIB)
    async with opened(path, _size_of(path), engine=names[0]) as device:
        known = list(cases(device.engine, memory))
    for case in known:
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(TURNS):
            for name, turns in spent.items():
                turns.append(await time_case(path, name, case, memory))
        told(case, spent)


def _size_of(path: Path) -> int | None:
    return None if path.exists() and not path.is_file() else SIZE


async def main(path: Path, names: list[str]) -> None:
    say("How many times faster than the first kind (and in brackets, how many times less of the")
    say("processor); the microseconds are the first kind's.")
    size = _size_of(path)
    device = await open_engine(path, size, engine="io_uring")
    target = Target(device.fd, str(path), device.size_bytes, device.alignment, True)
    # Waiting in the kernel holds up the loop, which has nothing else to do here.
    registration(target)
    submission(target)
    vectors(target)
    device.close()
    await parts(path)
    await engines(path, names or ["io_uring", "threads"])


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2:])
