"""What the kernel is told unasked: that something it may have cached is no longer so."""

from struct import Struct

from mountd.fuseproto.constants import Notice
from mountd.fuseproto.replies import OUT_HEADER

UNASKED = 0  # stands where an answer has the number of its request
INVAL_INODE_OUT = Struct("=Qqq")  # node, offset, length
ATTRIBUTES_ONLY = -1  # as offset: the pages stay


def _notice(code: Notice, content: bytes = b"") -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size + len(content), code, UNASKED) + content


def names_changed() -> bytes:
    """Return the notice that no name may be believed any more, of all the mount.

    It takes no lock and waits for nothing. Known to kernels from 7.44 on.
    """
    return _notice(Notice.INC_EPOCH)


def attributes_changed(node: int) -> bytes:
    """Return the notice that the attributes of a node are to be asked for again."""
    return _notice(Notice.INVAL_INODE, INVAL_INODE_OUT.pack(node, ATTRIBUTES_ONLY, 0))
