"""`stageline may-requeue RUN --job ID --restart N --because TEXT …`: a job's script asks this when an attempt has
ended. Exit code 0: requeue the job; 75: end it, for the printed reason."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.answers import DONE, RESUMABLE, print_line
from pipeline.config.paths import RunPaths
from pipeline.launch.requeues import AttemptEnd, committed_so_far, note_end, refusal
from storage.ledger import Ledger


def command(options: argparse.Namespace) -> int:
    paths = RunPaths(Path(options.run_dir))
    committed = committed_so_far(Ledger(str(paths.ledger)))
    end = AttemptEnd(options.restart, committed, options.because, options.lost)
    ends = note_end(paths.job, options.job, end)
    why = refusal(ends, restarts=options.restarts, requeues_without_progress=options.without_progress)
    if why is None:
        return DONE
    here = f", or `stageline resume {paths.root} cluster.kind=local` on one machine" * paths.config.exists()
    print_line(
        f"not requeued: {why}. The last attempt (restart {ends[-1].restart}) ended: {ends[-1].because}. What the "
        f"driver printed is above, what workers printed is in {paths.logs}. When that is mended, "
        f"`stageline submit {paths.job}/config.yaml` goes on{here}"
    )
    return RESUMABLE
