"""Clusters of daemons, each on a host of its own, for as long as a `with` lasts."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.daemon import Daemon, DaemonFailed
from bench.network import Network
from ctxfs.core.members import Member
from ctxfs.core.placement import Placement

PORT: Final = 7440
HEALTHY_SECONDS_MAX: Final = 30.0
POLL_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the daemons of a cluster have in common. `secure`: TLS."""

    name: str
    replicas: int
    connections: int
    hot_bytes: int
    channel: str = "auto"
    secure: bool = False
    port: int = PORT


class Cluster:
    """Its daemons know each other; all are there, and healthy."""

    def __init__(self, names: Sequence[str], mounts: dict[str, Path]) -> None:
        self.names = tuple(names)
        self.mounts = mounts
        self._placement = Placement(
            Member(name=name, slot=number, address="", zone="default", weight=1)
            for number, name in enumerate(names)
        )
        self._last = 0

    def fresh(self, count: int, home: str | None = None) -> list[str]:
        """Names that were never used before; `home`: who is the first home of all of them."""
        found: list[str] = []
        while len(found) < count:
            self._last += 1
            name = f"block-{self._last}"
            if home is None or self._placement.homes(name.encode(), 1) == (home,):
                found.append(name)
        return found


@contextlib.contextmanager
def cluster(
    network: Network, names: Sequence[str], base: Path, settings: Settings
) -> Iterator[Cluster]:
    """One daemon on each of these hosts. Raises DaemonFailed, CalledProcessError."""
    base.mkdir()
    with contextlib.ExitStack() as stack:
        trust = certificates(base, names) if settings.secure else {}
        mounts = {}
        for name in names:
            folder = base / name
            mounts[name] = folder / "ctx"
            mounts[name].mkdir(parents=True)
            file = folder / "ctxfs.toml"
            file.write_text(_config(network, names, name, settings, trust.get(name)))
            arguments = ["-c", str(file), "--hot", str(settings.hot_bytes)]
            arguments += ["--channel", settings.channel]
            inside = network.inside(name)
            stack.enter_context(Daemon(mounts[name], folder / "state", arguments, inside=inside))
        _wait_healthy(mounts)
        yield Cluster(names, mounts)


def _config(
    network: Network, names: Sequence[str], name: str, settings: Settings, trust: str | None
) -> str:
    port = settings.port
    members = ", ".join(f'"{each}={network.address(each)}:{port}"' for each in names)
    return (
        f'[cluster]\nid = "{settings.name}"\nname = "{name}"\nlisten = "0.0.0.0:{port}"\n'
        f"members = [{members}]\nreplicas = {settings.replicas}\n"
        f"connections = {settings.connections}\n{trust or 'insecure = true'}\n"
    )


def _wait_healthy(mounts: dict[str, Path]) -> None:
    deadline = time.monotonic() + HEALTHY_SECONDS_MAX
    for mount in mounts.values():
        while not _all_healthy(mount):
            if time.monotonic() > deadline:
                raise DaemonFailed("the members of a cluster do not find each other")
            time.sleep(POLL_SECONDS)


def _all_healthy(mount: Path) -> bool:
    told = json.loads((mount / ".ctx" / "peers").read_text())
    peers = [each["peer"] for each in told["members"] if not each["self"]]
    return all(peer is not None and peer["health"] == "healthy" for peer in peers)


def certificates(base: Path, names: Sequence[str]) -> dict[str, str]:
    """Make a certificate for each, which signs itself and is believed by all; what to configure."""
    for name in names:
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        command += f" -days 1 -subj /CN={name} -addext subjectAltName=DNS:{name}"
        files = ["-keyout", str(base / f"{name}.key"), "-out", str(base / f"{name}.pem")]
        subprocess.run([*command.split(), *files], check=True, capture_output=True)
    authority = base / "all.pem"
    authority.write_text("".join((base / f"{name}.pem").read_text() for name in names))
    return {
        name: f'ca = "{authority}"\ncert = "{base}/{name}.pem"\nkey = "{base}/{name}.key"'
        for name in names
    }
