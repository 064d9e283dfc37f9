"""Seconds of collectives between the ranks of a gang or a replica: the alpha-beta model, by kind of link.

With n ranks, B bytes, a latency of alpha seconds a hop and a bandwidth of beta bytes a second of each rank
(Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"):

    all-reduce, ring    2 (n - 1) alpha + 2 (n - 1)/n B/beta
    all-reduce, tree    2 log2(n) alpha + 2 B/beta              the faster of the two is used, as NCCL does
    reduce-scatter      (n - 1) alpha + (n - 1)/n B/beta        all-gather likewise
    send                alpha + B/beta

Every collective of GPUs also takes `LAUNCH_S`. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.hardware import HardwareCluster

Numbers = Any
"""A number. If the costs of several nodes are computed together: an array with one number per node."""
LAUNCH_S = 6.6e-6
"""Seconds of a collective before its first hop (NCCL, src/graph/tuning.cc: baseLat, ring, LL)."""
_PCIE_LATENCY_S = 1.0e-6
"""Seconds of a hop over PCIe (NCCL, src/graph/tuning.cc: hwLat, PCI, ring, LL)."""


@dataclass(frozen=True)
class Link:
    """The speed of the connection between the ranks of a group. If their messages cross several kinds of connection
    (NVLink, PCIe, network), it is the speed of the slowest."""

    latency_s: float
    bytes_per_s: float
    """Bandwidth of one rank in each direction."""
    launch_s: float = 0.0


def link_of(cluster: HardwareCluster, ranks: int, stride: int = 1) -> Link:
    """Return the slowest link between `ranks` workers whose indices are `stride` apart. Workers are placed in the order
    of their indices, and fill one node after the other."""
    hardware, extent = cluster.hardware, (ranks - 1) * stride + 1
    if not hardware.gpus_per_node:
        return Link(hardware.link_latency_s, hardware.links * hardware.link_bytes_per_s)
    within = extent <= cluster.gpus_per_node
    if extent <= hardware.nvlink_gpus and (within or hardware.nvlink_gpus > hardware.gpus_per_node):
        return Link(hardware.nvlink_latency_s, hardware.nvlink_bytes_per_s, LAUNCH_S)
    if within:
        return Link(_PCIE_LATENCY_S, hardware.pcie_bytes_per_s, LAUNCH_S)
    return Link(hardware.link_latency_s, hardware.links * hardware.link_bytes_per_s / hardware.gpus_per_node, LAUNCH_S)


def smaller(one: Numbers, other: Numbers) -> Numbers:
    """Return the smaller number. Arrays are compared element by element."""
    return np.minimum(one, other) if isinstance(one, np.ndarray) or isinstance(other, np.ndarray) else min(one, other)


def larger(one: Numbers, other: Numbers) -> Numbers:
    """Return the larger number. Arrays are compared element by element."""
    return np.maximum(one, other) if isinstance(one, np.ndarray) or isinstance(other, np.ndarray) else max(one, other)


def all_reduce_s(link: Link, ranks: int, num_bytes: Numbers) -> Numbers:
    """Return the seconds of an all-reduce of an array of `num_bytes` bytes; 0 for one rank."""
    if ranks <= 1:
        return 0.0
    ring = 2 * (ranks - 1) * link.latency_s + 2 * (ranks - 1) / ranks * num_bytes / link.bytes_per_s
    tree = 2 * math.log2(ranks) * link.latency_s + 2 * num_bytes / link.bytes_per_s
    return link.launch_s + smaller(ring, tree)


def gather_s(link: Link, ranks: int, num_bytes: Numbers) -> Numbers:
    """Return the seconds of an all-gather or a reduce-scatter of an array of `num_bytes` bytes; 0 for one rank."""
    if ranks <= 1:
        return 0.0
    return link.launch_s + (ranks - 1) * (link.latency_s + num_bytes / ranks / link.bytes_per_s)


def send_s(link: Link, num_bytes: Numbers) -> Numbers:
    """Return the seconds in which one rank sends `num_bytes` bytes to the next rank."""
    return link.launch_s + link.latency_s + num_bytes / link.bytes_per_s
