"""What can be known before anything is opened: whether this machine can do what it is told."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ctxfs.config import COLD_BYTES_MIN, ClusterConfig, ColdConfig, Config
from ctxfs.device import nvmedrive, shm
from ctxfs.errors import ConfigError
from ctxfs.units import format_size
from mountd import channels, drained, mounts
from mountd.keyring import key_ring
from mountd.memberfile import own_name
from mountd.options import may_allow_other
from mountd.statedir import PID_FILE

CGROUPS = Path("/sys/fs/cgroup")
FUSE_DEVICE = Path("/dev/fuse")
# Kinds of file system that show the kernel's own things: nobody makes files there.
NO_FILES = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts"),
        *("efivarfs", "fusectl", "mqueue", "proc", "pstore", "rpc_pipefs", "securityfs"),
        *("selinuxfs", "smackfs", "sysfs", "tracefs"),
    )
)


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


def problems(config: Config, *, mounted: bool = False) -> list[str]:
    """Everything in the way of starting, one line each. No signature is read, nothing changed.

    `mounted`: what is at the mount point is to be taken over, and is not asked.
    """
    found: list[str] = []
    if config.mount.path is None:
        found.append("no mount point: name it on the command line, or as [mount] path")
    elif not mounted and (reason := mounts.obstacle(config.mount.path)) is not None:
        found.append(str(reason))
    found += _fuse(config)
    found += _state(config.state)
    found += _hot(config)
    try:
        key_ring(config.codec)
    except ConfigError as error:
        found.append(str(error))
    if config.cluster.id is not None:
        found += _cluster(config.cluster)
    if config.log.file is not None:
        found += _log_file(config.log.file)
    for device in drained.present(config.cold, config.state):
        found += _cold(device, config.state)
    return found


def _cluster(cluster: ClusterConfig) -> Iterator[str]:
    try:
        own_name(cluster)
    except ConfigError as error:
        yield str(error)
    files = (cluster.ca, cluster.cert, cluster.key, cluster.etcd_ca, cluster.etcd_cert)
    for path in (*files, cluster.etcd_key, cluster.etcd_password_file):
        if path is not None and not os.access(path, os.R_OK):
            what = "this user may not read it" if path.exists() else "does not exist"
            yield f"cluster {path}: {what}"


def _fuse(config: Config) -> Iterator[str]:
    if not FUSE_DEVICE.exists():
        yield (
            f"{FUSE_DEVICE} does not exist: load the module with `modprobe fuse`, or give the "
            "container that device"
        )
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


def _state(path: Path) -> Iterator[str]:
    unusable = list(_directory("state directory", path))
    yield from unusable
    pid_file = path / PID_FILE
    if not unusable and pid_file.exists():
        if not pid_file.is_file():
            yield f"state directory {path}: {pid_file} is not a file"
        elif not os.access(pid_file, os.R_OK | os.W_OK):
            yield f"state directory {path}: this user may not write to {pid_file}"


def _directory(name: str, path: Path) -> Iterator[str]:
    """It is there, or can be made, and files in it too."""
    try:
        there = _nearest(path)
    except OSError as error:
        yield f"{name} {path}: {error.strerror}"
        return
    if not there.is_dir():
        yield f"{name} {path}: {there} is not a directory"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{name} {path}: this user may not write to {there}"
    elif (fstype := _fstype(there)) in NO_FILES:
        yield f"{name} {path}: nothing can be made in {there}, which is {fstype}"


def _nearest(path: Path) -> Path:
    """As much of a path as is there. Raises OSError where one may not even look."""
    while not path.exists():
        path = path.parent
    return path


def _fstype(path: Path) -> str:
    """The kind of file system, or nothing where the table of mounts does not tell."""
    number = path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    return next((each.fstype for each in mounts.mount_table() if each.device == device), "")


def _hot(config: Config) -> Iterator[str]:
    """Where a user may mount no tmpfs of its own, the one that is there must be large enough."""
    if os.geteuid() != 0:
        try:
            shm.plain_place(_nearest(config.state), config.hot.size_bytes)
        except ConfigError as error:
            yield str(error)
        except OSError:
            return  # told of the state directory already


def _log_file(path: Path) -> Iterator[str]:
    """It can be opened. Unlike the state directory, the one above it is not made."""
    try:
        if path.is_dir():
            yield f"log file {path}: is a directory"
        elif path.exists():
            if not os.access(path, os.W_OK):
                yield f"log file {path}: this user may not write it"
        elif not path.parent.exists():
            yield f"log file {path}: the directory {path.parent} does not exist"
        else:
            yield from _directory("directory of the log file", path.parent)
    except OSError as error:
        yield f"log file {path}: {error.strerror}"


def _cold(device: ColdConfig, state: Path) -> Iterator[str]:
    path = device.path
    try:
        wanted = cold_bytes(device)
        there = _bytes_there(path)
    except ConfigError as error:
        yield str(error)
        return
    if there is None:
        # The state directory is made before; no other is.
        if path.parent not in (state, *state.parents) and not path.parent.exists():
            yield f"cold {path}: the directory {path.parent} does not exist"
            return
        if path.is_symlink():
            yield f"cold {path}: is a link to what does not exist"
        yield from _directory("directory of cold", path.parent)
    elif not os.access(path, os.R_OK | os.W_OK):
        yield f"cold {path}: this user may not read and write it"
    if wanted < COLD_BYTES_MIN:
        yield f"cold {path}: must have at least {format_size(COLD_BYTES_MIN)}"
    if path.exists() and not path.is_file():
        if there is not None and wanted > there:
            yield f"cold {path}: has {format_size(there)}, less than its size of " + format_size(
                wanted
            )
    else:
        yield from _room(path, wanted - _allocated(path))


def _room(path: Path, missing: int) -> Iterator[str]:
    """A cold file is allocated whole when it is made: what it lacks must be free."""
    info = os.statvfs(_nearest(path.parent))
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
        if nvmedrive.is_command_device(path):
            return nvmedrive.size_bytes(path)
        if not stat.S_ISBLK(info.st_mode):
            raise ConfigError(
                f"cold {path}: is neither a file, a block device nor an NVMe command device"
            )
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cold {path}: {error.strerror}") from None
