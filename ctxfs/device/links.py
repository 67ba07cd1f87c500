"""One connected socket, plain or with TLS: what there is now, or a wait for more.

Everything that touches memory of others does so in one call, between two awaits. So who is about to
receive can look, right before each call, whether the memory is still there to be written to.
"""

import os
import socket
import ssl
from dataclasses import dataclass
from typing import Final, cast

import trio

from ctxfs.errors import PeerUnreachable

RECEIVE_BYTES: Final = 512 << 10  # what a waiting receiver is woken for, where more is to come
PIECE_BYTES: Final = 128 << 10  # that TLS takes at a time
USER_TIMEOUT_MS: Final = 20_000  # sent, and not acknowledged for so long: the connection is over


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of an open file."""

    fd: int
    offset: int
    length: int


class Link:
    """A connected TCP socket. `names`: who the certificate says it is; None where there is none."""

    names: tuple[bytes, ...] | None = None

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._low_water = 1
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)

    def close(self) -> None:
        """End it. Nobody may be waiting."""
        self._sock.close()

    def receive_nowait(self, target: memoryview) -> int | None:
        """Receive into `target` what is there; None: nothing yet. Raises PeerUnreachable."""
        try:
            length = self._sock.recv_into(target)
        except BlockingIOError:
            return None
        except OSError as error:
            raise broken(error) from error
        if not length:
            raise PeerUnreachable("the peer closed the connection")
        return length

    async def wait_to_receive(self, length: int) -> None:
        """Wait until there is something, and not too little where `length` bytes are to come."""
        self._wake_for(min(length, RECEIVE_BYTES))
        await trio.lowlevel.wait_readable(self._sock)

    async def receive(self, length: int) -> bytes:
        """Receive up to `length` bytes, at least one."""
        buffer = bytearray(length)
        with memoryview(buffer) as view:
            while (got := self.receive_nowait(view)) is None:
                await self.wait_to_receive(1)
        return bytes(buffer[:got])

    def send_nowait(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> int:
        """Send what there is room for and return how much that was. Raises PeerUnreachable."""
        try:
            return self._sock.send(data, socket.MSG_MORE if more else 0)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise broken(error) from error

    async def wait_to_send(self) -> None:
        """Wait until there is room to send."""
        await trio.lowlevel.wait_writable(self._sock)

    async def send_all(self, data: bytes) -> None:
        """Send all. Cancelled, the connection is of no more use."""
        with memoryview(data) as view:
            sent = self.send_nowait(view)
            while sent < len(view):
                await self.wait_to_send()
                sent += self.send_nowait(view[sent:])

    def send_file_nowait(self, source: FileSpan) -> int:
        """Send what there is room for and return how much that was. Raises PeerUnreachable."""
        try:
            sent = os.sendfile(self._sock.fileno(), source.fd, source.offset, source.length)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise broken(error) from error
        if not sent:
            raise PeerUnreachable("a file that was being sent became shorter")
        return sent

    def _wake_for(self, low_water: int) -> None:
        if low_water != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water


class TlsLink(Link):
    """The same, encrypted: every byte is copied. The handshake is still to be done."""

    _sock: ssl.SSLSocket

    async def shake_hands(self) -> None:
        """Raises PeerUnreachable, also where one side does not believe the other's certificate."""
        while True:
            try:
                self._sock.do_handshake()
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(self._sock)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(self._sock)
            except OSError as error:
                raise broken(error) from error
            else:
                break
        certificate = self._sock.getpeercert() or {}
        names = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
        self.names = tuple(name.encode() for kind, name in names if kind == "DNS")

    def receive_nowait(self, target: memoryview) -> int | None:
        try:
            length = self._sock.recv_into(target)
        except ssl.SSLWantReadError:
            return None
        except OSError as error:
            raise broken(error) from error
        if not length:
            raise PeerUnreachable("the peer closed the connection")
        return length

    def send_nowait(self, data: bytes | bytearray | memoryview, *, more: bool = False) -> int:
        # What did not go must come again, and not shorter: so pieces are cut here, always alike.
        with memoryview(data)[:PIECE_BYTES] as piece:
            try:
                return self._sock.send(piece)
            except ssl.SSLWantWriteError:
                return 0
            except OSError as error:
                raise broken(error) from error

    def send_file_nowait(self, source: FileSpan) -> int:
        piece = os.pread(source.fd, min(PIECE_BYTES, source.length), source.offset)
        if not piece:
            raise PeerUnreachable("a file that was being sent became shorter")
        return self.send_nowait(piece)

    def _wake_for(self, low_water: int) -> None:
        """The socket's bytes are not those that are waited for: any may complete a record."""


def broken(error: OSError) -> PeerUnreachable:
    """What a socket's error means for a connection."""
    return PeerUnreachable(f"the connection broke: {error.strerror or error}")
