"""Predict the number of open files that a process of a run needs, and read this account's limit."""

from __future__ import annotations

import resource
import sys

from pipeline.config.run import RunConfig
from pipeline.graph.graph import Gang

_OWN_DESCRIPTORS = 128
"""Open files of a process of a run, before those for each worker. Measured: 24 in the driver, 101 in a rank."""
_DESCRIPTORS_PER_WORKER = 12
"""Open files of the driver for each worker: pipes of its nanny, and TLS connections. Measured: 12."""
_DESCRIPTORS_PER_RANK = 16
"""Open files of a rank for each rank of its gang: a connection in each process group. Measured: 13."""


def descriptors_needed(config: RunConfig) -> int:
    """Return the largest number of open files that a process of the run on the driver's host needs."""
    gangs = config.gangs()
    driver = _OWN_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * sum(gang.workers for gang in gangs)
    if config.cluster.kind != "local":
        return driver
    return max(driver, *(descriptors_of_worker(gang) for gang in gangs))


def descriptors_of_worker(gang: Gang) -> int:
    """Return the number of open files that a worker of this gang needs."""
    return _OWN_DESCRIPTORS + (_DESCRIPTORS_PER_RANK * gang.workers if gang.ordered else 0)


def most_descriptors() -> int:
    """Return how many open files a process of this account may ask for: the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def allow_descriptors(needed: int) -> None:
    """Raise this process's soft limit of open files, which its children inherit, to `needed`, or to the hard limit if
    that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(needed, most_descriptors())), hard))
