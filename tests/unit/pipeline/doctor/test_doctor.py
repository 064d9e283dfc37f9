"""Each rung of `stageline doctor` names the fault that is planted in it. The whole ladder, without a fault, runs in
tests/integration/test_whole_doctor.py."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.cli.doctor import RUNGS
from pipeline.doctor import engines, exchange, gpus, host, packages, training
from pipeline.doctor.ladder import Absent, DoctorSettings, Finding, Rung, RungResult, Status, climb, lazily
from pipeline.doctor.rank import Published, RankJob, RankResult
from stages.engines.build import build_engine
from stages.engines.config import EngineConfig
from stages.engines.protocol import Completion, GenerationEngine, Request
from stages.models.spec import RANDOM_TINY, read_config

SOUND = RankResult(
    device="the CPU",
    logprobs=[-1.0, -2.0],
    after=[-0.9, -2.1],
    losses={"policy/loss": 0.1},
    digests=["a", "a"],
    seconds=0.1,
    state_bytes=1000,
    predicted_bytes=1000,
    peak_bytes=2000,
    published=Published(1000, 0.1, sound=True),
)
GPU = "0, GPU-1, NVIDIA H100 80GB HBM3, 580.65, 81559, {used}, {errors}"
TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-47\nGPU1\tNV18\t X \t0-47\n"


@pytest.fixture
def settings(tmp_path: Path) -> DoctorSettings:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return DoctorSettings(tmp_path, scratch)


def nvidia_smi(patch: pytest.MonkeyPatch, folder: Path, *, used: int = 4, errors: int = 0, cuda: str = "13.0") -> None:
    """Put a program on the path that answers as NVIDIA's does, and make torch see two GPUs."""
    smi = folder / "bin/nvidia-smi"
    smi.parent.mkdir()
    rows = GPU.format(used=used, errors=errors)
    smi.write_text(
        f'#!/bin/sh\ncase "$1" in --query*) echo "{rows}";; topo) printf "{TOPOLOGY}";; '
        f'*) echo "| CUDA Version: {cuda} |";; esac\n'
    )
    smi.chmod(0o755)
    patch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 2)
    patch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    patch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=str(index + 1)))


def wrong_engine(patch: pytest.MonkeyPatch) -> None:
    """Make the engine with a run's own kernels draw another last token."""

    def build(path: str, config: EngineConfig, **arguments: Any) -> GenerationEngine:
        engine = build_engine(path, config, **arguments)
        if config.embedded.kernels == "torch":
            return engine
        sound = engine.generate

        def generate(requests: Sequence[Request]) -> Iterator[Completion]:
            for completion in sound(requests):
                yield replace(completion, tokens=np.append(completion.tokens[:-1], 3))

        patch.setattr(engine, "generate", generate)
        return engine

    patch.setattr(engines, "build_engine", build)


def assert_fault(settings: DoctorSettings, name: str) -> RungResult:
    """Climb the one rung `name`. It must find a fault and say what to do."""
    (result,) = climb([rung for rung in RUNGS if rung.name == name], settings)
    assert result.status is Status.FAULT, result
    assert "traceback" not in result.facts, result.facts
    assert result.advice
    return result


def test_another_version_of_a_package(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: "0.0.1")
    assert "zarr" in assert_fault(settings, "packages").text


def test_few_open_files(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "most_descriptors", lambda: 64)
    assert_fault(settings, "limits")


def test_a_full_disk_and_one_that_cannot_be_written(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "FREE_DISK_BYTES", 1 << 60)
    assert_fault(settings, "disk")
    assert_fault(replace(settings, scratch=settings.scratch / "gone"), "disk")


def test_shared_memory_that_is_full_or_missing(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "FREE_SHARED_BYTES", 1 << 60)
    assert_fault(settings, "shared_memory")
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path / "missing")
    assert_fault(settings, "shared_memory")


def test_a_clock_that_is_behind(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time() - 3600
    monkeypatch.setattr(host.time, "time", lambda: now)
    assert 3590 < assert_fault(settings, "clock").facts["skew_s"] < 3700


def test_processors_that_are_taken(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(host, "_product_rate", lambda threads: 1e9 / threads)
    assert_fault(settings, "processors")


def test_no_compiler(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/compiler")
    assert_fault(settings, "compiler")


def test_a_host_whose_name_leads_nowhere(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    assert_fault(settings, "network")


def test_a_driver_that_is_older_than_torch(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(monkeypatch, tmp_path, cuda="11.4")
    assert assert_fault(settings, "driver").facts["driver_cuda"] == "11.4"


def test_a_torch_without_cuda_beside_gpus(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert_fault(settings, "driver")


@pytest.mark.parametrize("state", [{"errors": 2}, {"used": 9000}], ids=str)
def test_gpus_that_are_broken_or_taken(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, int]
) -> None:
    nvidia_smi(monkeypatch, tmp_path, **state)
    assert "GPU-1" in str(assert_fault(settings, "gpus").facts)


def test_a_gpu_of_others_is_not_looked_at(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi lists all GPUs of the host, also those that CUDA_VISIBLE_DEVICES hides."""
    nvidia_smi(monkeypatch, tmp_path, used=9000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="another"))
    theirs = gpus.Gpu(0, "GPU-1", "H100", "580", 1 << 36, 9 << 30, 0)
    ours = gpus.Gpu(1, "GPU-another", "H100", "580", 1 << 36, 0, 0)
    monkeypatch.setattr(gpus, "list_gpus", lambda: [theirs, ours])
    (result,) = climb([rung for rung in RUNGS if rung.name == "gpus"], settings)
    assert result.status is Status.OK, result


def test_a_driver_without_gpus(settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong on a node without GPUs; in a job that node was given by mistake."""
    nvidia_smi(monkeypatch, tmp_path)
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho No devices were found; exit 6\n")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (result,) = climb([rung for rung in RUNGS if rung.name == "driver"], settings)
    assert result.status is Status.ABSENT, result
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert_fault(settings, "driver")


def test_a_broken_library_is_the_fault_of_the_first_rung_that_needs_it(settings: DoctorSettings) -> None:
    (result,) = climb([Rung("one", "one", lazily("no_such_module:test"))], settings)
    assert result.status is Status.FAULT
    assert "ModuleNotFoundError" in result.text


def test_a_model_that_does_not_fit_is_not_this_machines(settings: DoctorSettings) -> None:
    (result,) = climb([rung for rung in RUNGS if rung.name == "float32"], replace(settings, model="random:70b-shape"))
    assert result.status is Status.ABSENT, result


def test_a_slow_link(settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 NVLinks make 450 GB/s. The pair at 20 GB/s is named, and not its way back."""
    nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(gpus, "copy_rate", lambda source, target: 400e9 if source else 20e9)
    text = assert_fault(settings, "gpu_links").text
    assert "GPU 0 to 1" in text
    assert "GPU 1 to 0" not in text


def test_healthy_gpus_have_no_fault(settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(gpus, "copy_rate", lambda source, target: 400e9)
    names = ("driver", "gpus", "gpu_links")
    results = climb([rung for rung in RUNGS if rung.name in names], settings)
    assert [result.status for result in results] == [Status.OK] * 3


def test_slow_sums_over_ranks(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SLOWEST", {"gloo": 1e15})
    assert assert_fault(settings, "ranks").facts["bytes_per_s"] > 0


def test_a_node_that_does_not_come(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"STEP_NUM_TASKS": "2", "PROCID": "1", "JOB_ID": "7", "STEP_ID": "0"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(exchange, "MEETING_S", 0.5)
    monkeypatch.setattr(exchange, "NODES_S", 60.0)
    assert "rank 0 did not write" in assert_fault(settings, "nodes").text


@pytest.mark.parametrize(
    ("rung", "wrong", "of"),
    [
        ("float32", {"logprobs": [-1.0, -2.1]}, {"dtype": "float32", "on_cpu": False}),
        ("float32", {"losses": {"policy/loss": math.nan}}, {"on_cpu": False}),
        ("bfloat16", {"after": [-1.1, -1.9]}, {"dtype": "bfloat16"}),
        ("bfloat16", {"digests": ["a", "b"]}, {"dtype": "bfloat16"}),
        ("layouts", {"logprobs": [-1.0, -2.1]}, {"pipeline": 2}),
        ("publication", {"published": Published(1000, 0.1, sound=False)}, {"publish": True}),
        ("memory", {"state_bytes": 2000}, {}),
    ],
)
def test_wrong_numbers_of_training(
    settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch, rung: str, wrong: dict[str, Any], of: dict[str, Any]
) -> None:
    """A result that is wrong in one field, from the jobs with the properties `of`, is that rung's fault alone."""

    def run(job: RankJob) -> RankResult:
        return replace(SOUND, **wrong) if all(getattr(job, name) == value for name, value in of.items()) else SOUND

    monkeypatch.setattr(training, "_run", lambda job: SOUND)
    (sound,) = climb([one for one in RUNGS if one.name == rung], settings)
    assert sound.status is Status.OK
    monkeypatch.setattr(training, "_run", run)
    assert_fault(settings, rung)


def test_a_rank_that_dies(settings: DoctorSettings, tmp_path: Path) -> None:
    """The model's directory lacks its weights. The rank's own words are in the report."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(read_config(RANDOM_TINY)))
    result = assert_fault(replace(settings, model=str(tmp_path / "model")), "float32")
    assert "safetensors" in result.facts["output"]


def test_an_engine_that_draws_other_tokens(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_engine(monkeypatch)
    assert_fault(settings, "embedded")


def test_an_environment_without_its_engine(settings: DoctorSettings) -> None:
    assert_fault(replace(settings, engines={"vllm": sys.executable}), "vllm")


def test_the_ladder_stops_at_the_first_fault(settings: DoctorSettings) -> None:
    """An error that nobody has foreseen is a fault of its rung, with its traceback. Absent things are none."""

    def absent(settings: DoctorSettings) -> Finding:
        raise Absent("no such thing")

    def broken(settings: DoctorSettings) -> Finding:
        raise ZeroDivisionError("1 / 0")

    rungs = [Rung(name, name, test) for name, test in (("one", absent), ("two", broken), ("three", broken))]
    results = climb(rungs, settings)
    assert [result.status for result in results] == [Status.ABSENT, Status.FAULT, Status.NOT_REACHED]
    assert "ZeroDivisionError" in results[1].facts["traceback"]
