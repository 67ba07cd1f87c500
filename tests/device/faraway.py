"""A member in a process of its own, in a network namespace of its own where that is asked for.

    python -m tests.device.faraway ADDRESS PORT

prints its port, has the block `k`, and ends with its standard input.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from ctxfs.device.peerserver import serve
from ctxfs.device.tcp import Address, Listener
from tests.device.peering import INSECURE, YOU, MemoryDoor, content_of

CONTENT = content_of(4_000_000)
HERE, THERE = "10.77.{}.1", "10.77.{}.2"
NOWHERE = "02:00:00:00:00:99"  # an address that nobody on the link has


@dataclass
class Faraway:
    """The process. Its address stays when it is started again."""

    address: Address
    process: subprocess.Popen[str]


@dataclass
class Wire:
    """A link between us and a namespace, whose directions can be cut without anybody being told.

    What is cut goes to a hardware address that nobody has.
    """

    namespace: str
    here: str  # devices
    there: str
    number: int

    @property
    def address(self) -> str:
        return THERE.format(self.number)

    def cut(self, *, to: bool = True, back: bool = True) -> None:
        if to:
            self._point(self.here, self.address, NOWHERE, "")
        if back:
            self._point(self.there, HERE.format(self.number), NOWHERE, self.namespace)

    def mend(self) -> None:
        self._point(self.here, self.address, mac_of(self.there, self.namespace), "")
        us = HERE.format(self.number)
        self._point(self.there, us, mac_of(self.here, ""), self.namespace)

    def _point(self, device: str, address: str, mac: str, namespace: str) -> None:
        ip(f"neigh replace {address} lladdr {mac} dev {device} nud permanent", namespace)


def ip(command: str, namespace: str = "") -> str:
    where = ["-n", namespace] if namespace else []
    done = subprocess.run(
        ["ip", *where, *command.split()], capture_output=True, text=True, check=True
    )
    return done.stdout


def mac_of(device: str, namespace: str) -> str:
    words = ip(f"-o link show {device}", namespace).split()
    return words[words.index("link/ether") + 1]


def why_no_namespaces() -> str | None:
    """The reason, for a skip."""
    try:
        ip("netns list")
        ip("link add ctxprobe0 type veth peer name ctxprobe1")
        ip("link del ctxprobe0")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return None


@contextmanager
def wire() -> Iterator[Wire]:
    """A namespace and a link to it."""
    number = os.getpid() % 250
    made = Wire(f"ctxfar{os.getpid()}", f"cf{os.getpid()}", f"ct{os.getpid()}", number)
    ip(f"netns add {made.namespace}")
    try:
        ip(f"link add {made.here} type veth peer name {made.there} netns {made.namespace}")
        ip(f"addr add {HERE.format(number)}/24 dev {made.here}")
        ip(f"link set {made.here} up")
        ip(f"addr add {made.address}/24 dev {made.there}", made.namespace)
        ip(f"link set {made.there} up", made.namespace)
        made.mend()
        yield made
    finally:
        subprocess.run(["ip", "link", "del", made.here], check=False)
        ip(f"netns del {made.namespace}")


@contextmanager
def faraway(address: Address = ("127.0.0.1", 0), namespace: str = "") -> Iterator[Faraway]:
    """Start it; it is killed at the end."""
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    host, port = address
    with subprocess.Popen(
        [*inside, sys.executable, "-m", "tests.device.faraway", host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Faraway((host, int(process.stdout.readline())), process)
        finally:
            process.kill()


async def main(host: str, port: int) -> None:
    """Answer until standard input ends."""
    door = MemoryDoor()
    door.put(b"k", CONTENT)
    listener = Listener((host, port))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, door, YOU, INSECURE)
        sys.stdout.write(f"{listener.address[1]}\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
