"""Slurm's commands as a cluster would answer them that nobody has: each prints what a file says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class FakeSlurm:
    """sbatch, scontrol and scancel, first on the path. sbatch takes every script, as job 1, 2, …, until it is told to
    refuse; scontrol has forgotten every job that it was told nothing of."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        commands = folder / "commands"
        commands.mkdir(parents=True)
        bodies = {
            "sbatch": "for script; do :; done; [ ! -e refuse ] || { cat refuse >&2; exit 1; }\n"
            "ls scripts 2>/dev/null | wc -l >last; mkdir -p scripts; job=$(($(<last) + 1))\n"
            'cp "$script" scripts/$job; echo $job',
            "scontrol": "for job; do :; done; echo $job >>asked; [ ! -e down ] || { cat down >&2; exit 1; }\n"
            'cat "job-$job" 2>/dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }',
            "scancel": 'echo "$*" >>cancelled',
        }
        for name, body in bodies.items():
            (commands / name).write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\ncd {folder}\n{body}\n")
            (commands / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")

    def refuse(self, complaint: str) -> None:
        """Every job from now on, as sbatch says it."""
        (self.folder / "refuse").write_text(f"{complaint}\n")

    def answer_nothing(self) -> None:
        """From now on there is no controller."""
        said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
        (self.folder / "down").write_text(said)

    def job_is(self, job: str, state: str) -> None:
        """Set the state that scontrol reports of a job from now on."""
        (self.folder / f"job-{job}").write_text(f"JobId={job} JobState={state} Reason=None Restarts=0 NodeList=n1\n")

    def asked(self) -> list[str]:
        """The jobs that scontrol was asked of, in turn."""
        return (self.folder / "asked").read_text().split()

    def scripts(self) -> list[str]:
        """Return the submitted scripts, in order."""
        return [path.read_text() for path in sorted((self.folder / "scripts").glob("*"))]
