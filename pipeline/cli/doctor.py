"""`stageline doctor [--submit CONFIG]`: test this machine, from its packages to a PPO update and the engines.

The tests stop at the first fault. The command explains the fault, and writes a report for people (.txt) and for a bug
report (.json).
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

from pipeline.cli.answers import BAD_INPUT, SUCCESS, print_line
from pipeline.doctor.runner import (
    DoctorResult,
    DoctorSettings,
    DoctorTest,
    Status,
    conclusion_line,
    load_lazily,
    machine_facts,
    result_text,
    run_tests,
)
from pipeline.errors import ConfigError
from stages.engines.config import OTHER_ENVIRONMENTS, find_interpreter, interpreter
from stages.models.spec import read_spec

TESTS = (
    DoctorTest("packages", "versions of the installed packages", load_lazily("packages:packages")),
    DoctorTest("limits", "limits of this account", load_lazily("host:limits")),
    DoctorTest("disk", "the disk of the runs", load_lazily("host:disk")),
    DoctorTest("shared_memory", "the memory of published weights", load_lazily("host:shared_memory")),
    DoctorTest("clock", "this host's clock", load_lazily("host:clock")),
    DoctorTest("processors", "speed of the processors", load_lazily("host:processors")),
    DoctorTest("compiler", "compiled kernels", load_lazily("host:compiler")),
    DoctorTest("network", "connections to this host", load_lazily("host:network")),
    DoctorTest("driver", "the NVIDIA driver and torch's CUDA", load_lazily("gpus:driver")),
    DoctorTest("gpus", "the GPUs", load_lazily("gpus:gpus")),
    DoctorTest("gpu_links", "copies between the host and its GPUs", load_lazily("gpus:gpu_links")),
    DoctorTest("ranks", "sums over processes", load_lazily("exchange:ranks")),
    DoctorTest("nodes", "sums over nodes", load_lazily("exchange:nodes")),
    DoctorTest("float32", "an update in float32", load_lazily("training:float32")),
    DoctorTest("bfloat16", "an update in bfloat16", load_lazily("training:bfloat16")),
    DoctorTest("layouts", "tensor, pipeline and data parallelism", load_lazily("training:layouts")),
    DoctorTest("publication", "published weights", load_lazily("training:publication")),
    DoctorTest("memory", "measured and predicted memory", load_lazily("training:memory")),
    DoctorTest("embedded", "the embedded engine", load_lazily("engines:embedded")),
    DoctorTest("vllm", "vLLM", load_lazily("engines:vllm")),
    DoctorTest("tensorrt_llm", "TensorRT-LLM", load_lazily("engines:tensorrt_llm")),
)
"""All tests, in the order in which they run."""


def command(options: argparse.Namespace) -> int:
    _refuse_useless_options(options)
    if options.submit is not None:
        return _submit(options)
    # When Megatron is imported, it warns that Transformer Engine and Apex are missing.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    out, runs_dir = _make_writable_folder("--out", options.out), _make_writable_folder("--runs-dir", options.runs_dir)
    scratch = Path(tempfile.mkdtemp(prefix=".doctor-", dir=runs_dir))
    print_line("tests of this machine, a minute or two; the first fault ends them")
    try:
        settings = DoctorSettings(
            runs_dir=runs_dir.absolute(),
            scratch=scratch,
            model=options.model,
            threads=options.threads or max(1, len(os.sched_getaffinity(0)) // 2),
            deadline_s=options.deadline,
            engines=_engine_pythons(options.engine),
        )
        results = run_tests(_tests_until(options.until), settings, _print_result)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print_line(conclusion_line(results))
    _write(out, results)
    return BAD_INPUT if any(result.status is Status.FAULT for result in results) else SUCCESS


def _make_writable_folder(key: str, given: str) -> Path:
    """Create a folder, and return it. Raises ConfigError if no file can be written there. `key`: option that the error
    names."""
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=given):
            return Path(given)
    except OSError as error:
        raise ConfigError(key, f"given {given!r}; cannot be written: {error.strerror}") from error


def _refuse_useless_options(options: argparse.Namespace) -> None:
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


def _tests_until(name: str | None) -> tuple[DoctorTest, ...]:
    """Return the tests up to the test `name`, including it. Return all tests if `name` is None. Raises ConfigError for
    an unknown name."""
    names = [test.name for test in TESTS]
    if name is None:
        return TESTS
    if name not in names:
        raise ConfigError("--until", f"given {name!r}; must be one of {', '.join(names)}")
    return TESTS[: names.index(name) + 1]


def _submit(options: argparse.Namespace) -> int:
    """Submit a job, and return the exit code. The job runs the tests on every node that a config asks for. All nodes
    write their reports into one folder. With `--dry-run`, only print the job's script."""
    submission = import_module("pipeline.launch.submission")  # loads torch
    config = import_module("pipeline.cli.slurm_jobs").cluster_config([options.submit, *options.more])
    folder = Path(options.out, f"doctor-{config.name}").absolute()
    arguments = ["--out", str(folder), "--runs-dir", config.runs_dir, "--model", options.model]
    arguments += ["--threads", str(options.threads), "--deadline", f"{options.deadline:g}"]
    arguments += [f"--engine={text}" for text in options.engine]
    arguments += [f"--until={options.until}"] if options.until is not None else []
    if options.dry_run:
        print_line(submission.doctor_script(config, folder, arguments).rstrip("\n"))
        return SUCCESS
    import_module("pipeline.launch.commands").require_slurm()
    submitted = submission.submit_doctor(config, folder, arguments)
    print_line(f"submitted job {submitted.job_id}: {submission.requested_nodes_text(config)}")
    print_line(f"  reports of its nodes, and what it prints: {folder}")
    return SUCCESS


def _print_result(result: DoctorResult) -> None:
    if result.status is not Status.NOT_REACHED:
        print_line(result_text(result))


def _engine_pythons(options: Sequence[str]) -> dict[str, str]:
    """Return kind of engine -> its Python interpreter, for the engines that need their own environment. An interpreter
    given as KIND=PYTHON replaces the interpreter that `make` installed. Kinds without an interpreter are left out.
    Raises ConfigError for a text of another form."""
    pythons = {kind: python for kind in OTHER_ENVIRONMENTS if (python := find_interpreter(kind)) is not None}
    for text in options:
        kind, _, python = text.partition("=")
        if kind not in OTHER_ENVIRONMENTS or not python:
            kinds = " or ".join(OTHER_ENVIRONMENTS)
            raise ConfigError("--engine", f"given {text!r}; must be KIND=PYTHON with KIND {kinds}")
        pythons[kind] = python
    return {kind: interpreter(python) for kind, python in pythons.items()}


def _write(folder: Path, results: Sequence[DoctorResult]) -> None:
    about = machine_facts()
    stem = folder / f"doctor-{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
    lines = [f"{name}: {value}" for name, value in about.items()]
    lines += ["", *(result_text(result) for result in results), "", conclusion_line(results)]
    stem.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    document = {"format": 1, "machine": about, "results": [asdict(result) for result in results]}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print_line(f"report: {stem}.txt, {stem}.json (for a bug report)")
