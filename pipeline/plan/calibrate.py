"""Fit a calibration to the nodes that runs executed.

The fit finds four numbers for each kind of work: `efficiency` and `element_efficiency` (shares of the hardware's peaks,
up to 1), `call_s` (seconds of a call) and `node_s` (fixed seconds of a node). `elements` are the node's seconds of
element-wise operations on a CPU, and `roofline` are all its other seconds, at the hardware's peaks:

    seconds - collectives  ~  roofline / efficiency + elements / element_efficiency + calls * call_s + node_s

The method is least squares of relative errors. Outliers count less (Huber's weights). The four numbers are weakly
pulled toward their usual proportions (`typical`, scaled to these runs). The pull on a number is in proportion to the
share of the seconds that is assumed for its term: a term that was taken for small may become large. If the nodes differ
in all terms, the data decides. If not (one run with shards of equal size), the proportions stay as assumed, and the
kind of work is listed as extrapolated.

On CPUs, if runs had different numbers of threads, the four numbers are fitted for many values of `thread_share`. The
value with the smallest errors is taken. If nodes worked on several cores at the same time, `crowding` is found in the
same way, from forward passes and updates: some of them ran alone, others beside an engine. It stays 0 if it explains
little.

The journal tells how long each node worked on store and ledger. The fit explains only the rest of a node's seconds.
`node_s` is the mean time on store and ledger plus the fixed seconds per node that the fit finds.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from pipeline.config.hardware import HardwareCluster
from pipeline.errors import ConfigError
from pipeline.plan.calibration import ELEMENTS, KINDS, STAGE_KIND, Calibration, StageSpeed, typical
from pipeline.plan.cost import Costs, costs_of, decoding_work
from pipeline.plan.decode import Decoded, RowQueue
from pipeline.plan.observed import Observed, ObservedRun
from pipeline.plan.training import Work
from stages.models.protocol import Role

FEWEST_STEPS = 4
"""Minimum number of steps of a run to calibrate from. If a worker runs a stage once per step, the first of its 4 nodes
is not measured. The other 3 show the scatter of the seconds."""
_ROUNDS = 4
"""Number of rounds of the fit. A round fits the speed of the engines, and then uses it to compute again which work an
engine did during each shard."""
_PULL = 0.1
"""Weight of the assumed speed in the fit. One measured node has the weight 1. The assumed speed is first scaled as a
whole to the measured seconds. Then it pulls the fitted numbers toward its own, each with its term's assumed share."""
_INDISTINCT = 30.0
"""Limit of the condition number of the fit's matrix. At this value or above, the fit cannot tell the numbers of a speed
apart."""
_THREAD_SHARES = tuple(share / 20 for share in range(20, -1, -1))
"""Values of `Calibration.thread_share` that the fit tries."""
_CROWDINGS = tuple(share / 50 for share in range(16))
"""Values of `Calibration.crowding` that the fit tries, from 0 to 0.3."""
_EXPLAINED = 0.1
"""Share of the error that `crowding` must explain. Below this share, chance would decide."""
_OUTLIER = 0.2
"""Relative error above which a node has less weight in the fit."""


@dataclass(frozen=True)
class Measurement:
    """A measured node, or a measured loading of new weights into an engine."""

    kind: str
    seconds: float
    """Measured seconds, minus the predicted seconds of collectives."""
    roofline: float
    """Seconds at the hardware's peaks, without `elements`."""
    calls: float
    elements: float = 0.0
    """Seconds of element-wise operations at the hardware's peak."""
    store_s: float = 0.0
    """Part of `seconds` that was spent on store and ledger; 0: not measured."""
    beside: bool = False
    """True for a node of an engine whose worker ran other nodes at the same time."""


def calibrate(runs: Sequence[ObservedRun], cluster: HardwareCluster, hardware: str) -> Calibration:
    """Return the calibration of a machine from runs on it. `hardware`: a name of `conf/hardware`, or the path of a
    file; it describes the same hardware as `cluster`. Raises ConfigError if a run has fewer than `FEWEST_STEPS`
    finished steps. Also raises it if a run was on other hardware than `hardware` or than the first run."""
    _check(runs, cluster, hardware)
    usual = typical(hardware, on_gpus=cluster.gpus > 0)
    shares = _THREAD_SHARES if not cluster.gpus and _differ_in_threads(runs) else (usual.thread_share,)
    fits = [_fit_kinds(runs, cluster, replace(usual, thread_share=share)) for share in shares]
    usual, speeds, extrapolated = min(fits, key=lambda each: _error(each[1], ("generate", "forward", "update")))
    if crowding := _crowding(runs, cluster, usual):
        usual, speeds, extrapolated = _fit_kinds(runs, cluster, replace(usual, crowding=crowding))
    if waits := [wait for one in runs for wait in one.waits]:
        speeds["overhead_s"] = usual_mean(waits)
    if gaps := [gap for one in runs for gap in one.turnarounds]:
        # a node's children wait for its worker's turnaround, too, so it is subtracted from their overhead
        speeds["turnaround_s"] = usual_mean(gaps)
        speeds["overhead_s"] = max(0.0, speeds.get("overhead_s", usual.overhead_s) - speeds["turnaround_s"])
    if drafted := [one.drafted for one in runs if one.drafted is not None]:
        speeds["tokens_per_pass"] = fmean(passes.tokens_per_pass for passes in drafted)
        speeds["drafts_per_pass"] = fmean(passes.drafts_per_pass for passes in drafted)
    return replace(
        usual,
        driver_s=fmean(one.driver_s for one in runs),
        description="measured in " + ", ".join(one.name for one in runs),
        prompt_tokens=fmean(one.prompt_tokens for one in runs),
        extrapolated=extrapolated,
        **speeds,
    )


def _crowding(runs: Sequence[ObservedRun], cluster: HardwareCluster, usual: Calibration) -> float:
    """Return the value of `Calibration.crowding` with which the seconds of forward passes and updates have the smallest
    errors. Return 0 if that value explains less than `_EXPLAINED` of the error, for example because all nodes were
    slowed down alike. Then nothing tells it from another efficiency."""
    kinds = "forward", "update"
    of_kinds = [replace(one, nodes=[n for n in one.nodes if STAGE_KIND[n.node.stage] in kinds]) for one in runs]
    if not any(node.crowded_s for one in of_kinds for node in one.nodes):
        return 0.0
    errors = {}
    for crowding in _CROWDINGS:
        samples = samples_of([one.alone(crowding) for one in of_kinds], cluster, usual)
        by_kind = {kind: [sample for sample in samples if sample.kind == kind] for kind in kinds}
        speeds = {kind: fit(measured, getattr(usual, kind))[0] for kind, measured in by_kind.items() if measured}
        errors[crowding] = _error(speeds, tuple(speeds))
    best = min(errors, key=lambda crowding: errors[crowding])
    return best if errors[best] < (1 - _EXPLAINED) * errors[0.0] else 0.0


def _differ_in_threads(runs: Sequence[ObservedRun]) -> bool:
    """Return True if gangs with the same roles had different numbers of threads."""
    threads: dict[frozenset[Role], set[int]] = {}
    for one in runs:
        for gang in one.run.config.gangs():
            threads.setdefault(gang.roles, set()).add(one.run.config.placement.gangs[gang.name].threads)
    return any(len(numbers) > 1 for numbers in threads.values())


def _fit_kinds(
    runs: Sequence[ObservedRun], cluster: HardwareCluster, usual: Calibration
) -> tuple[Calibration, dict[str, Any], list[str]]:
    """Fit the speed of each kind of work to the executed nodes. Return `usual` (the speeds are valid only with its
    other fields), the fitted fields, and the kinds whose numbers are partly assumed, because no node determines
    them."""
    runs = [one.alone(usual.crowding) for one in runs]
    samples = samples_of(runs, cluster, usual)
    for _ in range(_ROUNDS):  # the work between a shard's start and its end depends on the engine's speed
        if decoded := [sample for sample in samples if sample.kind == "generate"]:
            guess = replace(usual, generate=fit(decoded, usual.generate)[0])
            samples = samples_of(runs, cluster, guess)
    speeds: dict[str, Any] = {}
    extrapolated = []
    for kind in KINDS:
        usual_speed: StageSpeed = getattr(usual, kind)
        if of_kind := [sample for sample in samples if sample.kind == kind]:
            speeds[kind], distinct = fit(of_kind, usual_speed)
        else:
            speeds[kind], distinct = usual_speed, False
        extrapolated += [] if distinct else [kind]
    if shards := [sample for sample in samples if sample.kind == "generate"]:
        speeds["beside_s"] = _stores(shards)[1]
    return usual, speeds, extrapolated


def _error(speeds: Mapping[str, Any], kinds: Sequence[str]) -> float:
    """Return the mean squared `scatter` of fitted speeds, weighted by their measured nodes. It serves to choose
    `thread_share` and `crowding`."""
    measured = [speeds[kind] for kind in kinds if speeds[kind].scatter is not None]
    return sum(speed.nodes * speed.scatter**2 for speed in measured) / max(1, sum(speed.nodes for speed in measured))


def _check(runs: Sequence[ObservedRun], cluster: HardwareCluster, hardware: str) -> None:
    """Raise ConfigError if a run has fewer than `FEWEST_STEPS` finished steps. Also raise it if a run was on other
    hardware than `hardware` or than the first run of `runs`."""
    names = [one.name for one in runs]
    for one in runs:
        if names.count(one.name) > 1:
            raise ConfigError(
                one.name, f"given {names.count(one.name)} times; its nodes would count as often: give it once"
            )
        if one.steps < FEWEST_STEPS:
            need = f"has {one.steps} finished steps; a calibration needs {FEWEST_STEPS} or more"
            raise ConfigError(one.name, need)
        if not one.nodes:
            raise ConfigError(one.name, "its journal has no node that ended: calibrate from a run with its journal")
        if bool(one.gpu) != (cluster.gpus > 0):
            ran, has = one.gpu or "CPUs", "GPUs" if cluster.gpus else "none"
            raise ConfigError(one.name, f"ran on {ran}, and {hardware} has {has}: give the hardware that it ran on")
        model = hardware.partition("-")[0]
        if one.gpu and not hardware.endswith(".yaml") and model not in one.gpu:
            need = "give the hardware that it ran on"
            raise ConfigError(one.name, f"ran on {one.gpu}, not on {hardware}: {need}")
        first = runs[0]
        if (one.gpu, one.processor) != (first.gpu, first.processor):
            need = f"({one.gpu or one.processor}; {first.gpu or first.processor}): calibrate each alone"
            raise ConfigError(one.name, f"ran on another machine than {first.name} {need}")


def samples_of(runs: Sequence[ObservedRun], cluster: HardwareCluster, usual: Calibration) -> list[Measurement]:
    """Return the measurements of the nodes that `works_of` yields, and of all loads of new weights into engines. Nodes
    that took no longer than the predicted seconds of their collectives are left out."""
    measurements = []
    for one in runs:
        calibration = usual if one.drafted is None else replace(usual, **asdict(one.drafted))
        costs = costs_of(one.run, cluster, calibration, one.prompt_tokens)
        for node, work in works_of(one, costs):
            links = sum(work.links.values()) / usual.link_efficiency
            if node.seconds > links:
                kind, seconds = STAGE_KIND[node.node.stage], node.seconds - links
                stored = min(node.store_s, seconds)
                elements = work.parts.get(ELEMENTS, 0.0)
                roofline = work.roofline - elements
                measurements.append(
                    Measurement(kind, seconds, roofline, work.calls, elements, stored, _is_beside(node))
                )
        refit = costs.refit_work()
        measurements += [Measurement("refit", done.work, refit.roofline, refit.calls) for done in one.refits]
    return measurements


def works_of(one: ObservedRun, costs: Costs) -> Iterator[tuple[Observed, Work]]:
    """Yield (node, its work) for nodes that a run executed. The work (`Work`) has the seconds that the node would take
    at the hardware's peak rates. All publications of weights are included. Other nodes are included if the responses
    that they worked on are still stored.

    The work of a generated shard is everything that its engine did while the shard ran, including work for other
    shards.
    """
    stored = [node for node in one.nodes if node.lengths or node.node.stage == "publish"]
    by_engine: dict[str, list[Observed]] = {}
    for node in stored:
        if node.node.stage in ("generate", "evaluate"):
            by_engine.setdefault(node.worker, []).append(node)
        else:
            yield node, costs.work(node.node, node.lengths)
    for nodes in by_engine.values():
        after_s = [node.store_s or costs.after_rows_s(beside=node.beside) for node in nodes]
        for place, decoded in _replayed(nodes, costs.engine_queue(), after_s):
            yield nodes[place], decoding_work(decoded)


def _replayed(
    nodes: Sequence[Observed], queue: RowQueue[int], after_s: Sequence[float]
) -> Iterator[tuple[int, Decoded]]:
    """Replay the shards of one engine (`nodes`). Yield each shard's index, and the engine's predicted work until the
    end of its rows. It joins `queue` at its measured start, and leaves at the predicted or the measured end of its rows
    (`after_s` before the end of the node), whichever is earlier."""
    places = sorted(range(len(nodes)), key=lambda place: nodes[place].start_s)
    ends = [node.start_s + node.seconds - after for node, after in zip(nodes, after_s, strict=True)]
    joining, in_queue = deque(places), set[int]()
    while joining or in_queue:
        joins = nodes[joining[0]].start_s if joining else math.inf
        left = min(in_queue, key=lambda place: ends[place], default=None)
        ended = queue.next_end() if in_queue else None
        if left is not None and ended is not None and min(ended, ends[left]) <= joins:
            finished = queue.finish() if ended <= ends[left] else [(left, queue.drop(left, ends[left]))]
            in_queue.difference_update(place for place, _ in finished)
            yield from finished
        else:
            place = joining.popleft()
            queue.add(place, nodes[place].lengths, joins)
            in_queue.add(place)


def fit(samples: Sequence[Measurement], usual: StageSpeed) -> tuple[StageSpeed, bool]:
    """Fit a speed to measurements. Return the speed and a flag.

    The flag is True if the measurements determine all numbers of the speed. If it is False, the numbers keep, as far as
    possible, the ratios that they have in `usual`.
    """
    seconds = np.array([sample.seconds for sample in samples])
    stored = np.array([sample.store_s for sample in samples])
    columns = np.array([[sample.roofline, sample.elements, sample.calls, 1.0] for sample in samples])
    # apart from store and ledger a node has few fixed seconds: start with those of one call
    besides = usual.call_s if stored.any() and usual.call_s else usual.node_s
    start = np.array([1 / usual.efficiency, 1 / usual.element_efficiency, usual.call_s, besides])
    start *= np.median((seconds - stored) / (columns @ start))
    start[:2] = np.maximum(start[:2], 1.0)
    used = columns.any(axis=0)
    least = np.array([*1 / start[:2], 0.0, 0.0])[used]
    assumed = (columns * start)[:, used]
    pull = np.sqrt(_PULL) * (assumed / assumed.sum(axis=1)[:, None]).mean(axis=0)
    factors, outlying = np.ones(int(used.sum())), np.ones(len(samples))
    for _ in range(20):
        # errors are relative to the prediction: relative to the measurement, short nodes would count too much
        predicted = (columns * start)[:, used] @ factors + stored
        scaled = (columns * start)[:, used] / predicted[:, None]
        rows = np.vstack([scaled * outlying[:, None], np.diag(pull)])
        target = np.concatenate([(seconds - stored) / predicted * outlying, pull])
        factors = least + _not_negative(rows, target - rows @ least)
        errors = np.abs(seconds / predicted - 1)
        outlying = np.sqrt(np.minimum(1.0, _OUTLIER / np.maximum(errors, 1e-12)))
    fitted = start.copy()
    fitted[used] *= factors
    store_s, beside_s = _stores(samples)
    fitted[3] += store_s
    ratios = seconds / (columns @ fitted + beside_s * np.array([sample.beside for sample in samples]))
    speed = StageSpeed(
        efficiency=min(1.0, float(1 / fitted[0])),
        element_efficiency=min(1.0, float(1 / fitted[1])) if columns[:, 1].any() else 1.0,
        call_s=float(fitted[2]),
        node_s=float(fitted[3]),
        store_s=store_s,
        scatter=float(np.sqrt(np.average((ratios - 1) ** 2, weights=outlying**2))),
        nodes=len(samples),
    )
    return speed, _distinct(scaled)


def _stores(samples: Sequence[Measurement]) -> tuple[float, float]:
    """Return the mean seconds per node on store and ledger if it runs alone on its worker, and the additional seconds
    beside other nodes (0 if they took no longer, or only one kind was measured)."""
    beside, alone = ([one.store_s for one in samples if one.beside is kind] for kind in (True, False))
    if beside and alone and usual_mean(beside) > usual_mean(alone):
        return usual_mean(alone), usual_mean(beside) - usual_mean(alone)
    return usual_mean(beside + alone), 0.0


def usual_mean(seconds: Sequence[float] | np.ndarray) -> float:
    """Return the mean of `seconds` without the longest tenth and the shortest tenth. A median would ignore the long
    tail of such times, and a plain mean would count rare stalls."""
    ordered = np.sort(np.asarray(seconds))
    cut = len(ordered) // 10
    return float(ordered[cut : len(ordered) - cut].mean())


def _distinct(columns: np.ndarray) -> bool:
    """Return True if a fit can tell the coefficients of the columns apart."""
    lengths = np.linalg.norm(columns, axis=0)
    enough = len(columns) > columns.shape[1] and bool(lengths.all())
    return enough and bool(np.linalg.cond(columns / lengths) < _INDISTINCT)


def _not_negative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the x >= 0 that minimises |rows x - target|. There are at most four variables, so all choices of which
    variables are 0 are tried."""
    best, fewest = np.zeros(rows.shape[1]), float(target @ target)
    for size in range(1, rows.shape[1] + 1):
        for kept in itertools.combinations(range(rows.shape[1]), size):
            part = rows[:, kept]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            rest = part @ solution - target
            if (solution >= 0).all() and float(rest @ rest) < fewest:
                fewest = float(rest @ rest)
                best = np.zeros(rows.shape[1])
                best[list(kept)] = solution
    return best


def _is_beside(node: Observed) -> bool:
    """Return True for a node of an engine (a shard or a canary) whose worker ran other nodes at the same time."""
    return node.beside and STAGE_KIND[node.node.stage] == "generate"


def compared(
    runs: Sequence[ObservedRun], cluster: HardwareCluster, calibration: Calibration
) -> Iterator[tuple[str, float, float, int]]:
    """Yield (stage, measured seconds, predicted seconds, number of nodes) for each stage that the runs executed. The
    seconds are sums over the nodes, as if each node had run alone."""
    sums: dict[str, tuple[float, float, int]] = {}
    for one in (run.alone(calibration.crowding) for run in runs):
        costs = costs_of(one.run, cluster, calibration, one.prompt_tokens)
        for node, work in works_of(one, costs):
            measured, predicted, number = sums.get(node.node.stage, (0.0, 0.0, 0))
            seconds = costs.timed(work, node.node.stage) + calibration.beside_s * _is_beside(node)
            sums[node.node.stage] = (measured + node.seconds, predicted + seconds, number + 1)
    yield from ((stage, *totals) for stage, totals in sums.items())
