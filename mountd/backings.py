"""Hot files lent to the kernel (FUSE passthrough): one registration for all opens of an inode.

The kernel takes only one backing file for an inode at a time, and no open of another kind beside;
what may be lent is decided in the store.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mountd.device_fuse import FuseDevice
from mountd.operations import Operations

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Backing:
    """A registered file. Invariant: `handles` is not empty."""

    number: int
    handles: set[int]


class Backings:
    """Registrations by inode, each as long as an open uses it."""

    def __init__(self, device: FuseDevice) -> None:
        self._device = device
        self._by_node: dict[int, _Backing] = {}
        self._complained = False
        self.enabled = False  # until the kernel has said that it can

    def __len__(self) -> int:
        return len(self._by_node)

    def lend(self, operations: Operations, node: int, handle: int) -> int:
        """Return the id to answer an open with, 0 if it is to go through us."""
        if not self.enabled:
            return 0
        fd = operations.lend(handle)
        if fd is None:
            return 0
        backing = self._by_node.get(node)
        if backing is not None:
            backing.handles.add(handle)
            return backing.number
        try:
            number = self._device.open_backing(fd)
        except OSError as error:
            operations.keep(handle)
            if not self._complained:
                log.warning("the kernel takes no backing file: %s; reads go through us", error)
                self._complained = True
            return 0
        self._by_node[node] = _Backing(number, {handle})
        return number

    def give_back(self, node: int, handle: int) -> None:
        """An open has ended; the last one's end takes the file back."""
        backing = self._by_node.get(node)
        if backing is None or handle not in backing.handles:
            return
        backing.handles.remove(handle)
        if not backing.handles:
            del self._by_node[node]
            self._device.close_backing(backing.number)
