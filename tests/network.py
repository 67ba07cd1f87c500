"""Hosts on one network, each a network namespace of this machine, whose links can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

NOBODY = "02:00:00:00:00:fe"  # an Ethernet address that no host has
NAMESPACES = Path("/run/netns")


def skip_without_namespaces() -> None:
    """Skip the test where hosts cannot be made, with the reason."""
    missing = [each for each in ("ip", "tc", "nsenter") if shutil.which(each) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: apt-get install iproute2 util-linux")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")


class Network:
    """A bridge with one host for each name. Use as a context manager."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
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

    def __enter__(self) -> Network:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self.host}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name in self.names:
                self._add(name)
        except BaseException:
            self.close()
            raise
        return self

    def _add(self, name: str) -> None:
        space, plug = self._space(name), self._plug(name)
        _ip("netns", "add", space)
        _ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", plug, "master", self._bridge, "up")
        _ip("-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was made."""
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self._space(name))
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)

    # -- troubles, which nobody is told of

    def cut(self, sender: str, receiver: str) -> None:
        """What one host sends another does not arrive from now on; the other way it does."""
        where = self.address(receiver)
        _ip("-n", self._space(sender), "neighbour", "replace", where, "lladdr", NOBODY,
            "dev", "eth0", "nud", "permanent")  # fmt: skip

    def mend(self, sender: str, receiver: str) -> None:
        """The end of `cut`."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("-n", self._space(sender), "neighbour", "delete", self.address(receiver),
                "dev", "eth0")  # fmt: skip

    def unplug(self, name: str) -> None:
        """A host reaches nobody, and nobody it."""
        _ip("link", "set", self._plug(name), "down")

    def plug(self, name: str) -> None:
        """The end of `unplug`."""
        _ip("link", "set", self._plug(name), "up")

    def slow(self, name: str, bits_per_s: int) -> None:
        """What a host sends goes no faster than that, behind a queue of up to 200 ms."""
        _run(*self.inside(name), "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf",
             "rate", str(bits_per_s), "burst", "16kb", "latency", "200ms")  # fmt: skip

    def fast(self, name: str) -> None:
        """The end of `slow`."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(*self.inside(name), "tc", "qdisc", "delete", "dev", "eth0", "root")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
