"""`stageline logs RUN [--gang NAME] [--index I] [--lines N] [--follow]`: print the output of the job or of a gang's
workers."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from pipeline.cli.answers import DONE, note, print_line, submitted_config
from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.launch.commands import read_record
from pipeline.workers.messages import worker_name

_LOOK_S = 0.5


def command(options: argparse.Namespace) -> int:
    if options.lines < 0:
        raise ConfigError("--lines", f"given {options.lines}; must be 0 or more")
    files = _files(options.run_dir, options.gang, options.index)
    for name, file in files.items():
        if not file.exists() or file.stat().st_size == 0:
            say_so = "waiting for it" if options.follow else "--follow waits for it"
            note(f"{name} has printed nothing yet ({file}); {say_so}")
    offsets = {name: _print_end(name, file, options.lines, len(files) > 1) for name, file in files.items()}
    try:
        while options.follow:
            time.sleep(_LOOK_S)
            for name, file in files.items():
                offsets[name] = _print_from(name, file, offsets[name], len(files) > 1)
    except KeyboardInterrupt:
        return DONE
    return DONE


def _files(run_dir: str, gang: str | None, index: int | None) -> Mapping[str, Path]:
    """Return the log files, each with a label. Raises ConfigError if the run has no such gang or worker."""
    config, paths = submitted_config(run_dir), RunPaths(Path(run_dir))
    if gang is None:
        if index is not None:
            raise ConfigError("--index", f"given {index}; needs --gang NAME: a job's output is one")
        record = read_record(paths.job)
        if record is None:
            raise ConfigError(run_dir, "was not submitted as a job; --gang NAME shows what a gang's workers print")
        return {"job": Path(record.output)}
    if gang not in config.placement.gangs:
        raise ConfigError("--gang", f"given {gang!r}; the run has {', '.join(config.placement.gangs)}")
    workers = range(config.placement.gangs[gang].workers)
    if index is not None and index not in workers:
        raise ConfigError("--index", f"given {index}; {gang} has workers 0 to {workers[-1]}")
    names = [worker_name(gang, number) for number in workers if index in (None, number)]
    return {name: paths.logs / f"{name}.log" for name in names}


def _print_end(name: str, file: Path, lines: int, several: bool) -> int:
    """Print the last lines of a file. Return the offset of its end."""
    if not file.exists():
        return 0
    last: deque[bytes] = deque(maxlen=lines)
    end = 0
    with file.open("rb") as content:
        for line in content:
            if not line.endswith(b"\n"):
                break  # the line is being written; the next look prints it whole
            last.append(line)
            end += len(line)
    for line in last:
        _print(name, line, several)
    return end


def _print_from(name: str, file: Path, offset: int, several: bool) -> int:
    """Print the whole lines from an offset on. Return the offset of their end. A file that became shorter is read from
    its beginning."""
    if not file.exists():
        return 0
    with file.open("rb") as content:
        content.seek(offset if file.stat().st_size >= offset else 0)
        for line in content:
            if not line.endswith(b"\n"):
                return content.tell() - len(line)
            _print(name, line, several)
        return content.tell()


def _print(name: str, line: bytes, several: bool) -> None:
    text = line.decode(errors="replace").rstrip("\n")
    print_line(f"{name} | {text}" if several else text)
