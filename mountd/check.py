"""What can be known before anything is opened: whether this machine can do what it is told."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ctxfs.config import ColdConfig, Config
from ctxfs.errors import ConfigError
from ctxfs.units import format_size
from mountd import channels, mounts
from mountd.options import may_allow_other

CGROUPS = Path("/sys/fs/cgroup")
FUSE_DEVICE = Path("/dev/fuse")


def memory_bytes() -> int:
    """What this machine has, or what the container it runs in may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
    except OSError:
        group = ""
    for directory in {CGROUPS, CGROUPS / group.lstrip("/")}:
        try:
            text = (directory / "memory.max").read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def cold_bytes(device: ColdConfig) -> int:
    """The size a cold device has or will have; what is configured beats what is there.

    Raises ConfigError where neither says it.
    """
    if device.size_bytes is not None:
        return device.size_bytes
    if (there := _bytes_there(device.path)) is not None:
        return there
    raise ConfigError(
        f"cold {device.path}: does not exist; give its size to have it made: "
        f"--cold {device.path}:100GiB"
    )


def problems(config: Config) -> list[str]:
    """Everything in the way of starting, one line each. No signature is read, nothing changed."""
    found: list[str] = []
    if config.mount.path is None:
        found.append("no mount point: name it on the command line, or as [mount] path")
    elif (reason := mounts.obstacle(config.mount.path)) is not None:
        found.append(str(reason))
    elif os.geteuid() != 0 and not os.access(config.mount.path, os.W_OK):
        found.append(f"{config.mount.path}: an ordinary user mounts only where it may write")
    found += _fuse(config)
    found += _directory("state directory", config.state)
    if config.log.file is not None:
        found += _directory("directory of the log file", config.log.file.parent)
    for device in config.cold:
        found += _cold(device)
    return found


def _fuse(config: Config) -> Iterator[str]:
    if not FUSE_DEVICE.exists():
        yield f"{FUSE_DEVICE} does not exist: load the module with `modprobe fuse`, or give the "
        "container that device"
    elif not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        yield f"{FUSE_DEVICE}: this user may not read and write it"
    if shutil.which("fusermount3") is None:
        if os.geteuid() != 0:
            yield "an ordinary user needs fusermount3: install the package fuse3"
        elif config.mount.channel == channels.DIRECT and (lacks := channels.what_root_lacks()):
            yield f"channel direct: {lacks} cannot mount, and fusermount3 is not installed"
    try:
        may_allow_other(config.mount)
    except ConfigError as error:
        yield str(error)


def _directory(name: str, path: Path) -> Iterator[str]:
    """It is there, or can be made."""
    there = path
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        yield f"{name} {path}: {there} is not a directory"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{name} {path}: this user may not write to {there}"


def _cold(device: ColdConfig) -> Iterator[str]:
    path = device.path
    try:
        wanted = cold_bytes(device)
        there = _bytes_there(path)
    except ConfigError as error:
        yield str(error)
        return
    if there is None:
        yield from _directory("directory of cold", path.parent)
    elif not os.access(path, os.R_OK | os.W_OK):
        yield f"cold {path}: this user may not read and write it"
    if path.is_block_device():
        if there is not None and wanted > there:
            yield f"cold {path}: has {format_size(there)}, less than its size of " + format_size(
                wanted
            )
    else:
        yield from _room(path, wanted - _allocated(path))


def _room(path: Path, missing: int) -> Iterator[str]:
    """A cold file is allocated whole when it is made: what it lacks must be free."""
    if not path.parent.is_dir():
        return
    info = os.statvfs(path.parent)
    if missing > (free := info.f_bavail * info.f_frsize):
        yield f"cold {path}: needs {format_size(missing)} more, {format_size(free)} are free there"


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _bytes_there(path: Path) -> int | None:
    """Size of a device or file, None where there is none. Raises ConfigError for other things."""
    try:
        info = path.stat()
        if stat.S_ISREG(info.st_mode):
            return info.st_size
        if not stat.S_ISBLK(info.st_mode):
            raise ConfigError(f"cold {path}: is neither a file nor a block device")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cold {path}: {error.strerror}") from None
