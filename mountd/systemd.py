"""What systemd wants to hear (sd_notify(3)), in a datagram; silence where nobody listens."""

import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(*assignments: str) -> bool:
    """Send `NAME=value` lines to the service manager. False where there is none, or it is deaf."""
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
            sock.send("\n".join(assignments).encode())
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
