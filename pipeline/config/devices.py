"""Assign GPUs to workers before anything starts, so that no two workers share a GPU by accident.

Each rank of a gang needs one GPU. Each replica of the engine needs one GPU per rank of the replica. Each scoring worker
needs one if rewards have models and the gang's `device` is auto (`Gang.gpus`). A *unit* is a set of processes that are
placed together: all ranks of a gang on one host, one replica of the engine, or one scoring worker. Two ranks of a unit
never share a GPU, because NCCL would refuse that.

                      GPU   0    1    2    3
    train (4 ranks)         0    1    2    3    the larger units first, each on GPUs of its own
    critic (4 ranks)        0    1    2    3    if too few GPUs are free and sharing is allowed:
    generate (2 replicas)   0    1              a unit of one GPU goes to the least used one,
    (a critic of 2 ranks would be refused:      a larger unit to exactly the GPUs of another unit
     no other unit has exactly 2 GPUs)

Gangs that share devices (`placement.device_sharing`) count as one: the gang that needs the most GPUs gets them, and the
workers of the others use the same GPUs, in order.

Pure functions: the caller passes the number of GPUs of each host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.graph.graph import Gang
from stages.models.protocol import Role
from storage.problems import Problem

Worker = tuple[str, int]
"""(Name of the gang, index of the rank or replica in the gang)."""
THIS_HOST = "this host"
DeviceSharing = Collection[Collection[str]]
"""Groups of names of gangs that share the same devices."""


@dataclass(frozen=True)
class _Unit:
    """Workers of one gang on one host that must not share a GPU with one another."""

    gang: Gang
    indices: tuple[int, ...]
    gpus_per_worker: int
    """GPUs per worker."""

    @property
    def size(self) -> int:
        return len(self.indices) * self.gpus_per_worker


def place_all_here(gangs: Sequence[Gang]) -> dict[Worker, str]:
    """Return a mapping that places every worker on this host."""
    return {(gang.name, index): THIS_HOST for gang in gangs for index in range(gang.workers)}


def device_problems(
    gangs: Sequence[Gang],
    hosts: Mapping[Worker, str],
    num_gpus: Mapping[str, int],
    *,
    share: bool,
    device_sharing: DeviceSharing = (),
) -> Iterator[Problem]:
    """Yield the problems of a placement whose hosts have too few GPUs.

    Args:
        hosts: worker -> its host.
        num_gpus: host -> its number of GPUs; 0 if everything is computed on CPUs.
        share: True if gangs may share a GPU (`placement.oversubscribe`).
        device_sharing: `placement.device_sharing`.
    """
    for host, available in num_gpus.items():
        units, _ = _divide_units(_units(gangs, hosts, host) if available else [], device_sharing)
        for unit in units:
            if unit.size > available:
                yield _too_large_problem(unit, host, available, "" if share else _total_gpus_text(units))
                return
        needed = sum(unit.size for unit in units)
        if needed > available and not share:
            yield _too_many_problem(units, host, available)
        assigned = _assign_gpus(units, available) if share else {}
        if isinstance(assigned, _Unit):
            yield Problem(
                f"placement.gangs.{assigned.gang.name}.workers",
                assigned.gang.workers,
                f"its ranks would share some of another gang's GPUs and not all ({host} has {available}): give it as "
                "many as the other has, or 1",
            )


def plan_devices(
    gangs: Sequence[Gang],
    hosts: Mapping[Worker, str],
    num_gpus: Mapping[str, int],
    device_sharing: DeviceSharing = (),
) -> dict[Worker, tuple[int, ...]]:
    """Return worker -> the indices of its GPUs on its host. There are no indices if the worker needs no GPU or the host
    has none. `device_problems` must find no problem in the placement. Workers share GPUs only if there are too few, or
    if their gangs are in one group of `device_sharing`."""
    plan: dict[Worker, tuple[int, ...]] = dict.fromkeys(hosts, ())
    for host, available in num_gpus.items():
        if available:
            units, followers = _divide_units(_units(gangs, hosts, host), device_sharing)
            assigned = _assign_gpus(units, available)
            assert not isinstance(assigned, _Unit), f"{assigned} was not refused"
            plan |= assigned
            for leader, following in followers:
                plan |= _follow_leader(leader, following, assigned)
    return plan


def visible_devices(indices: Sequence[int], inherited: str | None) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` for a worker. `indices`: the worker's GPUs, as positions among the
    GPUs that this process sees. `inherited`: this process's own `CUDA_VISIBLE_DEVICES`, or None if it is not set."""
    names = inherited.split(",") if inherited is not None else None
    return ",".join(str(index) if names is None else names[index].strip() for index in indices)


def devices_of_joining_worker(
    gang: Gang,
    visible_gpus: Sequence[str],
    workers_by_gpu: Mapping[str, Collection[Worker]],
    *,
    share: bool,
    device_sharing: DeviceSharing = (),
) -> tuple[int, ...] | str:
    """Choose GPUs for a worker that joins a running cluster. Return their indices in `visible_gpus`. Return no indices
    if the worker needs no GPUs or sees none. If the worker cannot get enough GPUs, return the reason as a text.

    A GPU is free if no worker uses it. It also counts as free if all its users belong to other gangs that share devices
    with this worker's gang (`device_sharing`).

    Args:
        visible_gpus: identities of the GPUs that the worker sees. Two workers may see the same GPU.
        workers_by_gpu: identity of a GPU -> the workers that joined earlier and use it.
        share: `placement.oversubscribe`. If it is True and too few GPUs are free, the worker gets the least used GPUs
            that no other worker of its own gang uses.
        device_sharing: `placement.device_sharing`.
    """
    alternating = {name for group in device_sharing if gang.name in group for name in group} - {gang.name}
    workers_by_gpu = {
        device: [one for one in holders if one[0] not in alternating] for device, holders in workers_by_gpu.items()
    }
    each = gang.gpus
    if not each or not visible_gpus:
        return ()
    if len(visible_gpus) < each:
        return f"it needs {each} GPUs and sees {len(visible_gpus)}"
    free = [index for index, device in enumerate(visible_gpus) if not workers_by_gpu.get(device)]
    if len(free) >= each:
        return tuple(free[:each])
    others = [
        i
        for i, device in enumerate(visible_gpus)
        if all(name != gang.name for name, _ in workers_by_gpu.get(device, ()))
    ]
    if share and len(others) >= each:
        return tuple(sorted(others, key=lambda index: (len(workers_by_gpu.get(visible_gpus[index], ())), index))[:each])
    holders = sorted({f"{name}-{index}" for device in visible_gpus for name, index in workers_by_gpu.get(device, ())})
    seen = f"of the {len(visible_gpus)} that it sees {len(free)} are free"
    return f"it needs {each} GPUs; {seen}, others are {', '.join(holders)}'s"


def _divide_units(
    units: Sequence[_Unit], device_sharing: DeviceSharing
) -> tuple[list[_Unit], list[tuple[str, list[_Unit]]]]:
    """Return the units that get GPUs of their own, and pairs (leader, units that use its GPUs). The leader of a group
    of `device_sharing` is the gang that needs the most GPUs."""
    own, followers = list(units), []
    for group in device_sharing:
        sizes = {name: sum(unit.size for unit in units if unit.gang.name == name) for name in group}
        leader = max(group, key=lambda name: sizes[name])
        others = [unit for unit in own if unit.gang.name in group and unit.gang.name != leader]
        own = [unit for unit in own if unit not in others]
        followers += [(leader, [unit for unit in others if unit.gang.name == name]) for name in group if name != leader]
    return own, followers


def _follow_leader(
    leader: str, following: Sequence[_Unit], assigned: Mapping[Worker, tuple[int, ...]]
) -> dict[Worker, tuple[int, ...]]:
    """Return worker -> indices of its GPUs, for a gang that uses the GPUs of the gang `leader`: in ascending order, and
    from the first again after the last."""
    gpus = sorted({gpu for (gang, _), own in assigned.items() if gang == leader for gpu in own})
    by_worker, first = {}, 0
    for unit in following:
        for index in unit.indices:
            by_worker[unit.gang.name, index] = tuple(gpus[(first + n) % len(gpus)] for n in range(unit.gpus_per_worker))
            first += unit.gpus_per_worker
    return by_worker


def _units(gangs: Sequence[Gang], hosts: Mapping[Worker, str], host: str) -> list[_Unit]:
    units = []
    for gang in gangs:
        here = tuple(index for index in range(gang.workers) if hosts[gang.name, index] == host)
        if gang.is_ordered and here:
            units.append(_Unit(gang, here, gang.gpus))
        elif gang.gpus:
            units += [_Unit(gang, (index,), gang.gpus) for index in here]
    return units


def _assign_gpus(units: Sequence[_Unit], available: int) -> dict[Worker, tuple[int, ...]] | _Unit:
    """Return worker -> indices of its GPUs. If a unit cannot be placed, return the first such unit instead."""
    load = [0] * available
    assigned: dict[Worker, tuple[int, ...]] = {}
    taken: list[tuple[int, ...]] = []
    for unit in sorted(units, key=lambda unit: -unit.size):
        free = [gpu for gpu in range(available) if not load[gpu]]
        if len(free) >= unit.size:
            gpus = tuple(free[: unit.size])
        elif unit.size == 1:
            gpus = (min(range(available), key=load.__getitem__),)
        else:
            alike = [others for others in taken if len(others) == unit.size]
            if not alike:
                return unit
            gpus = min(alike, key=lambda others: load[others[0]])
        taken.append(gpus)
        for gpu in gpus:
            load[gpu] += 1
        for number, index in enumerate(unit.indices):
            assigned[unit.gang.name, index] = gpus[number * unit.gpus_per_worker : (number + 1) * unit.gpus_per_worker]
    return assigned


def _too_large_problem(unit: _Unit, host: str, available: int, total_text: str) -> Problem:
    """Return the problem of a unit that needs more GPUs than its host has. `total_text`: text for the end of the
    message that says how many GPUs all units need together, or ""."""
    name = unit.gang.name
    also = f"; {total_text}" if total_text else ""
    if Role.GENERATE in unit.gang.roles:
        return Problem(
            "engine.tensor_parallel",
            unit.gpus_per_worker,
            f"(with engine.pipeline_parallel) ranks of a replica need {unit.size} GPUs, {host} has {available}: at "
            f"most {available} ranks{also}",
        )
    need = f"its ranks need {unit.size} GPUs, {host} has {available}: at most {available}{also}"
    return Problem(f"placement.gangs.{name}.workers", unit.gang.workers, need)


def _too_many_problem(units: Sequence[_Unit], host: str, available: int) -> Problem:
    """Return the problem of a host whose workers need more GPUs than it has. The problem names the gang that needs the
    most GPUs."""
    by_gang = _gpus_of_gangs(units)
    most = max(by_gang, key=by_gang.__getitem__)
    workers = next(unit.gang.workers for unit in units if unit.gang.name == most)
    return Problem(
        f"placement.gangs.{most}.workers",
        workers,
        f"{_total_gpus_text(units)}, {host} has {available}: fewer workers or engine ranks, roles on one gang, or "
        "placement.oversubscribe=true for gangs that share GPUs and their memory",
    )


def _total_gpus_text(units: Sequence[_Unit]) -> str:
    """Return a text about the number of GPUs that units need together."""
    by_gang = _gpus_of_gangs(units)
    listed = ", ".join(f"{name} {number}" for name, number in by_gang.items())
    return f"the gangs need {sum(by_gang.values())} GPUs ({listed})"


def _gpus_of_gangs(units: Sequence[_Unit]) -> dict[str, int]:
    by_gang: dict[str, int] = {}
    for unit in units:
        by_gang[unit.gang.name] = by_gang.get(unit.gang.name, 0) + unit.size
    return by_gang
