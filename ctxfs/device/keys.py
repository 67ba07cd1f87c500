"""Where encryption keys lie: a file that nobody else may read, or the kernel's keyring.

What is in there is for `ctxfs.codec.keyring` to read.
"""

import ctypes
import errno
import os
import platform
import stat
from pathlib import Path
from typing import Final

from ctxfs.errors import ConfigError, unusable

FILE_BYTES_MAX: Final = 64 << 10
KEYRING_PREFIX: Final = "keyring:"

# request_key(2) and keyctl(2) have no wrappers in the C library. <asm/unistd.h> has their numbers.
_NUMBERS: Final = {"x86_64": (249, 250), "aarch64": (218, 219), "riscv64": (218, 219)}
_KEYCTL_READ: Final = 11


def read_keys(source: str) -> bytes:
    """What lies at `source`: a path, or `keyring:` and the description of a key of type `user`.

    Raises ConfigError, which names the source.
    """
    name = source.removeprefix(KEYRING_PREFIX)
    return _from_file(Path(source)) if name == source else _from_kernel(name)


def _from_file(path: Path) -> bytes:
    try:
        # A pipe would otherwise be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unusable(str(path), error) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path}: not a file")
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{path}: belongs to somebody else")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{path}: others may read or write it; chmod 600")
        if found.st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: longer than {FILE_BYTES_MAX} bytes")
        return os.read(fd, FILE_BYTES_MAX)
    except OSError as error:
        raise unusable(str(path), error) from error
    finally:
        os.close(fd)


def _from_kernel(description: str) -> bytes:
    """Look through the keyrings of thread, process and session, as request_key(2) does."""
    source = f"{KEYRING_PREFIX}{description}"
    try:
        request_key, keyctl = _NUMBERS[platform.machine()]
    except KeyError:
        raise ConfigError(f"{source}: no keyring is known on {platform.machine()}") from None
    name = os.fsencode(description)
    if not name or b"\0" in name:
        raise ConfigError(f"{source}: this is no description")
    try:
        serial = _call(request_key, b"user", name, None, 0)
        buffer = ctypes.create_string_buffer(FILE_BYTES_MAX)
        length = _call(keyctl, _KEYCTL_READ, serial, buffer, len(buffer), 0)
    except OSError as error:
        raise ConfigError(f"{source}: {_reason(error)}") from error
    return buffer.raw[: min(length, len(buffer))]


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOKEY:
        return "no such key; add it with `keyctl padd user NAME @u`"
    return error.strerror or str(error)


def _call(number: int, *arguments: bytes | int | ctypes.Array[ctypes.c_char] | None) -> int:
    """One system call. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(library.syscall(ctypes.c_long(number), *given))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
