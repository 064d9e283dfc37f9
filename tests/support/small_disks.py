"""A run whose disks fill up, one after the other, on real filesystems: `python -m tests.support.small_disks FOLDER`.

In a mount namespace of its own, so that nobody else sees the mounts (`unshare --mount`, as root). Each part of the
run's directory that is to fill up is a tmpfs; the run is resumed for each with room for a few pages there and plenty
elsewhere, and at last with plenty everywhere. Prints one JSON document: what each attempt said, and what is committed
in the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.driver.results import open_history
from tests.support.runs import ONE_GANG, QUIET, arguments, configure

CHANGES = (*QUIET, ONE_GANG, "staleness=0", "evaluate.every=0", "checkpoint.every=2", "steps=6")
ROOM = 256 << 20
PAGE = 4096
PHASES = {
    "board": 8 * PAGE,
    "run": 40 * PAGE,
    "ledger": 12 * PAGE,
    "journal": 2 * PAGE,
    "checkpoints": 16 * PAGE,
    "ledger, read only": None,
}
"""Name of a place that fills up -> bytes that it may still take. None: it is read-only."""


def mount(path: Path, *options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(path)], check=True)


def limit(path: Path, more: int | None) -> None:
    """Leaves room for so many bytes more; None: for none at all, whatever there is."""
    stat = os.statvfs(path)
    used = (stat.f_blocks - stat.f_bfree) * stat.f_bsize
    mount(path, "remount", "ro" if more is None else f"rw,size={used + more}")


def attempt(*command: str) -> tuple[int, str]:
    """Exit code, and what was said on stderr."""
    said = StringIO()
    with redirect_stderr(said), redirect_stdout(StringIO()):
        code = main(command)
    return code, " ".join(said.getvalue().split())


def run_on_small_disks(folder: Path) -> dict[str, object]:
    disks = {name: folder / name for name in ("board", "journal")}
    changes = [*CHANGES, f"cluster.weights_dir={disks['board']}"]
    config = configure(folder, "small", *changes)
    disks |= {"run": config.run_dir, "ledger": config.run_dir / "ledger", "checkpoints": config.run_dir / "checkpoints"}
    for disk in disks.values():
        disk.mkdir(parents=True)
        mount(disk, f"size={ROOM}", "mode=700")  # or `resume` refuses what others may change
    # So that the disk of the run's directory is not full for the journal first.
    (config.run_dir / "events.jsonl").symlink_to(disks["journal"] / "events.jsonl")
    said: dict[str, object] = {}
    command = ["run", *arguments(folder, "small", *changes)]
    for phase, more in PHASES.items():
        disk = disks[phase.split(",")[0]]
        limit(disk, more)
        code, text = attempt(*command)
        limit(disk, ROOM)
        said[phase] = {"code": code, "said": text, "faults": verify_run(config).faults, "disk": str(disk)}
        command = ["resume", str(config.run_dir)]
    code, text = attempt(*command)
    commits = open_history(config).ledger.list()
    faults = verify_run(config).faults
    contents = {str(commit.address): commit.content for commit in commits}
    return {"phases": said, "code": code, "said": text, "faults": faults, "contents": contents}


if __name__ == "__main__":
    print(json.dumps(run_on_small_disks(Path(sys.argv[1]))))
