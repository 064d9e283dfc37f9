"""Data for tracking: a run's settings, the metrics that are left out, the trace of a step, and system metrics by gang.

    config ──► settings without secrets; metrics that mean nothing under this config
    nodes of a step, with their times, inputs and outputs ──► spans of a trace
    worker's heartbeat ──cpu, memory, gpu──► scheduler ──every 10 s──► sums by gang ──► tracker

The functions that take a config are pure. `SystemMetrics` does what the last line shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import psutil

from pipeline.config.loading import flatten
from pipeline.config.run import RunConfig
from pipeline.graph.graph import Node
from pipeline.observe.history import History
from pipeline.observe.tracking import Span, Tracker
from pipeline.workers.messages import Outcome
from stages.models.protocol import Role
from storage.address import Address


def meaningless_metrics(config: RunConfig) -> frozenset[str]:
    """Return the metrics that repeat another metric, or never change, in a run of this config."""
    return frozenset(_meaningless_metrics(config))


def _meaningless_metrics(config: RunConfig) -> Iterator[str]:
    roles, ppo = config.placement.roles, config.ppo
    if ppo.kl.target is None:
        yield "kl/coef"
    if ppo.kl.where == "reward" and not ppo.entropy_coef:
        yield "policy/surrogate"  # equals the whole loss
    if config.has_critic and roles.get(Role.CRITIC.value) == roles[Role.POLICY.value]:
        yield "critic/peak_memory_bytes"  # the same processes as the policy's
    if config.staleness == 0:
        yield from ("staleness/mean", "staleness/max", "staleness/fraction_0", "mismatch/fresh_fraction")
        yield from ("mismatch/mean_abs_all", "mismatch/exp_abs_all")
    elif config.rollout.versions == "exact":  # from step `staleness` on no token is fresh
        yield from ("mismatch/mean_abs", "mismatch/exp_abs", "mismatch/fresh_fraction")
        yield from (f"staleness/fraction_{age}" for age in range(config.staleness + 1))


def tracked_params(config: RunConfig) -> dict[str, str]:
    """Return key path -> text of each setting of the config. Secrets and settings that the run does not read are left
    out."""
    unread = tuple(_unread_keys(config))
    return {key: value for key, value in flatten(config).items() if not key.startswith(unread)}


def _unread_keys(config: RunConfig) -> Iterator[str]:
    """Yield the prefixes of the config keys that the run does not read."""
    yield "slurm."  # the job's tags have the resources
    for gang in config.gangs():
        if gang.is_ordered:
            yield f"placement.gangs.{gang.name}.concurrent_shards"
        else:
            yield from (f"placement.gangs.{gang.name}.{key}" for key in ("layout.", "offload"))
    for name in config.placement.gangs.keys() - {gang.name for gang in config.gangs()}:
        yield f"placement.gangs.{name}."
    if config.cluster.kind == "local":
        yield from (f"cluster.{key}" for key in ("interface", "address", "arrival_timeout_s"))
    if not config.has_critic:
        yield from ("model.critic.", "model.critic_path", "model.critic_blocks")
    if not config.model.lora.rank:
        yield from ("model.lora.alpha", "model.lora.targets")
    if not config.evaluate.every:
        yield "evaluate.select."


# ---- Trace of a step -------------------------------------------------------------------------------------

_OF_VERSION = frozenset({"publish", "canary"})
_SHOWN = frozenset({"generate", "advantage"})
_WHOLE_STEP = frozenset({"advantage", "update_policy", "update_critic"})


def span_name(address: Address) -> str:
    """Return a span's name, such as `generate s0`, `publish v8`, `evaluate v4 s0`, `advantage`. The step is left out,
    since the trace's own name has it."""
    if address.stage in _WHOLE_STEP:
        return address.stage
    if address.stage in _OF_VERSION:
        return f"{address.stage} v{address.step}"
    version = f" v{address.step}" if address.stage.startswith("evaluate") else ""
    return f"{address.stage}{version} s{address.shard}"


def step_spans(ran: Iterable[tuple[Node, Outcome]], gang_of: Mapping[Role, str]) -> list[Span]:
    """Return a span for each node that ran."""
    return [
        Span(
            name=span_name(node.address),
            stage=node.stage,
            start_s=outcome.started,
            end_s=outcome.finished,
            gang=gang_of[node.role],
            worker=outcome.worker,
            attributes={"step": node.address.step, "shard": node.address.shard, "version": node.version},
            inputs=tuple(map(str, node.parents)),
            output=str(node.address),
        )
        for node, outcome in ran
    ]


def trace_previews(run_name: str, step: int, ran: Sequence[tuple[Node, Outcome]], history: History) -> tuple[str, str]:
    """Return the texts of request and response that MLflow's list of traces shows for a step, such as
    (`demo · step 7 · v6`, `reward 0.198 KL 0.79`). The request ends with the version that sampled the step's rows, or
    with a range such as `v5-6` if there are several. Results of nodes that an earlier driver ran are read from the
    ledger."""
    known = {node.address: outcome.ref for node, outcome in ran if outcome.ref is not None}
    sampled = {node.version for node, _ in ran if node.stage == "generate"}
    for address in history.addresses(step):
        commit = history.ledger.find(address) if address.stage in _SHOWN and address not in known else None
        if commit is not None:
            known[address] = commit.ref()
            sampled |= {*commit.provenance.weight_versions} if address.stage == "generate" else set()
    versions = sorted(sampled)
    asked = " · ".join([run_name, f"step {step}", *([f"v{versions[0]}"] if len(versions) == 1 else [])])
    if len(versions) > 1:
        asked += f" · v{versions[0]}-{versions[-1]}"
    advantage = known.get(Address("advantage", step))
    metrics = {} if advantage is None else advantage.metrics
    numbers = (("reward", metrics.get("reward/mean")), ("KL", metrics.get("kl/ref")))
    return asked, " ".join(f"{label} {value:.3g}" for label, value in numbers if value is not None)


# ---- System metrics --------------------------------------------------------------------------------------

SAMPLE_INTERVAL_S = 10.0


class SchedulerWorkers(Protocol):
    """The part of Dask's scheduler that we read."""

    @property
    def workers(self) -> Mapping[str, Any]:
        """Address of a worker -> Dask's state of the worker, with the attributes `name` and `metrics`."""
        ...


def gang_metrics(workers: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the metrics `system/GANG/*`, given pairs of a gang's name and one worker's measurements. Each metric is
    the sum over the gang's workers, except GPU utilisation: that is the mean over the workers with a GPU."""
    by_gang: dict[str, list[Mapping[str, Any]]] = {}
    for gang, measured in workers:
        by_gang.setdefault(gang, []).append(measured)
    metrics = {}
    for gang, all_of in sorted(by_gang.items()):
        metrics[f"system/{gang}/cpu_percent"] = sum(float(one.get("cpu", 0.0)) for one in all_of)
        metrics[f"system/{gang}/memory_bytes"] = sum(float(one.get("memory", 0.0)) for one in all_of)
        gpus = [one["gpu"] for one in all_of if one.get("gpu")]
        if gpus:
            metrics[f"system/{gang}/gpu_percent"] = sum(_number(gpu["utilization"]) for gpu in gpus) / len(gpus)
            metrics[f"system/{gang}/gpu_memory_bytes"] = sum(_number(gpu["memory-used"]) for gpu in gpus)
    return metrics


def _number(measured: float | None) -> float:
    return 0.0 if measured is None else float(measured)


class SystemMetrics:
    """Logs samples of the workers' CPU, memory and GPU use, and of the driver's CPU and memory use, to the tracker.
    Decides when the next sample is due.

    A sample costs little and covers all hosts, because it asks no worker. Dask's workers measure these values
    themselves and send them to the scheduler, which runs in this process. Child processes of a worker (an engine in its
    own environment) are not included. GPU values need pynvml; they were tested with made-up numbers only.
    """

    def __init__(
        self, scheduler: SchedulerWorkers, tracker: Tracker, began: float, now: Callable[[], float] = time.time
    ) -> None:
        """`began`: start of the run's first driver. Samples are numbered by the whole seconds since then."""
        self._scheduler = scheduler
        self._tracker = tracker
        self._began = began
        self._now = now
        self._process = psutil.Process()
        self._process.cpu_percent()  # later calls measure from here on
        self._next = now() + SAMPLE_INTERVAL_S

    def sample_if_due(self) -> None:
        """Track a sample if the next one is due. The driver's thread calls this method about once a second."""
        now = self._now()
        if now < self._next:
            return
        self._next = now + SAMPLE_INTERVAL_S
        workers = [(str(w.name).rpartition("-")[0], w.metrics) for w in list(self._scheduler.workers.values())]
        driver = {
            "system/driver/cpu_percent": self._process.cpu_percent(),
            "system/driver/memory_bytes": float(self._process.memory_info().rss),
        }
        self._tracker.log_metrics(round(now - self._began), driver | gang_metrics(workers))
