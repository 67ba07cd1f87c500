"""Hot files lent to the kernel (FUSE passthrough): one registration for all opens of an inode.

The kernel takes only one backing file for an inode at a time, and no open of another kind beside;
what may be lent is decided in the store.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mountd.device_fuse import FuseDevice
from mountd.openfiles import OpenFiles
from mountd.session import NOTED_BACKINGS, OpenFile, Session

log = logging.getLogger(__name__)

LOST_MAX = 64  # ids that a daemon may have got from the kernel and not noted before it died


@dataclass(slots=True)
class _Backing:
    """A registered file."""

    number: int
    handles: set[int]
    stays: bool = True  # after its last handle, since its block is still there
    place: int | None = None  # in the session, from the first time that no open uses it


class Backings:
    """Registrations by inode, each as long as an open uses it, and for a while after."""

    def __init__(self, device: FuseDevice, session: Session | None = None) -> None:
        self._device = device
        self._session = session
        self._by_node: dict[int, _Backing] = {}  # those with handles
        self._unused: OrderedDict[int, _Backing] = OrderedDict()  # the longest unused first
        self._places = list(range(NOTED_BACKINGS))
        self._complained = False
        self.enabled = False  # until the kernel has said that it can

    def __len__(self) -> int:
        return len(self._by_node)

    def lend(self, files: OpenFiles, node: int, handle: int) -> int:
        """Return the id to answer an open with, 0 if it is to go through us."""
        if not self.enabled:
            return 0
        fd = files.lend(handle)
        if fd is None:
            return 0
        number = self.number_of(node, fd)
        if not number:
            files.keep(handle)
            return 0
        self.use(node, handle)
        files.lent(handle, number)
        return number

    def number_of(self, node: int, fd: int) -> int:
        """Return the id of an inode's file, 0 if the kernel does not take it; `use` comes next."""
        backing = self._by_node.get(node)
        if backing is None:
            backing = self._unused.pop(node, None) or self._registered(fd)
            if backing is None:
                return 0
            self._by_node[node] = backing
        return backing.number

    def use(self, node: int, handle: int) -> None:
        """An open is answered with the id that `number_of` said."""
        self._by_node[node].handles.add(handle)

    def _registered(self, fd: int) -> _Backing | None:
        """Register a file that is not; None: the kernel takes none."""
        try:
            number = self._device.open_backing(fd)
        except OSError as error:
            if not self._complained:
                log.warning("the kernel takes no backing file: %s; reads go through us", error)
                self._complained = True
            return None
        if self._session is not None:
            self._session.newest_backing = number
        return _Backing(number, set())

    def resume(self, files: Iterable[OpenFile], is_gone: Callable[[int], bool]) -> None:
        """Take over the ids that a daemon before us had; give those back that nobody uses.

        `is_gone` says of an inode whether its hot file goes with the last open.
        """
        assert self._session is not None
        for file in files:
            if file.backing:
                stays = not is_gone(file.generation)
                known = _Backing(file.backing, set(), stays)
                self._by_node.setdefault(file.generation, known).handles.add(file.number)
        used = {backing.number for backing in self._by_node.values()}
        for number in set(self._session.noted_backings()) - used:
            self._device.close_backing(number)
        for place in range(NOTED_BACKINGS):
            self._session.set_noted_backing(place, 0)
        # The kernel counts on from the newest; what it gave later was never noted.
        newest = self._session.newest_backing
        for number in range(newest + 1, newest + LOST_MAX):
            if number not in used:
                self._device.close_backing(number)

    def give_back(self, node: int, handle: int) -> None:
        """An open has ended. After the last one, the next is likely soon."""
        backing = self._by_node.get(node)
        if backing is None or handle not in backing.handles:
            return
        backing.handles.remove(handle)
        if backing.handles:
            return
        del self._by_node[node]
        if backing.stays and self._has_place(backing):
            self._unused[node] = backing
        else:
            self._close(backing)

    def _has_place(self, backing: _Backing) -> bool:
        """Note an id in the session. It stays there while it is used again, so that opens and
        closes in turn write nothing.
        """
        if backing.place is not None:
            return True
        if not self._places and self._unused:
            self._close(self._unused.popitem(last=False)[1])
        if not self._places:
            return False
        backing.place = self._places.pop()
        self._note(backing.place, backing.number)
        return True

    def let_go(self, node: int) -> None:
        """The hot file goes: what the kernel holds of it would keep its memory."""
        unused = self._unused.pop(node, None)
        if unused is not None:
            self._close(unused)
        elif (backing := self._by_node.get(node)) is not None:
            backing.stays = False

    def _close(self, backing: _Backing) -> None:
        self._device.close_backing(backing.number)
        if backing.place is not None:
            self._note(backing.place, 0)
            self._places.append(backing.place)

    def _note(self, place: int, number: int) -> None:
        if self._session is not None:
            self._session.set_noted_backing(place, number)

    def end(self) -> None:
        """The mount has ended, and its registrations with it."""
        self._by_node.clear()
        self._unused.clear()
