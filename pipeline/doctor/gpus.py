"""The doctor's tests of GPUs and of the links between them. They are skipped on a machine without an NVIDIA driver.

These tests have not been run on a GPU yet. Their unit tests use output of `nvidia-smi` and rates of copies as input.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch

from pipeline.doctor.copies import CopyResult
from pipeline.doctor.processes import Program, run_together
from pipeline.doctor.runner import DoctorSettings, Fault, Finding, NotApplicable
from storage.codec import decode

SMI_TIMEOUT_S = 60.0
MIN_CAPABILITY = (8, 0)
"""Oldest accepted compute capability: Ampere, the first generation with bfloat16."""
MAX_USED_BYTES = 1 << 30
"""Number of bytes that other processes may use on a GPU. If they use more, the test reports a fault."""
LINK_BYTES_PER_S = 25e9
"""Rate of one NVLink in one direction, for generations 2 to 4. Generation 5 has twice this rate.

NVIDIA's data sheets state the rate of all links in both directions together: 600 GB/s with 12 links for the A100, 900
GB/s with 18 links for the H100."""
NEWER_LINKS = ("B100", "B200", "B300")
"""Parts of the names of GPUs that have NVLink of generation 5."""
MIN_LINK_FRACTION = 0.5
"""Lowest accepted rate of a copy between two GPUs, as a fraction of the rate of all NVLinks between them."""
PCIE_BYTES_PER_S = 5e9
"""Lowest accepted rate of a copy without NVLink, between GPUs or between a GPU and the host: a third of PCIe 3.0 x16.
"""
PROGRAM = ("-m", "pipeline.doctor.copies")
_NVIDIA_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
_FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
)


@dataclass(frozen=True)
class Gpu:
    """A GPU as `nvidia-smi` lists it."""

    index: int
    uuid: str
    name: str
    driver: str
    total_bytes: int
    used_bytes: int
    uncorrected_errors: int
    """Number of memory errors, since the driver was loaded, that could not be corrected. It is 0 if the GPU does not
    count memory errors."""


def driver(settings: DoctorSettings) -> Finding:
    """Test that the NVIDIA driver supports the CUDA version of torch, and that torch sees the GPUs."""
    here = [file for file in _NVIDIA_FILES if Path(file).exists()]
    if shutil.which("nvidia-smi") is None:
        if here:
            raise Fault(
                f"there is {here[0]}, but no nvidia-smi",
                "install the driver's utilities (in the container, too)",
            )
        raise NotApplicable("no NVIDIA driver")
    gpus = list_gpus()
    if torch.version.cuda is None:
        advice = "install a torch for CUDA, then `make install TORCH=system` (README)"
        raise Fault(f"torch {torch.__version__} was built without CUDA, beside {len(gpus)} GPUs", advice)
    speaks = _cuda_of_driver()
    facts = {"driver": gpus[0].driver, "driver_cuda": speaks, "torch_cuda": torch.version.cuda}
    if speaks is not None and _numbers(speaks)[0] < _numbers(torch.version.cuda)[0]:
        advice = f"update the driver to one for CUDA {torch.version.cuda}, or install a torch for CUDA {speaks}"
        raise Fault(f"driver {gpus[0].driver} is for CUDA {speaks}, torch for {torch.version.cuda}", advice, **facts)
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
            reason = "torch gives no reason"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        if shown in ("", "-1"):
            raise NotApplicable(f"CUDA_VISIBLE_DEVICES={shown} hides the {len(gpus)} GPUs, so the CPU is tested")
        advice = (
            "unset CUDA_VISIBLE_DEVICES"
            if shown is not None
            else "look at `dmesg`; a reboot may be due after an update"
        )
        raise Fault(f"nvidia-smi lists {len(gpus)} GPUs, but torch sees none: {reason}", advice, visible=shown, **facts)
    return Finding(f"driver {gpus[0].driver}, CUDA {torch.version.cuda}", facts)


def gpus(settings: DoctorSettings) -> Finding:
    """Test each GPU: its generation, errors of its memory, and the memory that other processes use."""
    if not torch.cuda.is_available():
        raise NotApplicable("no GPU that torch can use")
    visible = visible_gpus()
    facts = {"gpus": [vars(gpu) for gpu in visible]}
    for index in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(index) < MIN_CAPABILITY:
            name = torch.cuda.get_device_name(index)
            raise Fault(f"GPU {index} ({name}) has no bfloat16", "use an A100 or newer, or float16", **facts)
    for gpu in visible:
        if gpu.uncorrected_errors:
            advice = f"drain the node and reset {gpu.uuid}; replace it if they come back"
            raise Fault(f"GPU {gpu.index} has {gpu.uncorrected_errors} uncorrected memory errors", advice, **facts)
        if gpu.used_bytes > MAX_USED_BYTES:
            advice = "end the processes that `nvidia-smi` lists, or leave this GPU out (CUDA_VISIBLE_DEVICES)"
            raise Fault(f"others use {gpu.used_bytes >> 20} MB of GPU {gpu.index}", advice, **facts)
    names = sorted({gpu.name for gpu in visible})
    return Finding(f"{len(visible)} x {', '.join(names)}, {visible[0].total_bytes / 2**30:.0f} GB", facts)


def gpu_links(settings: DoctorSettings) -> Finding:
    """Test copies between the host and each GPU, and between each pair of GPUs. The copied bytes must be correct, and
    no copy may be too slow for the links that `nvidia-smi` lists (`slow_copies`)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise NotApplicable("no GPU that torch can use")
    number = {gpu.uuid: gpu.index for gpu in list_gpus()}
    numbers = [number.get(_uuid(index), index) for index in range(count)]
    by_number = parse_topology(_smi("topo", "-m")) if count > 1 else {}
    links = {f"{a}->{b}": by_number.get((numbers[a], numbers[b]), 0) for a, b in permutations(range(count), 2)}
    with tempfile.TemporaryDirectory(prefix="stageline-doctor-") as folder:
        result = Path(folder, "copies.json")
        arguments = [*PROGRAM, str(result), *(f"cuda:{index}" for index in range(count))]
        advice = "look at `dmesg` for errors of the GPUs, and send the JSON report"
        run_together([Program("copies between GPUs", arguments)], settings.deadline_s, advice)
        copied = decode(CopyResult, result.read_bytes())
    link = LINK_BYTES_PER_S * (2 if any(new in torch.cuda.get_device_name(0) for new in NEWER_LINKS) else 1)
    facts = {"bytes_per_s": copied.bytes_per_s, "wrong": copied.wrong}
    if copied.wrong:
        advice = "drain the node: data is damaged on its way. Look at `dmesg` and at `nvidia-smi -q` for errors"
        raise Fault(f"other bytes arrive than were sent: {', '.join(copied.wrong)}", advice, **facts)
    slow = list(slow_copies(copied.bytes_per_s, links, link))
    if slow:
        advice = "look at `nvidia-smi nvlink -s` and at the fabric manager's log; the node may need a reset"
        raise Fault("; ".join(slow), advice, **facts)
    hosts = min(rate for name, rate in copied.bytes_per_s.items() if "host" in name)
    between = min((rate for name, rate in copied.bytes_per_s.items() if "host" not in name), default=None)
    pairs = "" if between is None else f", {between / 1e9:.0f} GB/s or more between all pairs"
    return Finding(
        f"{hosts / 1e9:.0f} GB/s or more from and to the host{pairs}; the bytes that were sent arrive", facts
    )


def slow_copies(rates: Mapping[str, float], links: Mapping[str, int], link: float) -> Iterator[str]:
    """Yield a line of text for each copy whose rate is below the lowest accepted rate for its links.

    Args:
        rates: name of a copy ("from->to") -> its bytes per second.
        links: name of a copy -> number of NVLinks that it uses. 0 or no entry: it uses PCIe.
        link: bytes per second of one NVLink."""
    for name, rate in rates.items():
        number = links.get(name, 0)
        least = MIN_LINK_FRACTION * number * link if number else PCIE_BYTES_PER_S
        if rate < least:
            over = f"{number} NVLinks" if number else "PCIe"
            yield f"GPU {name}: {rate / 1e9:.1f} GB/s over {over}, expected {least / 1e9:.0f} or more"


def parse_topology(text: str) -> dict[tuple[int, int], int]:
    """Return (GPU, GPU) -> number of NVLinks between the two, for pairs that have any. `text`: output of `nvidia-smi
    topo -m`, in which a cell NV18 stands for 18 links."""
    links = {}
    for row in text.splitlines():
        cells = re.sub(r"\x1b\[[0-9;]*m", "", row).split()
        if not cells or re.fullmatch(r"GPU\d+", cells[0]) is None or len(cells) < 2 or cells[1].startswith("GPU"):
            continue
        for target, cell in enumerate(cells[1:]):
            if (match := re.fullmatch(r"NV(\d+)", cell)) is not None:
                links[int(cells[0][3:]), target] = int(match[1])
    return links


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that torch sees in this process, described as `nvidia-smi` lists them."""
    seen = {_uuid(index) for index in range(torch.cuda.device_count())}
    return [gpu for gpu in list_gpus() if gpu.uuid in seen]


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def list_gpus() -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists.

    Raises:
        Fault: `nvidia-smi` fails or does not answer, or a Slurm job has no GPU.
        NotApplicable: there is no GPU."""
    rows = csv.reader(io.StringIO(_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")))
    gpus = []
    for row in rows:
        index, uuid, name, of_driver, total, used, errors = (cell.strip() for cell in row)
        total_mib, used_mib, count = (int(text) if text.isdigit() else 0 for text in (total, used, errors))
        gpus.append(Gpu(int(index), uuid, name, of_driver, total_mib << 20, used_mib << 20, count))
    return gpus


def _cuda_of_driver() -> str | None:
    """Return the newest CUDA version that the driver supports, such as "13.0"."""
    match = re.search(r"CUDA Version:\s*([\d.]+)", _smi())
    return None if match is None else match[1]


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Fault(
            f"nvidia-smi does not answer in {SMI_TIMEOUT_S:g} s", "a GPU hangs: look at `dmesg`, reset it"
        ) from error
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        if "No devices were found" in "".join(lines):
            if "SLURM_JOB_ID" in os.environ:
                raise Fault("this job has no GPU", "ask Slurm for some: slurm.gres, slurm.gangs.*.gpus_per_worker")
            raise NotApplicable("no NVIDIA GPU")
        advice = "load the driver again or reboot: its library and its kernel module must be of one version"
        raise Fault(f"nvidia-smi fails: {lines[-1] if lines else done.returncode}", advice)
    return done.stdout


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
