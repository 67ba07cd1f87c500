"""Connections between members over TCP: dialing and listening, with TLS or without."""

import errno
import socket
from typing import Final

import trio

from ctxfs.device.links import Link, TlsLink, broken
from ctxfs.device.tls import Certificates, Security
from ctxfs.errors import ConfigError, PeerUnreachable

Address = tuple[str, int]  # a host's name or number, and a port
BACKLOG: Final = 256
# Of accept: the one connection is no more, or there are no descriptors for a moment.
_PASSING: Final = {errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.EPERM}
_SHORT: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SHORT_PAUSE_S: Final = 0.1


async def dial(address: Address, security: Security) -> Link:
    """Connect. Raises PeerUnreachable; takes as long as the caller lets it."""
    host, port = address
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerUnreachable(f"{host}: {error.strerror or error}") from error
    trouble: PeerUnreachable | None = None
    for family, kind, protocol, _, place in found:
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            await _connect(sock, place)
            return await _secured(sock, security, dialing=True)
        except PeerUnreachable as error:
            trouble = error
    raise trouble or PeerUnreachable(f"{host} has no address")


async def _connect(sock: socket.socket, place: object) -> None:
    """Close the socket where that fails."""
    try:
        sock.setblocking(False)
        code = sock.connect_ex(place)  # type: ignore[arg-type]
        if code == errno.EINPROGRESS:
            await trio.lowlevel.wait_writable(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise broken(OSError(code, errno.errorcode.get(code, str(code))))
    except BaseException:
        sock.close()
        raise


async def _secured(sock: socket.socket, security: Security, *, dialing: bool) -> Link:
    """Make a link of it, or close it."""
    try:
        sock.setblocking(False)
        if not isinstance(security, Certificates):
            return Link(sock)
        contexts = security.contexts
        context = contexts.dialing if dialing else contexts.listening
        link = TlsLink(
            context.wrap_socket(sock, server_side=not dialing, do_handshake_on_connect=False)
        )
    except OSError as error:  # it is gone already
        sock.close()
        raise broken(error) from error
    try:
        await link.shake_hands()
    except BaseException:
        link.close()
        raise
    return link


class Listener:
    """Where others dial us."""

    def __init__(self, address: Address) -> None:
        """Listen there. Port 0: any that is free. Raises ConfigError."""
        host, port = address
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        except OSError as error:
            raise ConfigError(f"{host}: {error.strerror or error}") from error
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(place)
            self._sock.listen(BACKLOG)
            self._sock.setblocking(False)
        except OSError as error:
            self._sock.close()
            raise ConfigError(f"{host}, port {port}: {error.strerror or error}") from error

    @property
    def address(self) -> Address:
        """Where we listen, as it came to be."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    async def accept(self) -> socket.socket:
        """Return the next one who dials, to be given to `secure`."""
        while True:
            try:
                return self._sock.accept()[0]
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)
            except OSError as error:
                if error.errno in _SHORT:
                    await trio.sleep(_SHORT_PAUSE_S)
                elif error.errno not in _PASSING:
                    raise

    async def secure(self, sock: socket.socket, security: Security) -> Link:
        """Make a link of who dialed. Raises PeerUnreachable."""
        return await _secured(sock, security, dialing=False)

    def close(self) -> None:
        """Listen no more. Nobody may be in `accept`."""
        self._sock.close()
