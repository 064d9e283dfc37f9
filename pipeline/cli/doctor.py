"""`stageline doctor [--submit CONFIG]`: test this machine, from its packages to a PPO update and the engines.

Stops at the first fault, explains it, and writes a report for people (.txt) and for a bug report (.json).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from pipeline.cli.answers import BAD_INPUT, DONE, print_line
from pipeline.doctor.ladder import DoctorSettings, Rung, RungResult, Status, climb, conclusion, lazily, line, machine
from pipeline.errors import ConfigError
from stages.engines.config import OTHER_ENVIRONMENTS, interpreter, made_interpreter
from stages.models.spec import read_spec

RUNGS = (
    Rung("packages", "versions of the installed packages", lazily("packages:packages")),
    Rung("limits", "limits of this account", lazily("host:limits")),
    Rung("disk", "the disk of the runs", lazily("host:disk")),
    Rung("shared_memory", "the memory of published weights", lazily("host:shared_memory")),
    Rung("clock", "this host's clock", lazily("host:clock")),
    Rung("processors", "speed of the processors", lazily("host:processors")),
    Rung("compiler", "compiled kernels", lazily("host:compiler")),
    Rung("network", "connections to this host", lazily("host:network")),
    Rung("driver", "the NVIDIA driver and torch's CUDA", lazily("gpus:driver")),
    Rung("gpus", "the GPUs", lazily("gpus:gpus")),
    Rung("gpu_links", "copies between the host and its GPUs", lazily("gpus:gpu_links")),
    Rung("ranks", "sums over processes", lazily("exchange:ranks")),
    Rung("nodes", "sums over nodes", lazily("exchange:nodes")),
    Rung("float32", "an update in float32", lazily("training:float32")),
    Rung("bfloat16", "an update in bfloat16", lazily("training:bfloat16")),
    Rung("layouts", "tensor, pipeline and data parallelism", lazily("training:layouts")),
    Rung("publication", "published weights", lazily("training:publication")),
    Rung("memory", "measured and predicted memory", lazily("training:memory")),
    Rung("embedded", "the embedded engine", lazily("engines:embedded")),
    Rung("vllm", "vLLM", lazily("engines:vllm")),
    Rung("tensorrt_llm", "TensorRT-LLM", lazily("engines:tensorrt_llm")),
)
"""All tests, in the order of the ladder."""


def command(options: argparse.Namespace) -> int:
    _refuse_odd(options)
    if options.submit is not None:
        return _submit(options)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")  # it recommends other libraries
    out, runs_dir = _writable("--out", options.out), _writable("--runs-dir", options.runs_dir)
    scratch = Path(tempfile.mkdtemp(prefix=".doctor-", dir=runs_dir))
    print_line("tests of this machine, a minute or two; the first fault ends them")
    try:
        settings = DoctorSettings(
            runs_dir=runs_dir.absolute(),
            scratch=scratch,
            model=options.model,
            threads=options.threads or max(1, len(os.sched_getaffinity(0)) // 2),
            deadline_s=options.deadline,
            engines=_engines(options.engine),
        )
        results = climb(_rungs_until(options.until), settings, _show)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print_line(conclusion(results))
    _write(out, results)
    return BAD_INPUT if any(result.status is Status.FAULT for result in results) else DONE


def _writable(key: str, given: str) -> Path:
    """Create a folder, and return it. Raises ConfigError, naming the option, if nothing can be written there."""
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=given):
            return Path(given)
    except OSError as error:
        raise ConfigError(key, f"given {given!r}; cannot be written: {error.strerror}") from error


def _refuse_odd(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that cannot work or would have no effect."""
    if options.threads < 0:
        raise ConfigError("--threads", f"given {options.threads}; must be 1 or more (0: half of the cores)")
    if not 0 < options.deadline < math.inf:
        raise ConfigError("--deadline", f"given {options.deadline:g}; must be above 0, in seconds")
    try:
        read_spec(options.model)
    except (OSError, ValueError) as error:
        raise ConfigError("--model", f"given {options.model!r}; {error}") from error
    if options.submit is None and (options.more or options.dry_run):
        given = " ".join(options.more) or "--dry-run"
        raise ConfigError("--submit", f"given {given!r} without it; only a job of Slurm has a config and a script")


def _rungs_until(name: str | None) -> tuple[Rung, ...]:
    """Return the rungs up to the one of that name, including it; None: all. Raises ConfigError for an unknown name."""
    names = [rung.name for rung in RUNGS]
    if name is None:
        return RUNGS
    if name not in names:
        raise ConfigError("--until", f"given {name!r}; must be one of {', '.join(names)}")
    return RUNGS[: names.index(name) + 1]


def _submit(options: argparse.Namespace) -> int:
    """Submit the tests to Slurm, on the nodes that a config asks for. The reports of all nodes go into one folder."""
    submission = import_module("pipeline.launch.submission")  # loads torch
    config = import_module("pipeline.cli.slurm_jobs").cluster_config([options.submit, *options.more])
    folder = Path(options.out, f"doctor-{config.name}").absolute()
    arguments = ["--out", str(folder), "--runs-dir", config.runs_dir, "--model", options.model]
    arguments += ["--threads", str(options.threads), "--deadline", f"{options.deadline:g}"]
    arguments += [f"--engine={text}" for text in options.engine]
    arguments += [f"--until={options.until}"] if options.until is not None else []
    if options.dry_run:
        print_line(submission.doctor_script(config, folder, arguments).rstrip("\n"))
        return DONE
    import_module("pipeline.launch.commands").require()
    submitted = submission.submit_doctor(config, folder, arguments)
    print_line(f"submitted job {submitted.job_id}: {submission.asked_for(config)}")
    print_line(f"  reports of its nodes, and what it prints: {folder}")
    return DONE


def _show(result: RungResult) -> None:
    if result.status is not Status.NOT_REACHED:
        print_line(line(result))


def _engines(given: Sequence[str]) -> dict[str, str]:
    """Return kind -> Python of the other engines: those given as KIND=PYTHON, and else those that `make` installed."""
    found = {kind: python for kind in OTHER_ENVIRONMENTS if (python := made_interpreter(kind)) is not None}
    for text in given:
        kind, _, python = text.partition("=")
        if kind not in OTHER_ENVIRONMENTS or not python:
            kinds = " or ".join(OTHER_ENVIRONMENTS)
            raise ConfigError("--engine", f"given {text!r}; must be KIND=PYTHON with KIND {kinds}")
        found[kind] = python
    return {kind: interpreter(python) for kind, python in found.items()}


def _write(folder: Path, results: Sequence[RungResult]) -> None:
    about = machine()
    stem = folder / f"doctor-{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
    lines = [f"{name}: {value}" for name, value in about.items()]
    lines += ["", *(line(result) for result in results), "", conclusion(results)]
    stem.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    document = {"format": 1, "machine": about, "results": [asdict(result) for result in results]}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print_line(f"report: {stem}.txt, {stem}.json (for a bug report)")
