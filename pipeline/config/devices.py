"""Which GPUs each worker has, counted out before anything starts, so that no two meet on one by accident.

What needs GPUs: every rank of a gang one, every replica of the engine as many as it has ranks. Rewards need none. What
is placed together is a *unit*: the ranks of a gang on one host, or one replica. Two ranks of a unit are never on one
GPU, which NCCL refuses.

                GPU     0    1    2    3
    train (4 ranks)     0    1    2    3                        the larger units first, each on GPUs of its own
    generate (2)        0    1                                  and where none are left, if sharing is asked for:
    critic (2)                    0    1                        a unit of one GPU on the least used
    (critic of 3: refused, it would share some of               a larger one on exactly those of another
     train's GPUs and not all)

Pure functions: how many GPUs a host has is asked by the caller. May import pipeline.config.placement (and below it
pipeline.graph.dispatch), stages.models.protocol and storage.problems.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.graph.dispatch import Gang
from stages.models.protocol import Role
from storage.problems import Problem

Worker = tuple[str, int]
"""Its gang's name, and its rank or replica."""
THIS_HOST = "this host"


@dataclass(frozen=True)
class _Unit:
    """Workers of one gang on one host that must not share a GPU with one another."""

    gang: Gang
    indices: tuple[int, ...]
    each: int
    """GPUs of a worker."""

    @property
    def size(self) -> int:
        return len(self.indices) * self.each


def all_here(gangs: Sequence[Gang]) -> dict[Worker, str]:
    """Every worker on this host."""
    return {(gang.name, index): THIS_HOST for gang in gangs for index in range(gang.workers)}


def device_problems(
    gangs: Sequence[Gang], replica_ranks: int, hosts: Mapping[Worker, str], num_gpus: Mapping[str, int], *, share: bool
) -> Iterator[Problem]:
    """What of a placement cannot have its GPUs. `hosts`: where each worker is; `num_gpus`: of each host, 0 where
    everything is computed on CPUs; `replica_ranks`: of the engine; `share`: `placement.share_devices`."""
    for host, available in num_gpus.items():
        units = _units(gangs, replica_ranks, hosts, host) if available else []
        for unit in units:
            if unit.size > available:
                yield _too_large(unit, host, available)
                return
        needed = sum(unit.size for unit in units)
        if needed > available and not share:
            yield _too_many(units, host, available)
        assigned = _assigned(units, available) if share else {}
        if isinstance(assigned, _Unit):
            yield Problem(
                f"placement.gangs.{assigned.gang.name}.workers",
                assigned.gang.workers,
                f"its ranks would share some of another gang's GPUs and not all ({host} has {available}): give it as "
                "many as the other has, or 1",
            )


def plan_devices(
    gangs: Sequence[Gang], replica_ranks: int, hosts: Mapping[Worker, str], num_gpus: Mapping[str, int]
) -> dict[Worker, tuple[int, ...]]:
    """The GPUs of each worker, as indices on its host; none where a worker needs none or its host has none. For what
    `device_problems` lets pass; GPUs are shared only where there are too few."""
    plan: dict[Worker, tuple[int, ...]] = dict.fromkeys(hosts, ())
    for host, available in num_gpus.items():
        if available:
            assigned = _assigned(_units(gangs, replica_ranks, hosts, host), available)
            assert not isinstance(assigned, _Unit), f"{assigned} was not refused"
            plan |= assigned
    return plan


def visible_devices(indices: Sequence[int], inherited: str | None) -> str:
    """`CUDA_VISIBLE_DEVICES` of a worker with these GPUs, counted among those that this process may see itself."""
    names = inherited.split(",") if inherited is not None else None
    return ",".join(str(index) if names is None else names[index].strip() for index in indices)


def devices_of_joining(
    gang: Gang,
    replica_ranks: int,
    seen: Sequence[str],
    taken: Mapping[str, Collection[Worker]],
    *,
    share: bool,
) -> tuple[int, ...] | str:
    """The GPUs of a worker that joins from some host, as indices into those that it sees (by identity, so that two
    workers which see the same one are known to); or what keeps it from having any. `taken`: who has each, of those that
    joined before it. None where it needs none, or sees none at all."""
    each = _devices_of_each(gang, replica_ranks)
    if not each or not seen:
        return ()
    if len(seen) < each:
        return f"it needs {each} GPUs and sees {len(seen)}"
    free = [index for index, device in enumerate(seen) if not taken.get(device)]
    if len(free) >= each:
        return tuple(free[:each])
    others = [i for i, device in enumerate(seen) if all(name != gang.name for name, _ in taken.get(device, ()))]
    if share and len(others) >= each:
        return tuple(sorted(others, key=lambda index: (len(taken.get(seen[index], ())), index))[:each])
    holders = sorted({f"{name}-{index}" for device in seen for name, index in taken.get(device, ())})
    return (
        f"it needs {each} GPUs; of the {len(seen)} that it sees {len(free)} are free, others are {', '.join(holders)}'s"
    )


def _devices_of_each(gang: Gang, replica_ranks: int) -> int:
    """GPUs that a worker of this gang needs, where there are any."""
    if Role.GENERATE in gang.roles:
        return replica_ranks
    return 1 if gang.ordered else 0


def _units(gangs: Sequence[Gang], replica_ranks: int, hosts: Mapping[Worker, str], host: str) -> list[_Unit]:
    units = []
    for gang in gangs:
        here = tuple(index for index in range(gang.workers) if hosts[gang.name, index] == host)
        each = replica_ranks if Role.GENERATE in gang.roles else 1
        if gang.ordered and here:
            units.append(_Unit(gang, here, each))
        elif Role.GENERATE in gang.roles:
            units += [_Unit(gang, (index,), each) for index in here]
    return units


def _assigned(units: Sequence[_Unit], available: int) -> dict[Worker, tuple[int, ...]] | _Unit:
    """The GPUs of each worker, or the unit that cannot have any."""
    load = [0] * available
    found: dict[Worker, tuple[int, ...]] = {}
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
            found[unit.gang.name, index] = gpus[number * unit.each : (number + 1) * unit.each]
    return found


def _too_large(unit: _Unit, host: str, available: int) -> Problem:
    name = unit.gang.name
    if Role.GENERATE in unit.gang.roles:
        return Problem(
            "engine.tensor_parallel",
            unit.each,
            f"(with engine.pipeline_parallel) ranks of a replica need {unit.size} GPUs, {host} has {available}: at "
            f"most {available} ranks",
        )
    need = f"its ranks need {unit.size} GPUs, {host} has {available}: at most {available}"
    return Problem(f"placement.gangs.{name}.workers", unit.gang.workers, need)


def _too_many(units: Sequence[_Unit], host: str, available: int) -> Problem:
    """Names the gang with the most."""
    by_gang: dict[str, int] = {}
    for unit in units:
        by_gang[unit.gang.name] = by_gang.get(unit.gang.name, 0) + unit.size
    most = max(by_gang, key=by_gang.__getitem__)
    listed = ", ".join(f"{name} {number}" for name, number in by_gang.items())
    workers = next(unit.gang.workers for unit in units if unit.gang.name == most)
    return Problem(
        f"placement.gangs.{most}.workers",
        workers,
        f"the gangs need {sum(by_gang.values())} GPUs ({listed}), {host} has {available}: fewer workers or engine "
        "ranks, roles on one gang, or placement.share_devices=true for gangs that share GPUs and their memory",
    )
