"""Rungs of training: updates, layouts, publication and memory, each in processes of its own (`rank.py`).

The reference is always a float32 update on the CPU with plain torch kernels. So on a CPU the compiled kernels are
compared with torch's, and on a GPU the GPU with the CPU.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch

from pipeline.doctor.ladder import Absent, DoctorSettings, Fault, Finding
from pipeline.doctor.rank import RankJob, RankResult, predicted_bytes
from storage.codec import decode, encode

Dtype = Literal["float32", "bfloat16"]
TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest accepted difference of a log-prob or a loss from the reference's, in nats. Rounding makes 1e-5 and 0.05."""
AGREEMENT: dict[Dtype, float] = {"float32": 0.999, "bfloat16": 0.7}
"""Least cosine between the update's changes of the log-probs and the reference's. Under Adam rounding turns the signs
of small gradients: measured 1 - 1e-10 and 0.89. Unrelated updates have about 0."""
LAYOUT_TOLERANCE = 1e-3
"""The same between layouts: sums over ranks are added in another order."""
MEMORY_SHARE = 1.3
"""Largest accepted ratio of measured to predicted memory."""
LONGEST_S = 600.0
"""Longest time of one test's processes."""
LAYOUTS = {"TP2": (2, 1), "PP2": (1, 2), "DP2": (1, 1)}
"""Tensor and pipeline sizes of the tested layouts, each of two ranks."""


def float32(settings: DoctorSettings) -> Finding:
    """Compare an update with the reference, and with itself."""
    return _update(settings, "float32")


def bfloat16(settings: DoctorSettings) -> Finding:
    """Compare an update in bfloat16 with the float32 reference, and with itself."""
    return _update(settings, "bfloat16")


def layouts(settings: DoctorSettings) -> Finding:
    """Compare two ranks with one, under tensor, pipeline and data parallelism."""
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        raise Absent("fewer than two GPUs")
    alone = _run(_job(settings))
    facts = {}
    for name, (tensor, pipeline) in LAYOUTS.items():
        found = _run(_job(settings, size=2, tensor=tensor, pipeline=pipeline))
        facts[name] = difference(alone, found)
        if not (facts[name] <= LAYOUT_TOLERANCE and agreement(alone, found) >= AGREEMENT["float32"]):
            advice = "the ranks' communication gives wrong numbers: look at the network rungs, and send the JSON report"
            raise Fault(f"{name} differs from one rank by {facts[name]:.2g} nats", advice, **facts)
    shown = ", ".join(f"{name} {value:.1g}" for name, value in facts.items())
    return Finding(f"differences from one rank: {shown} nats", facts)


def publication(settings: DoctorSettings) -> Finding:
    """Publish trained weights to shared memory, and read them back."""
    found = _run(_job(settings, publish=True))
    assert found.published is not None
    if not found.published.sound:
        advice = "shared memory does not keep what is written to it: test this host's memory"
        raise Fault("published weights are not what was written", advice)
    rate = found.published.num_bytes / max(found.published.seconds, 1e-9)
    facts = {"bytes": found.published.num_bytes, "seconds": found.published.seconds}
    return Finding(f"{found.published.num_bytes / 2**20:.1f} MB at {rate / 1e9:.2f} GB/s, read back whole", facts)


def memory(settings: DoctorSettings) -> Finding:
    """Compare the memory of a model's weights, gradients and optimizer with the prediction of `check`."""
    found = _run(_job(settings))
    ratio = found.state_bytes / found.predicted_bytes
    facts = {
        "measured_bytes": found.state_bytes,
        "predicted_bytes": found.predicted_bytes,
        "peak_bytes": found.peak_bytes,
    }
    if not 1 / MEMORY_SHARE <= ratio <= MEMORY_SHARE:
        advice = "`stageline check` predicts memory wrongly here, so leave room. Send the JSON report"
        raise Fault(f"state takes {ratio:.2f} times the predicted memory", advice, **facts)
    return Finding(f"{found.state_bytes / 2**20:.1f} MB of state, {ratio:.2f} times the prediction", facts)


def _update(settings: DoctorSettings, dtype: Dtype) -> Finding:
    reference = _run(_job(settings, kernels="torch", on_cpu=True))
    found = _run(_job(settings, dtype=dtype))
    differs, agrees = difference(reference, found), agreement(reference, found)
    facts = {"difference_nats": differs, "agreement": agrees, "digests": found.digests, "seconds": found.seconds}
    if not (differs <= TOLERANCE[dtype] and agrees >= AGREEMENT[dtype]):
        advice = "a kernel computes wrong numbers here: try model.kernels=portable, model.products=torch"
        cause = (
            f"differs from the reference by {differs:.2g} nats, and changes log-probs with cosine {agrees:.2f} to it"
        )
        raise Fault(f"an update in {dtype} {cause}", advice, **facts)
    if len(set(found.digests)) > 1:
        advice = "replay and recovery compare bits: set model.deterministic=true, and look for faulty memory"
        raise Fault(f"an update in {dtype}, repeated, gives other bits", advice, **facts)
    text = f"{differs:.1g} nats from the reference, the same bits twice, {found.seconds:.2f} s on {found.device}"
    return Finding(text, facts)


def difference(one: RankResult, other: RankResult) -> float:
    """Return the largest difference of log-probs before the update and of the losses, in nats. It is infinite if a
    number is missing or not finite."""
    if one.losses.keys() != other.losses.keys():
        return math.inf
    ones = [*one.logprobs, *one.losses.values()]
    others = [*other.logprobs, *(other.losses[name] for name in one.losses)]
    differences = [abs(a - b) for a, b in zip(ones, others, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def agreement(one: RankResult, other: RankResult) -> float:
    """Return the cosine between the two updates' changes of the log-probs: 1 for the same direction. NaN if nothing
    changed or a number is not finite."""
    changes = [np.subtract(result.after, result.logprobs) for result in (one, other)]
    with np.errstate(invalid="ignore"):
        return float(np.dot(*changes) / np.sqrt(np.prod([change @ change for change in changes])))


def _job(
    settings: DoctorSettings,
    *,
    dtype: Dtype = "float32",
    kernels: Literal["auto", "torch"] = "auto",
    size: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    publish: bool = False,
    on_cpu: bool = False,
) -> RankJob:
    return RankJob(
        model=settings.model,
        dtype=dtype,
        kernels=kernels,
        size=size,
        tensor=tensor,
        pipeline=pipeline,
        threads=settings.threads,
        publish=publish,
        on_cpu=on_cpu,
    )


@cache
def _run(job: RankJob) -> RankResult:
    """Run the ranks of a job and return rank 0's numbers. A job runs once, however many rungs need it.

    Raises Fault if a rank fails or does not end in time."""
    _refuse_too_large(job)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if job.on_cpu else {}
    with tempfile.TemporaryDirectory(prefix="stageline-doctor-") as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "pipeline.doctor.rank", encode(job)]
        logs = [Path(folder, f"rank{index}.log") for index in range(job.size)]
        ranks = []
        for index, log in enumerate(logs):
            arguments = [str(index), f"file://{folder}/rendezvous", str(result)]
            with log.open("w") as out:
                ranks.append(
                    subprocess.Popen(
                        [*command, *arguments], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **hidden}
                    )
                )
        try:
            _wait(ranks, logs)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return decode(RankResult, result.read_bytes())


def _refuse_too_large(job: RankJob) -> None:
    """Raise Absent for a model whose state does not fit."""
    needed, on_gpu = predicted_bytes(job), torch.cuda.is_available() and not job.on_cpu
    there = torch.cuda.get_device_properties(0).total_memory if on_gpu else psutil.virtual_memory().available
    if needed > there:
        where = "a GPU" if on_gpu else "this host"
        sizes = f"{needed / 2**30:.0f} GiB in {job.dtype}, {where} has {there / 2**30:.0f}"
        raise Absent(f"{job.model} needs {sizes}: give a smaller --model")


def _wait(ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Wait until all ranks have ended. Raises Fault for the first that fails, with the end of its output."""
    until = time.monotonic() + LONGEST_S
    while any(rank.poll() is None for rank in ranks):
        failed = next((index for index, rank in enumerate(ranks) if rank.poll()), None)
        if failed is not None:
            break
        if time.monotonic() > until:
            raise Fault(
                f"a test of {len(ranks)} ranks does not end in {LONGEST_S:g} s",
                "the ranks wait for one another: look at the network rungs, and send the JSON report",
                outputs=[log.read_text(errors="replace")[-2000:] for log in logs],
            )
        time.sleep(0.05)
    for index, rank in enumerate(ranks):
        if rank.poll():
            output = logs[index].read_text(errors="replace")
            said = output.strip().splitlines()[-1:] or ["it printed nothing"]
            raise Fault(
                f"rank {index} of {len(ranks)} ended with {rank.returncode}: {said[0]}",
                "send the JSON report, which has the rank's output",
                output=output[-4000:],
            )
