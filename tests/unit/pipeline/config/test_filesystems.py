"""Paths that several hosts can have mounted at once, judged by made-up listings of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.paths import network_filesystem

MOUNTS = r"""
22 1 0:20 / / rw,relatime shared:1 - overlay overlay rw
23 22 0:21 / /home rw,relatime shared:2 - nfs4 server:/home rw
24 23 0:22 / /home/scratch rw - xfs /dev/sdb rw
25 22 0:23 / /with\040space rw - lustre mds:/l rw
26 22 0:24 / /bucket rw - fuse.s3fs s3fs rw
27 22 0:25 / /over rw - xfs /dev/sdc rw
28 22 0:26 / /over rw - beegfs_nodev b rw
29 broken
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/runs/a.db", None),
        ("/home/me/runs/a.db", "nfs4"),
        ("/home/scratch/a.db", None),
        ("/homework/a.db", None),
        ("/with space/a.db", "lustre"),
        ("/bucket/a.db", "fuse.s3fs"),
        ("/over/a.db", "beegfs_nodev"),
    ],
)
def test_the_nearest_mount_says_it(path: str, kind: str | None) -> None:
    assert network_filesystem(Path(path), MOUNTS) == kind


def test_this_hosts_own_listing_can_be_read(tmp_path: Path) -> None:
    network_filesystem(tmp_path)
    assert network_filesystem(tmp_path, "") is None
