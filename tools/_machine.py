"""What a machine allows: the checks of `ctx doctor` that need no mount."""

import ctypes
import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ._output import short_size

OK = "ok"
WARN = "warn"
FAIL = "fail"  # mounting is impossible, or a mount or a device is broken

PASSTHROUGH_KERNEL = (6, 9)
FUSE_URING_KERNEL = (6, 14)
# What the PyPI wheel of liburing was compiled for; without them making a ring is SIGILL.
LIBURING_FLAGS = ("avx2", "avx512bw", "avx512f", "avx512vl", "bmi2", "movbe")
IO_URING_SETUP = 425  # the same number on every architecture
MEMLOCK_BYTES_WANTED = 64 << 20  # rings and their registered buffers
UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number beyond this


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report."""

    name: str
    state: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where to look: the real machine, or a tree of files that looks like one."""

    root: Path = Path("/")
    uid: int = 0
    release: str = ""  # of the kernel

    @classmethod
    def here(cls) -> "Machine":
        return cls(uid=os.geteuid(), release=os.uname().release)

    def read(self, path: str) -> str | None:
        """A small file's text, stripped, or None where it is not there or not ours to read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    @property
    def kernel(self) -> tuple[int, int]:
        """Major and minor number."""
        match = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(match[1]), int(match[2])) if match else (0, 0)


def checks(machine: Machine, hot_bytes: int) -> Iterator[Check]:
    """All checks of the machine, in the order of the report; see `check_memory`."""
    yield check_fuse_device(machine)
    yield check_fusermount(machine, shutil.which("fusermount3"))
    yield check_passthrough(machine)
    yield check_fuse_uring(machine)
    yield check_allow_other(machine)
    yield check_io_uring(machine, try_io_uring())
    yield check_processor(machine)
    yield check_huge_pages(machine)
    yield check_idling(machine)
    yield check_memory(machine, hot_bytes)
    yield check_locked_memory(machine, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def check_fuse_device(machine: Machine) -> Check:
    path = machine.root / "dev/fuse"
    remedy = "modprobe fuse; in a container, start it with --device /dev/fuse"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return Check("fuse device", FAIL, "/dev/fuse is not there", remedy)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            remedy = "chmod 666 /dev/fuse, or in a container also --cap-add SYS_ADMIN"
        return Check("fuse device", FAIL, f"/dev/fuse cannot be opened: {error.strerror}", remedy)
    return Check("fuse device", OK, "/dev/fuse can be opened")


def check_fusermount(machine: Machine, path: str | None) -> Check:
    name = "fusermount3"
    remedy = "apt install fuse3"
    if machine.uid == 0:
        if path is None:
            return Check(name, OK, "not installed; root mounts without it")
        return Check(name, OK, path)
    if path is None:
        return Check(name, FAIL, "not installed, and only root mounts without it", remedy)
    if not os.stat(path).st_mode & 0o4000:
        return Check(name, FAIL, f"{path} is not setuid", f"chmod u+s {path}, as root")
    return Check(name, OK, path)


def check_passthrough(machine: Machine) -> Check:
    name = "passthrough"
    if machine.kernel < PASSTHROUGH_KERNEL:
        return Check(
            name,
            WARN,
            f"Linux {machine.release} has no FUSE passthrough: the daemon carries all bytes",
            "Linux 6.9 or later reads and maps hot blocks at the memory's speed",
        )
    if machine.uid != 0:
        return Check(
            name, WARN, "the kernel has FUSE passthrough, for root only", "run the daemon as root"
        )
    return Check(name, OK, f"Linux {machine.release} has FUSE passthrough")


def check_fuse_uring(machine: Machine) -> Check:
    name = "fuse over io_uring"
    switch = "/sys/module/fuse/parameters/enable_uring"
    if machine.kernel < FUSE_URING_KERNEL:
        return Check(name, OK, f"Linux {machine.release} does not have it (6.14); not needed")
    if machine.read(switch.lstrip("/")) in ("Y", "1"):
        return Check(name, OK, "switched on")
    return Check(name, OK, "switched off; not needed", f"echo 1 > {switch} switches it on")


def check_allow_other(machine: Machine) -> Check:
    name = "allow_other"
    if machine.uid == 0:
        return Check(name, OK, "root may let other users in")
    lines = (machine.read("etc/fuse.conf") or "").splitlines()
    if any(line.strip() == "user_allow_other" for line in lines):
        return Check(name, OK, "other users may be let in")
    return Check(
        name,
        WARN,
        "your mounts can be seen by you alone",
        "add the line `user_allow_other` to /etc/fuse.conf, as root",
    )


def try_io_uring() -> int:
    """The errno of an io_uring_setup that is allowed to fail only for its arguments.

    Asking is the only way to know: a seccomp filter leaves no trace in /proc or /sys.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall(ctypes.c_long(IO_URING_SETUP), ctypes.c_long(0), None)
    return ctypes.get_errno()


def check_io_uring(machine: Machine, refusal: int) -> Check:
    name = "io_uring"
    slower = "the cold tier uses preadv in threads"
    disabled = machine.read("proc/sys/kernel/io_uring_disabled")
    if refusal == errno.ENOSYS:
        return Check(name, WARN, f"not in this kernel, or filtered: {slower}", "Linux 5.1 has it")
    if refusal == errno.EPERM:
        if disabled in ("1", "2"):
            remedy = "sysctl kernel.io_uring_disabled=0"
        else:
            remedy = "a seccomp filter refuses it: in a container, allow the io_uring calls"
        return Check(name, WARN, f"refused: {slower}", remedy)
    return Check(name, OK, "allowed")


def check_processor(machine: Machine) -> Check:
    name = "processor"
    flags: set[str] = set()
    for line in (machine.read("proc/cpuinfo") or "").splitlines():
        label, _, value = line.partition(":")
        if label.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    missing = [flag for flag in LIBURING_FLAGS if flag not in flags]
    if not missing:
        return Check(name, OK, "has what the liburing wheel was built for")
    return Check(
        name,
        WARN,
        f"lacks {' '.join(missing)}, which the liburing wheel needs: "
        "the cold tier uses preadv in threads",
        "another processor, or liburing built on this one",
    )


def check_huge_pages(machine: Machine) -> Check:
    name = "huge pages"
    text = machine.read("sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if text is None:
        return Check(
            name,
            WARN,
            "this kernel has none for shared memory: maps are read about 4 times slower",
            "a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        )
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen and chosen[1] == "deny":
        return Check(
            name,
            WARN,
            "denied for shared memory: maps are read about 4 times slower",
            "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled "
            "(a mount option decides then)",
        )
    return Check(name, OK, "the hot tier may have them")


def check_idling(machine: Machine) -> Check:
    name = "idle processors"
    driver = (machine.read("sys/devices/system/cpu/cpuidle/current_driver") or "none").strip()
    if driver == "none":
        return Check(name, OK, "sleep as they like: this kernel cannot be told otherwise")
    if not os.access(machine.root / "dev/cpu_dma_latency", os.W_OK):
        return Check(
            name,
            WARN,
            f"sleep deeply ({driver}) whatever comes: /dev/cpu_dma_latency is not ours to write",
            "a daemon run by root, with that device in its container",
        )
    return Check(name, OK, f"are kept awake while requests keep coming ({driver})")


def memory_limit_bytes(machine: Machine) -> int | None:
    """The tightest memory limit of the control groups this process is in, or None."""
    limits = []
    for line in (machine.read("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # A group's limit holds for those beneath it too. In a container the path is often the
        # host's, and only the base is there.
        group = Path(path.lstrip("/"))
        for step in [group, *group.parents]:
            text = machine.read(str(Path(base) / step / file)) or ""
            if text.isdigit() and int(text) < UNLIMITED_BYTES:
                limits.append(int(text))
    return min(limits, default=None)


def check_memory(machine: Machine, hot_bytes: int) -> Check:
    """`hot_bytes`: capacity of the hot tiers mounted now; their pages count as this memory."""
    name = "memory"
    meminfo = {}
    for line in (machine.read("proc/meminfo") or "").splitlines():
        label, _, value = line.partition(":")
        meminfo[label] = value.split()
    total = _kib(meminfo, "MemTotal")
    limit = memory_limit_bytes(machine)
    whole = total if limit is None else min(total, limit)
    of = "" if limit is None else f", control group limit {short_size(limit)}"
    text = f"{short_size(total)}, {short_size(_kib(meminfo, 'MemAvailable'))} available{of}"
    if hot_bytes > whole > 0:
        return Check(
            name,
            WARN,
            f"{text}; hot tiers may grow to {short_size(hot_bytes)}",
            "a smaller --hot, or a higher limit: else the kernel kills the daemon",
        )
    return Check(name, OK, text)


def _kib(meminfo: dict[str, list[str]], label: str) -> int:
    words = meminfo.get(label) or ["0"]
    return int(words[0]) * 1024


def check_locked_memory(machine: Machine, limit_bytes: int) -> Check:
    name = "locked memory"
    if machine.uid == 0 or limit_bytes in (resource.RLIM_INFINITY, -1):
        return Check(name, OK, "no limit")
    text = f"at most {short_size(limit_bytes)}"
    if limit_bytes >= MEMLOCK_BYTES_WANTED:
        return Check(name, OK, text)
    return Check(
        name,
        WARN,
        f"{text}: io_uring may not be able to register its buffers",
        "ulimit -l, or LimitMEMLOCK= of the service",
    )
