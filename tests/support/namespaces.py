"""Separate hosts on one machine: namespaces with an address, a name, a /dev/shm and a /tmp of their own each, joined by
a bridge. Only root can make them, and not everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

_SUBNET = "10.213.77"
_ENTER = """
set -e
hostname "$HOST_NAME"
mount -t tmpfs none /mnt
number=0
for shared in $SHARED; do
  mkdir -p "/mnt/$number"; mount --bind "$shared" "/mnt/$number"; number=$((number + 1))
done
mount -t tmpfs none /tmp
mount -t tmpfs none /dev/shm
number=0
for shared in $SHARED; do
  mkdir -p "$shared"; mount --bind "/mnt/$number" "$shared"; number=$((number + 1))
done
cd "$WORK"
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """A namespace that stands for a host."""

    name: str
    address: str
    namespace: str
    shared: tuple[Path, ...]

    @property
    def prefix(self) -> tuple[str, ...]:
        """Begins a command that is to run there."""
        settings = {"HOST_NAME": self.name, "SHARED": " ".join(map(str, self.shared)), "WORK": str(self.shared[0])}
        given = [f"{name}={value}" for name, value in settings.items()]
        inside = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", _ENTER, "sh"]
        return ("ip", "netns", "exec", self.namespace, "env", *given, *inside)


@contextmanager
def separate_hosts(names: Sequence[str], folder: Path) -> Iterator[dict[str, Host]]:
    """Hosts by name, which all see `folder`, this repository and this interpreter, and nothing else of /tmp. Skips the
    test where they cannot be made, saying why."""
    missing = [tool for tool in ("ip", "unshare", "hostname", "mount") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"namespaces need root and {', '.join(missing) or 'ip, unshare'}")
    shared = tuple(dict.fromkeys((folder.resolve(), ROOT.resolve(), Path(sys.prefix).resolve())))
    mark = f"sl{os.getpid() % 100000}"
    bridge = f"{mark}br"
    with ExitStack() as stack:
        _made(stack, ["ip", "link", "add", bridge, "type", "bridge"], ["ip", "link", "del", bridge])
        _run("ip", "link", "set", bridge, "up")
        hosts = {}
        for number, name in enumerate(names, 1):
            host = Host(name, f"{_SUBNET}.{number}", f"{mark}-{name}", shared)
            outer, inner = f"{mark}o{number}", f"{mark}i{number}"
            _made(stack, ["ip", "netns", "add", host.namespace], ["ip", "netns", "del", host.namespace])
            pair = ["ip", "link", "add", outer, "type", "veth", "peer", "name", inner]
            _made(stack, pair, ["ip", "link", "del", outer])  # a namespace's links outlive its name for a while
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "link", "set", inner, "netns", host.namespace)
            inside = ("ip", "-n", host.namespace)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", inner)
            _run(*inside, "link", "set", inner, "up")
            _run(*inside, "link", "set", "lo", "up")
            hosts[name] = host
        _run(*hosts[names[0]].prefix, "true")
        yield hosts


def _made(stack: ExitStack, make: Sequence[str], unmake: Sequence[str]) -> None:
    _run(*make)
    stack.callback(subprocess.run, unmake, check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine refuses namespaces: `{' '.join(command[:6])}`: {done.stderr.strip()}")
