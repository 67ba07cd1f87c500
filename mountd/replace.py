"""`ctx-mountd --replace`: the process that answers a mount is replaced, and nobody notices."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from ctxfs.errors import ConfigError, CtxfsError, unusable
from mountd import statedir

LOOK_MS = 50  # how often the file is looked at that tells the outcome


class NotReplaced(CtxfsError):
    """The successor did not come up; the daemon goes on as before."""


def replace(state: Path) -> str:
    """Replace the daemon that has this state directory; returns the line that says so.

    Returns when the successor answers. Raises ConfigError, NotReplaced.
    """
    try:
        parent = _parent_of(state)
        before, count = statedir.named(state), _outcome(state)[0]
        process = os.pidfd_open(parent)
    except ProcessLookupError:
        raise ConfigError(f"{state}: its daemon has just ended") from None
    except OSError as error:
        raise unusable(f"state directory {state}", error) from None
    try:
        signal.pidfd_send_signal(process, signal.SIGUSR1)
        reason = _wait(state, process, count)
    except PermissionError:
        raise ConfigError(
            f"{state}: not permitted to replace its daemon (pid {parent}); run as its user or root"
        ) from None
    finally:
        os.close(process)
    if reason:
        lines = (line.removeprefix("ctx-mountd: ") for line in reason.splitlines())
        who = "the daemon" if before is None else f"pid {before}"
        raise NotReplaced("\n".join([f"not replaced, {who} goes on:", *lines]))
    after = statedir.named(state)
    return f"ctxfs: {state}: pid {after} answers in place of pid {before}"


def _parent_of(state: Path) -> int:
    parent = statedir.owner(state, statedir.PARENT_FILE)
    if parent is not None:
        return parent
    lone = statedir.owner(state)
    if lone is None:
        raise ConfigError(
            f"{state}: no daemon has this state directory; name it with --state, or its "
            "configuration with -c"
        )
    raise ConfigError(
        f"{state}: the daemon with pid {lone} does not use the direct channel, so programs would "
        "notice; end it and start it anew"
    )


def _wait(state: Path, process: int, count: int) -> str:
    """The reason why the successor did not come up, empty if it answers."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    while not poll.poll(LOOK_MS):
        now, reason = _outcome(state)
        if now > count:
            return reason
    raise NotReplaced(f"{state}: its daemon ended meanwhile; see its log")


def _outcome(state: Path) -> tuple[int, str]:
    """How many times it was tried, and why the last one failed."""
    _, _, rest = (state / statedir.PARENT_FILE).read_text().partition("\n")
    count, _, reason = rest.partition("\n")
    return (int(count) if count.isdigit() else 0), reason
