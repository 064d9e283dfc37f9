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

Gangs that have their devices in turn (`placement.turns`) are one for this: the one that needs the most GPUs has them
counted out, and the others' workers are on the same ones, in order.

Pure functions: how many GPUs a host has is asked by the caller. May import pipeline.config.placement (and below it
pipeline.graph.gangs), stages.models.protocol and storage.problems.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.graph.gangs import Gang
from stages.models.protocol import Role
from storage.problems import Problem

Worker = tuple[str, int]
"""Its gang's name, and its rank or replica."""
THIS_HOST = "this host"
Turns = Collection[Collection[str]]
"""Groups of gangs, by name, that have the same devices in turn."""


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
    gangs: Sequence[Gang],
    replica_ranks: int,
    hosts: Mapping[Worker, str],
    num_gpus: Mapping[str, int],
    *,
    share: bool,
    turns: Turns = (),
) -> Iterator[Problem]:
    """What of a placement cannot have its GPUs. `hosts`: where each worker is; `num_gpus`: of each host, 0 where
    everything is computed on CPUs; `replica_ranks`: of the engine; `share`: `placement.share_devices`; `turns`:
    `placement.turns`."""
    for host, available in num_gpus.items():
        units, _ = _in_turn(_units(gangs, replica_ranks, hosts, host) if available else [], turns)
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
    gangs: Sequence[Gang],
    replica_ranks: int,
    hosts: Mapping[Worker, str],
    num_gpus: Mapping[str, int],
    turns: Turns = (),
) -> dict[Worker, tuple[int, ...]]:
    """The GPUs of each worker, as indices on its host; none where a worker needs none or its host has none. For what
    `device_problems` lets pass; GPUs are shared only where there are too few."""
    plan: dict[Worker, tuple[int, ...]] = dict.fromkeys(hosts, ())
    for host, available in num_gpus.items():
        if available:
            units, followers = _in_turn(_units(gangs, replica_ranks, hosts, host), turns)
            assigned = _assigned(units, available)
            assert not isinstance(assigned, _Unit), f"{assigned} was not refused"
            plan |= assigned
            for leader, following in followers:
                plan |= _after(leader, following, assigned)
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
    turns: Turns = (),
) -> tuple[int, ...] | str:
    """The GPUs of a worker that joins from some host, as indices into those that it sees (by identity, so that two
    workers which see the same one are known to); or what keeps it from having any. `taken`: who has each, of those that
    joined before it; one that others have which take turns with its gang counts as free. None where it needs none, or
    sees none at all."""
    alternating = {name for group in turns if gang.name in group for name in group} - {gang.name}
    taken = {device: [one for one in holders if one[0] not in alternating] for device, holders in taken.items()}
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


def _in_turn(units: Sequence[_Unit], turns: Turns) -> tuple[list[_Unit], list[tuple[str, list[_Unit]]]]:
    """Of the units on a host: those that have GPUs counted out, and, by the gang whose GPUs they have in turn, the
    others."""
    own, followers = list(units), []
    for group in turns:
        sizes = {name: sum(unit.size for unit in units if unit.gang.name == name) for name in group}
        leader = max(group, key=lambda name: sizes[name])
        others = [unit for unit in own if unit.gang.name in group and unit.gang.name != leader]
        own = [unit for unit in own if unit not in others]
        followers += [(leader, [unit for unit in others if unit.gang.name == name]) for name in group if name != leader]
    return own, followers


def _after(
    leader: str, following: Sequence[_Unit], assigned: Mapping[Worker, tuple[int, ...]]
) -> dict[Worker, tuple[int, ...]]:
    """The GPUs of the workers of a gang that has a leader's in turn."""
    gpus = sorted({gpu for (gang, _), own in assigned.items() if gang == leader for gpu in own})
    found, first = {}, 0
    for unit in following:
        for index in unit.indices:
            found[unit.gang.name, index] = tuple(gpus[(first + n) % len(gpus)] for n in range(unit.each))
            first += unit.each
    return found


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
