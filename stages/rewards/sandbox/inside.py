"""The program that runs in a sandbox: `python -m THIS_MODULE SOCKET PARENT`. SOCKET is a file descriptor, PARENT is the
process id of the worker. Each process is a child of the one above:

    if the host allows namespaces                      otherwise
      keeper   started by the worker                     keeper   started by the worker; adopts every orphan below it
        first    process 1 of the namespace                code     runs the reward, confined
          code     runs the reward, confined                 processes that the code starts
            processes that the code starts

The worker sees only the keeper, which ends with the exit status of the code. When the worker terminates the keeper or
ends in any way, all processes below the keeper are killed, even in other sessions and process groups. In a namespace,
the end of process 1 ends all other processes.

Worker and program talk over the socket:

- The worker sends settings (`process.Sandbox`): what to confine, and which function to call.
- The program confines itself, and answers with the protections that are in force.
- The function is called, and uses the socket from then on.

No other part of Stageline is loaded until the process is confined.
"""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any, NoReturn

import psutil

from stages.rewards.sandbox import kernel
from stages.rewards.sandbox.channel import SandboxChannel
from storage.host import end_with_parent

MAX_PROCESSES = 4096
"""Maximum number of processes and threads in a sandbox with namespaces. Without namespaces there is no limit. Code that
evaluates sampled text may not start processes."""
_LARGEST_FILE_BYTES = 1 << 34
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_CODE = ("/usr", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/sys/devices/system/cpu")
"""Paths that a sandbox for sampled text may read, besides the folders of Python and Stageline."""
_SHARED_MEMORY = "/dev/shm"
_LIMITED_PER_NAMESPACE = (6, 14)
"""First Linux version in which each namespace has its own `kernel.pid_max`. In earlier versions the host has only
one."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the worker
    channel, parent = SandboxChannel(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2])
    end_with_parent(parent)
    try:
        order = channel.receive()
    except (EOFError, OSError):
        return
    in_force = _confine(order, channel, parent)
    with suppress(EOFError, OSError):  # the worker has ended or closed the channel
        channel.send(in_force)
        resolve(order["serve"])(channel, order["start"])


def resolve(name: str) -> Callable[..., Any]:
    """Return the object that `module:name` names."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def _confine(order: Mapping[str, Any], channel: SandboxChannel, parent: int) -> dict[str, str | None]:
    """Fork a child and confine it. Return, in the child only, target (`process.PROTECTIONS`) -> the mechanism that
    protects it, or None. The calling process becomes the keeper (see the top of this file)."""
    network, answers, use = order["network"], order["answers"], order["use"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spaces = "namespaces" in use and _namespaces_work(network)
    if spaces:
        kernel.enter_namespaces(network=network)
        for folder in filter(os.path.isdir, order["hidden"]):
            kernel.mount_memory(folder, readonly=True)
        kernel.mount_memory(_SHARED_MEMORY)
        scratch = _SHARED_MEMORY  # disappears with the namespace
    else:
        kernel.adopt_orphans()
        scratch = tempfile.mkdtemp(prefix="stageline-scratch-")
    end_with_parent(parent, by=signal.SIGKILL if spaces else signal.SIGTERM)
    _fork_and_keep(channel, None if spaces else scratch)
    if spaces:
        _act_as_init(channel)
    os.environ["TMPDIR"] = scratch
    os.setsid()
    with suppress(OSError):  # if memory is short, the kernel ends this process rather than the worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE_BYTES, _LARGEST_FILE_BYTES))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    kernel.drop_capabilities()
    landlock = kernel.landlock_version() if "landlock" in use else 0
    if landlock:
        reads = [*_CODE, *_DEVICES, *_python_folders(order["root"])] if answers else ["/"]
        writes = ["/dev/null"] if answers else [*_writable_paths(scratch, shared=not spaces), *order["writes"]]
        kernel.restrict_files(reads, writes, network=network)
    filtered = "seccomp" in use and kernel.can_filter_calls()
    if filtered:
        kernel.filter_calls(network=network, answers=False)
    sockets = [*["namespace"] * spaces, *["seccomp"] * filtered]
    others = [*["namespace"] * spaces, *[f"Landlock {landlock}"] * (landlock >= 6)]
    if answers and landlock and filtered:
        others.append("seccomp")
    return {
        "files": f"Landlock {landlock}" if landlock else None,
        "network": ", ".join(sockets) or None if not network else None,
        "processes": ", ".join(others) or None,
    }


def _writable_paths(scratch: str, *, shared: bool) -> list[str]:
    """Return the paths that user code may write. `shared`: with shared memory, which semaphores need without
    namespaces."""
    return [scratch, *([_SHARED_MEMORY] if shared else []), *_DEVICES, *glob("/dev/nvidia*")]


def _python_folders(root: str) -> list[str]:
    """Return the folders of Python, its packages and Stageline's code, without a source tree's root: it may hold
    runs."""
    installed = Path(root).name.endswith("-packages")
    packages = [path for path in sys.path if path and (installed or not Path(root).is_relative_to(path))]
    return [sys.prefix, sys.base_prefix, *packages, *(f"{root}/{package}" for package in ("stages", "storage"))]


def _namespaces_work(network: bool) -> bool:
    """Return True if this host lets this user create namespaces. A child process tries it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        kernel.enter_namespaces(network=network)
        kernel.mount_memory(_SHARED_MEMORY)
    except OSError:
        os._exit(1)
    os._exit(0)


def _fork_and_keep(channel: SandboxChannel, scratch: str | None) -> None:
    """Fork, and return in the child only. The parent becomes its keeper, and ends with its exit status. Without
    namespaces it also deletes the folder `scratch`, and kills all descendants that are left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        end_with_parent()
        return

    def end(*_: object) -> None:
        with suppress(ProcessLookupError, ChildProcessError):  # it has just ended
            os.kill(child, signal.SIGKILL)
            if scratch is None:
                os.waitpid(child, 0)  # returns when its whole namespace has ended
        if scratch is not None:
            _clear(scratch)
        os._exit(0)

    channel.close()
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    code = _wait_for(child)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if scratch is not None:
        _clear(scratch)
    _end_like(code)


def _clear(scratch: str) -> None:
    """Kill all descendants of this process and delete the folder. This process adopts descendants whose parents end, so
    none can escape."""
    with suppress(ChildProcessError):  # no descendant is left
        while True:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)
    shutil.rmtree(scratch, ignore_errors=True)


def _act_as_init(channel: SandboxChannel) -> None:
    """Mount the namespace's own /proc, limit the number of processes in the namespace, then fork. Return in the child
    only. The parent is the first process of its namespace: it reaps orphans, and ends when the child ends."""
    with suppress(OSError):  # a container that hides parts of /proc cannot mount another
        kernel.mount_processes()
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= _LIMITED_PER_NAMESPACE:
        with suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(MAX_PROCESSES))
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    child = os.fork()
    if not child:
        end_with_parent()
        return
    channel.close()
    code = _wait_for(child)
    os._exit(code if code >= 0 else 128 - code)


def _wait_for(child: int) -> int:
    """Wait for a child and return its exit status, or -N if signal N ended it. Also reaps adopted orphans."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _end_like(code: int) -> NoReturn:
    """End this process with exit status `code`, or by signal N if `code` is -N or 128 + N."""
    number = -code if code < 0 else code - 128
    if number in {*signal.Signals}:
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(code if code >= 0 else 1)


if __name__ == "__main__":
    main()
