"""NVMe drives made for one test, in the lab's kernel: memory behind the kernel's own NVMe target.

They are reached over a fabric, the one within the kernel (loop) or TCP to ourselves, as a drive
elsewhere would be. Nothing of this is to be run on a machine that is used for anything else.
"""

import contextlib
import itertools
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mount.harness import wait_until

TARGET = Path("/sys/kernel/config/nvmet")
MEMORY_DISKS = Path("/sys/kernel/config/nullb")
FABRICS = Path("/dev/nvme-fabrics")
TCP_ADDRESS, TCP_PORT = "127.0.0.1", "4420"
PORTS = {"loop": TARGET / "ports/1", "tcp": TARGET / "ports/2"}  # the lab has made the first

_numbers = itertools.count(100)


@dataclass
class Drive:
    """One drive; its nodes are gone once it is lost."""

    name: str
    controller: str  # "nvme3"
    disk: Path  # its medium
    subsystem: Path

    @property
    def block(self) -> Path:
        """The block device."""
        return Path(f"/dev/{self.controller}n1")

    @property
    def command(self) -> Path:
        """The command device."""
        return Path(f"/dev/ng{self.controller.removeprefix('nvme')}n1")

    def lose(self) -> None:
        """Take it away without warning, as if it were pulled; returns when its node is gone."""
        (Path("/sys/class/nvme") / self.controller / "delete_controller").write_text("1")
        wait_until(lambda: not self.block.exists())

    def reset(self) -> None:
        """Reset the controller; returns when it works again."""
        (Path("/sys/class/nvme") / self.controller / "reset_controller").write_text("1")

    def disable(self) -> None:
        """The target does not give this namespace any more."""
        (self.subsystem / "namespaces/1/enable").write_text("0")

    def spoil(self, first: int, last: int) -> None:
        """Make these sectors of 512 bytes fail."""
        (self.disk / "badblocks").write_text(f"+{first}-{last}")


@contextlib.contextmanager
def drive(block_bytes: int = 512, mib: int = 64, transport: str = "loop") -> Iterator[Drive]:
    """A blank drive. Raises OSError where the kernel has no such fabric."""
    name = f"ctxfs{next(_numbers)}"
    with contextlib.ExitStack() as undo:
        port = _port(transport)
        disk = MEMORY_DISKS / f"nullb{name.removeprefix('ctxfs')}"
        disk.mkdir()
        undo.callback(disk.rmdir)
        for attribute, value in (("memory_backed", 1), ("size", mib), ("blocksize", block_bytes)):
            (disk / attribute).write_text(str(value))
        (disk / "power").write_text("1")
        subsystem = TARGET / "subsystems" / name
        _share(subsystem, Path("/dev") / disk.name, undo)
        link = port / "subsystems" / name
        link.symlink_to(subsystem)
        undo.callback(link.unlink)
        controller = _connect(name, transport)
        undo.callback(_disconnect, controller)
        made = Drive(name, controller, disk, subsystem)
        wait_until(lambda: made.block.exists() and made.command.exists())
        yield made


def _share(subsystem: Path, medium: Path, undo: contextlib.ExitStack) -> None:
    namespace = subsystem / "namespaces/1"
    subsystem.mkdir()
    undo.callback(subsystem.rmdir)
    (subsystem / "attr_allow_any_host").write_text("1")
    namespace.mkdir()
    undo.callback(namespace.rmdir)
    (namespace / "device_path").write_text(str(medium))
    (namespace / "enable").write_text("1")


def _port(transport: str) -> Path:
    port = PORTS[transport]
    if port.exists():
        return port
    port.mkdir()
    settings = {
        "addr_trtype": transport,
        "addr_adrfam": "ipv4",
        "addr_traddr": TCP_ADDRESS,
        "addr_trsvcid": TCP_PORT,
    }
    for attribute, value in settings.items():
        (port / attribute).write_text(value)
    return port


def why_not(transport: str) -> str | None:
    """Why this kernel cannot reach drives so, or None."""
    try:
        with drive(mib=32, transport=transport):
            return None
    except OSError as error:
        return f"this kernel has no NVMe over {transport}: {error.strerror}"


def _connect(name: str, transport: str) -> str:
    host = uuid.uuid4()
    options = {
        "transport": transport,
        "nqn": name,
        "hostnqn": f"nqn.2014-08.org.nvmexpress:uuid:{host}",
        "hostid": str(host),
    }
    if transport == "tcp":
        options |= {"traddr": TCP_ADDRESS, "trsvcid": TCP_PORT}
    fd = os.open(FABRICS, os.O_RDWR)
    try:
        os.write(fd, ",".join(f"{key}={value}" for key, value in options.items()).encode())
        answer = os.read(fd, 4096).decode()
    finally:
        os.close(fd)
    found = re.search(r"instance=(\d+)", answer)
    assert found, answer
    return f"nvme{found[1]}"


def _disconnect(controller: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (Path("/sys/class/nvme") / controller / "delete_controller").write_text("1")
    wait_until(lambda: not Path(f"/dev/{controller}").exists())
