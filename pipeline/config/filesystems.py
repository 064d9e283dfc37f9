"""What kind of filesystem a path is on, as Linux lists its mounts. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|beegfs\w*|ceph|cifs|smb\d?|9p|afs|pvfs2|orangefs|wekafs|panfs|glusterfs|gfs2|ocfs2|virtiofs|fuse\..*"
)
"""Types that several hosts can have mounted at once; `fuse.*` is what a program serves, mostly from elsewhere."""


def network_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """The type of the filesystem that a path is on, or will be, if several hosts can have it mounted; None where they
    cannot, or where the system does not say. `mounts`: the text of /proc/self/mountinfo."""
    if mounts is None:
        mounts = MOUNTS.read_text("utf8", "replace") if MOUNTS.is_file() else ""
    resolved = path.resolve()
    longest, found = -1, None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()[:1]
        if len(fields) < 5 or not kind:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if resolved.is_relative_to(point) and len(point.parts) >= longest:  # a later mount hides an earlier one
            longest, found = len(point.parts), kind[0]
    return found if found is not None and _NETWORK.fullmatch(found) else None
