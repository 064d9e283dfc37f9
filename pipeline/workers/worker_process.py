"""Start a worker process: environment, resources, forkserver, and the nanny that restarts it when it dies.

driver, or `stageline worker` ──► forkserver (imports torch; terminal signals blocked) ─fork──► worker processes
  └ nannies
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path
from typing import Any

import dask
from distributed import nanny, worker
from distributed.security import Security

from pipeline.config.run import RunConfig
from pipeline.graph.graph import Gang
from pipeline.workers.messages import pin_resource, slot_resource, worker_name
from pipeline.workers.pipe_queue import Queues
from stages.engines.remote.process import SCRATCH as ENGINE_SCRATCH
from stages.models.protocol import MODEL_ROLES, Role
from storage.host import process_alive

_DASK_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.work-stealing": False,
    # A death fails its tasks at once. The driver decides what to repeat: Dask must not repeat one rank of a collective.
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": None,  # long native calls hold the GIL; we have `cluster.deadline_s`
    # After this time Dask closes a lost worker for good, even if it has come back and died a second time.
    "distributed.deploy.lost-worker-timeout": "1000 days",
    "distributed.worker.daemon": False,
    "distributed.worker.http.routes": [],  # a worker's HTTP server has neither TLS nor a password
    # Workers fork from a clean process that has done their imports: see `start_forkserver`.
    "distributed.worker.multiprocessing-method": "forkserver",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.comm.timeouts.connect": "60s",
    "distributed.admin.tick.limit": "60s",
    "distributed.admin.low-level-log-length": 100,  # Dask has many logs, and each keeps whole messages
    "distributed.nanny.pre-spawn-environ": {},  # Dask would set it in the driver; see FORKSERVER_ENVIRONMENT
}


def _malloc_thresholds() -> tuple[int, int]:
    """Return glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, as high as it allows, so that malloc keeps freed memory. A
    step allocates the same large buffers again and again, and to fault in and zero their pages took a quarter of a
    training step. The cost: resident memory stays at its peak. Setting one threshold freezes the other, so both are
    set. glibc 2.36 accepts 1 GiB and 1 TiB; older versions may refuse more than 32 MiB, and then stay at 128 KiB."""
    libc, version = platform.libc_ver()
    current = libc == "glibc" and tuple(int(part) for part in version.split(".")[:2]) >= (2, 36)
    return (1 << 30, 1 << 40) if current else (1 << 25, 1 << 25)


_MMAP_THRESHOLD, _TRIM_THRESHOLD = _malloc_thresholds()
FORKSERVER_ENVIRONMENT = {
    # Dask runs tasks in threads, and glibc limits a thread's heap to 64 MiB. Larger buffers would be mapped and
    # unmapped every time.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD),
    # Libraries that are loaded before the fork read these variables. torch's own number is `placement.gangs.*.threads`.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DASK_LOGGING__DISTRIBUTED": "warning",
}
PRELOADED = ("stages.models.host", "stages.engines.embedded.engine", "storage.rollouts", "omegaconf")
"""Modules that the forkserver imports once for all workers: importing torch and Megatron takes each process seconds.
None of them may start a thread, since a process with threads must not fork."""
_SCRATCH = "stageline-dask-"
"""Prefix of a process's Dask directory in the temporary folder. The process id follows, as in `ENGINE_SCRATCH`."""
TERMINAL_SIGNALS = frozenset({signal.SIGINT, signal.SIGHUP})
"""Signals that a terminal sends to every process of a command: at Ctrl-C, and when the terminal is closed. Only the
driver must react to these signals."""
_UNLIMITED = 1_000_000.0
"""Capacity of the Dask resource that pins nodes to a worker. It is enough for any number of nodes. The number of nodes
at one time is limited by the worker's threads."""


def _worker_extensions() -> dict[str, Any]:
    return {name: kind for name, kind in worker.DEFAULT_EXTENSIONS.items() if name != "spans"}


def wait_policy(shared: bool) -> str:
    """Return OpenMP's wait policy. Threads that share cores must not spin: with spinning the work takes 5 to 17 times
    as long."""
    return "PASSIVE" if shared else "ACTIVE"


def worker_environment(threads: int, shared: bool, gpus: str | None = None) -> dict[str, str]:
    """Return the environment variables to set in a worker's process. The process also inherits the variables of the
    forkserver. The result includes this process's own variables, except those in `FORKSERVER_ENVIRONMENT`. This
    process's variables may have changed since the forkserver started: a notebook, for example, may set credentials
    after its first run.

    Args:
        shared: True if the process shares its cores.
        gpus: `CUDA_VISIBLE_DEVICES`, so that libraries in the process see only its own devices, numbered from 0. None:
            the value of this process.
    """
    return {
        **{name: value for name, value in os.environ.items() if name not in FORKSERVER_ENVIRONMENT},
        **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": wait_policy(shared),
        "PYTHONPATH": os.pathsep.join(
            p for p in (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")) if p
        ),
    }


def trainer_environment(roles: Collection[str], gpus: str | None) -> dict[str, str]:
    """Return environment variables for the process of a worker. A worker gets them if it has GPUs, has no engine, and
    trains a model or holds the reference model. For other workers the result is empty. A value that the user has set
    stays.

    - `PYTORCH_ALLOC_CONF`: expandable segments. With them, buffers of many sizes leave no holes in the GPU's memory. A
      worker with an engine does not get them, because CUDA graphs need fixed segments.
    - `CUDA_DEVICE_MAX_CONNECTIONS`: 1, as Megatron asks. Then kernels start in the order of their launch. So a
      collective of sequence parallelism overlaps the matrix product launched after it.

    `gpus`: value of `CUDA_VISIBLE_DEVICES` for the worker. None or empty: the worker has no GPUs.
    """
    if not gpus or Role.GENERATE in roles or MODEL_ROLES.isdisjoint(roles):
        return {}
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # the older name of the first
        del wanted["PYTORCH_ALLOC_CONF"]
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def bind_to_gpus(addresses: Iterable[str], devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Restrict all threads of this process, and its later children, to the cores nearest to GPUs with these PCI
    addresses (0000:1b:00.0). Cores that the process may not use are left out. Return the cores. If the system does not
    tell which cores are near, or the process may use none of them, change nothing and return an empty set."""
    near: set[int] = set()
    for address in addresses:
        listed = devices / address / "local_cpulist"
        near |= set(_numbers(listed.read_text())) if listed.is_file() else set()
    near &= os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task") if near else ():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), near)
    return near


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list as Linux writes it: 0-3,8."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def worker_resources(gang: Gang, index: int, waiting: int = 0) -> dict[str, float]:
    """Return the Dask resources of one worker:

    - Slots, one for each shard that the worker runs at the same time. An ordered gang's worker has a slot for each node
      that it has at the same time.
    - A pin, in practice without limit. It binds a node that needs no slot to this worker.

    `waiting`: number of further slots of a pool's worker, for shards that only wait for rows in other replicas.
    """
    return {
        slot_resource(gang.name, index): float(
            gang.max_submitted_nodes if gang.is_ordered else gang.concurrent_shards + waiting
        ),
        pin_resource(gang.name, index): _UNLIMITED,
    }


def worker_threads(gang: Gang, waiting: int = 0) -> int:
    """Return the number of tasks that a worker runs at once. In an ordered gang this is the number of nodes that it has
    at once. In a pool it is the maximum number of running nodes, plus `waiting` tasks for shards that only wait for
    rows in other replicas."""
    return gang.max_submitted_nodes if gang.is_ordered else gang.max_running_nodes + waiting


def shares_cores(config: RunConfig) -> bool:
    """Return True if the workers of the run compute with more than one thread in all. If such workers are on the same
    host, they may compete for its cores. They must then not spin while they wait."""
    threads = config.placement.gangs
    return sum(threads[gang.name].threads * gang.workers * _processes(config, gang) for gang in config.gangs()) > 1


def _processes(config: RunConfig, gang: Gang) -> int:
    """Return the number of a worker's computing processes. Its engine's inherit its environment."""
    return config.replica_ranks if Role.GENERATE in gang.roles else 1


def nanny_options(
    config: RunConfig, gang: Gang, index: int, security: Security, *, shared: bool, gpus: str | None
) -> dict[str, Any]:
    """Return the options of a worker's nanny, without its address. `shared`: True if other processes compute on the
    worker's host too. `gpus`: see `worker_environment`."""
    waiting = gang.concurrent_shards if config.cluster.migrate_rows and Role.GENERATE in gang.roles else 0
    return {
        "name": worker_name(gang.name, index),
        "protocol": "tls://",
        "security": security,
        "nthreads": worker_threads(gang, waiting),
        "resources": worker_resources(gang, index, waiting),
        "memory_limit": 0,
        "dashboard_address": "127.0.0.1:0",  # Dask's HTTP server, without pages: `_DASK_SETTINGS`
        "extensions": _worker_extensions(),
        "env": worker_environment(config.placement.gangs[gang.name].threads, shared, gpus)
        | trainer_environment(gang.roles, gpus),
    }


def remove_abandoned_scratch(folder: Path) -> None:
    """Remove the scratch directories of Dask and of engines that this user's dead processes left in the temporary
    folder `folder`. A directory stays while the process that made it is running. For engines little is left to do: a
    guard process removes most of an engine's directory (`stages/engines/remote/guard.py`)."""
    for path in (*folder.glob(f"{_SCRATCH}*-*"), *folder.glob(f"{ENGINE_SCRATCH}*-*")):
        owner = path.name.removeprefix(_SCRATCH).removeprefix(ENGINE_SCRATCH).partition("-")[0]
        if owner.isdigit() and not process_alive(int(owner)) and path.lstat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def dask_settings() -> Iterator[None]:
    """Set Dask's settings for a run until the block ends. First remove the scratch directories that killed processes
    left. Dask gets a scratch directory for this process, which is removed at the end of the block."""
    remove_abandoned_scratch(Path(tempfile.gettempdir()))
    prefix = f"{_SCRATCH}{os.getpid()}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as scratch,
        dask.config.set({**_DASK_SETTINGS, "temporary-directory": scratch}),
    ):
        yield


def ending_signals() -> frozenset[signal.Signals]:
    """Return the signals that end a driver or a `stageline worker`: SIGTERM, SIGINT and SIGHUP. SIGHUP is left out
    under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return frozenset({signal.SIGTERM, signal.SIGINT} | (set() if ignored else {signal.SIGHUP}))


WARNING_FILTERS = (
    "ignore:resource_tracker",  # it warns whenever it cleans up after killed workers
    "ignore:Transformer Engine and Apex are not installed",  # Megatron recommends them whenever it is imported
    "ignore:Apex is not installed",
)
"""Warnings that nobody can act on, as options of Python's -W."""


def start_forkserver(*, shared: bool) -> None:
    """Start the forkserver, the process that all workers are forked from, unless this process has one already.

    The forkserver imports `PRELOADED` (except on a host with NVIDIA devices), so a worker starts seconds sooner. It
    blocks the terminal's signals for all workers. OpenMP's settings are set here, because OpenMP reads them when it is
    loaded. `shared`: True if the workers share cores."""
    environment = {**FORKSERVER_ENVIRONMENT, "OMP_WAIT_POLICY": wait_policy(shared)}
    before = {name: os.environ.get(name) for name in environment}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    options = list(sys.warnoptions)
    sys.warnoptions += WARNING_FILTERS
    try:
        resource_tracker.ensure_running()  # this lifts the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
        os.environ.update(environment)
        # CUDA does not survive a fork once a library asked for devices.
        preloaded = () if Path("/dev/nvidiactl").exists() else PRELOADED
        get_context("forkserver").set_forkserver_preload(["distributed", *preloaded])
        nanny.get_mp_context = Queues  # named semaphores would outlive a kill of the whole process group
        forkserver.ensure_running()
    finally:
        sys.warnoptions[:] = options
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
