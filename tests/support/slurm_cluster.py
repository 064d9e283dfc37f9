"""A real Slurm of this machine's own: munged, slurmctld and several slurmd, each a node that does not know that it
shares its host. On loopback, in a temporary folder, as whoever runs the tests; without systemd, control groups and
accounting.

GPUs are made up: Slurm counts them, binds steps to them and sets CUDA_VISIBLE_DEVICES, with nothing behind them.
"""

from __future__ import annotations

import getpass
import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.ports import free_ports
from tests.support.waiting import until

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
PACKAGES = "munge slurmctld slurmd slurm-client"
"""Packages of Debian and Ubuntu."""
PARTITION, URGENT = "all", "urgent"
"""Jobs of the second one have those of the first requeued where they need their nodes."""
MOST_GPUS = 8
_FORGETS_S = 4.0
_SCHEDULES_S = 3.0
"""Time in which what can start is started."""
_MARK = "TESTS_SLURM_NODE"
"""In the environment of a node's slurmd, which the managers of its steps inherit and its jobs do not."""
_SBIN = "/usr/sbin:/sbin"
"""Where daemons are, which a user's path need not name."""

_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=256
GresTypes=gpu
LaunchParameters=enable_nss_slurm
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1,bf_resolution=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=10
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=30
TCPTimeout=5
JobRequeue=1
MaxArraySize=1001
AccountingStorageType=accounting_storage/none
"""


@dataclass(frozen=True)
class Node:
    """The resources that a node reports."""

    cpus: int = 4
    gpus: int = 0
    feature: str = "any"


def missing() -> str | None:
    """Return the parts of Slurm that this machine lacks, and how to get them; None: nothing is missing."""
    absent = [name for name in (*DAEMONS, *COMMANDS) if _which(name) is None]
    if not absent:
        return None
    return f"no {', '.join(absent)} on this machine: `make test-slurm` installs Debian's {PACKAGES}"


class SlurmCluster:
    """Owns the daemons, their folder, and every job that is left when it is closed."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = dict(nodes)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._told_to_start: dict[str, float] = {}
        """When Slurm was last told to start a job."""
        with ExitStack() as stack:
            # short: the path of a socket may have 107 characters
            self.root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
            stack.callback(self._stop)
            self._write()
            self.environment = os.environ | {
                "SLURM_CONF": str(self.root / "slurm.conf"),
                "PATH": f"{os.environ['PATH']}:{_SBIN}",
            }
            self._start_all()
            self._stack = stack.pop_all()

    def call(self, *command: str, check: bool = True) -> str:
        """Return the output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout

    def state(self, job: str) -> str:
        """Return the state of a job, or of the first component of a heterogeneous one: PENDING, RUNNING, COMPLETED,
        …"""
        return self.show(job)["JobState"]

    def show(self, job: str) -> dict[str, str]:
        """All that Slurm knows of a job, or of the first component of one, as `scontrol show job` has it."""
        return self._components(job)[0]

    def may_start(self, job: str, restarts: int) -> bool:
        """Return True if a job was requeued so often, its last start has ended, and slurmd has forgotten that it was
        killed, for which Slurm waits two minutes."""
        shown = self._components(job)
        submitted = max(time.mktime(time.strptime(one["SubmitTime"], "%Y-%m-%dT%H:%M:%S")) for one in shown)
        requeued = all((one["JobState"], one["Restarts"]) == ("PENDING", str(restarts)) for one in shown)
        return requeued and not self.processes() and time.time() - submitted > _FORGETS_S

    def started_now(self, job: str) -> bool:
        """Let a requeued job wait no longer, every component of a heterogeneous one. Return True if it runs. Slurm is
        told again only after the time in which it starts what can start."""
        waiting = [one["JobId"] for one in self._components(job) if one["JobState"] == "PENDING"]
        if waiting and time.monotonic() - self._told_to_start.get(job, -math.inf) > _SCHEDULES_S:
            for number in waiting:
                self.call("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)
            self._told_to_start[job] = time.monotonic()
        return not waiting and self.state(job) == "RUNNING"

    def _components(self, job: str) -> list[dict[str, str]]:
        lines = self.call("scontrol", "--oneliner", "show", "job", job).splitlines()
        return [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines if line]

    def kill_node(self, name: str) -> None:
        """SIGKILL to a node's slurmd, to the managers of its steps, and to what they have started: as if its power had
        failed. All are stopped before the first is killed, or a job's script would see its driver die, and act; and
        children are killed before their parents, since the kernel continues what is stopped when its parent's end
        leaves its process group an orphan: srun's second process then cancels the step on all nodes."""
        daemon = self._daemons.pop(f"slurmd {name}")
        here = f"SLURM_CONF={self.root}/slurm.conf\0"
        marks = (f"{_MARK}={name}\0", f"SLURMD_NODENAME={name}\0")  # managers of steps; what these have started
        stopped: set[int] = set()
        while running := {pid for mark in marks for pid in processes_with(here, mark)} - stopped:
            _signal(running, signal.SIGSTOP)
            stopped |= running
        _signal(sorted(stopped, key=_depth, reverse=True), signal.SIGKILL)
        daemon.kill()
        daemon.wait()

    def start_node(self, name: str) -> None:
        """A node, again."""
        self._start(f"slurmd {name}", "slurmd", "-D", "-N", name)

    def recover(self) -> None:
        """Ends what is left of jobs and starts the nodes that are down: for whoever comes next, whatever became of the
        test before."""
        left = self.call("squeue", "--noheader", "--format=%i").split()
        if left:
            self.call("scancel", "--full", *left, check=False)
            until(lambda: not self.processes(), "no job is left", every_s=0.1)
        for name in self._nodes:
            if f"slurmd {name}" not in self._daemons:
                self.start_node(name)
        self._wait_for_nodes()

    def processes(self) -> list[int]:
        """Return the processes of all jobs: those with this Slurm's configuration in their environment."""
        return processes_with(f"SLURM_CONF={self.root}/slurm.conf", "SLURM_JOB_ID=")

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self) -> None:
        for name in ("run", "munge", "state", "log", *(f"spool/{node}" for node in self._nodes)):
            (self.root / name).mkdir(parents=True)
        (self.root / "munge").chmod(0o700)
        key = self.root / "munge/munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for number in range(MOST_GPUS):
            (self.root / f"run/nvidia{number}").symlink_to("/dev/null")  # slurmd wants a device
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(1 + len(self._nodes))
        lines = [_CONFIGURATION.format(host=host, port=port, user=getpass.getuser(), root=self.root)]
        gres = ["AutoDetect=off"]
        for (name, node), own in zip(self._nodes.items(), ports, strict=True):
            has = f"CPUs={node.cpus} RealMemory=8000 Feature={node.feature}" + (
                f" Gres=gpu:{node.gpus}" * (node.gpus > 0)
            )
            lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} {has}")
            if node.gpus:
                gres.append(f"NodeName={name} Name=gpu File={self.root}/run/nvidia[0-{node.gpus - 1}]")
        for partition, tier in ((PARTITION, 1), (URGENT, 2)):
            default = "YES" if partition == PARTITION else "NO"
            times = f"MaxTime=60 DefaultTime=10 State=UP PriorityTier={tier} Default={default}"
            lines.append(f"PartitionName={partition} Nodes={','.join(self._nodes)} {times}")
        (self.root / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.root / "gres.conf").write_text("\n".join(gres) + "\n")
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def _start_all(self) -> None:
        files = [f"--{name}-file={self.root}/{path}" for name, path in _MUNGE_FILES.items()]
        munge = f"--socket={self.root}/run/munge.sock"
        self._start("munged", "munged", "--foreground", "--force", "--num-threads=2", munge, *files)
        until(lambda: self._succeeds("munge", "-n", "-S", str(self.root / "run/munge.sock")), "munged's socket")
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in self._nodes:
            self.start_node(node)
        self._wait_for_nodes()

    def _wait_for_nodes(self) -> None:
        idle = ("sinfo", "--noheader", "--Node", "--states=idle", f"--partition={PARTITION}", "--format=%N")
        until(lambda: len(self.call(*idle, check=False).split()) == len(self._nodes), "all nodes are idle", every_s=0.1)

    def _start(self, name: str, command: str, *arguments: str) -> None:
        with (self.root / f"log/{name.replace(' ', '.')}.log").open("ab") as log:
            program = _which(command)
            assert program is not None
            environment = self.environment | {_MARK: name.partition(" ")[2]}
            self._daemons[name] = subprocess.Popen(
                [program, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _succeeds(self, *command: str) -> bool:
        return subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode == 0

    def _stop(self) -> None:
        if "slurmctld" in self._daemons:
            self._succeeds("scancel", f"--user={getpass.getuser()}")
            self._succeeds("scancel", "--signal=KILL", f"--user={getpass.getuser()}")
        for daemon in reversed(self._daemons.values()):
            daemon.kill()  # a node that is told to end waits up to a minute for the steps of jobs to end
        for daemon in self._daemons.values():
            daemon.wait()
        for pid in processes_with(f"SLURM_CONF={self.root}/slurm.conf", ""):
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


_MUNGE_FILES = {"key": "munge/munge.key", "pid": "run/munged.pid", "log": "log/munged.log", "seed": "munge/seed"}


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _depth(pid: int) -> int:
    """Return the number of ancestors of a process below init; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return len(psutil.Process(pid).parents())
    return 0


def processes_with(*needed: str) -> list[int]:
    """Ids of living processes of this user whose command line and environment together have all of these texts."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                text = (folder / "cmdline").read_bytes() + b"\0" + (folder / "environ").read_bytes() + b"\0"
                if text.strip(b"\0") and all(part.encode() in text for part in needed):
                    found.append(int(folder.name))
    return found


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SBIN}")
