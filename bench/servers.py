"""What remote blocks are compared with: iperf3, Redis and Mooncake's store, on the same hosts."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.network import Network
from bench.samples import Sample
from bench.ways import check

IPERF_PORT: Final = 5201
REDIS_PORT: Final = 6399
MASTER_PORT: Final = 50071
SEGMENT_BYTES_MIN: Final = 512 << 20
READY_SECONDS_MAX: Final = 20.0
POLL_SECONDS: Final = 0.02
END_SECONDS_MAX: Final = 10.0


class NotHere(Exception):
    """A program or a package is missing; the text says what to do about it."""


def need_program(name: str, package: str) -> str:
    """Where a program is. Raises NotHere."""
    found = shutil.which(name)
    if found is None:
        raise NotHere(f"{name} is not installed: apt-get install {package}")
    return found


def need_module(name: str, package: str) -> None:
    """Raise NotHere where a module is missing."""
    if importlib.util.find_spec(name) is None:
        raise NotHere(f"the module {name} is not installed: pip install {package}")


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that is ended with the `with`; what it says goes to `log`, its output to us."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()
        process.stdout.close()


# -- iperf3


@contextlib.contextmanager
def iperf_servers(network: Network, names: Sequence[str], base: Path) -> Iterator[None]:
    """One on each host. Raises NotHere."""
    program = need_program("iperf3", "iperf3")
    with contextlib.ExitStack() as stack:
        for name in names:
            command = [*network.inside(name), program, "-s", "-p", str(IPERF_PORT), "--forceflush"]
            process = stack.enter_context(running(command, base / "iperf3.log"))
            assert process.stdout is not None
            while "listening" not in process.stdout.readline():
                if process.poll() is not None:
                    raise NotHere("iperf3 ends by itself; see whether its port is taken")
        yield


def iperf(
    network: Network, pairs: Sequence[tuple[str, str]], *, connections: int, bytes_each: int
) -> Sample:
    """All pairs of a receiver and a sender at once, with so many connections each."""
    processes = []
    for receiver, sender in pairs:
        command = f"iperf3 -c {network.address(sender)} -p {IPERF_PORT} -R -J -P {connections}"
        whole = [*network.inside(receiver), *command.split(), "-n", str(bytes_each)]
        processes.append(subprocess.Popen(whole, stdout=subprocess.PIPE, text=True))
    said: list[dict[str, Any]] = [json.loads(each.communicate()[0]) for each in processes]
    if troubles := [each["error"] for each in said if "error" in each]:
        raise OSError(f"iperf3: {troubles[0]}")
    found = [each["end"]["sum_received"] for each in said]
    return Sample(
        operations=len(found),
        bytes=sum(each["bytes"] for each in found),
        seconds=max(each["seconds"] for each in found),
    )


# -- Redis


@contextlib.contextmanager
def redis_pair(
    network: Network, primary: str, replica: str, base: Path
) -> Iterator[dict[str, Any]]:
    """A primary and its replica, in memory alone; yields what a client has to know.

    Raises NotHere.
    """
    program = need_program("redis-server", "redis-server")
    need_module("redis", "redis")
    with contextlib.ExitStack() as stack:
        for name in (primary, replica):
            folder = base / f"redis-{name}"
            folder.mkdir()
            command = f"{program} --port {REDIS_PORT} --bind 0.0.0.0 --protected-mode no"
            command += f" --appendonly no --repl-diskless-sync-delay 0 --dir {folder}"
            command += f" --logfile {folder}/log"
            if name == replica:
                command += f" --replicaof {network.address(primary)} {REDIS_PORT}"
            whole = [*network.inside(name), *command.split(), "--save", ""]
            stack.enter_context(running(whole, folder / "errors"))
        places = {"primary": network.address(primary), "replica": network.address(replica)}
        for address in places.values():
            _wait_listening(address, REDIS_PORT)
        _wait_linked(places["replica"])
        yield {which: (address, REDIS_PORT) for which, address in places.items()}


def _wait_linked(replica: str) -> None:
    redis: Any = importlib.import_module("redis")
    with redis.Redis(replica, REDIS_PORT) as client:
        _until(lambda: client.info("replication")["master_link_status"] == "up", "Redis's replica")


def _wait_listening(address: str, port: int) -> None:
    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((address, port), 1.0):
            return True
        return False

    _until(answers, f"{address}:{port}")


def _until(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not is_so():
        if time.monotonic() > deadline:
            raise NotHere(f"{what} does not come up")
        time.sleep(POLL_SECONDS)


# -- Mooncake


@contextlib.contextmanager
def mooncake(
    network: Network, near: str, far: str, room_bytes: int, base: Path
) -> Iterator[dict[str, Any]]:
    """A master and the owner of a segment on the far host, another owner on the near one; yields
    what a client on the near host has to know. Raises NotHere.
    """
    need_module("mooncake", "--no-deps mooncake-transfer-engine-non-cuda")
    package: Any = importlib.import_module("mooncake")
    program = Path(package.__file__).parent / "mooncake_master"
    master = f"{network.address(far)}:{MASTER_PORT}"
    with contextlib.ExitStack() as stack:
        command = f"{program} -rpc_address 0.0.0.0 -rpc_port {MASTER_PORT}"
        command += f" -metrics_port {MASTER_PORT + 1}"
        log = base / "mooncake.log"
        with log.open("ab") as file:  # it says much, and nobody would read it from a pipe
            process = subprocess.Popen(
                [*network.inside(far), *command.split()],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        _wait_listening(network.address(far), MASTER_PORT)
        segments = {}
        for name in (near, far):
            told = [network.address(name), master, str(max(SEGMENT_BYTES_MIN, room_bytes))]
            whole = [*network.inside(name), sys.executable, "-m", "bench.servers", *told]
            owner = stack.enter_context(running(whole, log))
            segments[name] = _segment_of(owner)
        yield {"address": network.address(near), "master": master, "far": segments[far]}


SEGMENT_MARK: Final = "bench segment: "


def _segment_of(owner: subprocess.Popen[str]) -> str:
    assert owner.stdout is not None
    while line := owner.stdout.readline():
        if line.startswith(SEGMENT_MARK):
            return line.removeprefix(SEGMENT_MARK).strip()
    raise NotHere("Mooncake's store does not come up here")


def own_a_segment(address: str, master: str, size: str) -> None:
    """Be the owner of a segment, until nobody wants it any more."""
    module: Any = importlib.import_module("mooncake.store")
    store = module.MooncakeDistributedStore()
    check(store.setup(address, "P2PHANDSHAKE", int(size), 64 << 20, "tcp", "", master))
    print(f"\n{SEGMENT_MARK}{store.get_hostname()}", flush=True)
    sys.stdin.read()
    os._exit(0)  # an orderly end takes it some seconds


if __name__ == "__main__":
    own_a_segment(*sys.argv[1:])
