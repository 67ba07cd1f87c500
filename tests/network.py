"""Hosts on one network, each a network namespace of this machine, whose links can be cut."""

from __future__ import annotations

import contextlib
import subprocess

import pytest

from bench import network
from bench.network import NoNetwork, check_network, run, run_ip

NOBODY = "02:00:00:00:00:fe"  # an Ethernet address that no host has


def skip_without_namespaces() -> None:
    """Skip the test where hosts cannot be made, with the reason."""
    try:
        check_network()
    except NoNetwork as error:
        pytest.skip(str(error))


class Network(network.Network):
    """The same, with troubles that nobody is told of."""

    def cut(self, sender: str, receiver: str) -> None:
        """What one host sends another does not arrive from now on; the other way it does."""
        where = self.address(receiver)
        run_ip("-n", self._space(sender), "neighbour", "replace", where, "lladdr", NOBODY,
            "dev", "eth0", "nud", "permanent")  # fmt: skip

    def mend(self, sender: str, receiver: str) -> None:
        """The end of `cut`."""
        with contextlib.suppress(subprocess.CalledProcessError):
            run_ip("-n", self._space(sender), "neighbour", "delete", self.address(receiver),
                "dev", "eth0")  # fmt: skip

    def unplug(self, name: str) -> None:
        """A host reaches nobody, and nobody it."""
        run_ip("link", "set", self._plug(name), "down")

    def plug(self, name: str) -> None:
        """The end of `unplug`."""
        run_ip("link", "set", self._plug(name), "up")

    def slow(self, name: str, bits_per_s: int) -> None:
        """What a host sends goes no faster than that, behind a queue of up to 200 ms."""
        self.limit(name, bits_per_s, 16 << 10, 0.2)

    def fast(self, name: str) -> None:
        """The end of `slow`."""
        with contextlib.suppress(subprocess.CalledProcessError):
            run(*self.inside(name), "tc", "qdisc", "delete", "dev", "eth0", "root")
