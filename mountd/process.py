"""What /proc tells of a client: which process a thread belongs to, and how it is ending.

The kernel names the *thread* that made a request. Nothing here may touch the mount itself: the
loop that would answer is the one that asks.
"""

import ctypes
import enum
import errno
import os
import signal

PF_EXITING = 0x00000004  # include/linux/sched.h
PF_SIGNALED = 0x00000400  # killed by a signal
# Signals by which somebody is told to end, handled or not. A fatal one shows as SIGKILL.
ENDING = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
_ENDING_MASK = sum(1 << (number - 1) for number in ENDING)


class Fate(enum.Enum):
    """How a process is doing."""

    ALIVE = enum.auto()
    EXITING = enum.auto()  # of its own will
    KILLED = enum.auto()
    GONE = enum.auto()


_libc = ctypes.CDLL(None, use_errno=True)


def is_thread_of(tid: int, pid: int) -> bool:
    """Whether a thread is one of a process now; a system call that sends nothing (tgkill(2))."""
    return _libc.tgkill(pid, tid, 0) == 0 or ctypes.get_errno() == errno.EPERM


def process_of(tid: int) -> int:
    """Return the process (thread group) of a thread; `tid` itself if it is gone already."""
    if tid > 0 and is_thread_of(tid, tid):
        return tid  # the first thread of a process, as most are: /proc would take ten times longer
    try:
        with open(f"/proc/{tid}/status", "rb", buffering=0) as file:
            head = file.read(512)
    except OSError:
        return tid
    start = head.find(b"\nTgid:")
    return int(head[start + 6 : head.index(b"\n", start + 6)]) if start >= 0 else tid


def fate_of(pid: int) -> Fate:
    """Return how a process is doing, by the flags in its stat line (proc(5), field 9)."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            line = file.read(1024)
    except OSError:
        return Fate.GONE
    # The command name before it may hold anything, so count from its closing parenthesis.
    flags = int(line[line.rindex(b")") + 2 :].split(b" ", 7)[6])
    if flags & PF_SIGNALED:
        return Fate.KILLED
    return Fate.EXITING if flags & PF_EXITING else Fate.ALIVE


def is_to_end(tid: int) -> bool:
    """Return whether a thread is gone, or a signal that it does not block tells it to end."""
    pending = blocked = 0
    try:
        with open(f"/proc/{tid}/status", "rb") as file:
            for line in file:
                if line.startswith((b"SigPnd:", b"ShdPnd:")):
                    pending |= int(line.split()[1], 16)
                elif line.startswith(b"SigBlk:"):
                    blocked = int(line.split()[1], 16)
    except OSError:
        return True
    return bool(pending & ~blocked & _ENDING_MASK)


def newest_pid() -> int:
    """Return the number given to the newest process or thread of this machine."""
    with open("/proc/loadavg", "rb", buffering=0) as file:
        return int(file.read(128).rsplit(b" ", 1)[1])


def writable_descriptors(pid: int, inode: int) -> int:
    """Return how many descriptors of a process may write an inode of ours.

    Only /proc is read: looking at the files themselves would ask the mount.
    """
    count = 0
    try:
        numbers = os.listdir(f"/proc/{pid}/fdinfo")
    except OSError:
        return 0
    for number in numbers:
        try:
            with open(f"/proc/{pid}/fdinfo/{number}", "rb", buffering=0) as file:
                words = file.read(256).split()
        except OSError:
            continue  # closed meanwhile
        facts = dict(zip(words[::2], words[1::2], strict=False))
        writable = int(facts.get(b"flags:", b"0"), 8) & os.O_ACCMODE != os.O_RDONLY
        if writable and facts.get(b"ino:") == b"%d" % inode:
            count += 1
    return count


def supplementary_groups(tid: int) -> set[int]:
    """Return the supplementary group ids of a thread; empty if it is gone."""
    try:
        with open(f"/proc/{tid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Groups:"):
                    return {int(word) for word in line.split()[1:]}
    except OSError:
        pass
    return set()
