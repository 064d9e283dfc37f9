"""The settings of one gang that a search tries, each with the seconds of its nodes.

    layouts, micro-batches, engines' ranks, rows, slots
      ── drop what does not fit in memory ── drop each option that another option beats or equals (`pareto`)
          └ Option: settings, and the seconds of each node of a step

Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.fitting import RECOMPUTES
from pipeline.config.memory import PlannedRun, engine_memory, row_cache_bytes, worker_memory
from pipeline.config.placement import GangConfig
from pipeline.config.run import RunConfig
from pipeline.graph.graph import SHARDED, Node, step_nodes
from pipeline.plan.cores import working_threads
from pipeline.plan.cost import costs_of
from pipeline.plan.decode import least_work
from pipeline.plan.space import GENERATE, SCORE, RoleGrouping, Space, assembled, gang_settings, graph_of_steps
from stages.models.config import LayoutConfig
from stages.models.layouts import layout_problems
from stages.models.protocol import MODEL_ROLES, Role

_SAMPLED = 4
"""Number of shards from which the lower bounds on a step's times are estimated if the step has too many shards to
compute all of them."""
_FILLED = 0.95
"""Largest share of a GPU's free memory that an engine's cache gets."""


@dataclass(frozen=True)
class Option:
    """Settings of one gang, with the seconds of its nodes in a step."""

    gang: str
    devices: int
    """Number of GPUs of the gang. On a host without GPUs: number of threads of all its workers together."""
    used_cores: float
    """Cores that the gang keeps busy while all of its workers run, on a host without GPUs."""
    settings: GangConfig
    changes: Mapping[str, Any]
    """Settings outside of the placement. The keys `policy` and `critic` have the `micro_batch_tokens` of these models.
    All other keys are settings of the section `engine`."""
    seconds: Mapping[str, tuple[float, ...]]
    """Stage -> seconds for which each of its nodes in a step keeps its worker busy. If `Space.sampled` is true, only
    the first `_SAMPLED` shards have an entry."""
    busy_s: float
    """Lower bound of the seconds that a step keeps the gang busy."""
    generate_s: float
    """Lower bound of the seconds from the start of a step's generation to its end, if the gang does nothing else."""


class Options:
    """The options of gangs that were found so far, and the results of memory checks. These results do not depend on the
    number of shards."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._known: dict[tuple[frozenset[Role], int, int, bool], list[Option]] = {}
        self._fitting: dict[tuple[object, ...], bool] = {}
        self._weights: dict[int, float] = {}
        """Number of an engine's ranks -> bytes on each GPU that the engine takes without its cache."""

    def trainer(self, grouping: RoleGrouping, gang: str, shards: int, devices: int) -> list[Option]:
        """Return the options to try for a gang of models with this number of devices. On GPUs, options that do not fit
        in the memory of the GPUs are left out.

        If the gang has devices of its own, options that are never better than another option are left out too
        (`pareto`). If it shares its devices, they are kept: a slower option may need less memory, and the devices may
        then be handed over faster.
        """
        key = grouping.gangs[gang], shards, devices, grouping.shares_devices
        if key not in self._known:
            trainers = [*self._trainers(grouping, gang, shards, devices)]
            self._known[key] = trainers if grouping.shares_devices else pareto(trainers)
        return self._known[key]

    def engine(self, grouping: RoleGrouping, shards: int, devices: int) -> list[Option]:
        """Return the options of the generating pool with this number of devices. Options are left out for the same
        reasons as in `trainer`."""
        key = frozenset({Role.GENERATE}), shards, devices, grouping.shares_devices
        if key not in self._known:
            engines = [*self._engines(grouping, shards, devices)]
            self._known[key] = engines if grouping.shares_devices else pareto(engines)
        return self._known[key]

    def _trainers(self, grouping: RoleGrouping, gang: str, shards: int, devices: int) -> Iterator[Option]:
        space, roles = self._space, grouping.gangs[gang]
        divisions: dict[tuple[int, int], list[GangConfig]] = {}
        for settings in _layouts(space, roles, shards, devices):
            divisions.setdefault((settings.layout.tensor, settings.layout.pipeline), []).append(settings)
        for tokens, savings in itertools.product(_micro_batches(space), divisions.values()):
            trained = sorted(roles & {Role.POLICY, Role.CRITIC})
            changes = {str(role): tokens for role in trained} if tokens is not None else {}
            for settings in savings:  # the first that fits recomputes the least
                run = replace(space.run, config=assembled(space, grouping, {gang: (settings, changes)}, shards, 0))
                layout = settings.layout
                key = roles, devices, layout.tensor, layout.pipeline, layout.recompute, tokens
                if key not in self._fitting:
                    self._fitting[key] = _fits(space, run, gang)
                if self._fitting[key]:
                    yield _option(space, run, gang, devices, settings, changes)
                    break

    def _engines(self, grouping: RoleGrouping, shards: int, devices: int) -> Iterator[Option]:
        space, config = self._space, self._space.base
        configured, rows = gang_settings(space, frozenset({Role.GENERATE})), config.rollout.rows // shards
        on_gpus, per_node = space.run.on_gpus, space.cluster.gpus_per_node
        for ranks in (1, 2, 4, 8) if on_gpus else (1,):
            if devices % ranks or (on_gpus and ranks > per_node):
                continue
            sizes = [(devices // ranks, configured.threads)]
            if not on_gpus:
                sizes = [(n, devices // n) for n in range(1, devices + 1) if devices % n == 0]
            for (workers, threads), slots in itertools.product(sizes, (1, 2, 4)):
                if slots > max(1, math.ceil(shards / workers)):
                    continue  # some slots would stay empty
                settings = replace(configured, workers=workers, threads=threads, concurrent_shards=slots)
                for max_rows in sorted({min(config.engine.max_rows, rows * slots), rows * slots}):
                    budget = (
                        self._cache_mb(grouping, settings, ranks, max_rows) if on_gpus else config.engine.kv_budget_mb
                    )
                    if budget:
                        changes = _engine_changes(ranks, max_rows, budget)
                        chosen = {GENERATE: (settings, changes)}
                        run = replace(space.run, config=assembled(space, grouping, chosen, shards, 0))
                        yield _option(space, run, GENERATE, devices, settings, changes)

    def _cache_mb(self, grouping: RoleGrouping, settings: GangConfig, ranks: int, max_rows: int) -> int:
        """Return the megabytes of keys and values that fit beside an engine's weights; 0 if not even one row fits. An
        engine that does not reserve its cache gets at most what its rows can fill."""
        space = self._space
        chosen = {GENERATE: (settings, _engine_changes(ranks, max_rows, 1))}
        config = assembled(space, grouping, chosen, space.shards[0], 0)
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
    """Yield the settings that the search tries for a gang that holds models. On GPUs, these are all possible layouts.
    Without GPUs, it is a single worker with `devices` threads."""
    config = space.base
    settings = gang_settings(space, roles)
    if not space.run.on_gpus:
        yield replace(settings, workers=1, threads=devices, layout=LayoutConfig(), concurrent_shards=1)
        return
    rows = (config.rollout.rows // shards, config.rollout.rows // config.ppo.minibatches)
    per_node = space.cluster.gpus_per_node
    trained = roles & {Role.POLICY, Role.CRITIC}
    divisible = all(config.model.optimizer_of(role).optimizer == "adamw" for role in trained)
    for tensor, pipeline in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        data, cut = divmod(devices, tensor * pipeline)
        if cut or tensor > per_node or any(number % data for number in rows):
            continue
        for saving in RECOMPUTES:
            layout = replace(
                saving,
                tensor=tensor,
                pipeline=pipeline,
                sequence_parallel=tensor > 1,
                distributed_optimizer=data > 1 and divisible,
                recompute_modules=list(saving.recompute_modules),
            )
            specs = {role: space.run.separate_specs.get(role, space.run.spec) for role in roles & MODEL_ROLES}
            if not any(any(layout_problems(config.model, role, spec, layout)) for role, spec in specs.items()):
                yield replace(settings, workers=devices, layout=layout, concurrent_shards=1)


def _micro_batches(space: Space) -> list[int | None]:
    """Return the sizes of micro-batches to try, in tokens; None: the config's own size."""
    model = space.base.model
    if model.policy.micro_batch_rows or model.critic.micro_batch_rows or not space.run.on_gpus:
        return [None]
    tokens = model.policy.micro_batch_tokens
    return [max(1, tokens // 2), tokens, 2 * tokens]


def _fits(space: Space, run: PlannedRun, name: str) -> bool:
    """Return True if each rank of a gang fits on its GPU while no other gang uses it. A host's memory is checked later,
    for all gangs of a config together."""
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
    overheads = busy = generating = 0.0
    graph = graph_of_steps(config)
    for node in step_nodes(graph, 1):
        if node.role not in gang.roles or node.address.shard >= sampled:
            continue
        stands_for = config.rollout.shards / sampled if node.stage in SHARDED else 1.0
        lengths = _lengths_of(space, config, node)
        alone = costs.seconds(node, lengths) - costs.writeback_s(name, node.stage)
        seconds.setdefault(node.stage, []).append(alone)
        if node.stage == "generate" and gang.concurrent_shards > 1:
            together += lengths
            continue
        share = stands_for * alone / (1 if gang.is_ordered else gang.workers)
        busy += share
        generating += share if node.stage == "generate" else 0.0
        overheads += stands_for * costs.overhead(node) if gang.is_ordered and gang.workers > 1 else 0.0
    if together:  # the bound assumes that the batch is always full, and that all slots always have other nodes to run
        work = least_work(costs.engine, costs.prompt_tokens, together)
        generating = config.rollout.shards / sampled * costs.decoding_s(work) / gang.workers
        busy = max(generating, busy / gang.concurrent_shards)
    by_stage = {stage: tuple(values) for stage, values in seconds.items()}
    used = working_threads(config, space.calibration.thread_share).get(name, 0.0)
    used *= 1 if gang.is_ordered else gang.workers
    return Option(name, devices, used, settings, changes, by_stage, busy + overheads, generating)


def _lengths_of(space: Space, config: RunConfig, node: Node) -> Sequence[int]:
    if node.stage in ("advantage", "update_policy", "update_critic"):
        return space.lengths.tokens
    if node.stage == "publish":
        return ()
    return space.lengths.rows(0, node.address.shard, config.rows_per_shard)


def pareto(options: Sequence[Option]) -> list[Option]:
    """Drop each option that is no better than another option, and return the others. An option is no better if it takes
    as many seconds or more for every node, and has as much work or more in a step (`busy_s`). Of equal options, the
    first stays.

    Only options with the same number of workers and the same `concurrent_shards` are compared. If a worker has several
    shards at once, `max_rows` must be equal too. These shards share a batch of up to `max_rows` rows. With a smaller
    batch, the first shard may end earlier, and the seconds of the nodes do not show this advantage.
    """

    def numbers(option: Option) -> list[float]:
        return [option.busy_s, *itertools.chain.from_iterable(option.seconds[s] for s in sorted(option.seconds))]

    best: dict[tuple[int, int, int | None], list[tuple[list[float], Option]]] = {}
    for option in sorted(options, key=numbers):
        slots = option.settings.concurrent_shards
        alike = option.settings.workers, slots, option.changes.get("max_rows") if slots > 1 else None
        own = numbers(option)
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in best.get(alike, ())):
            best.setdefault(alike, []).append((own, option))
    return [option for of_kind in best.values() for _, option in of_kind]


def scoring_option(space: Space, grouping: RoleGrouping, shards: int) -> Option:
    """Return the only option of the scoring gang. It uses none of the devices."""
    config = assembled(space, grouping, {}, shards, 0)
    return _option(space, replace(space.run, config=config), SCORE, 0, config.placement.gangs[SCORE], {})
