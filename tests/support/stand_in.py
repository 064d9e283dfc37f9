"""In the place of `stageline`, for tests of a job's script: a driver that ends when it is told to, workers that end
with it. `python stand_in.py job RUN/job/config.yaml`, `python stand_in.py worker RUN --gang NAME --index I`. Whether a
job may be requeued is decided by Stageline itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pipeline.cli.main import main as stageline


def main(command: str, place: str, *options: str) -> None:
    if "--help" in options:
        return
    run = Path(place).parents[1] if command == "job" else Path(place)
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    if command == "worker":
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        print("worker there", flush=True)
        print(f"{' '.join(options[1::2])} on {os.environ['SLURMD_NODENAME']} sees GPUs {gpus};", flush=True)
        while not (run / f"ended-{start}").exists():
            time.sleep(0.05)
        return
    code = 75
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda *_: sys.exit(75))
        print(f"driver of start {start}", flush=True)
        while not (run / "finish").exists():
            time.sleep(0.05)
        code = int((run / "finish").read_text())
    finally:
        (run / f"ended-{start}").touch()
    sys.exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "may-requeue":
        sys.exit(stageline())
    main(*sys.argv[1:])
