"""Search for the fastest ways to place a run on devices.

    `space`     groupings of the roles into gangs
    `options`   possible settings of each gang on each number of devices, with the seconds of its nodes
      └ combinations of gangs, shards and staleness, each with a lower bound of its step time
          └ the simulator plays them, the lowest bound first, until no bound is below the best time found

Lower bounds of the mean step time. Each bound holds for every schedule:

    work     a gang runs the nodes of a step one after the other; replicas of a pool share the nodes at best evenly.
             The work of gangs that share devices adds up.
    cores    the gangs of a host without GPUs share its cores: the sum over all gangs of busy cores x seconds, divided
             by the number of cores
    latency  with a staleness bound of eta, publish[v] -> generate[v + eta] -> ... -> publish[v + eta + 1] is a chain of
             nodes that moves the run on by eta + 1 steps

So the result is the best plan of the space under three conditions (`SearchResult.exact`). No combination was left out.
No bound was estimated from a sample of the shards. The search ended because no remaining bound was below the best time
found.

A search on several nodes, or on many cores, is followed by searches on half as many, a quarter, and so on. On one node
a gang may have any number of devices, and with fewer combinations none is left out. So more devices never make a plan
worse than half as many.

Response lengths are drawn once and used in every step of every plan, so no plan is better because of luckier draws. No
I/O, no clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from pipeline.config.hardware import GIB
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.plan.cost import Costs, costs_of
from pipeline.plan.lengths import Lengths
from pipeline.plan.options import Option, Options, scoring_option
from pipeline.plan.scenario import scenario_of
from pipeline.plan.simulate import Scenario, SimulationResult, play
from pipeline.plan.space import (
    GENERATE,
    TRAIN,
    RoleGrouping,
    Space,
    assembled,
    counts_of,
    graph_of_steps,
    role_groupings,
)

DEVICES = "--devices"
"""The command-line option with the number of devices. Each ConfigError raised in this module names the option as the
setting at fault."""
_MOST_COMBINATIONS = 20_000
"""Maximum number of combinations (one option for each gang) that are tried for one division of the roles into gangs and
one number of shards. If there are more, each gang keeps only one option for each number of devices: the option with the
least work."""


_MOST_REASONS = 3
"""Maximum number of reasons in a message that says why every plan was refused."""


@dataclass(frozen=True)
class Plan:
    """A way to place a run, and the result of its simulation."""

    grouping: str
    config: RunConfig
    devices: int
    """Number of devices that the plan uses."""
    bounds: Mapping[str, float]
    """Lower bounds of the mean step time, in seconds: name of a bound -> bound. The names are:

    - the name of a gang: a bound from the work of this gang in a step
    - `devices`, in place of these names if the gangs use the same devices in turn: a bound from the work of all gangs
      together
    - `cores`, only if the gangs share the cores of a host: a bound from the work on these cores
    - `latency`: a bound from the longest chain of nodes that must run one after the other
    """
    result: SimulationResult
    value: float
    """Value of the objective. Less is better."""

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sort key: the best plan first. Of equally good plans, the one with fewer devices, and then with less
        staleness, is better."""
        return float(f"{self.value:.6g}"), self.devices, self.config.staleness

    @property
    def limit(self) -> str:
        """Name of the largest bound, which limits the step time."""
        return max(self.bounds, key=lambda name: self.bounds[name])


@dataclass(frozen=True)
class Objective:
    """The quantity by which the search compares plans."""

    per_device: bool = False
    """True to maximise the samples per device and hour, False to minimise the step time."""
    staleness_price: float = 0.0
    """Fraction by which the number of needed samples rises with each version of staleness."""

    def value(self, step_s: float, devices: int, staleness: float) -> float:
        """Return the number that the search minimises: the seconds of a step, times `devices` if `per_device`, times
        (1 + `staleness_price` x `staleness`)."""
        return step_s * (devices if self.per_device else 1) * (1 + self.staleness_price * staleness)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for the fastest placement of a run: the best plans, and how many combinations were
    considered and simulated."""

    plans: Sequence[Plan]
    """The best plan of each `RoleGrouping` and staleness bound. The best plan of all comes first. A plan is left out if
    a better one of its grouping is asynchronous, too, and has a lower bound."""
    considered: int
    """Number of combinations that fit in the memory of the devices."""
    simulated: int
    exact: bool
    """True if no other combination of the space can be better than the first plan."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of simulated combinations whose config was refused for this reason. A combination is checked
    only if it is better than all accepted combinations of the same grouping and staleness bound."""

    def best(self, *, synchronous: bool) -> Plan | None:
        """Return the best plan whose staleness bound is 0 if `synchronous`, or above 0 if not. None if no plan has such
        a bound."""
        return next((plan for plan in self.plans if (plan.config.staleness == 0) == synchronous), None)


# ---- combinations and their bounds -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination:
    """One option for each gang, a number of shards and a staleness bound."""

    grouping: RoleGrouping
    options: Sequence[Option]
    shards: int
    staleness: int
    devices: int
    """Number of devices that the gangs use together."""
    bounds: Mapping[str, float]

    @property
    def bound_s(self) -> float:
        """Lower bound of the mean step time."""
        return max(self.bounds.values())


def combinations(space: Space, watch: Callable[[str], None] = lambda text: None) -> tuple[list[Combination], bool]:
    """Return (the combinations in which each gang fits in the memory of its devices, `exact`).

    `exact` is False if combinations may have been left out because there were too many (`_MOST_COMBINATIONS`), or if a
    lower bound of the step time is only an estimate, because the number of shards is large (`Space.sampled`).

    Args:
        watch: called with texts about the progress.

    Raises:
        ConfigError: no combination fits on the devices.
    """
    fitting, exact, nothing = _combinations(space, watch, lambda option: True)
    if not fitting:
        raise ConfigError(DEVICES, _fits_nowhere(space, nothing, watch))
    return fitting, exact


def _combinations(
    space: Space, watch: Callable[[str], None], keeps: Callable[[Option], bool]
) -> tuple[list[Combination], bool, set[str]]:
    """Return the result of `combinations`, for the options of gangs for which `keeps` returns True, and the names of
    the gangs that fit in no grouping."""
    fitting: list[Combination] = []
    known, counts = Options(space), counts_of(space)
    exact, nothing = True, set[str]()
    for grouping, shards in itertools.product(role_groupings(space.base), space.shards):
        watch(f"settings of each gang: {grouping.name}, {shards} shards")
        engines = [option for n in counts for option in known.engine(grouping, shards, n)]
        trainers = [
            [option for n in counts for option in known.trainer(grouping, g, shards, n)] for g in grouping.gangs
        ]
        nothing |= {name for name, of_gang in zip(grouping.gangs, trainers, strict=True) if not of_gang}
        nothing |= set() if engines else {GENERATE}
        every = [[option for option in of_gang if keeps(option)] for of_gang in (engines, *trainers)]
        exact &= not space.sampled(shards)
        if math.prod(map(len, every)) > _MOST_COMBINATIONS:
            every, exact = [_least_work(options) for options in every], False
        scoring = scoring_option(space, grouping, shards)
        for options in itertools.product(*every):
            needed = [option.devices for option in options]
            if grouping.shares_devices and len(set(needed)) > 1:
                continue
            used = space.used_devices(grouping, needed)
            if used is None:
                continue
            for staleness in space.staleness:
                bounds = _bounds(space, grouping, options, scoring, staleness)
                fitting.append(Combination(grouping, options, shards, staleness, used, bounds))
    return fitting, exact, nothing


def _least_work(options: Sequence[Option]) -> list[Option]:
    """Return one option for each number of devices: the option with the least work in a step."""
    least: dict[int, Option] = {}
    for option in options:
        known = least.get(option.devices)
        if known is None or option.busy_s < known.busy_s:
            least[option.devices] = option
    return list(least.values())


def _bounds(
    space: Space, grouping: RoleGrouping, options: Sequence[Option], scoring: Option, staleness: int
) -> dict[str, float]:
    """Return lower bounds of the mean step time (`Plan.bounds`)."""
    work = {option.gang: option.busy_s for option in options}
    if grouping.shares_devices:
        work = {"devices": sum(work.values())}
    if space.cores is not None:
        work["cores"] = sum(option.used_cores * option.busy_s for option in options) / space.cores
    seconds = {stage: s for option in (*options, scoring) for stage, s in option.seconds.items()}
    engine, trainer = options[0], next(option for option in options if option.gang == TRAIN)
    forward = [stage for stage in ("score", "reference", "logprob", "value") if stage in seconds]
    after = seconds["advantage"][0] + seconds["update_policy"][0] + seconds["publish"][0]
    after += 5 * space.calibration.overhead_s
    first, one = max(seconds["generate"]), max(min(seconds[stage]) for stage in forward)
    chain = first + one + after
    if not staleness:  # no node of a step runs before the step's version is published
        all_forward = sum(sum(trainer.seconds[stage]) for stage in forward if stage in trainer.seconds)
        chain = max(chain, engine.generate_s + one + after, min(seconds["generate"]) + all_forward + after)
    return work | {"latency": chain / (staleness + 1)}


def _fits_nowhere(space: Space, nothing: set[str], watch: Callable[[str], None]) -> str:
    """Return a text that says why no combination fits. If the run fits on up to 64 times as many GPUs, the text names
    the smallest such number."""
    given = f"no settings of {', '.join(sorted(nothing))} fit" if nothing else "the gangs together do not fit"
    if not space.run.on_gpus:
        return f"{given} on {space.devices} cores: more cores"
    there = f"{space.devices} GPUs ({space.device_bytes / GIB:.1f} GiB each)"
    whole = space.cluster.hardware.gpus_per_node
    sizes = [n for n in range(space.devices + 1, 64 * space.devices + 1) if n < whole or n % whole == 0]
    sizes = sizes or [whole]

    @cache
    def fitting(devices: int) -> str | None:
        watch(f"{given}; trying {devices} GPUs")
        nodes, per_node = max(1, devices // whole), min(devices, whole)
        larger = replace(space, devices=devices, cluster=replace(space.cluster, nodes=nodes, gpus_per_node=per_node))
        return _smallest_fit(larger)

    last = next((2**power - 1 for power in range(len(sizes).bit_length()) if fitting(sizes[2**power - 1])), None)
    if last is None:
        last = len(sizes) - 1
        if not fitting(sizes[last]):
            dtype = "model.dtype=bfloat16, " * (space.base.model.dtype != "bfloat16")
            return (
                f"{given} on {there}, nor on {sizes[-1]} of them: devices with more memory, smaller "
                f"model.*.micro_batch_tokens, {dtype}LoRA or more model.frozen_blocks"
            )
    first = bisect_left(sizes, True, (last + 1) // 2, last, key=lambda devices: fitting(devices) is not None)
    return f"{given} on {there}; it would fit on {sizes[first]}, with the gangs {fitting(sizes[first])}"


def _smallest_fit(space: Space) -> str | None:
    """Return the first grouping whose gangs fit on the devices of a space, with the fewest devices of each gang, as
    text. Return None if no grouping fits."""
    counts, known = counts_of(space), Options(space)
    for grouping in role_groupings(space.base):
        needed = {GENERATE: next((n for n in counts if known.engine(grouping, space.shards[0], n)), 0)}
        for gang in grouping.gangs:
            needed[gang] = next((n for n in counts if known.trainer(grouping, gang, space.shards[0], n)), 0)
        if all(needed.values()) and space.used_devices(grouping, [*needed.values()]) is not None:
            return f"{grouping.name} ({', '.join(f'{gang} {n}' for gang, n in needed.items())})"
    return None


# ---- the search ------------------------------------------------------------------------------------------------------


def search(
    space: Space,
    objective: Objective,
    refuse: Callable[[RunConfig], str | None],
    most: int = 60,
    watch: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Search for the best plan for each division of the roles into gangs (`RoleGrouping`) and each staleness bound.
    Plans are compared by simulation. The best plan of all comes first in the result.

    Plans with a staleness bound of 0 and plans with larger bounds are searched separately, each in two phases. The
    first phase simulates up to `most` combinations, the most promising first. Some pairs of grouping and staleness
    bound may then have no accepted plan. The second phase simulates only combinations of these pairs. Both phases
    together simulate at most 2 x `most` combinations.

    Args:
        refuse: returns the reason why a run with this config would be refused, or None.
        most: maximum number of simulations in the first phase.
        watch: called with texts about the progress.

    Raises:
        ConfigError: no combination fits, or `refuse` refused every plan that it was asked about.
    """
    plans: list[Plan] = []
    refused: dict[str, int] = {}
    plays = itertools.count(1)
    considered, exact = 0, True

    def accepts(plan: Plan) -> bool:
        reason = refuse(plan.config)
        if reason is not None:
            refused[reason] = refused.get(reason, 0) + 1
        return reason is None

    def play_one(one: Combination) -> Plan:
        best = f", the best takes {min(plan.result.mean_s for plan in plans):.3g} s a step" if plans else ""
        watch(f"{considered} combinations fit; simulating number {next(plays)}{best}")
        return played_plan(part, objective, one)

    simulated, nothing = 0, set[str]()
    for part in (space, *_smaller_spaces(space)):
        known = [
            min((plan.value for plan in plans if bool(plan.config.staleness) == kind), default=math.inf)
            for kind in (False, True)
        ]
        every, is_exact, fit_nowhere = _combinations(part, watch, partial(_may_be_better, objective, max(known)))
        nothing |= fit_nowhere if part is space else set()
        considered += len(every)
        exact &= is_exact
        for asynchronous in (False, True):
            of_kind = [one for one in every if bool(one.staleness) == asynchronous]
            judged, num_simulated, ended = _search(objective, play_one, accepts, of_kind, most, known[asynchronous])
            plans += judged
            simulated += num_simulated
            exact &= ended
    if not plans and not considered:
        raise ConfigError(DEVICES, _fits_nowhere(space, nothing, watch))
    if not plans:
        raise ConfigError(DEVICES, f"every plan for {space.devices} devices would be refused: {_commonest(refused)}")
    plans.sort(key=lambda plan: plan.rank)
    best_of: dict[tuple[str, int], Plan] = {}
    least: dict[str, int] = {}
    for plan in plans:
        staleness = plan.config.staleness
        if staleness <= least.get(plan.grouping, staleness):  # else a better plan of this grouping has less staleness
            best_of.setdefault((plan.grouping, staleness), plan)
        if staleness:
            least[plan.grouping] = min(staleness, least.get(plan.grouping, staleness))
    return SearchResult(list(best_of.values()), considered, simulated, exact, refused)


def _smaller_spaces(space: Space) -> Iterator[Space]:
    """Yield the space with half as many nodes, a quarter, and so on; without GPUs, with half as many cores, and so on,
    as long as not every number of threads is in the space (`counts_of`)."""
    if space.cores is None:
        nodes = space.cluster.nodes
        while (nodes := nodes // 2) > 0:
            cluster = replace(space.cluster, nodes=nodes)
            yield replace(space, devices=cluster.gpus, cluster=cluster)
    devices = 0 if space.cores is None else space.devices
    while devices > 8 and (devices := devices // 2):
        yield replace(space, devices=devices, cluster=replace(space.cluster, some_cores=devices))


def _may_be_better(objective: Objective, known: float, option: Option) -> bool:
    """Return True unless the work of a gang with this option alone makes every plan worse than the value `known`."""
    return objective.value(option.busy_s, option.devices, 0.0) < known


def _commonest(refused: Mapping[str, int]) -> str:
    """Return the most frequent reasons for which plans were refused, and how many others there are."""
    ordered = sorted(refused, key=lambda reason: refused[reason], reverse=True)
    others = len(ordered) - _MOST_REASONS
    return "; ".join(ordered[:_MOST_REASONS]) + (
        f"; and {others} other reason{'s' * (others > 1)}" if others > 0 else ""
    )


def _search(
    objective: Objective,
    play_one: Callable[[Combination], Plan],
    accepts: Callable[[Plan], bool],
    every: Sequence[Combination],
    most: int,
    known: float = math.inf,
) -> tuple[list[Plan], int, bool]:
    """Simulate combinations, those with the lowest bound of the objective first. Return the accepted plans, the number
    of simulations, and True if no other combination can be better than the best plan.

    The first phase ends then, or after `most` simulations. The second makes at most as many, and looks for plans of
    the pairs of grouping and staleness bound that have none yet.

    Args:
        accepts: True if a run with the plan's config would not be refused. Called only for the best of its pair so far.
        known: value of the best plan of another space: only better combinations are simulated, and in one phase.
    """
    waiting = [
        (objective.value(one.bound_s, one.devices, 0.0), one.devices, number, one) for number, one in enumerate(every)
    ]
    plans: list[Plan] = []
    best, num_simulated = known, 0
    best_of: dict[tuple[str, int], float] = {}

    def judge(one: Combination) -> None:
        nonlocal best, num_simulated
        plan = play_one(one)
        num_simulated += 1
        kind = one.grouping.name, one.staleness
        if plan.value < best_of.get(kind, math.inf) and accepts(plan):
            plans.append(plan)
            best_of[kind] = plan.value
            best = min(best, plan.value)

    heapq.heapify(waiting)
    while waiting and waiting[0][0] < best and num_simulated < most:
        judge(heapq.heappop(waiting)[-1])
    exact = not waiting or waiting[0][0] >= best
    while (
        waiting and num_simulated < 2 * most and known == math.inf
    ):  # for comparison: a plan for each grouping and staleness bound that has none yet
        one = heapq.heappop(waiting)[-1]
        if (one.grouping.name, one.staleness) not in best_of:
            judge(one)
    return plans, num_simulated, exact


def played_plan(space: Space, objective: Objective, one: Combination) -> Plan:
    """Simulate a combination and return its plan."""
    chosen = {option.gang: (option.settings, option.changes) for option in one.options}
    config = assembled(space, one.grouping, chosen, one.shards, one.staleness)
    costs = costs_of(replace(space.run, config=config), space.cluster, space.calibration)
    result = play(scenario_to_plan(costs, space.lengths))
    value = objective.value(result.mean_s, one.devices, result.mean_staleness)
    return Plan(one.grouping.name, config, one.devices, one.bounds, result, value)


def scenario_to_plan(costs: Costs, lengths: Lengths) -> Scenario:
    """Return the scenario that is simulated to compare plans: `space.STEPS` steps without evaluations."""
    return replace(scenario_of(costs, lengths), spec=graph_of_steps(costs.run.config))
