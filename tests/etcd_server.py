"""A real etcd with its own data and ports, for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

START_S = 30.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class EtcdServer:
    """One member, on loopback. Use as a context manager; `stop` and `start` keep its data."""

    def __init__(
        self, base: Path, *arguments: str | Path, scheme: str = "http", host: str = "127.0.0.1"
    ) -> None:
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("etcd is not installed: apt-get install etcd-server")
        self.endpoint = f"{scheme}://{host}:{free_port()}"
        peer = f"http://127.0.0.1:{free_port()}"
        self._log = base / "etcd.log"
        self._command: list[str | Path] = [
            program, "--data-dir", base / "etcd", "--name", "only",
            "--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"only={peer}",
            # Elections within a moment, and leases of a second.
            "--heartbeat-interval", "10", "--election-timeout", "100",
            *arguments,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start; returns when it answers, which it says as systemd wants to be told."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self._log.open("ab") as log:
            ready.bind("")  # the kernel chooses an abstract name
            ready.settimeout(START_S)
            where = ready.getsockname().decode().replace("\0", "@", 1)
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=os.environ | {"NOTIFY_SOCKET": where},
            )
            try:
                assert b"READY=1" in ready.recv(100)
            except TimeoutError:
                self.stop()
                told = self._log.read_text()[-4000:]
                raise AssertionError(f"etcd did not start\n{told}") from None

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it, by default as a power cut does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            self._process.wait(START_S)
            self._process = None

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
