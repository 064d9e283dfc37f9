"""The files of a run's directory, the kind of filesystem that a path is on, and who else can change a directory."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ConfigError
from storage.host import who_else_can_change


@dataclass(frozen=True)
class RunPaths:
    """The files of a run's directory. `RunConfig.stored` has the place of the ledger and the rollouts."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def identity(self) -> Path:
        return self.root / "identity.json"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts.npz"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def first_full_events(self) -> Path:
        """Path of the first full file of a run's journal. The driver appends to `events`. When that file is full for
        the first time, the driver renames it to this path and begins a new `events` (see
        `pipeline/observe/journal.py`). Until then there is no file with this path."""
        return self.root / "events-000001.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def variant(self) -> Path:
        """File of a variant (a run that is trained on the rollouts of another run, its parent). It names the parent,
        and the settings in which the two runs differ."""
        return self.root / "variant.json"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def report(self) -> Path:
        """The report of the run: one HTML file."""
        return self.root / "report.html"

    @property
    def logs(self) -> Path:
        """Directory with the output of each worker."""
        return self.root / "logs"

    @property
    def attached(self) -> Path:
        """Directory with the scheduler files of a run with attached workers; private to its user."""
        return self.root / "attached"

    @property
    def samples(self) -> Path:
        return self.root / "samples.json"

    @property
    def lock(self) -> Path:
        return self.root / "driver.lock"

    @property
    def mlflow_spool(self) -> Path:
        return self.root / "mlflow_spool.jsonl"

    @property
    def job(self) -> Path:
        """Directory of a submitted job: its config, script, id and output."""
        return self.root / "job"

    def weights(self, version: int) -> Path:
        """Return the directory of a version's Hugging Face export."""
        return self.root / "weights" / f"v{version:06d}"

    def board(self, weights_dir: str | None) -> Path:
        """Return the directory of published weights. It is below `weights_dir`, or below /dev/shm (memory) if
        `weights_dir` is None. Its name depends only on the path of the run's directory, so that a resumed run finds the
        files from before a crash."""
        name = hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:12]
        return Path(weights_dir or "/dev/shm") / f"stageline-{self.root.name}-{name}"


# ---- Filesystems -----------------------------------------------------------------------------------------

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|beegfs\w*|ceph|cifs|smb\d?|9p|afs|pvfs2|orangefs|wekafs|panfs|glusterfs|gfs2|ocfs2|virtiofs|fuse\..*"
)
"""Pattern of the types of filesystems that several hosts can mount at once. `fuse.*` is included, because the program
that serves such a filesystem mostly gets the files from another host."""


def network_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the filesystem that a path is on, if several hosts can mount a filesystem of this type at
    once. Otherwise return None. Also return None if the system has no /proc/self/mountinfo. The path need not exist
    yet. `mounts`: the text of /proc/self/mountinfo; None: the file is read."""
    if mounts is None:
        mounts = MOUNTS.read_text("utf8", "replace") if MOUNTS.is_file() else ""
    resolved = path.resolve()
    longest, longest_kind = -1, None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()[:1]
        if len(fields) < 5 or not kind:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if resolved.is_relative_to(point) and len(point.parts) >= longest:  # a later mount hides an earlier one
            longest, longest_kind = len(point.parts), kind[0]
    return longest_kind if longest_kind is not None and _NETWORK.fullmatch(longest_kind) else None


# ---- Trust -----------------------------------------------------------------------------------------------
#
# A run's directory decides which code its reader executes: its config names files of code (rewards, engines), and its
# checkpoints become the weights. Commands that only show a run read it as data and need no check.

TRUSTED = "STAGELINE_TRUST"
"""Name of the environment variable that lists trusted directories, separated by colons. Their content is trusted, no
matter who wrote it. This is no config key, because the config is itself in the directory to trust."""


def write_fault(directory: Path) -> str | None:
    """Return the system's reason why no file can be made in a directory, or None if one can. Leaves no file."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or str(error)


def refuse_foreign(run_dir: Path) -> None:
    """Raise ConfigError if another account can change a run's directory or files in it that this process would execute.
    The error names the file and a remedy. If the directory does not exist yet, the directories above it are checked.
    Nothing is checked if the run's directory is one of the directories that `TRUSTED` lists, or below one of them."""
    trusted = [Path(one).resolve() for one in os.environ.get(TRUSTED, "").split(os.pathsep) if one]
    if any(run_dir.resolve().is_relative_to(one) for one in trusted):
        return
    paths = RunPaths(run_dir)
    for place in (run_dir, paths.config, paths.identity, paths.job, paths.checkpoints):
        why = who_else_can_change(place, all_below=place != run_dir)
        if why is not None:
            raise ConfigError(
                str(run_dir),
                f"{why}, so that another account decides what runs here. Use `chmod`, or a copy of your own; if you "
                f"trust everybody who can write there, set {TRUSTED}={run_dir.resolve()} in the environment (a "
                "directory above it covers all that is below)",
            )
