"""The doctor's tests of training: updates, layouts, publication and memory. The updates run in processes of their own
(`rank.py`).

The reference is always a float32 update on the CPU with plain torch kernels. Without GPUs, the compiled kernels are
compared with torch's. With GPUs, every GPU is compared with the CPU, all of them at the same time.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from pipeline.doctor.jobs import Dtype, RankJob, RankResult, predicted_peak_bytes, predicted_state_bytes
from pipeline.doctor.processes import Program, run_together
from pipeline.doctor.runner import DoctorSettings, Fault, Finding, NotApplicable
from storage.codec import decode, encode

TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest accepted difference between a log-prob or a loss and the same number of the reference, in nats. Rounding
alone causes differences of 1e-5 in float32 and 0.05 in bfloat16."""
AGREEMENT: dict[Dtype, float] = {"float32": 0.999, "bfloat16": 0.7}
"""Smallest accepted cosine between the changes that two updates make to all log-probs (`cosine_of_changes`). One update
is the tested one. The other is the reference or, when a layout is tested, the update by a single rank.

Rounding can change the sign of a small gradient, and Adam makes small gradients as large as others. The measured
cosines are 1 - 1e-10 in float32 and 0.96 in bfloat16. The cosine is about 0 for unrelated updates."""
LAYOUT_TOLERANCE = 1e-3
"""Largest accepted difference between a log-prob or a loss of a layout and the same number of a single rank, in nats.
Small differences occur because ranks add up numbers in another order."""
STATE_SHARE = 1.05
"""Largest accepted factor between the measured and the predicted bytes of the state, in either direction. Both numbers
count the same tensors."""
PEAK_SHARE, PEAK_BYTES = 0.3, 32 << 20
"""Largest accepted difference between the measured and the predicted peak: this fraction of the prediction, plus this
number of bytes.

The prediction leaves out temporary tensors of the optimizer. On a CPU it leaves out the pages of libraries and the
memory that the allocator keeps (measured: 16 to 23 MB). For a model of a few MB, the test therefore only detects a
prediction that misses most of the activations."""
LAYOUTS = {"TP2": (2, 1), "PP2": (1, 2), "DP2": (1, 1)}
"""Name of a tested layout -> (tensor-parallel size, pipeline-parallel size). Each layout has two ranks."""
ADVICE = (
    "if that file is another library's, install it again or remove it. Else send the JSON report: it has all output"
)

Gang = tuple[RankJob, ...]
"""Jobs that the same ranks compute one after the other, so that libraries are loaded only once. All these jobs have the
same number of ranks."""


def float32(settings: DoctorSettings) -> Finding:
    """Test an update in float32 on each device. It must agree with the reference, and its repetition must give the same
    bits."""
    return _update(settings, "float32")


def bfloat16(settings: DoctorSettings) -> Finding:
    """Test an update in bfloat16 on each device. It must agree with the float32 reference, and its repetition must give
    the same bits."""
    return _update(settings, "bfloat16")


def layouts(settings: DoctorSettings) -> Finding:
    """Test that two ranks compute the same update as one rank, with tensor, pipeline and data parallelism. The two
    ranks use neighbouring GPUs."""
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        raise NotApplicable("fewer than two GPUs")
    alone = _float32(settings)[_job(settings, publish=True)]
    firsts = first_gpus_of_pairs()
    gangs = tuple(
        tuple(_job(settings, first, size=2, tensor=tensor, pipeline=pipeline) for tensor, pipeline in LAYOUTS.values())
        for first in firsts
    )
    results, facts = _run(gangs, settings.deadline_s), dict[str, float]()
    for first, gang in zip(firsts, gangs, strict=True):
        for name, job in zip(LAYOUTS, gang, strict=True):
            where = f"{name} on GPUs {first} and {first + 1}" if job.on_gpu else name
            facts[where] = max_difference(alone, results[job])
            if not (
                facts[where] <= LAYOUT_TOLERANCE and cosine_of_changes(alone, results[job]) >= AGREEMENT["float32"]
            ):
                advice = "the ranks' communication gives wrong numbers: look at the tests before. Send the JSON report"
                raise Fault(f"{where} differs from one rank by {facts[where]:.2g} nats", advice, **facts)
    largest = {name: max(value for at, value in facts.items() if at.startswith(name)) for name in LAYOUTS}
    shown = ", ".join(f"{value:.1g} ({name})" for name, value in largest.items())
    return Finding(f"two ranks compute what one does, within {shown} nats", facts)


def publication(settings: DoctorSettings) -> Finding:
    """Test that weights published to shared memory are read back unchanged."""
    published = _float32(settings)[_job(settings, publish=True)].published
    assert published is not None
    if not published.sound:
        advice = "shared memory does not keep what is written to it: test this host's memory"
        raise Fault("published weights are not what was written", advice)
    rate = published.num_bytes / max(published.seconds, 1e-9)
    facts = {"bytes": published.num_bytes, "seconds": published.seconds}
    return Finding(f"{published.num_bytes / 2**20:.1f} MB at {rate / 1e9:.2f} GB/s, the same bytes read back", facts)


def memory(settings: DoctorSettings) -> Finding:
    """Test that `stageline check` predicts the memory of an update correctly: the state (weights and optimizer,
    with the gradients' buffer) and the peak."""
    results = _float32(settings)
    facts, texts = dict[str, float](), list[str]()
    for job in _device_jobs(settings, "float32"):
        measured, state, peak = results[job], predicted_state_bytes(job), predicted_peak_bytes(job)
        where = f"GPU {job.device}: " if job.on_gpu else ""
        named = {
            "state_bytes": measured.state_bytes,
            "predicted_state_bytes": state,
            "peak_bytes": measured.peak_bytes,
            "predicted_peak_bytes": peak,
        }
        facts |= {f"{where}{name}": value for name, value in named.items()}
        text = (
            f"{where}weights and optimizer {measured.state_bytes / 2**20:.1f} MB (predicted {state / 2**20:.1f}), "
            f"peak {measured.peak_bytes / 2**20:.0f} MB (predicted {peak / 2**20:.0f})"
        )
        kept_close = 1 / STATE_SHARE <= measured.state_bytes / state <= STATE_SHARE
        peak_close = abs(measured.peak_bytes - peak) <= PEAK_SHARE * peak + PEAK_BYTES
        if not (kept_close and peak_close):
            advice = "`stageline check` predicts memory wrongly here, so leave room. Send the JSON report"
            raise Fault(text, advice, **facts)
        texts.append(text)
    return Finding(texts[0] if len(texts) == 1 else f"{texts[0]}; alike on {len(texts)} GPUs", facts)


def _update(settings: DoctorSettings, dtype: Dtype) -> Finding:
    results = _float32(settings)
    reference, jobs = results[_reference(settings)], _device_jobs(settings, dtype)
    if dtype != "float32":
        results = _run(tuple((job,) for job in jobs), settings.deadline_s)
    facts: dict[str, Mapping[str, object]] = {}
    for job in jobs:
        result, where = results[job], f"GPU {job.device}" if job.on_gpu else "CPU"
        differs, agrees = max_difference(reference, result), cosine_of_changes(reference, result)
        facts[where] = {
            "difference_nats": differs,
            "agreement": agrees,
            "digests": result.digests,
            "seconds": result.seconds,
        }
        if not (differs <= TOLERANCE[dtype] and agrees >= AGREEMENT[dtype]):
            advice = "a kernel computes wrong numbers here: try model.kernels=portable, model.products=torch"
            cause = f"differs from the reference by {differs:.2g} nats, and its changes agree with cosine {agrees:.2f}"
            raise Fault(f"an update in {dtype} on {where} {cause}", advice, **facts)
        if len(set(result.digests)) > 1:
            advice = "replay and recovery compare bits: set model.deterministic=true, and look for faulty memory"
            raise Fault(f"an update in {dtype} on {where}, repeated, gives other bits", advice, **facts)
    largest, seconds = (
        max(max_difference(reference, results[job]) for job in jobs),
        max(results[job].seconds for job in jobs),
    )
    on = f"{len(jobs)} GPUs" if len(jobs) > 1 else results[jobs[0]].device
    return Finding(
        f"log-probs within {largest:.1g} nats of plain torch in float32, the same bits twice, {seconds:.2f} s on {on}",
        facts,
    )


def max_difference(first: RankResult, second: RankResult) -> float:
    """Return the largest difference between two results in nats, over the losses and the log-probs before the update.
    It is infinite if one result lacks a loss of the other, or if a difference is not finite."""
    if first.losses.keys() != second.losses.keys():
        return math.inf
    ones = [*first.logprobs, *first.losses.values()]
    others = [*second.logprobs, *(second.losses[name] for name in first.losses)]
    differences = [abs(a - b) for a, b in zip(ones, others, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def cosine_of_changes(first: RankResult, second: RankResult) -> float:
    """Return the cosine between two vectors: the changes of all log-probs by the first update and by the second. It is
    1 for the same direction, and NaN if an update changed no log-prob or a number is not finite."""
    changes = [np.subtract(result.after, result.logprobs) for result in (first, second)]
    with np.errstate(invalid="ignore"):
        return float(np.dot(*changes) / np.sqrt(np.prod([change @ change for change in changes])))


# ---- jobs ------------------------------------------------------------------------------------------------


def device_indices() -> range:
    """Return the indices of all GPUs that this process sees. Without GPUs, return only index 0, which stands for the
    CPU."""
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 1)


def first_gpus_of_pairs() -> list[int]:
    """Return the first GPU of each pair of neighbouring GPUs. The pairs cover all GPUs; if the number of GPUs is odd,
    the last two pairs overlap. Without GPUs, return [0]."""
    last = max(len(device_indices()) - 2, 0)
    return sorted({min(first, last) for first in device_indices()[::2]})


def _job(settings: DoctorSettings, device: int = 0, **of_job: Any) -> RankJob:
    job = RankJob(settings.model, "float32", threads=settings.threads, device=device, on_gpu=torch.cuda.is_available())
    return replace(job, **of_job)


def _reference(settings: DoctorSettings) -> RankJob:
    return _job(settings, kernels="torch", on_gpu=False)


def _device_jobs(settings: DoctorSettings, dtype: Dtype) -> list[RankJob]:
    """Return one job for each device. In float32, the first job also publishes its trained weights."""
    return [_job(settings, index, dtype=dtype, publish=dtype == "float32" and not index) for index in device_indices()]


def _float32(settings: DoctorSettings) -> Mapping[RankJob, RankResult]:
    """Run the test update in float32 on each device, and as a reference on the CPU with torch's kernels, for several
    tests."""
    alone: list[Gang] = [(job,) for job in _device_jobs(settings, "float32")]
    reference: Gang = (_reference(settings),)
    gangs = [reference, *alone] if torch.cuda.is_available() else [alone[0] + reference]
    return _run(tuple(gangs), settings.deadline_s)


@cache
def _run(gangs: tuple[Gang, ...], deadline_s: float) -> dict[RankJob, RankResult]:
    """Run gangs at the same time, and return job -> results, cached for several tests. Raises NotApplicable if a model
    does not fit into memory, Fault if a process failed or passed the deadline."""
    for job in {job for gang in gangs for job in gang}:
        _refuse_too_large(job)
    with tempfile.TemporaryDirectory(prefix="stageline-doctor-") as folder:
        folders = [Path(folder, str(number)) for number in range(len(gangs))]
        for made in folders:
            made.mkdir()
        programs = [one for gang, made in zip(gangs, folders, strict=True) for one in _ranks(gang, made)]
        run_together(programs, deadline_s, ADVICE)
        by_job: dict[RankJob, RankResult] = {}
        for gang, made in zip(gangs, folders, strict=True):
            results = decode(list[RankResult], (made / "result.json").read_bytes())
            by_job |= dict(zip(gang, results, strict=True))
        return by_job


def _ranks(gang: Gang, folder: Path) -> Iterator[Program]:
    job, names = gang[0], ", ".join(sorted({job.dtype for job in gang}))
    for index in range(job.size):
        where = f"GPU {job.device + index}" if job.on_gpu else "the CPU"
        who = f"rank {index} of {job.size} ({names}, {where})"
        arguments = ["-m", "pipeline.doctor.rank", encode(gang), str(index), str(folder), str(folder / "result.json")]
        yield Program(who, arguments, {} if job.on_gpu else {"CUDA_VISIBLE_DEVICES": ""})


def _refuse_too_large(job: RankJob) -> None:
    """Raise NotApplicable if the model's state does not fit into the memory of the device."""
    needed = predicted_state_bytes(job)
    there = (
        torch.cuda.get_device_properties(job.device).total_memory if job.on_gpu else psutil.virtual_memory().available
    )
    if needed > there:
        where = f"GPU {job.device}" if job.on_gpu else "this host"
        sizes = f"{needed / 2**30:.0f} GiB in {job.dtype}, {where} has {there / 2**30:.0f}"
        raise NotApplicable(f"{job.model} needs {sizes}: give a smaller --model")
