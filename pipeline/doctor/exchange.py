"""The doctor's tests of connections between processes: one process for each GPU of this host, or one on each node of a
job.

    rank 0 listens ──► writes its address to the file RENDEZVOUS ──► the others connect ──► all add up the same tensor

Each rank is a process of its own: `python -m pipeline.doctor.exchange INDEX SIZE RENDEZVOUS RESULT SECONDS PLACE`, with
PLACE `here` or `nodes`.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from pipeline.config.hardware import hardware_with
from pipeline.doctor.processes import Program, run_together
from pipeline.doctor.runner import DoctorSettings, Fault, Finding, NotApplicable
from storage.codec import decode, encode
from storage.host import end_with_parent, route_address

NUM_BYTES = {"gloo": 64 << 20, "nccl": 256 << 20}
RENDEZVOUS_S = 300.0
"""Longest time that a rank waits for the others, in seconds. The other ranks' nodes may take longer for the preceding
tests."""
MIN_BYTES_PER_S = {"gloo": 20e6, "nccl": 1e9}
"""Backend -> lowest accepted rate of an all-reduce in bytes per second, if the rate of the links is not known. For gloo
this is about a fifth of the rate of 1 Gbit/s Ethernet. For NCCL it is about the whole rate of a link with 10 Gbit/s."""
MIN_LINK_FRACTION = 0.25
"""Fraction of the links' rate in `conf/hardware` that an all-reduce by NCCL must reach.

We expect an all-reduce of NUM_BYTES to reach more than half of the rate over good links. Over PCIe in place of NVLink,
or over TCP in place of InfiniBand, we expect a tenth or less. We have not measured these fractions."""
PROGRAM = ("-m", "pipeline.doctor.exchange")
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
"""Environment variables that make NCCL print its network. The report contains this output."""
ADVICE = "look for a node that stopped at an earlier test, then at firewalls: these hosts must reach one another"

Place = Literal["here", "nodes"]


@dataclass(frozen=True)
class AllReduceResult:
    """Result of the test of all-reduce bandwidth."""

    backend: str
    gpu: str
    """Name of rank 0's GPU; empty if it has none."""
    bytes_per_s: float
    """Size of one rank's tensor, divided by the duration of the fastest of six all-reduces."""


def ranks(settings: DoctorSettings) -> Finding:
    """Test an all-reduce on this host. There is one process per GPU, or two processes if there are no GPUs. Raises
    NotApplicable if there is only one GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 2
    if count < 2:
        raise NotApplicable("fewer than two GPUs")
    with tempfile.TemporaryDirectory(prefix="stageline-doctor-") as folder:
        rendezvous, result = Path(folder, "rendezvous"), Path(folder, "result")
        programs = [_program(index, count, rendezvous, result, "here") for index in range(count)]
        run_together(programs, settings.deadline_s, ADVICE)
        return judge_rate(decode(AllReduceResult, result.read_bytes()), count, "here")


def nodes(settings: DoctorSettings) -> Finding:
    """Test an all-reduce over the nodes of the Slurm job step that this process belongs to, with one rank per node.
    Raises NotApplicable if the process belongs to no step, or to a step with only one task."""
    size = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if size < 2:
        raise NotApplicable("not a Slurm step on several nodes (stageline doctor --submit CONFIG)")
    index = int(os.environ["SLURM_PROCID"])
    name = f"doctor-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    rendezvous = settings.runs_dir / f".{name}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    result = settings.scratch / "nodes"
    try:
        run_together([_program(index, size, rendezvous, result, "nodes")], settings.deadline_s, ADVICE)
        if index:
            return Finding(f"{size} nodes added up a tensor, correctly")
        return judge_rate(decode(AllReduceResult, result.read_bytes()), size, "nodes")
    finally:
        if not index:
            rendezvous.unlink(missing_ok=True)


def _program(index: int, size: int, rendezvous: Path, result: Path, place: Place) -> Program:
    arguments = [*PROGRAM, str(index), str(size), str(rendezvous), str(result), str(RENDEZVOUS_S)]
    return Program(f"rank {index} of {size}", [*arguments, place], LOG)


def judge_rate(measured: AllReduceResult, size: int, place: Place) -> Finding:
    """Return the finding of an all-reduce over `size` ranks.

    Raises:
        Fault: the rate is too slow for the links between the ranks."""
    who = f"{size} processes on this host" if place == "here" else f"{size} nodes"
    least, because = _min_rate(measured, size, place)
    rate = f"{who} add up {measured.bytes_per_s / 1e9:.2f} GB/s by {measured.backend}"
    compared = f"{least / 1e9:.2f} or more expected ({because})"
    facts = {
        "backend": measured.backend,
        "gpu": measured.gpu,
        "bytes_per_s": measured.bytes_per_s,
        "least_bytes_per_s": least,
    }
    if measured.bytes_per_s < least:
        advice = "NCCL may have fallen back to TCP or PCIe (run again with NCCL_DEBUG=INFO). On CPUs: a faster network"
        raise Fault(f"{rate}; {compared}", advice, **facts)
    return Finding(f"{rate}; {compared}", facts)


def _min_rate(measured: AllReduceResult, size: int, place: Place) -> tuple[float, str]:
    """Return the lowest accepted rate in bytes per second, and the reason for it. In a ring of n ranks, an all-reduce
    sends a rank's bytes 2 (n - 1) / n times over each link."""
    known = hardware_with(measured.gpu) if measured.backend == "nccl" else None
    if known is None:
        slow = "a fifth of 1 Gbit/s Ethernet"
        unknown = f"10 Gbit/s: no file in conf/hardware is for {measured.gpu!r}" if measured.gpu else slow
        return MIN_BYTES_PER_S[measured.backend], unknown
    name, hardware = known
    if place == "nodes":
        link, of = hardware.link_bytes_per_s, "a network link"
    else:
        over = hardware.nvlink_bytes_per_s
        link, of = (over, "NVLink") if over else (hardware.pcie_bytes_per_s, "PCIe")
    rate = MIN_LINK_FRACTION * link * size / (2 * (size - 1))
    return rate, f"a quarter of what {of} of {name} allows, {link / 1e9:.0f} GB/s"


def measure_all_reduce(
    index: int, size: int, rendezvous: Path, timeout_s: float, *, on_one_host: bool
) -> AllReduceResult:
    """Join the group as rank `index`, run six all-reduces, and check every number of their results. Return the rate of
    the fastest all-reduce.

    Args:
        index: number of this rank.
        size: number of ranks.
        rendezvous: file in which rank 0 announces its address.
        timeout_s: longest time to wait for the other ranks.
        on_one_host: True if all ranks are on this host, each with a GPU of its own. Otherwise each rank has the first
            GPU of its node.

    Raises:
        RuntimeError: the other ranks do not connect, or the result is wrong."""
    timeout = timedelta(seconds=timeout_s)
    host, port = (reachable_address(on_one_host), 0) if not index else _address(rendezvous, timeout_s)
    store = dist.TCPStore(host, port, None, is_master=not index, timeout=timeout, wait_for_workers=False)
    if not index:
        staged = rendezvous.with_name(f"{rendezvous.name}.new")
        staged.write_text(f"{host} {store.port}")
        staged.replace(rendezvous)
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    device = torch.device("cuda", index if on_one_host else 0) if cuda else torch.device("cpu")
    dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=timeout)
    best, num_bytes = 0.0, NUM_BYTES[backend]
    try:
        pattern = torch.arange(num_bytes // 4, device=device).remainder_(251).float()  # small enough for exact sums
        expected = pattern * size + size * (size - 1) // 2
        for _ in range(6):  # the first all-reduce opens the connections
            tensor = pattern + index
            float(tensor[-1])  # waits for the device
            began = time.perf_counter()
            dist.all_reduce(tensor)
            float(tensor[-1])
            best = max(best, num_bytes / (time.perf_counter() - began))
            wrong = int((tensor != expected).sum())
            if wrong:
                raise RuntimeError(f"{wrong} of {len(tensor)} numbers of the sum over {size} ranks are wrong")
    finally:
        dist.destroy_process_group()
    return AllReduceResult(backend, torch.cuda.get_device_name(device) if cuda else "", best)


def reachable_address(on_one_host: bool) -> str:
    """Return the address at which the other ranks reach this host.

    - If all ranks are on one host, the address is 127.0.0.1.
    - Otherwise it is the address to which the host's name resolves.
    - If the name resolves to a loopback address, as in Debian's /etc/hosts, it is the address of the interface that has
      the default route. If the host has no default route, it is the loopback address."""
    if on_one_host:
        return "127.0.0.1"
    named = socket.gethostbyname(socket.gethostname())
    if not ip_address(named).is_loopback:
        return named
    try:
        return route_address("192.0.2.1")  # this address belongs to no host, so the default route leads to it
    except OSError:
        return named  # no route at all: a machine without a network


def _address(rendezvous: Path, timeout_s: float) -> tuple[str, int]:
    until = time.monotonic() + timeout_s
    while not rendezvous.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"rank 0 did not write {rendezvous} in {timeout_s:g} s")
        time.sleep(0.1)
    host, port = rendezvous.read_text().split()
    return host, int(port)


def main() -> int:
    end_with_parent()
    index, size, rendezvous, result, timeout_s, place = sys.argv[1:]
    measured = measure_all_reduce(
        int(index), int(size), Path(rendezvous), float(timeout_s), on_one_host=place == "here"
    )
    if index == "0":
        Path(result).write_text(encode(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
