"""Errors that own their answer: the errno a program sees and the exit code of a tool."""

import errno


class CtxfsError(Exception):
    """Base of all expected errors. Anything else that escapes is a bug."""

    code: int = errno.EIO
    exit_code: int = 1


class ConfigError(CtxfsError):
    """The configuration, or a flag, says something that cannot be done. You can mend it."""

    code = errno.EINVAL
    exit_code = 2


class BlockNotFound(CtxfsError):
    """No tier holds this key."""

    code = errno.ENOENT
    exit_code = 3


class BadValue(CtxfsError):
    """A name or a value that is not accepted; the text says what is."""

    code = errno.EINVAL
    exit_code = 2


class NameTooLong(CtxfsError):
    """A path component over 255 bytes, or a key over 4095."""

    code = errno.ENAMETOOLONG
    exit_code = 2


class BlockExists(CtxfsError):
    """The name is taken, and the caller asked for a new one."""

    code = errno.EEXIST


class IsDirectory(CtxfsError):
    """The name is a prefix of keys, not a block."""

    code = errno.EISDIR


class NotDirectory(CtxfsError):
    """The name is a block, not a prefix of keys."""

    code = errno.ENOTDIR


class DirectoryNotEmpty(CtxfsError):
    """There are still keys beneath this prefix."""

    code = errno.ENOTEMPTY


class NotPermitted(CtxfsError):
    """What a sealed block, or this file system, does not allow."""

    code = errno.EPERM


class NotYours(CtxfsError):
    """The block belongs to somebody else."""

    code = errno.EACCES


class NoAttribute(CtxfsError):
    """The attribute is not set."""

    code = errno.ENODATA


class TierFull(CtxfsError):
    """There is no room in the tier, and nothing in it may go."""

    code = errno.ENOSPC
    exit_code = 4


class TierTrouble(CtxfsError):
    """The hot tier's files cannot be opened or mapped. The machine is at fault, not a block."""

    code = errno.EIO
    exit_code = 5


class TooManyOpen(CtxfsError):
    """More files are open than the daemon has descriptors for (`ulimit -n`, LimitNOFILE)."""

    code = errno.ENFILE
    exit_code = 4


class NoRoom(CtxfsError):
    """The file system beneath has no room for what the daemon keeps there."""

    code = errno.ENOSPC
    exit_code = 4


class DeadlineExceeded(CtxfsError):
    """A tier did not answer in time."""

    code = errno.ETIMEDOUT
    exit_code = 5


class EtcdError(CtxfsError):
    """etcd answered with an error that has no name of its own."""


class EtcdAway(EtcdError):
    """No endpoint of etcd answered in time. What was asked for may still be done."""

    code = errno.ETIMEDOUT
    exit_code = 5


class EtcdRefused(EtcdError):
    """etcd does not let us: the user, the password, a permission or a certificate is wrong."""

    code = errno.EACCES


class NameTaken(CtxfsError):
    """Another daemon of the cluster has this member's name. One of them has to be called else."""

    code = errno.EEXIST
    exit_code = 2


class LeaseGone(EtcdError):
    """The lease has run out, or was revoked; what was kept under it is deleted."""

    code = errno.ENOENT


class HistoryGone(EtcdError):
    """etcd no longer has the changes since a revision: all has to be read again."""

    code = errno.ENOENT


class DeviceError(CtxfsError):
    """The medium failed a read, a write or a flush."""

    code = errno.EIO
    exit_code = 5


class DeviceLost(DeviceError):
    """The medium is gone: a read came back short, or a raw drive says it is full.

    A removed NVMe drive answers reads with 0 bytes and no error, and writes with ENOSPC.
    """


class PeerError(CtxfsError):
    """Another member, or the way to it, is at fault."""

    code = errno.EIO
    exit_code = 5


class PeerProtocolError(PeerError):
    """A peer sent what the protocol does not allow. It costs that peer its connection."""


class PeerRejected(PeerError):
    """Two members cannot work together: another cluster, name, certificate or version."""


class PeerUnreachable(PeerError):
    """There is no connection to the peer, or it did not answer others lately. Nothing was asked."""

    code = errno.ETIMEDOUT


class ReplicasMissing(PeerError):
    """The block is on this host's medium, but in time not on all members that are to hold it."""

    code = errno.EREMOTEIO


class PeerBusy(PeerError):
    """The peer has the block, and asks to have it read from another holder."""


class PeerRefused(PeerError):
    """The peer has trouble of its own, or no room."""


class BlockGone(BlockNotFound):
    """A peer knows that this version was removed, and of no later one."""

    def __init__(self, text: str, version: int = 0, until_ns: int = 0) -> None:
        super().__init__(text)
        self.version = version
        self.until_ns = until_ns  # wall clock: how long this is to be remembered


class CopyCorrupt(DeviceError):
    """A copy's bytes do not match their checksum. It is dropped, never served."""


class BadStream(CopyCorrupt):
    """Encoded bytes that are no stream of the codec's, or whose checksum does not match."""


class BadTag(CopyCorrupt):
    """Encrypted bytes were changed, or belong to another block, or the key is another one."""


class UnknownKey(DeviceError):
    """A copy is encrypted with a key that we were not given. It is good once the key is back."""

    code = errno.ENOKEY


class NewerStream(DeviceError):
    """A copy was encoded by a later version, which can still read it."""

    code = errno.EPROTONOSUPPORT


class ForeignSignature(ConfigError):
    """The device or file holds somebody else's data; `--format` overwrites it."""


class DeviceBusy(ConfigError):
    """Another daemon has this device, state directory or mount point."""

    code = errno.EBUSY


class HoldsBlocks(ConfigError):
    """The device holds blocks of a cold tier, which only a start lays beside those of others."""

    code = errno.ENOTEMPTY


class NoSuchDevice(ConfigError):
    """The cold tier has no device of this path."""

    code = errno.ENODEV


def unusable(what: str, error: OSError) -> CtxfsError:
    """The error for a file or directory that was needed and refused: `what`, and the reason."""
    # Some have no number, and then no strerror either: a socket's path that is too long.
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (NoRoom if full else ConfigError)(f"{what}: {error.strerror or error}")
