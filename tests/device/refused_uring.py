"""A process whose kernel refuses io_uring_setup, as a container's seccomp profile does.

    python -m tests.device.refused_uring DEVICE

Prints what `open_engine` chose, and why, as JSON, after it wrote and read a block.
"""

import ctypes
import errno
import json
import struct
import sys
from pathlib import Path

import trio

from ctxfs.device import uring
from tests.device.places import Memory, opened, pattern

IO_URING_SETUP = 425  # on every architecture
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: code, jump if true, if false, operand
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_RET_ERRNO, _RET_ALLOW = 0x00050000, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse(number: int, code: int) -> None:
    """Let system call `number` fail with `code` in this process from now on."""
    program = b"".join(
        (
            _INSTRUCTION.pack(_LOAD, 0, 0, 0),  # the system call's number
            _INSTRUCTION.pack(_JUMP_EQUAL, 0, 1, number),
            _INSTRUCTION.pack(_RETURN, 0, 0, _RET_ERRNO | code),
            _INSTRUCTION.pack(_RETURN, 0, 0, _RET_ALLOW),
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    described = ctypes.byref(_Program(len(program) // _INSTRUCTION.size, program))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


async def main(path: Path) -> None:
    refuse(IO_URING_SETUP, errno.EPERM)
    async with opened(path) as device:
        source, target = Memory(8192), Memory(8192)
        source.view[:] = pattern(1, 8192)
        await device.engine.write(4096, [source.span])
        await device.engine.read(4096, target.span)
        answer = {
            "engine": device.engine.name,
            "why": device.why_not_uring,
            "probe": uring.probe(),
            "same": target.view == source.view,
        }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))
