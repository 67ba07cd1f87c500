"""Keys: the names of blocks. A key is a path below the mount; its parts are file names."""

from ctxfs.errors import BadValue, NameTooLong

NAME_BYTES_MAX = 255
KEY_BYTES_MAX = 4095


def check_name(name: bytes) -> bytes:
    """Return `name` if it is a legal file name: 1 to 255 bytes, no `/`, no NUL, not `.` or `..`."""
    if len(name) > NAME_BYTES_MAX:
        raise NameTooLong(f"a name has at most {NAME_BYTES_MAX} bytes, this one {len(name)}")
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise BadValue(f"not a name: {name!r}")
    return name


def split_key(key: bytes) -> list[bytes]:
    """Return the names that `key` is made of. Raises BadValue and NameTooLong."""
    if len(key) > KEY_BYTES_MAX:
        raise NameTooLong(f"a key has at most {KEY_BYTES_MAX} bytes, this one {len(key)}")
    return [check_name(name) for name in key.split(b"/")]


def is_temporary(name: bytes) -> bool:
    """Whether clients use such a name only until they rename it: `*.tmp*`, or a leading dot."""
    return name.startswith(b".") or b".tmp" in name


def is_lock(name: bytes) -> bool:
    """Whether processes lock each other out by this file, so that all must open the same one."""
    return name.endswith(b".lock")
