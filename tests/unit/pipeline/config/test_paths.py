"""Open files: a run asks for as many as it needs, and is refused where it cannot have them. Limits hold for a whole
process, so that each test has one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.fitting import descriptors_needed
from pipeline.config.loading import load_config
from pipeline.config.paths import network_filesystem
from tests.support.paths import ROOT, TINY
from tests.support.processes import start_python

LIMITED = f"""
import os, resource, sys
os.chdir({str(ROOT)!r})
def soft():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
def limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
"""


def said(script: str) -> tuple[int, str]:
    """Return the exit status and the output."""
    with start_python(LIMITED + script) as process:
        output, _ = process.communicate()
    return process.returncode, output


def test_the_driver_needs_twelve_for_each_worker_and_a_rank_sixteen_for_each_of_its_gang() -> None:
    config = load_config([TINY], [])
    assert sum(gang.workers for gang in config.gangs()) == 3
    assert descriptors_needed(config) == 128 + 3 * 12
    config.placement.gangs["train"].workers = 50
    assert descriptors_needed(config) == 128 + 50 * 16
    config.cluster.kind = "attached"
    assert descriptors_needed(config) == 128 + 52 * 12


@pytest.mark.parametrize(("needed", "given"), [(50, 100), (300, 300), (900, 500)])
def test_the_soft_limit_is_raised_as_far_as_the_hard_one(needed: int, given: int) -> None:
    ask = f"limit(100, 500)\nfrom pipeline.config.fitting import *\nraise_descriptor_limit({needed})\nprint(soft())"
    assert said(ask) == (0, f"{given}\n")


@pytest.mark.processes
def test_local_workers_have_what_they_need() -> None:
    start = f"""
from pipeline.config.loading import load_config
from pipeline.driver.cluster import LocalWorkers
if __name__ == "__main__":
    limit(40, 1024)
    with LocalWorkers(load_config([{str(TINY)!r}], ["cluster.dashboard=null"])) as workers:
        workers.client.wait_for_workers(3)
        print(sorted({{soft(), *workers.client.run(soft).values()}}))
"""
    assert said(start) == (0, "[164]\n")


def test_check_refuses_more_workers_than_the_hard_limit_allows() -> None:
    check = f"""
from pipeline.cli.main import main
limit(150, 150)
sys.stderr = sys.stdout
sys.exit(main(["check", {str(TINY)!r}]))
"""
    code, output = said(check)
    assert code == 2
    assert "placement.gangs: given 3 workers; a process of the run then has up to 164 files open" in output
    assert "this account may have 150 (`ulimit -Hn`)" in output


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
