"""What is done about a filesystem that says no: errors that may pass are tried again, the others are said clearly.

    ESTALE, EIO, EAGAIN, ETIMEDOUT, ...   tried again, 0.05 s to 2 s apart, until `patience_s` is spent; said on stderr
    ENOSPC, EDQUOT, EROFS, EACCES, ...    StoreRefused, which names the path: nothing gets better by waiting
    file not found, file exists           an answer, not a fault: handed on

Every operation that is tried again must be harmless when repeated, also where the first try had succeeded and only its
answer was lost. May import the standard library and storage.errors.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from storage.errors import StoreRefused, StoreUnavailable

TRANSIENT = frozenset(
    {
        errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ENOLCK, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT,
        errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN,
        errno.EPIPE, errno.ESHUTDOWN,
    }
)  # fmt: skip
"""What a network filesystem, or a disk behind one, says while something is being put right."""
REFUSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EMFILE})
"""What stays so until a person does something."""

_SHORTEST_S, _LONGEST_S = 0.05, 2.0

Answer = TypeVar("Answer")


def patiently(act: Callable[[], Answer], path: str, patience_s: float) -> Answer:
    """What `act()` gives, which does something with `path`.

    Raises:
        StoreRefused: full, read only, not permitted.
        StoreUnavailable: the same passing error for longer than `patience_s`.
        OSError: every other.
    """
    give_up: float | None = None
    pause_s = _SHORTEST_S
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno in REFUSING:
                raise refusal(error, path) from error
            if error.errno not in TRANSIENT:
                raise
            now = time.monotonic()
            give_up = now + patience_s if give_up is None else give_up
            if now + pause_s > give_up:
                raise StoreUnavailable(f"{path}: {_said(error)}, still so after {patience_s:g} s of trying") from error
            print(f"{path}: {_said(error)}; trying again in {pause_s:g} s", file=sys.stderr, flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)


def may_pass(error: BaseException) -> bool:
    """Whether what was being done when this was raised may succeed later: a store that was unavailable for longer than
    it was waited for, or an OSError of `TRANSIENT` that nobody waited for."""
    return isinstance(error, StoreUnavailable) or (isinstance(error, OSError) and error.errno in TRANSIENT)


def until_seen(look: Callable[[], Answer | None], patience_s: float) -> Answer | None:
    """What `look()` gives once it is not None, or None after `patience_s`: a network filesystem may go on saying for
    a while that a file, which another host has made, is not there."""
    found, pause_s, waited_s = look(), _SHORTEST_S, 0.0
    while found is None and waited_s < patience_s:
        time.sleep(pause_s)
        waited_s += pause_s
        pause_s = min(2 * pause_s, _LONGEST_S)
        found = look()
    return found


def refusal(error: OSError, path: str) -> StoreRefused:
    """An error of `REFUSING` in the words of whoever has to do something about it."""
    return StoreRefused(
        f"{path}: {_said(error)}. What is committed is whole and stays; put this right, and the run can be resumed"
    )


def _said(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{os.strerror(error.errno)} ({name})" if error.errno else str(error)
