"""A real MLflow server on loopback, as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from pipeline.observe.tracking import WRITER_ENV
from tests.support.ports import free_ports
from tests.support.waiting import until

NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Else the server starts a runner of GenAI's jobs and seven consumers, processes of Python each."""


@contextmanager
def mlflow_server(uri: str, folder: Path) -> Iterator[str]:
    """Serve the store at `uri`, and artifacts from `folder`; yield the server's address."""
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, *where]
    with (folder / "mlflow_server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--artifacts-destination", str(folder / "artifacts")],
            env=os.environ | WRITER_ENV | NO_JOBS, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: _answers(f"{address}/health"), "MLflow answers", every_s=0.5)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # asked to end it waits for a browser's connections
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
