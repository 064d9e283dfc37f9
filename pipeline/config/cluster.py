"""The section `cluster`: how long the driver waits, how often it tries again. May import storage.problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from storage.problems import Problem, above, at_least, local_directory

_ADDRESS = re.compile(r"[^\s/:\[\]]*:(\d{1,5})")
_HIGHEST_PORT = 65535
FEWEST_TO_GATHER = 3
"""The smallest `move_rows_below` at which anything can move: fewer rows than that are two, on two replicas."""


@dataclass
class ClusterConfig:
    kind: Literal["local", "attached"] = "local"
    """Where workers come from. local: the driver starts them on its own host. attached: they are started elsewhere, by
    `stageline worker`, on any hosts, and join."""
    interface: str | None = None
    """Attached: the network interface, of the same name on every host, that everything listens on and that gloo and
    NCCL use; null: on each host the one by which it reaches the driver."""
    host: str | None = None
    """Attached: the address of the driver's host that the scheduler listens on; null: the interface's, or that of the
    default route."""
    port: int = 0
    """Attached: the scheduler's; 0: any."""
    scheduler_file: str | None = None
    """Attached: where workers read how to join; null: in the run's directory, a new one for each attempt."""
    arrival_timeout_s: float = 600.0
    """Attached: for a worker to join, from the driver's start or from its loss. A replica that does not is left out; a
    rank that does not ends the run, which can be resumed."""
    clock_skew_s: float = 5.0
    """Attached: by how much a host's clock may differ from the driver's."""
    dashboard: str | None = "127.0.0.1:8787"
    """Address of the Dask dashboard; null: none. Another port is taken if this one is in use."""
    start_timeout_s: float = 300.0
    """For workers to load their models, once their process is there."""
    deadline_s: float = 1800.0
    """For one node; after it the worker is taken for lost."""
    collective_timeout_s: float = 300.0
    """For the ranks of a gang to come to a collective; after it the gang is taken for lost, and the error names the
    ranks that did not come. At most half of `deadline_s` counts, or the gang would be ended before it can say so."""
    attempts: int = 3
    """How often a node may lose its worker before the run gives up."""
    same_numerics: Literal["refuse", "warn"] = "refuse"
    """What happens where a gang's workers, or those of a run that goes on, would compute other last bits: another
    processor, compiler, kernel or library."""
    weights_dir: str | None = None
    """Directory for published weights; null: in /dev/shm."""
    host_memory_gb: float | None = None
    """Of a host, 2^30 bytes each, that a run may be predicted to take; null: what this host, or its container, has."""
    device_memory_gb: float | None = None
    """Of a GPU, likewise."""
    move_rows_below: int = 0
    """When fewer rows than these are left on all replicas together, they move to fewer replicas. 0: never."""


def collective_timeout_s(config: ClusterConfig) -> float:
    """Seconds after which the ranks of a gang give a collective up."""
    return min(config.collective_timeout_s, config.deadline_s / 2)


def cluster_problems(config: ClusterConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    yield from at_least(1, {"cluster.attempts": config.attempts})
    seconds = {
        "cluster.start_timeout_s": config.start_timeout_s,
        "cluster.deadline_s": config.deadline_s,
        "cluster.collective_timeout_s": config.collective_timeout_s,
        "cluster.arrival_timeout_s": config.arrival_timeout_s,
        "cluster.clock_skew_s": config.clock_skew_s,
    }
    yield from above(0, seconds, " seconds")
    limits = {
        "cluster.host_memory_gb": config.host_memory_gb,
        "cluster.device_memory_gb": config.device_memory_gb,
    }
    yield from above(0, limits, ", or null for what there is")
    yield from local_directory("cluster.weights_dir", config.weights_dir)
    yield from local_directory("cluster.scheduler_file", config.scheduler_file)
    yield from _dashboard_problems(config.dashboard)
    yield from _attached_problems(config)
    below = config.move_rows_below
    if below != 0 and below < FEWEST_TO_GATHER:
        yield Problem(
            "cluster.move_rows_below",
            below,
            f"must be 0 (rows stay where they are) or {FEWEST_TO_GATHER} or more: two rows on two replicas are the "
            "fewest that can be brought together",
        )


def _dashboard_problems(given: str | None) -> Iterator[Problem]:
    address = None if given is None else _ADDRESS.fullmatch(given)
    if given is not None and (address is None or int(address[1]) > _HIGHEST_PORT):
        need = f"must be HOST:PORT, as in 127.0.0.1:8787, with a port from 0 (any) to {_HIGHEST_PORT}; or null for none"
        yield Problem("cluster.dashboard", given, need)


def _attached_problems(config: ClusterConfig) -> Iterator[Problem]:
    """Of what only attached workers have."""
    if not 0 <= config.port <= _HIGHEST_PORT:
        yield Problem("cluster.port", config.port, f"must be from 1 to {_HIGHEST_PORT}, or 0 for any")
    if config.interface is not None and config.host is not None:
        need = f"cluster.interface={config.interface} says it already: one of the two, or neither"
        yield Problem("cluster.host", config.host, need)
    if config.kind == "local":
        given = {
            "cluster.interface": config.interface,
            "cluster.host": config.host,
            "cluster.port": config.port or None,
            "cluster.scheduler_file": config.scheduler_file,
        }
        for key, value in given.items():
            if value is not None:
                yield Problem(key, value, "needs cluster.kind=attached: local workers are reached by 127.0.0.1 alone")
