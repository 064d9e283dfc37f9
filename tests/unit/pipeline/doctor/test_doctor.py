"""Each test of `stageline doctor` names the fault that is planted in it. All tests in order, without a fault, run in
tests/integration/test_whole_doctor.py."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from pipeline.cli.doctor import TESTS
from pipeline.doctor import copies, engines, exchange, gpus, host, packages, training
from pipeline.doctor.copies import CopyResult
from pipeline.doctor.jobs import (
    EngineJob,
    EngineResult,
    GeneratedRow,
    Published,
    RankJob,
    RankResult,
    predicted_peak_bytes,
    predicted_state_bytes,
)
from pipeline.doctor.processes import Program, run_together
from pipeline.doctor.runner import (
    DoctorResult,
    DoctorSettings,
    DoctorTest,
    Fault,
    Finding,
    NotApplicable,
    Status,
    load_lazily,
    run_tests,
)
from stages.models.spec import RANDOM_TINY, read_config
from storage.codec import encode

SOUND = RankResult(
    device="the CPU",
    logprobs=[-1.0, -2.0],
    after=[-0.9, -2.1],
    losses={"policy/loss": 0.1},
    digests=["a", "a"],
    seconds=0.1,
    state_bytes=predicted_state_bytes(RankJob("random:tiny", "float32")),
    peak_bytes=predicted_peak_bytes(RankJob("random:tiny", "float32")),
    published=Published(1000, 0.1, sound=True),
)
ROW, OTHER = GeneratedRow([5, 6, 7, 8], [-1.0, -2.0, -1.5, -0.5]), GeneratedRow([5, 9, 9, 9], [-1.0, -3.0, -3.0, -3.0])
SHIFTED = GeneratedRow(ROW.tokens, [value + 0.1 for value in ROW.logprobs])
ENGINE = EngineResult(
    device="cpu",
    draws="keyed",
    start_s=1.0,
    tokens_per_s=10.0,
    refit_s=1.0,
    refit_bytes=1000,
    slept=True,
    first=[ROW],
    alone=[ROW],
    changed=[OTHER],
    again=[ROW],
)
HANG = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
H100 = "NVIDIA H100 80GB HBM3"
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
    patch.setattr(torch.cuda, "get_device_name", lambda index: H100)
    properties = SimpleNamespace
    patch.setattr(
        torch.cuda, "get_device_properties", lambda index: properties(uuid=str(index + 1), total_memory=1 << 36)
    )


def copied(patch: pytest.MonkeyPatch, rate: Callable[[str], float], wrong: Sequence[str] = ()) -> None:
    """Let the copies between two GPUs have these rates and be wrong as told."""
    names = ("host->0", "0->host", "host->1", "1->host", "0->1", "1->0")

    def run_together(programs: Sequence[Program], deadline_s: float, advice: str) -> None:
        result = Path(programs[0].arguments[2])
        result.write_text(encode(CopyResult({name: rate(name) for name in names}, [*wrong])))

    patch.setattr(gpus, "run_together", run_together)


def climbed(settings: DoctorSettings, name: str) -> DoctorResult:
    """Run the one test `name`."""
    (result,) = run_tests([test for test in TESTS if test.name == name], settings)
    return result


def assert_fault(settings: DoctorSettings, name: str) -> DoctorResult:
    """Run the one test `name`. It must find a fault and say what to do."""
    result = climbed(settings, name)
    assert result.status is Status.FAULT, result
    assert "traceback" not in result.facts, result.facts
    assert result.advice
    return result


def test_another_version_of_a_package(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: "0.0.1")
    assert "zarr" in assert_fault(settings, "packages").text


def test_few_open_files(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "max_descriptors", lambda: 64)
    assert_fault(settings, "limits")


def test_a_full_disk_and_one_that_cannot_be_written(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MIN_FREE_DISK_BYTES", 1 << 60)
    assert_fault(settings, "disk")
    assert_fault(replace(settings, scratch=settings.scratch / "gone"), "disk")


def test_shared_memory_that_is_full_or_missing(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MIN_FREE_SHARED_BYTES", 1 << 60)
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
    """nvidia-smi lists all GPUs of the host, even if CUDA_VISIBLE_DEVICES hides some."""
    nvidia_smi(monkeypatch, tmp_path, used=9000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="another"))
    theirs = gpus.Gpu(0, "GPU-1", "H100", "580", 1 << 36, 9 << 30, 0)
    ours = gpus.Gpu(1, "GPU-another", "H100", "580", 1 << 36, 0, 0)
    monkeypatch.setattr(gpus, "list_gpus", lambda: [theirs, ours])
    (result,) = run_tests([test for test in TESTS if test.name == "gpus"], settings)
    assert result.status is Status.OK, result


def test_a_driver_without_gpus(settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong on a node without GPUs; in a job that node was given by mistake."""
    nvidia_smi(monkeypatch, tmp_path)
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho No devices were found; exit 6\n")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (result,) = run_tests([test for test in TESTS if test.name == "driver"], settings)
    assert result.status is Status.ABSENT, result
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert_fault(settings, "driver")


def test_gpus_that_are_hidden_on_purpose(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert climbed(settings, "driver").status is Status.ABSENT
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # one that is not there
    assert_fault(settings, "driver")


def test_the_file_of_a_broken_library_is_named(tmp_path: Path) -> None:
    """Megatron imports some libraries wherever they are installed."""
    broken = tmp_path / "broken.py"
    broken.write_text("raise OSError('libcublas.so: cannot open')")
    program = Program("rank 0", ["-c", "import broken"], {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(Fault, match=str(broken)):
        run_together([program], 60.0, "repair it")


def test_a_broken_library_is_the_fault_of_the_first_rung_that_needs_it(settings: DoctorSettings) -> None:
    (result,) = run_tests([DoctorTest("one", "one", load_lazily("no_such_module:test"))], settings)
    assert result.status is Status.FAULT
    assert "ModuleNotFoundError" in result.text


def test_a_model_that_does_not_fit_is_not_this_machines(settings: DoctorSettings) -> None:
    (result,) = run_tests(
        [test for test in TESTS if test.name == "float32"], replace(settings, model="random:70b-shape")
    )
    assert result.status is Status.ABSENT, result


def test_a_slow_link(settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 NVLinks make 450 GB/s. The copy at 20 GB/s is named, and not its way back; the host's have PCIe alone."""
    nvidia_smi(monkeypatch, tmp_path)
    copied(monkeypatch, lambda name: 400e9 if name == "1->0" else 20e9)
    text = assert_fault(settings, "gpu_links").text
    assert "0->1" in text
    assert "1->0" not in text
    assert "host" not in text


def test_a_copy_that_damages_data(settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(monkeypatch, tmp_path)
    copied(monkeypatch, lambda name: 400e9, ["1->host"])
    assert "1->host" in assert_fault(settings, "gpu_links").text


@pytest.mark.parametrize("damage", [None, "one bit", "two words swapped"])
def test_a_checksum_finds_damaged_copies(monkeypatch: pytest.MonkeyPatch, damage: str | None) -> None:
    """On CPUs in place of GPUs: the third copy changes one bit, or swaps two words beyond the first piece."""
    sound, count = torch.Tensor.copy_, itertools.count(1)

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        sound(self, source)
        if damage is not None and 8 < next(count) <= 12:  # each copy is made four times
            self[-1] ^= damage == "one bit"
            if damage == "two words swapped":
                self[[-1, -2]] = self[[-2, -1]]
        return self

    monkeypatch.setattr(copies, "PIECE", 1000)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    found = copies.measure_copies(["cpu", "cpu"], 3001 * 8)
    assert found.wrong == ([] if damage is None else ["host->1", "1->host", "1->0"])
    assert found.bytes_per_s.keys() == {"host->0", "0->host", "host->1", "1->host", "0->1", "1->0"}


def test_healthy_gpus_have_no_fault(settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(monkeypatch, tmp_path)
    copied(monkeypatch, lambda name: 400e9)
    names = ("driver", "gpus", "gpu_links")
    results = run_tests([test for test in TESTS if test.name in names], settings)
    assert [result.status for result in results] == [Status.OK] * 3


@pytest.mark.parametrize("test", ["gpu_links", "embedded", "ranks"])
def test_a_hang_is_named_and_ended(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str
) -> None:
    """The program that hangs has started another one. After the deadline neither is running."""
    if test == "gpu_links":
        nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(gpus, "PROGRAM", ("-c", HANG))
    monkeypatch.setattr(engines, "PROGRAM", ("-c", HANG))
    monkeypatch.setattr(exchange, "PROGRAM", ("-c", HANG))
    earlier = set(psutil.Process().children(recursive=True))  # of other tests in this process
    result = assert_fault(replace(settings, deadline_s=1.0), test)
    assert "no end after 1 s" in result.text
    assert result.facts["outputs"]
    assert set(psutil.Process().children(recursive=True)) <= earlier


def test_slow_sums_over_ranks(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MIN_BYTES_PER_S", {"gloo": 1e15})
    assert assert_fault(settings, "ranks").facts["bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("gpu", "rate", "size", "place", "slow"),
    [
        (H100, 3e9, 8, "here", True),  # TCP on loopback
        (H100, 50e9, 8, "here", True),  # PCIe; 450 GB/s x 8 / (2 x 7) / 4 = 64
        (H100, 65e9, 8, "here", False),
        (H100, 3e9, 2, "nodes", True),  # TCP; 50 GB/s x 2 / (2 x 1) / 4 = 12.5
        (H100, 13e9, 2, "nodes", False),
        ("NVIDIA GeForce RTX 3090", 3e9, 2, "here", False),  # not in conf/hardware
        ("NVIDIA GeForce RTX 3090", 0.5e9, 2, "here", True),
    ],
)
def test_a_fallback_to_a_slower_link(gpu: str, rate: float, size: int, place: Any, slow: bool) -> None:
    """A rate is compared with the links that conf/hardware has for this GPU; otherwise with 10 Gbit/s."""
    found = exchange.AllReduceResult("nccl", gpu, rate)
    if slow:
        with pytest.raises(Fault):
            exchange.judge_rate(found, size, place)
    else:
        assert exchange.judge_rate(found, size, place).facts["least_bytes_per_s"] <= rate


def test_a_node_that_does_not_come(settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"STEP_NUM_TASKS": "2", "PROCID": "1", "JOB_ID": "7", "STEP_ID": "0"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(exchange, "RENDEZVOUS_S", 0.5)
    assert "rank 0 did not write" in assert_fault(settings, "nodes").text


@pytest.mark.parametrize(
    ("test", "wrong", "of"),
    [
        ("float32", {"logprobs": [-1.0, -2.1]}, {"dtype": "float32", "kernels": "auto"}),
        ("float32", {"losses": {"policy/loss": math.nan}}, {"kernels": "auto"}),
        ("bfloat16", {"after": [-1.1, -1.9]}, {"dtype": "bfloat16"}),
        ("bfloat16", {"digests": ["a", "b"]}, {"dtype": "bfloat16"}),
        ("layouts", {"logprobs": [-1.0, -2.1]}, {"pipeline": 2}),
        ("publication", {"published": Published(1000, 0.1, sound=False)}, {"publish": True}),
        ("memory", {"state_bytes": 2 * SOUND.state_bytes}, {}),
        ("memory", {"peak_bytes": SOUND.peak_bytes + (60 << 20)}, {}),
        ("memory", {"peak_bytes": SOUND.state_bytes}, {}),
    ],
)
def test_wrong_numbers_of_training(
    settings: DoctorSettings, monkeypatch: pytest.MonkeyPatch, test: str, wrong: dict[str, Any], of: dict[str, Any]
) -> None:
    """A result that is wrong in one field, from the jobs with the properties `of`, is that test's fault alone."""

    plant(monkeypatch, {}, {})
    assert climbed(settings, test).status is Status.OK
    plant(monkeypatch, wrong, of)
    assert_fault(settings, test)


def plant(patch: pytest.MonkeyPatch, wrong: dict[str, Any], of: dict[str, Any]) -> None:
    """Let jobs with the properties `of` have results that are wrong in these fields, and all others sound ones."""

    def result(job: RankJob) -> RankResult:
        sound = replace(SOUND, state_bytes=predicted_state_bytes(job), peak_bytes=predicted_peak_bytes(job))
        return replace(sound, **wrong) if all(getattr(job, name) == value for name, value in of.items()) else sound

    patch.setattr(training, "_run", lambda gangs, deadline_s: {job: result(job) for gang in gangs for job in gang})


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        ("float32", {"logprobs": [-1.0, -2.1]}),
        ("bfloat16", {"digests": ["a", "b"]}),
        ("layouts", {"logprobs": [-1.0, -2.1]}),
        ("memory", {"peak_bytes": 1 << 40}),
    ],
)
def test_every_gpu_is_tested(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, wrong: dict[str, Any]
) -> None:
    """Eight GPUs, of which number 6 (in layouts rank 0 of its pair) computes wrong numbers."""
    nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    of = {"device": 6, "size": 2 if test == "layouts" else 1}
    plant(monkeypatch, wrong, of)
    result = assert_fault(settings, test)
    assert "6" in result.text


def test_an_odd_number_of_gpus_is_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert training.first_gpus_of_pairs() == [0, 2, 3]


def test_a_rank_that_dies(settings: DoctorSettings, tmp_path: Path) -> None:
    """The model's directory lacks its weights. The rank's own words are in the report."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(read_config(RANDOM_TINY)))
    result = assert_fault(replace(settings, model=str(tmp_path / "model")), "float32")
    assert "safetensors" in str(result.facts["outputs"])


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        ("float32", {"first": [OTHER]}),
        ("float32", {"first": [SHIFTED]}),
        ("float32", {"alone": [OTHER]}),
        ("float32", {"again": [SHIFTED]}),
        ("float32", {"changed": [ROW]}),
        ("bfloat16", {"first": [OTHER], "alone": [OTHER], "again": [OTHER], "changed": [ROW]}),
        ("bfloat16", {"again": [replace(ROW, logprobs=[-1.0, -2.0, -1.5, -1.5])]}),
    ],
)
def test_an_engine_that_draws_other_rows(
    settings: DoctorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, wrong: dict[str, Any]
) -> None:
    """On GPU 1 of two. In bfloat16 rounding may shift log-probs, and a few draws."""
    nvidia_smi(monkeypatch, tmp_path)
    rounded = replace(ENGINE, first=[SHIFTED], alone=[SHIFTED], again=[SHIFTED])

    def planted(wrong: dict[str, Any]) -> None:
        def result(job: EngineJob) -> EngineResult:
            sound = ENGINE if job.dtype == "float32" else rounded
            return replace(sound, **wrong) if (job.device, job.dtype) == ("cuda:1", dtype) else sound

        monkeypatch.setattr(engines, "_run", lambda groups, deadline_s: {job: result(job) for g in groups for job in g})

    planted({})
    assert climbed(settings, "embedded").status is Status.OK
    planted(wrong)
    assert "cuda:1" in assert_fault(settings, "embedded").text


def test_an_environment_without_its_engine(settings: DoctorSettings) -> None:
    assert_fault(replace(settings, engines={"vllm": sys.executable}), "vllm")


def test_the_ladder_stops_at_the_first_fault(settings: DoctorSettings) -> None:
    """An error that nobody has foreseen is a fault of its test, with its traceback. A part that the machine does not
    have is none."""

    def absent(settings: DoctorSettings) -> Finding:
        raise NotApplicable("no such thing")

    def broken(settings: DoctorSettings) -> Finding:
        raise ZeroDivisionError("1 / 0")

    tests = [DoctorTest(name, name, test) for name, test in (("one", absent), ("two", broken), ("three", broken))]
    results = run_tests(tests, settings)
    assert [result.status for result in results] == [Status.ABSENT, Status.FAULT, Status.NOT_REACHED]
    assert "ZeroDivisionError" in results[1].facts["traceback"]
