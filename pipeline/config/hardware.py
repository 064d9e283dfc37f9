"""Hardware that a run can be checked against: kinds of nodes (`conf/hardware/*.yaml`), and clusters of such nodes.

A file describes one kind of node. `16x8xH100-80` names a cluster: 16 nodes with 8 GPUs each, of the kind in
`conf/hardware/H100-80.yaml`. Nothing here looks at this machine.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.loading import load_file
from pipeline.errors import ConfigError, refuse
from storage.problems import Problem, above, at_least, setting, setting_problems

GIB = 1 << 30
FOLDER = Path(__file__).resolve().parents[2] / "conf/hardware"
AS = "--as"
"""The option that names a cluster. Errors about the cluster name this option as the setting at fault."""
_TEXT = re.compile(r"(?:(\d+)x)?(\d+)x(\S+)")
_FORM = (
    "NODESxGPUSxHARDWARE, as in 16x8xH100-80; GPUSxHARDWARE for a single node; NODESxcpu for nodes without GPUs, "
    "NODESxCORESxcpu for some of their cores"
)


@dataclass(frozen=True)
class HardwareConfig:
    """One kind of node. A device is a GPU, or on a node without GPUs one core."""

    description: str = "???"
    """The node in words."""
    gpu: str = ""
    """Name of the GPUs as CUDA reports it. By this name `stageline doctor` finds the hardware file that describes a
    machine. "" if there are no GPUs or the name is not known."""
    gpus_per_node: int = setting("???", at_least(0))
    """GPUs of a whole node. 0: everything is computed on the cores."""
    device_memory_gib: float = setting("???", at_least(0))
    """Memory of a GPU as CUDA reports it to programs, in units of 2^30 bytes; 0 without GPUs."""
    bf16_flops: float = setting("???", above(0))
    """Peak rate of a device in dense bfloat16 matrix products, in FLOP/s."""
    fp32_flops: float = setting("???", above(0))
    """Peak rate of a device in float32 arithmetic (not TF32), in FLOP/s."""
    memory_bytes_per_s: float = setting("???", above(0))
    """Peak bandwidth of a GPU's memory. Without GPUs, peak bandwidth of the node's memory for all cores together."""
    core_bytes_per_s: float | None = setting(None, above(0))
    """Bandwidth of the host's memory that a single core reaches. null: it may use the whole node's bandwidth."""
    nvlink_bytes_per_s: float = setting("???", at_least(0))
    """Bandwidth of a GPU over NVLink in each direction. 0: there is no NVLink, and GPUs communicate over PCIe."""
    nvlink_gpus: int = setting("???", at_least(0))
    """Number of GPUs that NVLink connects with one another; 0 without NVLink. It may be larger than the number of GPUs
    of a node."""
    nvlink_latency_s: float = setting("???", at_least(0))
    """Seconds that a short message takes from GPU to GPU over NVLink, inside a collective; 0 without NVLink."""
    pcie_bytes_per_s: float = setting("???", at_least(0))
    """Bandwidth between a GPU and the host's memory in each direction; 0 without GPUs."""
    links: int = setting("???", at_least(1))
    """Number of network links from a whole node to the other nodes."""
    link_bytes_per_s: float = setting("???", above(0))
    """Bandwidth of a link in each direction."""
    link_latency_s: float = setting("???", above(0))
    """Seconds that a short message takes from one node to the next over the network, inside a collective."""
    host_memory_gib: float = setting("???", above(0))
    """Memory of a whole node's host, in units of 2^30 bytes."""
    shared_memory_gib: float = setting("???", above(0))
    """Size of /dev/shm. Its content counts as host memory too."""
    cores: int = setting("???", at_least(1))
    """Cores of a whole node, without hyper-threads."""

    def host_bytes_per_s(self, cores: int) -> float:
        """Return the bandwidth of the memory of a node without GPUs that a number of its cores reach together."""
        return min(self.memory_bytes_per_s, cores * (self.core_bytes_per_s or math.inf))


def hardware_names() -> list[str]:
    """Return the names of the kinds of nodes that ship with Stageline."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_hardware(name: str, option: str = AS) -> HardwareConfig:
    """Return the description of a type of machine from a hardware file. Raises ConfigError if there is no such file or
    its settings are wrong.

    Args:
        name: name of a file in `conf/hardware` without `.yaml`, or the path of any YAML file.
        option: command-line option with which the user gave the name. The error about a missing file names this option.
    """
    file = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not file.is_file() and name.endswith(".yaml"):
        raise ConfigError(
            option, f"given {name!r}; no such file (shipped kinds of nodes: {', '.join(hardware_names())})"
        )
    if not file.is_file():
        known = hardware_names()
        alike = [one for one in known if one.casefold().startswith(name.casefold())]
        meant = alike or difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {meant[0]}?" if meant else ""
        need = f"no such hardware{hint} (there are {', '.join(known)}, or the path of a YAML file)"
        raise ConfigError(option, f"given {name!r}; {need}")
    config: HardwareConfig = load_file(HardwareConfig, file)[0]
    problems = (*setting_problems(config), *hardware_problems(config))
    refuse(replace(problem, need=f"{problem.need} (in {file})") for problem in problems)
    return config


def hardware_with(gpu: str) -> tuple[str, HardwareConfig] | None:
    """Return the name and the settings of the shipped kind of node for GPUs with the CUDA name `gpu`. Return None if
    there is no such kind, or `gpu` is ""."""
    kinds = ((name, load_hardware(name)) for name in hardware_names())
    return next(((name, config) for name, config in kinds if gpu and config.gpu == gpu), None)


def hardware_problems(config: HardwareConfig) -> Iterator[Problem]:
    """Yield the contradictions between a file's settings."""
    with_gpus = {"device_memory_gib": config.device_memory_gib, "pcie_bytes_per_s": config.pcie_bytes_per_s}
    without = with_gpus | {
        "nvlink_bytes_per_s": config.nvlink_bytes_per_s,
        "nvlink_gpus": config.nvlink_gpus,
        "nvlink_latency_s": config.nvlink_latency_s,
    }
    if config.gpus_per_node:
        for key, value in with_gpus.items():
            if not value:
                yield Problem(key, value, f"must be above 0: a node has {config.gpus_per_node} GPUs (gpus_per_node)")
    else:
        for key, value in without.items():
            if value:
                yield Problem(key, value, "must be 0: a node has no GPUs (gpus_per_node)")
    if bool(config.nvlink_bytes_per_s) != (config.nvlink_gpus > 1):
        need = "must be 2 or more with NVLink (nvlink_bytes_per_s), and 0 without"
        yield Problem("nvlink_gpus", config.nvlink_gpus, need)
    if bool(config.nvlink_bytes_per_s) != bool(config.nvlink_latency_s):
        need = "must be above 0 with NVLink (nvlink_bytes_per_s), and 0 without"
        yield Problem("nvlink_latency_s", config.nvlink_latency_s, need)
    if config.shared_memory_gib > config.host_memory_gib:
        need = f"must be at most host_memory_gib = {config.host_memory_gib:g}, which it is a part of"
        yield Problem("shared_memory_gib", config.shared_memory_gib, need)


@dataclass(frozen=True)
class HardwareCluster:
    """Nodes of one kind. A run may use only a share of a node's GPUs. It then has the same share of the node's memory
    and cores, because clouds and schedulers assign memory and cores in proportion to GPUs."""

    nodes: int
    gpus_per_node: int
    """Number of GPUs of each node that are used."""
    hardware: HardwareConfig
    some_cores: int = 0
    """Number of cores that the run uses on each node, if the nodes have no GPUs; 0: all cores. Even with fewer cores,
    the run has all memory of the node."""

    @property
    def share(self) -> float:
        """Share of a whole node that is used: the share of its GPUs, or 1 for a node without GPUs."""
        return self.gpus_per_node / self.hardware.gpus_per_node if self.hardware.gpus_per_node else 1.0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def device_bytes(self) -> int:
        """Memory of a GPU, in bytes."""
        return int(self.hardware.device_memory_gib * GIB)

    @property
    def host_bytes(self) -> int:
        """Bytes of memory that the run has on a node's host: `share` times the whole memory."""
        return int(self.hardware.host_memory_gib * GIB * self.share)

    @property
    def shared_bytes(self) -> int:
        """Bytes of a node's /dev/shm that the run has: `share` times its whole size."""
        return int(self.hardware.shared_memory_gib * GIB * self.share)

    @property
    def cores(self) -> int:
        """Number of cores of a node that may be used."""
        return self.some_cores or max(1, int(self.hardware.cores * self.share))


def hardware_of(text: str) -> str:
    """Return the name of the hardware in a text like `16x8xH100-80` that `read_cluster` accepts."""
    match = _TEXT.fullmatch(text)
    assert match is not None, f"{text} names no cluster"
    return match[3]


def read_cluster(text: str, option: str = AS) -> HardwareCluster:
    """Return the cluster that a text like `16x8xH100-80` names. Raises ConfigError if the text has another form, the
    hardware is unknown, or the number of nodes, GPUs or cores is impossible. `option`: the option by which the text was
    given. The error names it as the setting at fault."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(option, f"given {text!r}; must be {_FORM} (there are {', '.join(hardware_names())})")
    first, last = match[1], int(match[2])
    hardware = load_hardware(match[3], option)
    whole = hardware.gpus_per_node
    nodes, per_node = (int(first), last) if first is not None else ((1, last) if whole else (last, 0))
    gpus, some_cores = (per_node, 0) if whole else (0, per_node)
    if nodes < 1 or (whole and gpus < 1):
        raise ConfigError(option, f"given {text!r}; must have 1 node or more, and 1 GPU or more a node")
    most, what = (whole, "GPUs") if whole else (hardware.cores, "cores")
    if per_node > most:
        need = f"a node of {match[3]} ({hardware.description}) has {most} {what}: at most {most}"
        raise ConfigError(option, f"given {text!r}; {need}")
    return HardwareCluster(nodes, gpus, hardware, some_cores)
