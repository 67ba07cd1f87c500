"""Where keys lie."""

import ctypes
import os
from pathlib import Path

import pytest

from ctxfs.device.keys import FILE_BYTES_MAX, read_keys
from ctxfs.errors import ConfigError

CONTENT = b"first " + b"11" * 32 + b"\n"
ADD_KEY = {"x86_64": 248, "aarch64": 217, "riscv64": 217}[os.uname().machine]
PROCESS_KEYRING = -2


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(CONTENT)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_that_is_ours_alone_is_read(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert read_keys(str(key_file)) == CONTENT


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644, 0o601])
def test_a_file_that_others_may_touch_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(str(key_file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(key_file: Path) -> None:
    os.chown(key_file, 12345, -1)
    with pytest.raises(ConfigError, match="somebody else"):
        read_keys(str(key_file))


def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, key_file: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="not a file"):
        read_keys(str(pipe))
    with pytest.raises(ConfigError, match="not a file"):
        read_keys(str(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(str(tmp_path / "missing"))
    key_file.write_bytes(bytes(FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="longer"):
        read_keys(str(key_file))


def test_a_key_of_the_kernel_keyring_is_read() -> None:
    library = ctypes.CDLL(None, use_errno=True)
    serial = library.syscall(
        ctypes.c_long(ADD_KEY),
        b"user",
        b"ctxfs-test",
        CONTENT,
        ctypes.c_long(len(CONTENT)),
        ctypes.c_long(PROCESS_KEYRING),
    )
    assert serial > 0, os.strerror(ctypes.get_errno())
    assert read_keys("keyring:ctxfs-test") == CONTENT


def test_a_key_that_the_kernel_does_not_know_says_how_to_add_it() -> None:
    with pytest.raises(ConfigError, match="keyctl padd"):
        read_keys("keyring:ctxfs-there-is-no-such-key")
    with pytest.raises(ConfigError, match="no description"):
        read_keys("keyring:")
