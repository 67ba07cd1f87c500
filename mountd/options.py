"""Mount options: what `-o` may say, and who may see the mount."""

import logging
import os
from pathlib import Path

from ctxfs.config import MountConfig, Override
from ctxfs.errors import ConfigError

log = logging.getLogger(__name__)

# Taken because mount(8) and fstab(5) pass them on: they say what holds here anyway, or are for
# others to heed.
IGNORED = frozenset(
    (
        *("rw", "async", "exec", "nosuid", "nodev", "default_permissions"),
        *("defaults", "auto", "noauto", "nofail", "nouser", "_netdev"),
    )
)
IGNORED_PREFIXES = ("x-", "X-", "comment=")
_ACCEPTED = "accepted are allow_other, default_permissions, fsname=NAME, rw, and those of fstab"


def parse_options(options: list[str], *, sloppy: bool = False) -> list[Override]:
    """Overrides for comma-separated lists of options. Raises ConfigError naming all others.

    `sloppy` tolerates what is not known, as `mount -s` asks.
    """
    overrides, refused = [], []
    for option in filter(None, ",".join(options).split(",")):
        name, _, value = option.partition("=")
        if option == "allow_other":
            overrides.append(Override("-o allow_other", "mount", "allow_other", True))
        elif name == "fsname":
            overrides.append(Override("-o fsname", "mount", "fsname", value))
        elif option not in IGNORED and not option.startswith(IGNORED_PREFIXES):
            refused.append(option)
    if refused and not sloppy:
        lines = (f"-o {option}: is no option of this mount; {_ACCEPTED}" for option in refused)
        raise ConfigError("\n".join(lines))
    return overrides


def allow_other(wanted: bool | None, *, uid: int, fuse_conf: str) -> bool:
    """Whether the mount is opened to other users. None: where that is permitted.

    Raises ConfigError where it was asked for and `fuse_conf` does not let an ordinary user.
    """
    lines = (line.partition("#")[0].strip() for line in fuse_conf.splitlines())
    permitted = uid == 0 or "user_allow_other" in lines
    if wanted and not permitted:
        raise ConfigError(
            "allow_other is not permitted to an ordinary user: let root put the line "
            "user_allow_other into /etc/fuse.conf, or leave the option out"
        )
    return permitted if wanted is None else wanted


def may_allow_other(mount: MountConfig) -> bool:
    """The same for this user and this machine."""
    opened = allow_other(mount.allow_other, uid=os.geteuid(), fuse_conf=fuse_conf())
    if not opened and mount.allow_other is None:
        log.info("only this user sees the mount: /etc/fuse.conf does not say user_allow_other")
    return opened


def fuse_conf() -> str:
    """What /etc/fuse.conf says; nothing where there is none."""
    try:
        return Path("/etc/fuse.conf").read_text("utf-8", "replace")
    except OSError:
        return ""
