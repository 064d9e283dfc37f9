"""The section `cluster`: how long the driver waits, how often it tries again. May import storage.problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from storage.problems import Problem, above, at_least, local_directory

FEWEST_TO_GATHER = 3
"""The smallest `move_rows_below` at which anything can move: fewer rows than that are two, on two replicas."""


@dataclass
class ClusterConfig:
    dashboard: str | None = "127.0.0.1:8787"
    """Address of the Dask dashboard; null: none. Another port is taken if this one is in use."""
    start_timeout_s: float = 300.0
    """For workers to come up and load their models."""
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
    }
    yield from above(0, seconds, " seconds")
    limits = {
        "cluster.host_memory_gb": config.host_memory_gb,
        "cluster.device_memory_gb": config.device_memory_gb,
    }
    yield from above(0, limits, ", or null for what there is")
    yield from local_directory("cluster.weights_dir", config.weights_dir)
    below = config.move_rows_below
    if below != 0 and below < FEWEST_TO_GATHER:
        yield Problem(
            "cluster.move_rows_below",
            below,
            f"must be 0 (rows stay where they are) or {FEWEST_TO_GATHER} or more: two rows on two replicas are the "
            "fewest that can be brought together",
        )
