"""What systemd wants to hear (sd_notify(3)), in a datagram; silence where nobody listens."""

import array
import logging
import os
import socket
from collections.abc import MutableMapping, Sequence

log = logging.getLogger(__name__)


FIRST_FD = 3  # sd_listen_fds(3): what the manager kept for us begins here


def notify(*assignments: str, fds: Sequence[int] = ()) -> bool:
    """Send `NAME=value` lines to the service manager. False where there is none, or it is deaf.

    The manager gets duplicates of `fds`.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # the abstract name space
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        # A manager that does not read must not stop the daemon from serving.
        sock.setblocking(False)
        try:
            sock.connect(address)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sock.sendmsg(["\n".join(assignments).encode()], rights)
        except OSError as error:
            log.warning("systemd was not told %s: %s", assignments[0], error.strerror or error)
            return False
    return True


def ready(status: str) -> bool:
    """The mount answers. The process id is said too: it is not the one started, with --daemon."""
    return notify("READY=1", f"MAINPID={os.getpid()}", f"STATUS={status}")


def status(text: str) -> bool:
    """One line for `systemctl status`."""
    return notify(f"STATUS={text}")


def stopping(text: str) -> bool:
    """The daemon drains and ends."""
    return notify("STOPPING=1", f"STATUS={text}")


def store(name: str, fd: int) -> bool:
    """Have the manager keep a descriptor for the next process of the service, by this name.

    It is not to drop it on its own (FDPOLL): one of /dev/fuse looks broken until it is mounted.
    """
    return notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd])


def forget(name: str) -> bool:
    """The manager is to close what it keeps by this name."""
    return notify("FDSTOREREMOVE=1", f"FDNAME={name}")


def keeps() -> bool:
    """Whether the manager gave descriptors to this process that it kept for it."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def stored(name: str, environ: MutableMapping[str, str] = os.environ) -> list[int]:
    """The descriptors that the manager kept by this name for this process.

    Asks once: what says so is taken out of the environment, as it is not for our children.
    """
    process, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if process != str(os.getpid()) or not count.isdigit():
        return []
    fds = range(FIRST_FD, FIRST_FD + int(count))
    for fd in fds:
        os.set_inheritable(fd, False)
    return [fd for fd, each in zip(fds, names, strict=False) if each == name]
