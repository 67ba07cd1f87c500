"""Reading blocks of a peer over loopback, beside iperf3 with as many connections.

    python -m tests.device.measuring.peers [CONNECTIONS [SECONDS]]

The peer is a process of its own. All kinds are measured in turns within one run; only the ratios
mean anything. Needs iperf3 (`apt install iperf3`).
"""

import json
import os
import statistics
import subprocess
import sys
import time

import trio

from ctxfs.device.mapping import Mapping
from ctxfs.device.peer import Peer
from ctxfs.device.peerserver import serve
from ctxfs.device.tcp import Listener
from tests.device.measuring.__main__ import say
from tests.device.peering import INSECURE, ME, YOU, MemoryDoor, memory_file

BLOCK_BYTES = 2 << 20
BLOCKS = 32
READERS = 8
TURNS = 3
WITHIN_S = 60.0


async def be_the_peer() -> None:
    """Answer until standard input ends."""
    door = MemoryDoor()
    for number in range(BLOCKS):
        door.put(b"k%d" % number, os.urandom(BLOCK_BYTES))
    listener = Listener(("127.0.0.1", 0))
    say(str(listener.address[1]))
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, listener, door, YOU, INSECURE)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def read_blocks(peer: Peer, seconds: float, *, fresh: bool) -> float:
    """Gigabytes a second, into mappings that are used again or new ones."""
    end_s = trio.current_time() + seconds
    done = 0

    async def read_some(first: int) -> None:
        nonlocal done
        fd = memory_file(bytes(BLOCK_BYTES))
        mapping = Mapping(fd, BLOCK_BYTES)
        number = first
        while trio.current_time() < end_s:
            if fresh:
                mapping.close()
                os.ftruncate(fd, 0)
                os.ftruncate(fd, BLOCK_BYTES)
                mapping = Mapping(fd, BLOCK_BYTES)
            number = (number + 1) % BLOCKS
            await peer.read(b"k%d" % number, 1, mapping.view, WITHIN_S)
            done += BLOCK_BYTES
        mapping.close()
        os.close(fd)

    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for reader in range(READERS):
            nursery.start_soon(read_some, reader)
    return done / (trio.current_time() - began_s) / 1e9


def iperf(connections: int, seconds: float) -> float:
    """Gigabytes a second of iperf3."""
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "--forceflush", "-p", "5299"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        pass
    done = subprocess.run(
        f"iperf3 -c 127.0.0.1 -p 5299 -J -P {connections} -t {max(1, round(seconds))}".split(),
        capture_output=True,
        check=True,
    )
    server.communicate()
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9


async def latency(peer: Peer, seconds: float) -> float:
    """Microseconds of one lookup after the other, the median."""
    end_s = time.perf_counter() + seconds
    spent = []
    while (began_s := time.perf_counter()) < end_s:
        await peer.lookup([b"none"], WITHIN_S)
        spent.append(time.perf_counter() - began_s)
    return statistics.median(spent) * 1e6


async def measure(port: int, connections: int, seconds: float) -> None:
    figures: dict[str, list[float]] = {"iperf3": [], "read": [], "read, new memory": []}
    peer = Peer(ME, b"two", ("127.0.0.1", port), INSECURE, lanes=connections)
    async with trio.open_nursery() as nursery:
        await nursery.start(peer.run)
        for _ in range(TURNS):
            figures["iperf3"].append(await trio.to_thread.run_sync(iperf, connections, seconds))
            figures["read"].append(await read_blocks(peer, seconds, fresh=False))
            figures["read, new memory"].append(await read_blocks(peer, seconds, fresh=True))
        say(f"lookup, one after the other: {await latency(peer, 1):.0f} us")
        nursery.cancel_scope.cancel()
    for kind, found in figures.items():
        ratio = statistics.median(
            mine / other for mine, other in zip(found, figures["iperf3"], strict=True)
        )
        say(f"{kind:20} {statistics.median(found):5.2f} GB/s   {ratio:.2f} of iperf3")


def main(arguments: list[str]) -> None:
    """Measure, or be the peer of somebody who does."""
    if arguments == ["serve"]:
        trio.run(be_the_peer)
        return
    connections = int(arguments[0]) if arguments else 4
    seconds = float(arguments[1]) if len(arguments) > 1 else 2.0
    command = [sys.executable, "-m", "tests.device.measuring.peers", "serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        trio.run(measure, port, connections, seconds)
        child.communicate("")


if __name__ == "__main__":
    main(sys.argv[1:])
