"""What the bits of a mode allow to whom, where the kernel cannot ask for us."""

from __future__ import annotations

from ctxfs.core.block import Directory, Node
from mountd import process
from mountd.values import Caller

R_BIT, W_BIT, X_BIT = 4, 2, 1


def groups_of(caller: Caller) -> set[int]:
    """Return the groups a caller is in; root needs none."""
    return {caller.gid} | (process.supplementary_groups(caller.pid) if caller.uid else set())


def may(node: Node, bits: int, uid: int, groups: set[int]) -> bool:
    """Whether a user has one of the rights."""
    shift = 6 if uid == node.uid else 3 if node.gid in groups else 0
    return uid == 0 or bool(node.mode & bits << shift)


def may_read(node: Node, uid: int, groups: set[int]) -> bool:
    """Whether a user may see that something is there."""
    if uid == node.uid:
        return True
    # Who may enter a directory may see that it is there.
    return may(node, R_BIT | X_BIT if isinstance(node, Directory) else R_BIT, uid, groups)
