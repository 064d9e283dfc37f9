"""Rungs of the connections between processes: two on this host, and one on each node of a Slurm job.

    rank 0 listens ──► writes its address to the file MEETING ──► the others connect ──► all add up the same tensor

Each rank is a process of its own:
`python -m pipeline.doctor.exchange INDEX SIZE MEETING RESULT SECONDS PLACE`, with PLACE `here` or `nodes`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from pipeline.doctor.ladder import Absent, DoctorSettings, Fault, Finding

NUM_BYTES = 64 << 20
MEETING_S = 120.0
"""Longest wait of a rank for the others."""
NODES_S = 300.0
"""Longest time of a rank's process."""
SLOWEST = {"gloo": 20e6, "nccl": 1e9}
"""Slowest accepted sum over ranks, in bytes per second: a fifth of 1 Gbit/s Ethernet, and 10 Gbit/s."""


def ranks(settings: DoctorSettings) -> Finding:
    """Add up a tensor over two processes on this host."""
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        raise Absent("fewer than two GPUs")
    with tempfile.TemporaryDirectory(prefix="stageline-doctor-") as folder:
        meeting, result = Path(folder, "meeting"), Path(folder, "result")
        processes = [_start(index, 2, meeting, result, "here") for index in range(2)]
        return _finding(processes, result, "two processes here")


def nodes(settings: DoctorSettings) -> Finding:
    """Add up a tensor over the nodes of the Slurm job step that this process belongs to, one rank a node."""
    size = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if size < 2:
        raise Absent("not a Slurm step on several nodes (stageline doctor --submit CONFIG)")
    index = int(os.environ["SLURM_PROCID"])
    name = f"doctor-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    meeting = settings.runs_dir / f".{name}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    result = settings.scratch / "nodes"
    try:
        return _finding([_start(index, size, meeting, result, "nodes")], result if not index else None, f"{size} nodes")
    finally:
        if not index:
            meeting.unlink(missing_ok=True)


def _start(
    index: int, size: int, meeting: Path, result: Path, place: Literal["here", "nodes"]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline.doctor.exchange", str(index), str(size)]
    command += [str(meeting), str(result), str(MEETING_S), place]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finding(processes: Sequence[subprocess.Popen[str]], result: Path | None, who: str) -> Finding:
    advice = "look for a node that stopped at an earlier test, then at firewalls: these hosts must reach one another"
    try:
        outputs = [process.communicate(timeout=NODES_S)[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise Fault(f"{who} do not meet in {NODES_S:g} s", advice) from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            said = output.strip().splitlines()[-1:] or ["it printed nothing"]
            raise Fault(f"{who} cannot add up a tensor: {said[0]}", advice, output=output[-4000:])
    if result is None:
        return Finding(f"{who} added up a tensor")
    backend, text = result.read_text().split()
    rate = float(text)
    facts = {"backend": backend, "bytes_per_s": rate}
    if rate < SLOWEST[backend]:
        raise Fault(f"{who} add up {rate / 1e6:.0f} MB/s by {backend}", f"choose a faster network: {advice}", **facts)
    return Finding(f"{who} add up {rate / 1e9:.2f} GB/s by {backend}", facts)


def exchange(index: int, size: int, meeting: Path, timeout_s: float, *, alone: bool) -> tuple[str, float]:
    """Join the group and add up a tensor of NUM_BYTES. Return the backend and the bytes per second, the best of five.
    `alone`: all ranks are on this host, each with a GPU of its own; otherwise each has the first GPU of its node.

    Raises RuntimeError if the others do not come, or if the sum is wrong."""
    timeout = timedelta(seconds=timeout_s)
    host, port = (own_address(alone), 0) if not index else _address(meeting, timeout_s)
    store = dist.TCPStore(host, port, None, is_master=not index, timeout=timeout, wait_for_workers=False)
    if not index:
        staged = meeting.with_name(f"{meeting.name}.new")
        staged.write_text(f"{host} {store.port}")
        staged.replace(meeting)
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    device = torch.device("cuda", index if alone else 0) if cuda else torch.device("cpu")
    dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=timeout)
    best = 0.0
    try:
        for _ in range(6):  # the first one opens the connections
            tensor = torch.full((NUM_BYTES // 4,), float(index + 1), device=device)
            began = time.perf_counter()
            dist.all_reduce(tensor)
            total = float(tensor[-1])  # waits for the device
            best = max(best, NUM_BYTES / (time.perf_counter() - began))
            if total != size * (size + 1) / 2:
                raise RuntimeError(f"the sum over {size} ranks is {total}, not {size * (size + 1) / 2}")
    finally:
        dist.destroy_process_group()
    return backend, best


def own_address(alone: bool) -> str:
    """Return the address by which the other ranks reach this host: that of its name, or where that is a loopback
    address, as in Debian's /etc/hosts, that of the interface of the default route."""
    if alone:
        return "127.0.0.1"
    named = socket.gethostbyname(socket.gethostname())
    if not ip_address(named).is_loopback:
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket only chooses its route; nothing is sent
        except OSError:
            return named  # no route at all: a machine by itself
        return str(probe.getsockname()[0])


def _address(meeting: Path, timeout_s: float) -> tuple[str, int]:
    until = time.monotonic() + timeout_s
    while not meeting.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"rank 0 did not write {meeting} in {timeout_s:g} s")
        time.sleep(0.1)
    host, port = meeting.read_text().split()
    return host, int(port)


def main() -> int:
    index, size, meeting, result, timeout_s, place = sys.argv[1:]
    alone = place == "here"
    backend, rate = exchange(int(index), int(size), Path(meeting), float(timeout_s), alone=alone)
    if index == "0":
        Path(result).write_text(f"{backend} {rate}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
