"""Real places for tests of the device room: memory, files, loop devices, engines that run."""

import contextlib
import mmap
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import trio

from ctxfs.device import uring
from ctxfs.device.blockfile import OpenedDevice, open_engine
from ctxfs.device.engine import Span
from ctxfs.device.mapping import Mapping

MIB = 1 << 20


class Memory:
    """Page-aligned memory of its own."""

    def __init__(self, length: int) -> None:
        self.fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, length)
        self.mapping = Mapping(self.fd, length)
        os.close(self.fd)
        self.span = self.mapping.span()

    @property
    def view(self) -> memoryview:
        return self.mapping.view

    def at(self, offset: int, length: int) -> Span:
        return Span(self.mapping.address + offset, length)


def pattern(seed: int, length: int) -> bytes:
    """Bytes that differ from page to page and from seed to seed."""
    page = b"".join((seed * 7919 + n).to_bytes(8, "big") for n in range(mmap.PAGESIZE // 8))
    pages = (page[:-8] + n.to_bytes(8, "big") for n in range(-(-length // mmap.PAGESIZE)))
    return b"".join(pages)[:length]


@contextlib.asynccontextmanager
async def opened(
    path: Path, size_bytes: int | None = 64 * MIB, engine: str = "auto"
) -> AsyncIterator[OpenedDevice]:
    """A device whose engine runs."""
    device = await open_engine(path, size_bytes, engine=engine)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(device.run)
            yield device
            nursery.cancel_scope.cancel()
    finally:
        device.close()


def why_no_loop_devices() -> str | None:
    if os.geteuid() != 0:
        return "loop devices are for root"
    found = subprocess.run(["losetup", "-f"], capture_output=True, text=True, check=False)
    return None if found.returncode == 0 else found.stderr.strip()


@contextlib.contextmanager
def loop_device(backing: Path, size_bytes: int = 64 * MIB, sector: int = 512) -> Iterator[Path]:
    """A block device over a sparse file; both are gone afterwards."""
    with backing.open("wb") as file:
        file.truncate(size_bytes)
    command = ["losetup", "-f", "--show", "--direct-io=on", "-b", str(sector), str(backing)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    device = Path(found.stdout.strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "-d", str(device)], check=True)
        backing.unlink()


@contextlib.contextmanager
def mounted_ext4(device: Path, point: Path) -> Iterator[None]:
    """A new file system on `device`, mounted on `point`, which is made."""
    subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
    point.mkdir()
    subprocess.run(["mount", str(device), str(point)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(point)], check=True)


def why_no_uring() -> str | None:
    return uring.probe()
