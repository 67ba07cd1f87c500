"""Which of the two ways to speak to the kernel is taken here, and why."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ctxfs.config import Channel

DIRECT = "direct"
PYFUSE3 = "pyfuse3"
PASSTHROUGH_SINCE = (6, 9)
CAP_SYS_ADMIN = 1 << 21  # linux/capability.h


@dataclass(slots=True)
class ChosenChannel:
    """The channel, and what is known of it; `passthrough` from the first answer on."""

    name: str
    why: str
    privileged: bool  # we may mount, and hand files to the kernel
    passthrough: bool = False  # the kernel reads sealed hot blocks itself


def choose(wanted: Channel) -> ChosenChannel:
    """Decide. Looks at the kernel's version and our rights, and changes nothing."""
    lacks = what_root_lacks()
    old = kernel_is_old(os.uname().release)
    if wanted == PYFUSE3:
        return ChosenChannel(PYFUSE3, "asked for", lacks is None)
    if wanted == DIRECT:
        return ChosenChannel(DIRECT, "asked for", lacks is None)
    if lacks is not None:
        return ChosenChannel(PYFUSE3, lacks, privileged=False)
    if old is not None:
        return ChosenChannel(PYFUSE3, old, privileged=True)
    return ChosenChannel(DIRECT, f"root, on Linux {_short(os.uname().release)}", privileged=True)


def kernel_is_old(release: str) -> str | None:
    """Why this kernel has no FUSE passthrough; None if its version has."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None:
        return f"Linux {release} tells no version"
    if (int(numbers[1]), int(numbers[2])) >= PASSTHROUGH_SINCE:
        return None
    return f"Linux {_short(release)} has no FUSE passthrough; 6.9 has"


def what_root_lacks(proc: Path = Path("/proc/self")) -> str | None:
    """Why this process may not mount and lend files as the machine's root may; None if it may."""
    if os.geteuid() != 0:
        return "not root"
    status = (proc / "status").read_text()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if effective is None or not int(effective[1], 16) & CAP_SYS_ADMIN:
        return "root without CAP_SYS_ADMIN"
    if (proc / "uid_map").read_text().split() != ["0", "0", "4294967295"]:
        return "root of a user namespace only"
    return None


def _short(release: str) -> str:
    return ".".join(re.findall(r"\d+", release)[:2])
