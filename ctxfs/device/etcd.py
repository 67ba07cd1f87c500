"""etcd, through its HTTP gateway (`/v3/`, from etcd 3.4 on): leases, transactions, lists, watches.

Every call has a deadline, which the endpoints share: one that does not answer costs its part, and
the next is asked. docs/cluster.md has the facts about the gateway.
"""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx
import trio

from ctxfs.device.etcd_values import (
    Found,
    Json,
    KeyValue,
    StaleToken,
    encoded,
    failure,
    pair,
    parsed,
    prefix_end,
    put_if,
    revision_of,
)
from ctxfs.device.keys import read_keys
from ctxfs.errors import ConfigError, EtcdAway, EtcdError, EtcdRefused, LeaseGone

WATCH: Final = "watch"  # the one call whose answer does not end


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """How etcd is reached. `endpoints`: URLs. The password file is read whenever we log in."""

    endpoints: tuple[str, ...]
    deadline_s: float = 3.0
    user: str | None = None
    password_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def tls_context(settings: EtcdSettings) -> ssl.SSLContext:
    """What certificates are checked and shown. Raises ConfigError, which names the file."""
    if settings.ca is None and not any(url.startswith("https:") for url in settings.endpoints):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused: to read all authorities takes long
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{settings.ca}: {_reason(error)}") from None
    if settings.cert is not None:
        try:
            context.load_cert_chain(settings.cert, settings.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{settings.cert}, {settings.key}: {_reason(error)}") from None
    return context


class Etcd:
    """A client. Use as an async context manager.

    All calls raise EtcdAway where no endpoint answers in time, EtcdRefused where none lets us, and
    EtcdError for the rest. A call that timed out may have been carried out.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self._token = ""
        self._first = 0  # the endpoint that answered last, and is asked first

    async def __aenter__(self) -> Self:
        # Deadlines are ours; proxies of the environment are not meant for what is in the cluster.
        context = await trio.to_thread.run_sync(tls_context, self.settings)
        self._http = httpx.AsyncClient(verify=context, timeout=None, trust_env=False)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with trio.CancelScope(shield=True):
            await self._http.aclose()

    @property
    def endpoint(self) -> str:
        """Who answered last."""
        return self.settings.endpoints[self._first]

    # ---- leases

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        """A new lease: its number, and how long it lasts, which may be more than asked for."""
        told = await self.call("lease/grant", {"TTL": str(max(1, math.ceil(ttl_s)))})
        return int(told["ID"]), float(told.get("TTL", 0))

    async def keep_alive(self, lease: int) -> float:
        """The lease lasts anew; for how long. Raises LeaseGone."""
        told = await self.call("lease/keepalive", {"ID": str(lease)})
        ttl_s = float(told.get("result", {}).get("TTL", 0))
        if ttl_s <= 0:
            raise LeaseGone(f"lease {lease:x} has run out")
        return ttl_s

    async def revoke(self, lease: int) -> None:
        """End a lease, and delete what is kept under it. Raises LeaseGone."""
        await self.call("lease/revoke", {"ID": str(lease)})

    # ---- keys

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        """Set a key. Raises LeaseGone."""
        await self.call(
            "kv/put", {"key": encoded(key), "value": encoded(value), "lease": str(lease)}
        )

    async def put_if(
        self, key: bytes, value: bytes, *, revision: int = 0, lease: int = 0
    ) -> KeyValue | None:
        """Set a key if its last change was at `revision` (0: if there is none).

        None: it is set. Else what is there; of a key that is gone, its value is None. Where an
        earlier try was carried out without our hearing of it, what is there is our own.
        """
        told = await self.call("kv/txn", put_if(key, value, revision, lease))
        if told.get("succeeded"):
            return None
        there = told["responses"][0]["response_range"].get("kvs", ())
        return pair(there[0]) if there else KeyValue(key, None, 0)

    async def delete(self, key: bytes) -> None:
        """Delete a key, if it is there."""
        await self.call("kv/deleterange", {"key": encoded(key)})

    async def list(self, prefix: bytes) -> Found:
        """All keys that begin with `prefix`, in their order."""
        told = await self.call(
            "kv/range", {"key": encoded(prefix), "range_end": encoded(prefix_end(prefix))}
        )
        return Found(revision_of(told), tuple(pair(each) for each in told.get("kvs", ())))

    # ---- asking

    async def call(self, path: str, body: Json) -> Json:
        """One request. The answer, from the first endpoint that gives one."""
        async with self.answered(path, body) as response:
            content = await response.aread()
        told = parsed(content)
        # A stream of one answer, as that of keepalive, tells of errors with a good status.
        if "error" in told:
            raise failure(told)
        return told

    @asynccontextmanager
    async def answered(self, path: str, body: Json) -> AsyncIterator[httpx.Response]:
        """The response to a request, of which the first part has come; the rest may take long."""
        if self.settings.user is not None and not self._token:
            await self._log_in()
        try:
            response = await self._send(path, body)
        except StaleToken:
            await self._log_in()
            response = await self._send(path, body)
        try:
            yield response
        finally:
            with trio.CancelScope(shield=True):
                await response.aclose()

    def forget_login(self) -> None:
        """Say who we are again, with the next call."""
        self._token = ""

    async def _log_in(self) -> None:
        settings = self.settings
        if settings.user is None or settings.password_file is None:
            raise EtcdRefused("etcd wants a user and a password")
        password = await trio.to_thread.run_sync(read_keys, str(settings.password_file))
        self._token = ""
        try:
            text = password.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigError(f"{settings.password_file}: is not UTF-8") from None
        response = await self._send("auth/authenticate", {"name": settings.user, "password": text})
        self._token = str(parsed(response.content).get("token", ""))

    async def _send(self, path: str, body: Json) -> httpx.Response:
        """Ask one endpoint after the other. A good answer's content is read, but for a watch."""
        deadline = trio.current_time() + self.settings.deadline_s
        endpoints = self.settings.endpoints
        reasons: list[str] = []
        for count in range(len(endpoints)):
            number = (self._first + count) % len(endpoints)
            share_s = (deadline - trio.current_time()) / (len(endpoints) - count)
            with trio.move_on_after(share_s):
                try:
                    response = await self._post(endpoints[number], path, body)
                except httpx.HTTPError as error:
                    reasons.append(f"{endpoints[number]}: {_reason(error)}")
                    continue
                except EtcdAway as error:
                    reasons.append(f"{endpoints[number]}: {error}")
                    continue
                self._first = number
                return response
            reasons.append(f"{endpoints[number]}: does not answer")
        raise EtcdAway("; ".join(reasons))

    async def _post(self, endpoint: str, path: str, body: Json) -> httpx.Response:
        headers = {"Authorization": self._token} if self._token else {}
        request = self._http.build_request(
            "POST", f"{endpoint.rstrip('/')}/v3/{path}", json=body, headers=headers
        )
        request.stream = _Body(request.content)
        response = await self._http.send(request, stream=True)
        try:
            if response.is_success and path == WATCH:
                return response
            await response.aread()
        except BaseException:
            with trio.CancelScope(shield=True):
                await response.aclose()
            raise
        if response.is_success:
            return response
        try:
            told = parsed(response.content)
        except EtcdError:
            told = {}
        raise failure(told, response.status_code)


class _Body(httpx.AsyncByteStream):
    """What is sent, as one piece.

    httpx's own is a generator, which it leaves unfinished where a connection breaks meanwhile.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        content, self._content = self._content, b""
        if not content:
            raise StopAsyncIteration
        return content


def _reason(error: Exception) -> str:
    """Why it could not be reached: the innermost reason, which httpx wraps twice."""
    # Without a word: that is how a server ends it that does not like our certificate.
    return next(
        filter(None, map(_text, _causes(error))), "ends the connection; is TLS as it wants?"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        if cause in chain:
            break
        chain.append(cause)
    return reversed(chain)


def _text(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_text, error.exceptions)), "")
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good: {error.verify_message}"
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return str(error)
