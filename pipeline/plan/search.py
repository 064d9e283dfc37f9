"""Search for the fastest ways to place a run on devices.

    forms       gangs of roles: engine | trainer;  engine | policy + reference | critic;  engine and trainer in turns
      └ gangs   for each number of devices: layouts, micro-batches, engines' ranks, rows, slots
                  ── what does not fit in memory is left out ── what is slower in every stage than another is left out
          └ combinations of gangs, shards and staleness, each with a lower bound of its step time
              └ the simulator plays them, the lowest bound first, until no bound is below the best time found

Lower bounds of the mean step time, each of which holds for every schedule:

    work     a gang runs the nodes of a step one after the other; replicas of a pool share them at best evenly.
             The work of gangs that share devices adds up.
    latency  publish[v] -> generate[v + eta] -> ... -> publish[v + eta + 1] is a chain of eta + 1 steps

So the result is the best of the space whenever the search ends because of the bounds (`Found.exact`). Lengths are drawn
for one step, and every step has the same ones, so no plan is better because of luckier draws. No I/O, no clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.hardware import GIB, HardwareCluster
from pipeline.config.memory import PlannedRun, engine_memory, row_cache_bytes, worker_memory
from pipeline.config.placement import GangConfig, PlacementConfig
from pipeline.config.run import RunConfig
from pipeline.config.slurm import SlurmGangConfig
from pipeline.errors import ConfigError
from pipeline.graph.graph import SHARDED, GraphSpec, Node, step_nodes
from pipeline.plan.calibration import Calibration
from pipeline.plan.cost import Costs, costs_of
from pipeline.plan.decode import decode
from pipeline.plan.lengths import Lengths, SameLengths
from pipeline.plan.simulate import Played, Scenario, play, scenario_of
from stages.models.config import LayoutConfig
from stages.models.layouts import layout_problems
from stages.models.protocol import MODEL_ROLES, Role

GENERATE, TRAIN, CRITIC, SCORE = "generate", "train", "critic", "score"
"""Names of the gangs of a plan."""
DEVICES = "--devices"
"""The option that names the devices. Errors have it as their key."""
STEPS = 12
"""Steps that are simulated."""
_EXACT_SHARDS, _SAMPLED = 16, 4
"""The bounds are computed from every shard if there are at most `_EXACT_SHARDS`, otherwise from `_SAMPLED` of them."""
_MOST_COMBINATIONS = 20_000
"""Largest number of combinations of the options of a form's gangs. If there are more, each gang keeps only the option
with the least work for each number of devices."""
_FILLED = 0.95
"""Largest share of a GPU's free memory that an engine's cache gets."""
_RECOMPUTES = (
    LayoutConfig(),
    LayoutConfig(recompute="selective", recompute_modules=["mlp"]),
    LayoutConfig(recompute="full"),
)
"""Ways to recompute activations, from the fastest to the one that saves the most memory."""


@dataclass(frozen=True)
class Form:
    """A division of the roles into gangs."""

    name: str
    gangs: Mapping[str, frozenset[Role]]
    """Gangs that hold models, by name."""
    in_turns: bool = False
    """True if these gangs and the engine take turns on the same devices."""


@dataclass(frozen=True)
class Option:
    """Settings of one gang, with the seconds of its nodes in a step."""

    gang: str
    devices: int
    settings: GangConfig
    changes: Mapping[str, Any]
    """Settings outside of the placement: `policy` and `critic` (micro_batch_tokens), and the engine's."""
    seconds: Mapping[str, tuple[float, ...]]
    """Seconds of each node of a step, by stage."""
    busy_s: float
    """Lower bound of the seconds that a step keeps the gang busy."""


@dataclass(frozen=True)
class Plan:
    """A way to place a run, and the result of its simulation."""

    form: str
    config: RunConfig
    devices: int
    """Devices that it uses."""
    bounds: Mapping[str, float]
    """Lower bounds of the step time, by the name of a gang, or `latency` for the chain of a step's nodes."""
    played: Played
    value: float
    """Value of the objective; less is better."""

    @property
    def limit(self) -> str:
        """Name of the largest bound, which limits the step time."""
        return max(self.bounds, key=lambda name: self.bounds[name])


@dataclass(frozen=True)
class Objective:
    """The quantity that a plan is chosen by."""

    per_device: bool = False
    """True: the most samples per device and hour; else the shortest step."""
    staleness_price: float = 0.0
    """Share by which one version of staleness raises the number of samples that are needed."""

    def value(self, step_s: float, devices: int, staleness: float) -> float:
        """Return the number that the search minimises: seconds of a step, times `devices` if `per_device`, increased by
        the share `staleness_price` for each version of staleness."""
        return step_s * (devices if self.per_device else 1) * (1 + self.staleness_price * staleness)


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    plans: Sequence[Plan]
    """The best plan of each form (`Form`) and staleness bound. The best of all comes first."""
    considered: int
    """Number of combinations that fit in the memory of the devices."""
    simulated: int
    exact: bool
    """True if no other combination of the space can be better than the first plan."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Number of combinations that the checks of a config refused, by the reason."""

    def best(self, *, synchronous: bool) -> Plan | None:
        """Return the best plan with a staleness bound of 0 if `synchronous`, else above 0; None if there is none."""
        return next((plan for plan in self.plans if (plan.config.staleness == 0) == synchronous), None)


@dataclass(frozen=True)
class Space:
    """The input of a search."""

    run: PlannedRun
    cluster: HardwareCluster
    calibration: Calibration
    lengths: SameLengths
    devices: int
    """GPUs, or cores of a host without GPUs."""
    staleness: Sequence[int]
    """Staleness bounds to try."""
    shards: Sequence[int]
    """Numbers of shards to try."""

    @property
    def base(self) -> RunConfig:
        return self.run.config

    def sampled(self, shards: int) -> bool:
        """Return True if only some shards' seconds are computed for the bounds, which are then estimates."""
        return shards > _EXACT_SHARDS

    @property
    def device_bytes(self) -> float:
        given = self.base.cluster.device_memory_gb
        return min(self.cluster.device_bytes, math.inf if given is None else given * GIB)


def space_of(
    run: PlannedRun, cluster: HardwareCluster, calibration: Calibration, lengths: Lengths, devices: int
) -> Space:
    """Return the space around a config: its staleness bound and 0, 1 and 2; its number of shards, half and twice that
    number. Numbers that would divide a prompt's responses between shards are left out."""
    config = run.config
    rows = config.rollout.rows
    shards = {config.rollout.shards * 2**power // 2 for power in range(3)}
    counts = sorted(n for n in shards if n and rows % n == 0 and _whole_groups(config, rows // n))
    tokens = lengths.rows(0, 0, rows)
    staleness = sorted({0, 1, 2, config.staleness})
    return Space(run, cluster, calibration, SameLengths(tokens), devices, staleness, counts)


def _whole_groups(config: RunConfig, rows: int) -> bool:
    return rows % config.rollout.responses_per_prompt == 0


# ---- forms and numbers of devices ----------------------------------------------------------------------------------


def forms(config: RunConfig) -> list[Form]:
    """Return the ways to divide a config's roles into gangs. An engine that cannot free its devices takes no turns."""
    models = frozenset({Role.POLICY, Role.REFERENCE}) | ({Role.CRITIC} if config.has_critic else frozenset())
    found = [Form("apart", {TRAIN: models})]
    if config.capabilities().sleeps != "nothing":
        found.append(Form("in turns", {TRAIN: models}, in_turns=True))
    if config.has_critic:
        divided = {TRAIN: models - {Role.CRITIC}, CRITIC: frozenset({Role.CRITIC})}
        found.append(Form("critic apart", divided))
    return found


def device_counts(devices: int, per_node: int) -> list[int]:
    """Return the numbers of devices that a gang may have. On one node any number is possible. On several nodes a gang
    has 1, 2, 3, 4, 6, 8, 12, ... whole nodes: a power of two, or three times one."""
    if devices <= per_node:
        return [*range(1, devices + 1)]
    nodes = devices // per_node
    whole = {scale * 2**power for scale in (1, 3) for power in range(nodes.bit_length())}
    return sorted(count * per_node for count in whole if count <= nodes)


# ---- options of one gang -------------------------------------------------------------------------------------------


class Options:
    """Owns the options of gangs that were found so far, and the results of memory checks, which do not depend on the
    number of shards."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._known: dict[tuple[frozenset[Role], int, int, bool], list[Option]] = {}
        self._fitting: dict[tuple[object, ...], bool] = {}
        self._weights: dict[int, float] = {}
        """Bytes on a GPU of an engine without a cache, by its ranks."""

    def trainer(self, form: Form, gang: str, shards: int, devices: int) -> list[Option]:
        """Return the options of a gang of models on a number of devices that fit in memory. Options that `pareto` drops
        are left out, but not for gangs that take turns: their hand-overs may be faster with less memory."""
        key = form.gangs[gang], shards, devices, form.in_turns
        if key not in self._known:
            found = [*self._trainers(form, gang, shards, devices)]
            self._known[key] = found if form.in_turns else pareto(found)
        return self._known[key]

    def engine(self, form: Form, shards: int, devices: int) -> list[Option]:
        """Return the options of the generating pool on a number of devices, as `trainer` does."""
        key = frozenset({Role.GENERATE}), shards, devices, form.in_turns
        if key not in self._known:
            found = [*self._engines(form, shards, devices)]
            self._known[key] = found if form.in_turns else pareto(found)
        return self._known[key]

    def _trainers(self, form: Form, gang: str, shards: int, devices: int) -> Iterator[Option]:
        space, roles = self._space, form.gangs[gang]
        divisions: dict[tuple[int, int], list[GangConfig]] = {}
        for settings in _layouts(space, roles, shards, devices):
            divisions.setdefault((settings.layout.tensor, settings.layout.pipeline), []).append(settings)
        for tokens, savings in itertools.product(_micro_batches(space), divisions.values()):
            trained = sorted(roles & {Role.POLICY, Role.CRITIC})
            changes = {str(role): tokens for role in trained} if tokens is not None else {}
            for settings in savings:  # the first that fits recomputes the least
                run = replace(space.run, config=assembled(space, form, {gang: (settings, changes)}, shards, 0))
                layout = settings.layout
                key = roles, devices, layout.tensor, layout.pipeline, layout.recompute, tokens
                if key not in self._fitting:
                    self._fitting[key] = _fits(space, run, gang)
                if self._fitting[key]:
                    yield _option(space, run, gang, devices, settings, changes)
                    break

    def _engines(self, form: Form, shards: int, devices: int) -> Iterator[Option]:
        space, config = self._space, self._space.base
        given, rows = _given(space, frozenset({Role.GENERATE})), config.rollout.rows // shards
        on_gpus, per_node = space.run.on_gpus, space.cluster.gpus_per_node
        for ranks in (1, 2, 4, 8) if on_gpus else (1,):
            if devices % ranks or (on_gpus and ranks > per_node):
                continue
            sizes = [(devices // ranks, given.threads)]
            if not on_gpus:
                sizes = [(n, devices // n) for n in range(1, devices + 1) if devices % n == 0]
            for (workers, threads), slots in itertools.product(sizes, (1, 2, 4)):
                if slots > max(1, math.ceil(shards / workers)):
                    continue  # some slots would stay empty
                settings = replace(given, workers=workers, threads=threads, concurrent_shards=slots)
                for max_rows in sorted({min(config.engine.max_rows, rows * slots), rows * slots}):
                    budget = self._cache_mb(form, settings, ranks, max_rows) if on_gpus else config.engine.kv_budget_mb
                    if budget:
                        changes = _engine_changes(ranks, max_rows, budget)
                        chosen = {GENERATE: (settings, changes)}
                        run = replace(space.run, config=assembled(space, form, chosen, shards, 0))
                        yield _option(space, run, GENERATE, devices, settings, changes)

    def _cache_mb(self, form: Form, settings: GangConfig, ranks: int, max_rows: int) -> int:
        """Return the megabytes of keys and values that fit beside an engine's weights; 0 if not even one row fits. An
        engine that does not reserve its cache gets at most what its rows can fill."""
        space = self._space
        chosen = {GENERATE: (settings, _engine_changes(ranks, max_rows, 1))}
        config = assembled(space, form, chosen, space.shards[0], 0)
        run = replace(space.run, config=config)
        if ranks not in self._weights:
            (gang,) = (gang for gang in config.gangs() if gang.name == GENERATE)
            self._weights[ranks] = worker_memory(run, gang, 0).on_device / ranks
        free = space.device_bytes - self._weights[ranks]
        row = row_cache_bytes(config, run.spec)
        wanted = max_rows * row if not engine_memory(run).reserves_cache else math.inf
        room = _FILLED * free * ranks
        return math.ceil(min(room, wanted)) // 2**20 + (wanted <= room) if room >= row else 0


def _engine_changes(ranks: int, max_rows: int, kv_budget_mb: int) -> dict[str, Any]:
    return {
        "tensor_parallel": ranks,
        "pipeline_parallel": 1,
        "max_rows": max_rows,
        "kv_budget_mb": kv_budget_mb,
    }


def _layouts(space: Space, roles: frozenset[Role], shards: int, devices: int) -> Iterator[GangConfig]:
    """Yield the settings of a gang of models to try: each possible layout on GPUs, or one worker without GPUs."""
    config = space.base
    given = _given(space, roles)
    if not space.run.on_gpus:
        yield replace(given, workers=1, threads=devices, layout=LayoutConfig(), concurrent_shards=1)
        return
    rows = (config.rollout.rows // shards, config.rollout.rows // config.ppo.minibatches)
    per_node = space.cluster.gpus_per_node
    for tensor, pipeline in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        data, cut = divmod(devices, tensor * pipeline)
        if cut or tensor > per_node or any(number % data for number in rows):
            continue
        for saving in _RECOMPUTES:
            layout = replace(
                saving,
                tensor=tensor,
                pipeline=pipeline,
                sequence_parallel=tensor > 1,
                distributed_optimizer=data > 1,
                recompute_modules=list(saving.recompute_modules),
            )
            specs = {role: space.run.own_specs.get(role, space.run.spec) for role in roles & MODEL_ROLES}
            if not any(any(layout_problems(config.model, role, spec, layout)) for role, spec in specs.items()):
                yield replace(given, workers=devices, layout=layout, concurrent_shards=1)


def _given(space: Space, roles: frozenset[Role]) -> GangConfig:
    """Return the threads of the config's own gang with the first of these roles, and its offload for a gang of policy
    and critic. Its other settings may not suit another gang, so they are defaults."""
    placement = space.base.placement
    first = next(role for role in (Role.GENERATE, Role.POLICY, Role.CRITIC) if role in roles)
    given = placement.gangs[placement.roles[first]]
    offload = given.offload if {Role.POLICY, Role.CRITIC} <= roles else "none"
    return GangConfig(threads=given.threads, offload=offload, weights_dir=None)


def _micro_batches(space: Space) -> list[int | None]:
    """Return the sizes of micro-batches to try, in tokens; None: the config's own size."""
    model = space.base.model
    if model.policy.micro_batch_rows or model.critic.micro_batch_rows or not space.run.on_gpus:
        return [None]
    given = model.policy.micro_batch_tokens
    return [max(1, given // 2), given, 2 * given]


def _fits(space: Space, run: PlannedRun, name: str) -> bool:
    """Return True if the ranks of a gang fit in their GPUs when they run alone. Always True without GPUs, where only
    whole configs are checked."""
    if not run.on_gpus:
        return True
    (gang,) = (gang for gang in run.config.gangs() if gang.name == name)
    per_stage = gang.workers // run.config.placement.gangs[name].layout.pipeline
    ranks = sorted({0, per_stage, gang.workers - 1} & {*range(gang.workers)})
    return all(worker_memory(run, gang, rank).on_device <= space.device_bytes for rank in ranks)


def _option(
    space: Space, run: PlannedRun, name: str, devices: int, settings: GangConfig, changes: Mapping[str, Any]
) -> Option:
    costs = costs_of(run, space.cluster, space.calibration)
    config = run.config
    (gang,) = (gang for gang in config.gangs() if gang.name == name)
    sampled = _SAMPLED if space.sampled(config.rollout.shards) else config.rollout.shards
    seconds: dict[str, list[float]] = {}
    together = list[int]()
    overheads = busy = 0.0
    for node in step_nodes(_graph_of_steps(config), 1):
        if node.role not in gang.roles or node.address.shard >= sampled:
            continue
        stands_for = config.rollout.shards / sampled if node.stage in SHARDED else 1.0
        lengths = _lengths_of(space, config, node)
        alone = costs.seconds(node, lengths)
        seconds.setdefault(node.stage, []).append(alone)
        if node.stage == "generate" and gang.concurrent_shards > 1:
            together += lengths
            continue
        busy += stands_for * alone / (1 if gang.ordered else gang.workers)
        overheads += stands_for * costs.overhead(node) if gang.ordered and gang.workers > 1 else 0.0
    if together:  # the bound assumes that one queue has all rows at once, and that no shard waits for its store
        stands_for, of_rows = config.rollout.shards / sampled, decode(costs.engine, costs.prompt_tokens, together)
        busy += stands_for * costs.decoding_s(of_rows) / gang.workers
    by_stage = {stage: tuple(values) for stage, values in seconds.items()}
    return Option(name, devices, settings, changes, by_stage, busy + overheads)


def _lengths_of(space: Space, config: RunConfig, node: Node) -> Sequence[int]:
    if node.stage in ("advantage", "update_policy", "update_critic"):
        return space.lengths.tokens
    if node.stage == "publish":
        return ()
    return space.lengths.rows(0, node.address.shard, config.rows_per_shard)


def pareto(options: Sequence[Option]) -> list[Option]:
    """Return the options without those that are at least as slow as another one in every stage and in the work of a
    step. Only options with as many workers and slots are compared. Engines with several slots must also have the same
    `max_rows`, because with a smaller batch the first of several shards may end earlier."""

    def numbers(option: Option) -> list[float]:
        return [option.busy_s, *itertools.chain.from_iterable(option.seconds[s] for s in sorted(option.seconds))]

    found: dict[tuple[int, int, int | None], list[tuple[list[float], Option]]] = {}
    for option in sorted(options, key=numbers):
        slots = option.settings.concurrent_shards
        alike = option.settings.workers, slots, option.changes.get("max_rows") if slots > 1 else None
        own = numbers(option)
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in found.get(alike, ())):
            found.setdefault(alike, []).append((own, option))
    return [option for of_kind in found.values() for _, option in of_kind]


# ---- whole configs ---------------------------------------------------------------------------------------------------


def assembled(
    space: Space,
    form: Form,
    chosen: Mapping[str, tuple[GangConfig, Mapping[str, Any]]],
    shards: int,
    staleness: int,
) -> RunConfig:
    """Return the config with these settings of gangs. A gang that is not chosen has one worker."""
    base = space.base
    gangs = {SCORE: _scorers(space, chosen), GENERATE: _given(space, frozenset({Role.GENERATE}))}
    gangs |= {name: _given(space, roles) for name, roles in form.gangs.items()}
    gangs |= {name: settings for name, (settings, _) in chosen.items()}
    roles = {str(Role.GENERATE): GENERATE, str(Role.SCORE): SCORE}
    roles |= {str(role): name for name, of_gang in form.gangs.items() for role in sorted(of_gang)}
    placement = PlacementConfig(
        gangs=gangs,
        roles=roles,
        oversubscribe=base.placement.oversubscribe,
        device_sharing=[[GENERATE, *form.gangs]] if form.in_turns else [],
    )
    changes: dict[str, Any] = {key: value for _, of_gang in chosen.values() for key, value in of_gang.items()}
    tokens = {role: changes.pop(role) for role in ("policy", "critic") if role in changes}
    model = replace(
        base.model,
        **{role: replace(getattr(base.model, role), micro_batch_tokens=count) for role, count in tokens.items()},
    )
    config = replace(
        base,
        staleness=staleness,
        model=model,
        engine=replace(base.engine, **changes),
        rollout=replace(base.rollout, shards=shards, versions=base.rollout.versions if staleness else "exact"),
        placement=placement,
    )
    return _on_nodes(space, config, form)


def _scorers(space: Space, chosen: Mapping[str, tuple[GangConfig, Mapping[str, Any]]]) -> GangConfig:
    """Return the settings of the scoring gang: the config's own, or defaults if that gang has roles besides scores and
    advantages. On several nodes a worker runs beside each engine node."""
    placement = space.base.placement
    roles = {role for role, gang in placement.roles.items() if gang == placement.roles[Role.SCORE]}
    given = placement.gangs[placement.roles[Role.SCORE]] if roles <= {Role.SCORE, Role.ADVANTAGE} else GangConfig()
    workers = given.workers
    if space.cluster.nodes > 1 and GENERATE in chosen:
        engine, changes = chosen[GENERATE]
        workers = max(1, engine.workers * changes["tensor_parallel"] // space.cluster.gpus_per_node)
    return GangConfig(workers=workers, threads=given.threads, concurrent_shards=given.concurrent_shards)


def _on_nodes(space: Space, config: RunConfig, form: Form) -> RunConfig:
    """Return the config with the number of nodes of each gang. On one node the driver starts the workers."""
    if space.cluster.nodes == 1:
        return replace(config, cluster=replace(config.cluster, kind="local"), slurm=replace(config.slurm, gangs={}))
    per_node = space.cluster.gpus_per_node
    gangs = {gang.name: gang for gang in config.gangs()}
    nodes = {name: max(1, gang.workers * gang.gpus // per_node) for name, gang in gangs.items() if name != SCORE}
    host = max(nodes, key=lambda name: nodes[name]) if form.in_turns else None
    of_gangs = {
        name: SlurmGangConfig(nodes=count) if host in (None, name) else SlurmGangConfig(beside=host)
        for name, count in nodes.items()
    }
    of_gangs[SCORE] = SlurmGangConfig(beside=GENERATE if host is None else host)
    return replace(
        config, cluster=replace(config.cluster, kind="attached"), slurm=replace(config.slurm, gangs=of_gangs)
    )


def _graph_of_steps(config: RunConfig) -> GraphSpec:
    return replace(config.graph(), steps=STEPS, eval_every=0)


# ---- combinations and their bounds -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination:
    """One option for each gang, with shards and a staleness bound."""

    form: Form
    options: Sequence[Option]
    shards: int
    staleness: int
    bounds: Mapping[str, float]

    @property
    def devices(self) -> int:
        of_gangs = [option.devices for option in self.options]
        return max(of_gangs) if self.form.in_turns else sum(of_gangs)

    @property
    def bound_s(self) -> float:
        """Lower bound of the mean step time."""
        return max(self.bounds.values())


def combinations(space: Space) -> tuple[list[Combination], bool]:
    """Return the combinations of the space whose gangs each fit in the devices' memory; and True if no combination was
    left out and all bounds are exact.

    Raises:
        ConfigError: the models or the engine fit on no number of these devices.
    """
    found: list[Combination] = []
    known, counts = Options(space), _counts(space)
    exact, nothing = True, set[str]()
    for form, shards in itertools.product(forms(space.base), space.shards):
        engines = [option for n in counts for option in known.engine(form, shards, n)]
        trainers = [[option for n in counts for option in known.trainer(form, g, shards, n)] for g in form.gangs]
        nothing |= {name for name, of_gang in zip(form.gangs, trainers, strict=True) if not of_gang}
        nothing |= set() if engines else {GENERATE}
        every = [engines, *trainers]
        exact &= not space.sampled(shards)
        if math.prod(map(len, every)) > _MOST_COMBINATIONS:
            every, exact = [_least_work(options) for options in every], False
        scoring = _scoring(space, form, shards)
        for options in itertools.product(*every):
            needed = [option.devices for option in options]
            if form.in_turns and len(set(needed)) > 1:
                continue
            if (max(needed) if form.in_turns else sum(needed)) > space.devices:
                continue
            for staleness in space.staleness:
                bounds = _bounds(space, form, options, scoring, staleness)
                found.append(Combination(form, options, shards, staleness, bounds))
    if not found:
        raise ConfigError(DEVICES, _fits_nowhere(space, nothing))
    return found, exact


def _counts(space: Space) -> list[int]:
    return device_counts(space.devices, max(1, space.cluster.gpus_per_node or space.cluster.cores))


def _least_work(options: Sequence[Option]) -> list[Option]:
    """Return the option with the least work in a step for each number of devices."""
    least: dict[int, Option] = {}
    for option in options:
        known = least.get(option.devices)
        if known is None or option.busy_s < known.busy_s:
            least[option.devices] = option
    return list(least.values())


def _scoring(space: Space, form: Form, shards: int) -> Option:
    """Return the only option of the scoring gang, which uses none of the devices."""
    config = assembled(space, form, {}, shards, 0)
    return _option(space, replace(space.run, config=config), SCORE, 0, config.placement.gangs[SCORE], {})


def _bounds(space: Space, form: Form, options: Sequence[Option], scoring: Option, staleness: int) -> dict[str, float]:
    """Return lower bounds of the mean step time, by the name of a gang or `latency`."""
    work = {option.gang: option.busy_s for option in options}
    if form.in_turns:
        work = {"devices in turns": sum(work.values())}
    seconds = {stage: s for option in (*options, scoring) for stage, s in option.seconds.items()}
    engine, trainer = options[0], next(option for option in options if option.gang == TRAIN)
    forward = [stage for stage in ("score", "reference", "logprob", "value") if stage in seconds]
    after = seconds["advantage"][0] + seconds["update_policy"][0] + seconds["publish"][0]
    after += 5 * space.calibration.overhead_s
    first, one = min(seconds["generate"]), max(min(seconds[stage]) for stage in forward)
    chain = first + one + after
    if not staleness:  # nothing of a step runs before its version is published
        all_forward = sum(sum(trainer.seconds[stage]) for stage in forward if stage in trainer.seconds)
        chain = max(chain, engine.busy_s + one + after, first + all_forward + after)
    return work | {"latency": chain / (staleness + 1)}


def _fits_nowhere(space: Space, nothing: set[str]) -> str:
    """Return why no combination fits, and a number of GPUs on which one would if it is at most 64 times as many."""
    given = f"no settings of {', '.join(sorted(nothing))} fit" if nothing else "the gangs together do not fit"
    if not space.run.on_gpus:
        return f"{given} on {space.devices} cores: more cores"
    there = f"{space.devices} GPUs ({space.device_bytes / GIB:.1f} GiB each)"
    whole = space.cluster.hardware.gpus_per_node
    for devices in (space.devices * factor for factor in (2, 4, 8, 16, 32, 64)):
        cluster = replace(space.cluster, nodes=max(1, devices // whole), gpus_per_node=min(devices, whole))
        larger = replace(space, devices=cluster.gpus, cluster=cluster)
        counts, known = _counts(larger), Options(larger)
        for form in forms(space.base):
            needed = {GENERATE: next((n for n in counts if known.engine(form, space.shards[0], n)), 0)}
            for gang in form.gangs:
                needed[gang] = next((n for n in counts if known.trainer(form, gang, space.shards[0], n)), 0)
            total = max(needed.values()) if form.in_turns else sum(needed.values())
            if all(needed.values()) and total <= larger.devices:
                listed = ", ".join(f"{gang} {n}" for gang, n in needed.items())
                return f"{given} on {there}; it would fit on {total}, with the gangs {form.name} ({listed})"
    dtype = "model.dtype=bfloat16, " * (space.base.model.dtype != "bfloat16")
    return (
        f"{given} on {there}, nor on {larger.devices} of them: devices with more memory, smaller "
        f"model.*.micro_batch_tokens, {dtype}LoRA or more model.frozen_blocks"
    )


# ---- the search ------------------------------------------------------------------------------------------------------


def search(space: Space, objective: Objective, refuse: Callable[[RunConfig], str | None], most: int = 60) -> Found:
    """Return the best simulated plan of each form and staleness bound. The best of all comes first.

    Args:
        refuse: returns why a run of a config would be refused, or None.
        most: most combinations to simulate with a staleness bound of 0, and again with larger ones. Up to as many more
            are simulated to find a plan for each form and bound.

    Raises:
        ConfigError: nothing fits, or the checks refuse everything.
    """
    every, exact = combinations(space)
    plans: list[Plan] = []
    refused: dict[str, int] = {}

    def accepts(plan: Plan) -> bool:
        reason = refuse(plan.config)
        if reason is not None:
            refused[reason] = refused.get(reason, 0) + 1
        return reason is None

    simulated = 0
    for asynchronous in (False, True):
        of_kind = [one for one in every if bool(one.staleness) == asynchronous]
        found, played, ended = _search(space, objective, accepts, of_kind, most)
        plans += found
        simulated += played
        exact &= ended
    if not plans:
        raise ConfigError(DEVICES, f"every plan for {space.devices} devices would be refused: {'; '.join(refused)}")
    plans.sort(key=lambda plan: (plan.value, plan.devices))
    best_of: dict[tuple[str, int], Plan] = {}
    for plan in plans:
        best_of.setdefault((plan.form, plan.config.staleness), plan)
    return Found(list(best_of.values()), len(every), simulated, exact, refused)


def _search(
    space: Space, objective: Objective, accepts: Callable[[Plan], bool], every: Sequence[Combination], most: int
) -> tuple[list[Plan], int, bool]:
    """Return the accepted plans, the number of simulations, and True if no other combination can be better than the
    best plan."""
    waiting = [
        (objective.value(one.bound_s, one.devices, 0.0), one.devices, number, one) for number, one in enumerate(every)
    ]
    plans: list[Plan] = []
    best, played = math.inf, 0
    best_of: dict[tuple[str, int], float] = {}

    def play_one(one: Combination) -> None:
        nonlocal best, played
        plan = played_plan(space, objective, one)
        played += 1
        kind = one.form.name, one.staleness
        if plan.value < best_of.get(kind, math.inf) and accepts(plan):
            plans.append(plan)
            best_of[kind] = plan.value
            best = min(best, plan.value)

    heapq.heapify(waiting)
    while waiting and waiting[0][0] < best and played < most:
        play_one(heapq.heappop(waiting)[-1])
    exact = not waiting or waiting[0][0] >= best
    while waiting and played < 2 * most:  # one of each other form and staleness bound, for comparison
        one = heapq.heappop(waiting)[-1]
        if (one.form.name, one.staleness) not in best_of:
            play_one(one)
    return plans, played, exact


def played_plan(space: Space, objective: Objective, one: Combination) -> Plan:
    """Simulate a combination and return its plan."""
    chosen = {option.gang: (option.settings, option.changes) for option in one.options}
    config = assembled(space, one.form, chosen, one.shards, one.staleness)
    costs = costs_of(replace(space.run, config=config), space.cluster, space.calibration)
    played = play(scenario_to_plan(costs, space.lengths))
    rows = sum(played.staleness.values())
    age = sum(age * count for age, count in played.staleness.items()) / rows
    value = objective.value(played.mean_s, one.devices, age)
    return Plan(one.form.name, config, one.devices, one.bounds, played, value)


def scenario_to_plan(costs: Costs, lengths: Lengths) -> Scenario:
    """Return the scenario by which plans are compared: some steps without evaluations."""
    return replace(scenario_of(costs, lengths), spec=_graph_of_steps(costs.run.config))
