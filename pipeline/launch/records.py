"""What is kept of a job beside its run: `job/job.json`. May import the standard library and storage.files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from storage import files
from storage.errors import StoreError

_FILE = "job.json"


@dataclass(frozen=True)
class JobRecord:
    """The newest job of a run."""

    job_id: str
    """With the number of its task, where it is one of an array: 12_3."""
    output: str
    """The file that it prints into."""


def write_record(folder: Path, record: JobRecord) -> None:
    """Whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write(files.open_root(str(folder)), _FILE, (json.dumps(asdict(record), indent=1) + "\n").encode())


def read_record(folder: Path) -> JobRecord | None:
    """The record in a run's `job/`; None where it was never submitted.

    Raises:
        StoreError: it is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf8"))
        return JobRecord(content["job_id"], content["output"])
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{path} is not what was written: {error}") from error
