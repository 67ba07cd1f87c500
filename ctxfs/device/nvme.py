"""NVMe commands through io_uring (IORING_OP_URING_CMD) on the command device of a namespace.

A command goes around the block layer and the page cache: nothing cuts it, nothing merges it with
its neighbours, nothing tries it again. So all three are done here. Layouts are those of
linux/nvme_ioctl.h; status codes those of the NVM Express base specification.
"""

import errno
import struct
from typing import Final

from ctxfs.device.dialects import TryAgain
from ctxfs.device.queues import WHOLE_BYTES
from ctxfs.device.requests import Target, failure
from ctxfs.device.transfers import Part
from ctxfs.device.uring import OP_URING_CMD, Ring
from ctxfs.errors import DeviceError, DeviceLost

# struct nvme_uring_cmd: opcode, flags, reserved, namespace, cdw2, cdw3, metadata, address,
# metadata length, data length, cdw10 to cdw15, timeout in ms (0: the driver's), reserved.
COMMAND = struct.Struct("=BBHIIIQQII6III")
URING_CMD_IO = 0xC0484E80  # _IOWR('N', 0x80, struct nvme_uring_cmd)
URING_CMD_IO_VEC = 0xC0484E81  # the same, with vectors at the address and their number for length
FLUSH, WRITE, READ = 0, 1, 2
_OPCODES: Final = {"flush": FLUSH, "write": WRITE, "read": READ}

RETRY_SECONDS = 0.1  # a controller that resets, or a path that is lost, needs a moment
RETRIES_MAX = 100

_CODE, _DO_NOT_RETRY = 0x7FF, 0x4000  # of a status: type and code, and what the drive advises
_INVALID_NAMESPACE = 0x00B
_PATH = 0x300  # status type 3: the way to the drive, not the drive
_PASSING: Final = frozenset({0x007, 0x008, 0x021, 0x022, 0x082})
_TEXTS: Final = {
    0x002: "invalid field in the command",
    0x004: "data transfer error",
    0x006: "internal error of the drive",
    0x007: "the command was aborted",
    0x008: "the command was aborted",
    _INVALID_NAMESPACE: "the namespace is gone",
    0x020: "the namespace is write protected",
    0x021: "the command was interrupted",
    0x022: "transient transport error",
    0x080: "beyond the end of the namespace",
    0x081: "the drive has no capacity left",
    0x082: "the namespace is not ready",
    0x083: "another host has reserved the namespace",
    0x084: "the namespace is being formatted",
    0x182: "this part of the namespace is read-only",
    0x280: "write fault",
    0x281: "unrecovered read error",
    0x282: "end-to-end guard check failed",
    0x286: "access denied",
    0x287: "these blocks were never written",
    0x301: "this way to the namespace is lost for good",
    0x302: "this way to the namespace is closed",
    0x303: "this way to the namespace is changing",
    0x360: "the controller has trouble on its way to the namespace",
    0x370: "no way to the controller",
    0x371: "the host gave the command up",
}


def status_text(status: int) -> str:
    """What a command's status says, in words and as number."""
    text = _TEXTS.get(status & _CODE, "the drive refused the command")
    return f"{text} (NVMe status {status:#x})"


class NvmeCommands:
    """The dialect of one namespace. `command_bytes_max`: what one command may move, whole blocks.

    All requests are multiples of 4096 bytes, and so of the namespace's blocks.
    """

    name = "nvme"

    def __init__(
        self, target: Target, namespace: int, block_bytes: int, command_bytes_max: int
    ) -> None:
        self.part_bytes = min(WHOLE_BYTES, command_bytes_max)
        self._target = target
        self._namespace = namespace
        self._block_bytes = block_bytes

    def put(self, ring: Ring, number: int, part: Part) -> None:
        kind, address, length = URING_CMD_IO, 0, 0
        first = count = 0
        if part.verb != "flush":
            address, length = part.memory()
            kind = URING_CMD_IO if len(part.spans) == 1 else URING_CMD_IO_VEC
            first, count = part.offset // self._block_bytes, part.length // self._block_bytes
        # cdw10 and cdw11: the first block; cdw12: the number of blocks, less one.
        # fmt: off
        command = COMMAND.pack(
            _OPCODES[part.verb], 0, 0, self._namespace, 0, 0, 0, address, 0, length,
            first & 0xFFFFFFFF, first >> 32, max(count - 1, 0), 0, 0, 0, 0, 0,
        )
        # fmt: on
        ring.put(OP_URING_CMD, number, fd=self._target.fd, offset=kind, command=command)

    def judge(self, part: Part, result: int) -> int:
        if result == 0:
            return part.length
        if _passes(result) and part.retries < RETRIES_MAX:
            raise TryAgain(RETRY_SECONDS)
        if result < 0:
            raise failure(self._target, part.what, -result)
        kind = DeviceLost if result & _CODE == _INVALID_NAMESPACE else DeviceError
        raise kind(f"{self._target.name}: {part.what}: {status_text(result)}")


def _passes(result: int) -> bool:
    """Whether the same command may succeed in a moment.

    The driver answers EINTR for what it took back when it reset the controller.
    """
    if result < 0:
        return -result in (errno.EAGAIN, errno.EINTR)
    if result & _DO_NOT_RETRY:
        return False
    return result & _CODE in _PASSING or result & 0x700 == _PATH
