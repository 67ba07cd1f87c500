"""The direct channel: /dev/fuse itself, for root on Linux 6.9 or later (others: without lending).

One task reads requests and answers them. If one of them has to wait, another task takes over the
reading, and the first ends with that request: so a task is made only where somebody waits.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from ctxfs.errors import ConfigError, CtxfsError
from mountd import device_fuse, process
from mountd.backings import Backings
from mountd.beliefs import Beliefs
from mountd.channels import ChosenChannel
from mountd.deadlines import Waiter
from mountd.device_fuse import FuseDevice
from mountd.direct_requests import (
    AT_ONCE,
    MAY_WAIT,
    PATIENT,
    UNTIMED,
    Answer,
    Translator,
    is_for_reading,
)
from mountd.fuseproto import negotiation, replies
from mountd.fuseproto.constants import MINOR_EPOCH, MINOR_MIN, PAGE_BYTES, SILENT, Opcode
from mountd.fuseproto.negotiation import Agreement
from mountd.fuseproto.requests import (
    HEADER,
    Body,
    Create,
    Header,
    Init,
    Interrupt,
    Malformed,
    Mknod,
    Release,
    UnknownOpcode,
    is_release_without,
    looked_up,
    open_without,
    parse_body,
    parse_header,
)
from mountd.nodes import SEALED_ATTR_S
from mountd.noticing import noticing
from mountd.operations import Operations
from mountd.redirects import RetryLookup
from mountd.session import RESENT, Agreed, Session
from mountd.values import WRITES, Lifetimes

log = logging.getLogger(__name__)

HEADERS_BYTES = PAGE_BYTES  # room for what precedes the data of the largest request
# After an answer the next request comes within some microseconds, or is not to be waited for here.
LOOKING_NS = 50_000
LOOKING_LONG_NS = 250_000  # while that has just been too short: programs read between two opens
STRETCH_NS = 500_000  # while requests keep coming, others get their turn so often
SPARE_BUFFERS = 8
# How long the kernel may believe what it is told. Whatever changes is taken back, so this bounds
# only how long the memory of it is kept here.
NAMES_S = 5.0
ATTRIBUTES_S = 5.0
PAUSE_NS = 20_000  # between two requests of one call, as a rename's; until then others wait
MOMENT_NS = 5_000  # in which a program that closed a file opens the next one
PUT_OFF_MAX = 16
INTERRUPT_POLL_S = 0.1  # how often a request that goes on after a signal is looked at


class _Reader:
    """Who reads requests now, or did until one of them had to wait."""

    __slots__ = (
        "_succeed", "buffer", "header", "is_answered", "scope", "waiter", "was_succeeded",
    )  # fmt: skip

    def __init__(self, buffer: bytearray, succeed: Callable[[_Reader], None]) -> None:
        self.buffer = buffer
        self.scope = trio.CancelScope()
        self.header: Header | None = None  # of the request in hand
        self.was_succeeded = False
        self.waiter: Waiter | None = None  # while the request in hand waits
        self.is_answered = False  # it is, as overdue, while the task has not ended yet
        self._succeed = succeed

    def suspended(self) -> None:
        """The request in hand puts this task to sleep."""
        self.was_succeeded = True
        self._succeed(self)


class DirectChannel:
    """A mount that is answered here."""

    def __init__(
        self,
        device: FuseDevice,
        operations: Operations,
        chosen: ChosenChannel,
        session: Session | None,
    ) -> None:
        self._device = device
        self._alertness = operations.alertness
        self._chosen = chosen
        self._operations = operations
        self._session = session
        self.beliefs = Beliefs(device.notify)
        self._backings = Backings(device, session)
        self._translator = Translator(operations, self._backings, self.beliefs)
        self._max_pages = device_fuse.max_pages()
        self._buffer_bytes = self._max_pages * PAGE_BYTES + HEADERS_BYTES
        self._buffers: list[bytearray] = []
        self._waiting: dict[int, _Reader] = {}  # by the number of the request
        self._nursery: trio.Nursery | None = None
        self._looking_ns = LOOKING_NS
        self._put_off: list[bytearray] = []

    async def serve(
        self,
        scope: trio.CancelScope,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer the kernel until the mount is ended (then cancel `scope`), or until cancelled."""
        resumed = self._session.resumed if self._session is not None else None
        if resumed is not None:
            self._resume(resumed)
        if resumed is not None or await self._agree():
            try:
                async with trio.open_nursery() as beside:
                    beside.start_soon(self._alertness.watch)
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        nursery.start_soon(self._read_requests)
                        task_status.started()
                    beside.cancel_scope.cancel()
            finally:
                self.beliefs.end()
                self._backings.end()
        log.info("the mount was ended from outside")
        scope.cancel()

    # -- the beginning

    async def _agree(self) -> bool:
        """Answer INIT, the first request. False: the mount was ended before it came."""
        if self._device.adopted:
            self._device.resend()  # whoever read it did not answer it
        buffer = self._buffer()
        while True:
            length = self._device.read(buffer)
            if length is None:
                await trio.lowlevel.wait_readable(self._device.fd)
                continue
            if not length:
                return False
            header = parse_header(buffer, length)
            body = parse_body(header, buffer)
            if not isinstance(body, Init):
                self._device.answer(replies.failure(header.unique, errno.EIO))
            elif self._answer_init(header, body):
                self._buffers.append(buffer)
                return True

    def _answer_init(self, header: Header, offer: Init) -> bool:
        try:
            agreement = negotiation.agree(
                offer, max_pages=self._max_pages, passthrough=self._chosen.privileged
            )
        except negotiation.TooOld as error:
            self._device.answer(replies.failure(header.unique, errno.EPROTO))
            raise ConfigError(
                f"{error}, the direct channel 7.{MINOR_MIN} and later; use --channel pyfuse3"
            ) from error
        answer = negotiation.major_only() if agreement is None else agreement.answer
        told = replies.init(answer)
        self._device.answer(replies.header(header.unique, len(told)), told)
        if agreement is None:
            return False
        self._begin(agreement)
        return True

    def _begin(self, agreement: Agreement) -> None:
        agreed = Agreed(agreement.minor, agreement.max_write, agreement.passthrough)
        if self._session is not None:
            self._session.agreed(agreed)
        self._go_by(agreed)
        log.info(
            "FUSE 7.%d, requests of up to %d bytes, %s passthrough",
            agreed.minor,
            agreed.max_write,
            "with" if agreed.passthrough else "without",
        )

    def _go_by(self, agreed: Agreed) -> None:
        self._backings.enabled = self._chosen.passthrough = agreed.passthrough
        self._buffer_bytes = agreed.max_write + HEADERS_BYTES
        self._take_back_what_changes(names=agreed.minor >= MINOR_EPOCH)

    def _resume(self, agreed: Agreed) -> None:
        """Take over a mount that outlived the daemon before us."""
        self._go_by(agreed)
        files = self._operations.resume()
        self._backings.resume(files, self._operations.is_gone)
        self.beliefs.resume()
        self._device.resend()
        log.info("the mount goes on, with %d open files", len(files))

    def _take_back_what_changes(self, *, names: bool) -> None:
        """Let the kernel cache attributes, and names if it can be told that they changed."""
        catalog = self._operations.catalog
        catalog.hot_goes = self._backings.let_go
        catalog.attributes_changed = self.beliefs.attributes_changed
        if names:
            catalog.name_changed = self.beliefs.name_changed
        self._operations.nodes.lifetimes = Lifetimes(NAMES_S if names else 0.0, ATTRIBUTES_S)
        self.beliefs.begin(max(ATTRIBUTES_S, SEALED_ATTR_S), names=names)

    # -- requests

    def _buffer(self) -> bytearray:
        if self._buffers:
            return self._buffers.pop()
        return bytearray(self._buffer_bytes)

    async def _read_requests(self) -> None:
        """Read and answer, until one request had to wait and is answered, or the mount ends."""
        reader = _Reader(self._buffer(), self._hand_over)
        try:
            with reader.scope:
                await self._read_on(reader)
        finally:
            if reader.was_succeeded and reader.header is not None:
                self._waiting.pop(reader.header.unique, None)
                if reader.waiter is not None:
                    self._operations.deadlines.over(reader.waiter)
        ended = reader.scope.cancelled_caught and not reader.is_answered
        if ended and reader.header is not None:
            self._device.answer(replies.failure(reader.header.unique, errno.EINTR))
        if len(self._buffers) < SPARE_BUFFERS:
            self._buffers.append(reader.buffer)

    async def _read_on(self, reader: _Reader) -> None:
        device, buffer = self._device, reader.buffer
        turn_ns = 0
        while not reader.was_succeeded:
            now_ns = time.monotonic_ns()
            if now_ns >= turn_ns:
                await trio.lowlevel.checkpoint()
                turn_ns = now_ns + STRETCH_NS
            idle = not device.has_request()
            if idle and self._put_off and (idle := not device.wait_briefly(MOMENT_NS)):
                self._do_put_off()
                idle = not device.has_request()
            if idle and self._is_over():
                await trio.lowlevel.wait_readable(device.fd)
                self._alertness.stir()
                then_ns = time.monotonic_ns()
                is_soon = then_ns - now_ns < LOOKING_LONG_NS
                self._looking_ns = LOOKING_LONG_NS if is_soon else LOOKING_NS
                turn_ns = then_ns + STRETCH_NS
            length = device.read(buffer)
            if length is None:
                continue
            if not length:
                return
            if is_release_without(WRITES, buffer, length) and len(self._put_off) < PUT_OFF_MAX:
                self._put_off.append(buffer[:length])
                continue
            answer = self._answer_at_once(buffer, length)
            if answer is None:
                await self._answer_one(reader, length)
                continue
            self._device.answer(answer)
            self._alertness.requests += 1
            self._operations.note_opens()

    def _answer_at_once(self, buffer: bytearray, length: int) -> bytes | None:
        """Return the answer to the two requests that are most often waited for."""
        if (opening := open_without(WRITES, buffer, length)) is not None:
            return self._translator.open_to_read(*opening)
        if (looking := looked_up(buffer, length)) is not None:
            return self._translator.look_in_vain(*looking)
        return None

    def _is_over(self) -> bool:
        """Whether the next request is not to be waited for here, or did not come in time."""
        # What others wait for may come first; who follows events waits for nothing in particular.
        if any(each.waiter is not None for each in self._waiting.values()):
            return True
        if _others_can_go_on():
            return not self._device.wait_briefly(PAUSE_NS)
        return not self._device.wait_briefly(self._looking_ns)

    def _in_hand(self, header: Header | None) -> None:
        """What is written down from here on is the effect of this request."""
        if self._session is not None:
            self._session.request = header.unique & ~RESENT if header is not None else 0

    def _hand_over(self, reader: _Reader) -> None:
        assert self._nursery is not None
        assert reader.header is not None
        self._in_hand(None)
        self._waiting[reader.header.unique] = reader
        reader.waiter = self._watch(reader, reader.header)
        self._nursery.start_soon(self._read_requests)

    def _watch(self, reader: _Reader, header: Header) -> Waiter | None:
        if header.opcode in UNTIMED:
            return None
        body = parse_body(header, reader.buffer)

        def end(error: CtxfsError) -> None:
            # At once: the task may be waiting for a device, and that can be for ever.
            del self._waiting[header.unique]
            reader.is_answered = True
            self._device.answer(replies.failure(header.unique, error.code))
            reader.scope.cancel()

        return self._operations.deadlines.begin(
            Opcode(header.opcode).name,
            header.node,
            end,
            name=body.name if isinstance(body, Create | Mknod) else b"",
            is_patient=header.opcode in PATIENT,
            is_reader=is_for_reading(body),
        )

    async def _answer_one(self, reader: _Reader, length: int) -> None:
        self._alertness.requests += 1
        try:
            header = reader.header = parse_header(reader.buffer, length)
        except Malformed as error:
            log.error("a request that cannot be read: %s", error)
            if length >= HEADER.size:
                unique = HEADER.unpack_from(reader.buffer)[2]
                self._device.answer(replies.failure(unique, errno.EIO))
            return
        body: Body | None = None
        try:
            body = parse_body(header, reader.buffer)
            if self._put_off and header.opcode != Opcode.OPEN:
                self._do_put_off()
            self._in_hand(header)
            at_once = AT_ONCE.get(header.opcode)
            answer = at_once(self._translator, header, body) if at_once is not None else None
            if answer is None:
                answer = await self._perform(reader, header, body)
                if reader.is_answered:
                    self._translator.take_back(header, answer)
                    return
        except Exception as error:
            self._refuse(header, body, error)
            return
        if header.opcode not in SILENT:
            self._device.answer(replies.header(header.unique, len(answer)), answer)

    def _do_put_off(self) -> None:
        """Carry out closes that nobody waits for: the next open was to come first."""
        self._alertness.requests += len(self._put_off)
        for message in self._put_off:
            header = parse_header(message, len(message))
            body = parse_body(header, message)
            assert isinstance(body, Release)
            self._translator.release(header, body)
            self._device.answer(replies.failure(header.unique, 0))
        self._put_off.clear()

    async def _perform(self, reader: _Reader, header: Header, body: Body) -> Answer:
        may_wait = MAY_WAIT.get(header.opcode)
        if may_wait is not None:
            return await noticing(may_wait(self._translator, header, body), reader.suspended)
        if isinstance(body, Interrupt):
            self._interrupt(body.unique)
            return b""
        raise UnknownOpcode(str(header.opcode))

    def _refuse(self, header: Header, body: Body | None, error: Exception) -> None:
        """Answer with an error. Anything unexpected is a bug, and crashes."""
        if isinstance(error, CtxfsError):
            done = self._translator.done_before(header, body, error)
            if done is not None:
                self._device.answer(replies.header(header.unique, len(done)), done)
                return
        match error:
            case CtxfsError():
                code = error.code
            case RetryLookup():
                code = errno.ESTALE
            case UnknownOpcode():
                code = errno.ENOSYS
            case Malformed():
                log.error("request %d cannot be understood: %s", header.opcode, error)
                code = errno.EINVAL
            case OSError():
                log.error("a request failed", exc_info=error)
                code = error.errno or errno.EIO
            case _:
                raise error
        if header.opcode not in SILENT:
            self._device.answer(replies.failure(header.unique, code))

    # -- signals

    def _interrupt(self, unique: int) -> None:
        """Who waits for that request got a signal. Most requests are answered by then."""
        reader = self._waiting.get(unique)
        if reader is not None:
            assert self._nursery is not None
            self._nursery.start_soon(self._end_if_unwanted, reader, unique)

    async def _end_if_unwanted(self, reader: _Reader, unique: int) -> None:
        """Answer EINTR to who is to end; other signals wait, as they do for a disk.

        The kernel tells of the first signal only, so whether a later one ends it is looked at.
        """
        assert reader.header is not None
        while self._waiting.get(unique) is reader:
            if process.is_to_end(reader.header.pid):
                reader.scope.cancel()
                return
            await trio.sleep(INTERRUPT_POLL_S)


def _others_can_go_on() -> bool:
    """Whether tasks beside this one wait for nothing but their turn."""
    now = trio.lowlevel.current_statistics()
    return now.tasks_runnable > 0 or now.run_sync_soon_queue_size > 0


@contextmanager
def mounted(
    operations: Operations,
    path: Path,
    *,
    fsname: str,
    allow_other: bool,
    chosen: ChosenChannel,
    session: Session | None = None,
    fuse_fd: int | None = None,
) -> Iterator[DirectChannel]:
    """Mount at `path`; the channel's `serve` answers until it is ended. Unmounts at the end.

    A `session` that an earlier daemon left is gone on with; then `fuse_fd` is mounted already.
    With a descriptor of /dev/fuse from a parent, an error leaves the mount to the next child.
    """
    device = device_fuse.mount(
        path, fsname=fsname, allow_other=allow_other, privileged=chosen.privileged, fd=fuse_fd
    )
    try:
        goes_on = session is not None and session.resumed is not None
        if device.adopted and not goes_on and device_fuse.is_mounted(device.fd):
            # Nobody will ask to agree again, so waiting for it would hang all programs.
            raise ConfigError(f"{path}: the mount cannot be taken over: its session is lost")
        yield DirectChannel(device, operations, chosen, session)
    except BaseException:
        device.leave()
        raise
    device.close()
