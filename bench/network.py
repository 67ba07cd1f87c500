"""Hosts on one network, each a network namespace of this machine. Shared by `bench` and tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

NAMESPACES = Path("/run/netns")
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
}  # and the packages that they are in

BURST_S = 0.001  # sent at once where a link's speed is limited
QUEUE_S = 0.02  # of what waits for such a link


class NoNetwork(Exception):
    """Namespaces cannot be made here; the text says what to do about it."""


def check_network() -> None:
    """Raise NoNetwork, with the remedy, where hosts cannot be made."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise NoNetwork(f"{program} is not installed: apt-get install {package}")
    if os.geteuid() != 0:
        raise NoNetwork("network namespaces need root")


class Network:
    """A bridge with one host for each name. Use as a context manager."""

    def __init__(self, names: Sequence[str], bits_per_s: int | None = None) -> None:
        """`bits_per_s`: what a host can send; None: as much as there is time for."""
        self.names = tuple(names)
        self._bits_per_s = bits_per_s
        mine = os.getpid()
        self._bridge = f"ctb{mine}"
        self._prefix = f"198.18.{mine % 256}"  # of the range for tests of networks
        self.host = f"{self._prefix}.1"  # this machine, which no cut between hosts concerns

    def address(self, name: str) -> str:
        """Where a host is found."""
        return f"{self._prefix}.{self.names.index(name) + 2}"

    def inside(self, name: str) -> list[str]:
        """What a command begins with that runs on a host, and sees all files of this machine."""
        return ["nsenter", f"--net={NAMESPACES / self._space(name)}"]

    def _space(self, name: str) -> str:
        return f"{self._bridge}-{name}"

    def _plug(self, name: str) -> str:
        return f"{self._bridge}p{self.names.index(name)}"

    def __enter__(self) -> Self:
        try:
            run_ip("link", "add", self._bridge, "type", "bridge")
            run_ip("address", "add", f"{self.host}/24", "dev", self._bridge)
            run_ip("link", "set", self._bridge, "up")
            for name in self.names:
                self._add(name)
        except BaseException:
            self.close()
            raise
        return self

    def _add(self, name: str) -> None:
        space, plug = self._space(name), self._plug(name)
        run_ip("netns", "add", space)
        run_ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", space)
        run_ip("link", "set", plug, "master", self._bridge, "up")
        run_ip("-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        run_ip("-n", space, "link", "set", "eth0", "up")
        run_ip("-n", space, "link", "set", "lo", "up")
        if self._bits_per_s is not None:
            burst = max(16_000, int(self._bits_per_s / 8 * BURST_S))
            self.limit(name, self._bits_per_s, burst, QUEUE_S)

    def limit(self, name: str, bits_per_s: int, burst_bytes: int, queue_s: float) -> None:
        """What a host sends goes no faster than that, behind a queue of so many seconds."""
        run(*self.inside(name), "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf",
            "rate", str(bits_per_s), "burst", f"{burst_bytes}b",
            "latency", f"{round(queue_s * 1000)}ms")  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was made."""
        for name in self.names:
            # With its namespace a link would go too, but at some later moment.
            with contextlib.suppress(subprocess.CalledProcessError):
                run_ip("link", "delete", self._plug(name))
            with contextlib.suppress(subprocess.CalledProcessError):
                run_ip("netns", "delete", self._space(name))
        with contextlib.suppress(subprocess.CalledProcessError):
            run_ip("link", "delete", self._bridge)


def run_ip(*arguments: str) -> None:
    """`ip`, from iproute2. Raises CalledProcessError."""
    run("ip", *arguments)


def run(*command: str) -> None:
    """A command that says nothing. Raises CalledProcessError."""
    subprocess.run(command, check=True, capture_output=True, timeout=30)
