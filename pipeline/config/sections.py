"""The smaller sections of a run's config, each with the function that yields its problems.

alarms       rules that warn about a run, and which of them end it
checkpoint   how often the trained models are saved
cluster      where workers come from, how long the driver waits, how often it tries again
evaluate     how often and how held-out prompts are sampled and scored, and which version is the best
export       which versions are written in Hugging Face layout
mismatch     how engine and trainer are compared at each version, and when the difference is an alarm
rollout      responses per step, and their division into shards
tracking     MLflow, plots and the report
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stages.rewards.config import RewardPartsConfig, parts_problems
from storage.config import EvaluationPromptsConfig, evaluation_prompts_problems
from storage.problems import Constraint, Problem, above, at_least, divides, local_directory, setting, unknown_problems

RULES = (
    "trainer_idle", "engine_silent", "staleness", "entropy", "kl", "critic", "mismatch", "first_updates",
    "equal_groups", "cut_responses", "constant_score", "constant_length", "unmoved",
)  # fmt: skip
"""Names of the alarms that `alarms.stop` may list. The journal, MLflow's tags and the table at the end of a run use the
same names. Only `mismatch` is an exception: in the journal it is an alarm of the stage `canary`, and it has no tag in
MLflow."""

_LIMITS = {
    "trainer_idle": "trainer_idle_s",
    "engine_silent": "engine_silent_s",
    "staleness": "staleness_steps",
    "entropy": "entropy_below",
    "kl": "kl_above",
    "critic": "critic_steps",
}
"""Rule -> the setting of `alarms` with its limit; null switches the rule off. Rules that are not listed are always on,
except mismatch, which has a section of its own."""


@dataclass
class AlarmsConfig:
    """The limits of the rules that warn about a run. Null switches a rule off. A rule raises an alarm when its
    condition is first met. It raises the next alarm only after the condition has been false in between."""

    trainer_idle_s: float | None = setting(900.0, above(0, ", or null for no such alarm"))
    """trainer_idle: alarm if the policy's gang is up and has no node to work on for this many seconds."""
    engine_silent_s: float | None = setting(900.0, above(0, ", or null for no such alarm"))
    """engine_silent: alarm if a generating replica has nodes to run and finishes none for this many seconds."""
    staleness_steps: int | None = setting(None, at_least(1, ", or null for no such alarm"))
    """staleness: alarm if every token is at the staleness bound for this many steps in a row. It needs
    `rollout.versions` latest or inflight: under `exact` every row is at the bound by design."""
    entropy_below: float | None = setting(0.05, above(0, ", or null for no such alarm"))
    """entropy: alarm if the policy's entropy (`policy/entropy`, nats per sampled token) is below this for 3 steps in a
    row: the policy has collapsed."""
    kl_above: float | None = setting(1.0, above(0, ", or null for no such alarm"))
    """kl: alarm if the KL to the reference (`kl/ref_per_token`, nats per token) is above this for 3 steps in a row."""
    critic_steps: int | None = setting(5, at_least(1, ", or null for no such alarm"))
    """critic: alarm if `critic/explained_variance` is below -0.05, or `critic/lr` is 0, for this many steps in a row:
    the critic is worse than a constant, or learns nothing."""
    stop: list[str] = setting([])
    """Rules whose alarm ends the run. The run can be resumed. `mismatch` is the alarm of the canaries (section
    `mismatch`)."""


def alarms_problems(config: AlarmsConfig) -> Iterator[Problem]:
    """Yield the section's problems that do not involve other sections."""
    yield from unknown_problems("alarms.stop", config.stop, RULES, "rule")
    for rule in config.stop:
        if rule in _LIMITS and getattr(config, _LIMITS[rule]) is None:
            need = f"that rule is off (alarms.{_LIMITS[rule]}=null): give its limit, or leave it out"
            yield Problem("alarms.stop", rule, need)


# ---- checkpoint ------------------------------------------------------------------------------------------


@dataclass
class CheckpointConfig:
    """Checkpoints of the trained models, from which a run continues after it has lost a trainer."""

    every: int = setting(10, at_least(1))
    """Updates between checkpoints. After a trainer is lost, at most this number of updates is replayed from the stored
    rollouts."""
    keep: int = setting(2, at_least(1))
    """Number of newest checkpoints to keep of each model. More are kept if the staleness bound needs an older one."""
    keep_every: int | None = setting(None, at_least(1))
    """Checkpoints of versions that are multiples of this number are also kept; null: no further checkpoints."""


def checkpoint_problems(config: CheckpointConfig) -> Iterator[Problem]:
    """Yield the section's problems that do not involve other sections."""
    if config.keep_every is not None and config.every >= 1 and config.keep_every % config.every:
        need = f"must be a multiple of checkpoint.every = {config.every}: no other versions are saved"
        yield Problem("checkpoint.keep_every", config.keep_every, need)


# ---- cluster ---------------------------------------------------------------------------------------------

_HIGHEST_PORT = 65535
_LISTENING = re.compile(r"(\[(?P<v6>[^\s/\[\]]+)\]|(?P<host>[^\s/:\[\]]*))(:(?P<port>\d{1,5}))?")
_ADDRESS = re.compile(r"[^\s/:\[\]]*:(\d{1,5})")
_WHAT_THERE_IS = ", or null for what there is"


def _is_address(given: str) -> bool:
    match = _ADDRESS.fullmatch(given)
    return match is not None and int(match[1]) <= _HIGHEST_PORT


def _listening(given: str) -> tuple[str | None, int] | None:
    """Return host (None: not given) and port (0: any) of a `cluster.address`, or None if it is no address."""
    match = _LISTENING.fullmatch(given)
    if match is None or not given or int(match["port"] or 0) > _HIGHEST_PORT:
        return None
    return match["v6"] or match["host"] or None, int(match["port"] or 0)


@dataclass
class ClusterConfig:
    """The Dask cluster: where its workers come from, how long they may take, and how often work is retried."""

    kind: Literal["local", "attached"] = "local"
    """Origin of the workers. local: the driver starts them on its own host. attached: `stageline worker` starts them on
    any hosts, and they join."""
    interface: str | None = None
    """Name of the network interface for all listening sockets, gloo and NCCL, the same on every host. Only used with
    `kind: attached`. null: each host uses the interface by which it reaches the driver. gloo and NCCL then use the
    interfaces in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if these are set."""
    address: str | None = setting(
        None,
        Constraint(
            f"HOST, HOST:PORT or :PORT, with a port up to {_HIGHEST_PORT} and an IPv6 address in brackets; or null",
            lambda given: _listening(given) is not None,
        ),
    )
    """Attached: address on the driver's host that the scheduler listens on: HOST, HOST:PORT or :PORT. Without HOST the
    scheduler listens on the address of `interface`, or if that is null on the address of the default route. Without
    PORT it takes any free port. null: neither HOST nor PORT."""
    arrival_timeout_s: float = setting(600.0, above(0, " seconds"))
    """Attached: seconds that a worker may take to join. They count from the driver's start, or from the loss of the
    process that the worker replaces. A replica that is late is left out. A rank that is late ends the run, which can be
    resumed."""
    dashboard: str | None = setting(
        "127.0.0.1:8787",
        Constraint(
            f"HOST:PORT, as in 127.0.0.1:8787, with a port from 0 (any) to {_HIGHEST_PORT}; or null for none",
            _is_address,
        ),
    )
    """Address of the Dask dashboard; null: none. Another port is taken if this one is in use."""
    start_timeout_s: float | None = setting(None, above(0, " seconds, or null"))
    """Seconds that a worker may take to load its models after its process has started. null: 300 plus 10 for every GB
    of the largest model's files."""
    deadline_s: float = setting(1800.0, above(0, " seconds"))
    """Seconds that a node of the task graph may take. After that time the node also runs on another replica, and the
    slow worker gets no new nodes. If the slow worker does not finish within another `deadline_s`, it is ended. If no
    other replica can do the node's work, the slow worker counts as lost after the first `deadline_s`, and is ended
    then."""
    collective_timeout_s: float = setting(300.0, above(0, " seconds"))
    """Seconds for all ranks of a gang to reach a collective; after that the gang counts as lost, and the error names
    the missing ranks. At most half of `deadline_s` is used, so that the error comes before the gang is ended."""
    attempts: int = setting(3, at_least(1))
    """Maximum number of times that a node of the task graph is tried. A try fails if the node's worker is lost, or its
    stage raises a transient error. If all tries fail, the run ends."""
    same_numerics: Literal["refuse", "warn"] = "refuse"
    """Action if the workers of a gang differ in processor, compiler, kernels or libraries, or if these have changed
    when the run is resumed. The last bits of results would then differ."""
    weights_dir: str | None = setting(None, local_directory())
    """Directory for published weights; null: in /dev/shm."""
    host_memory_gb: float | None = setting(None, above(0, _WHAT_THERE_IS))
    """Limit of the memory that a run is predicted to take on a host, in units of 2^30 bytes; null: all memory of this
    host or its container."""
    device_memory_gb: float | None = setting(None, above(0, _WHAT_THERE_IS))
    """Limit of the memory that a run is predicted to take on a GPU, in units of 2^30 bytes; null: all memory of the
    GPU."""
    migrate_rows: bool = False
    """True: rows in flight move between the replicas of the engine if all work then ends sooner, as predicted from the
    measured cost of a pass. They move from loaded to idle replicas, or to fewer replicas while other work waits for a
    replica. Tokens and log-probs stay the same."""


def listening(config: ClusterConfig) -> tuple[str | None, int]:
    """Return the host and the port on which the scheduler listens. Host None: the address of `interface`, or of the
    default route. Port 0: any free port."""
    return (None if config.address is None else _listening(config.address)) or (None, 0)


def collective_timeout_s(config: ClusterConfig) -> float:
    """Return the seconds after which the ranks of a gang abandon a collective."""
    return min(config.collective_timeout_s, config.deadline_s / 2)


def cluster_problems(config: ClusterConfig) -> Iterator[Problem]:
    """Yield the section's problems that do not involve other sections."""
    if config.interface is not None and listening(config)[0] is not None:
        need = f"cluster.interface={config.interface} says the host already: one of the two, or :PORT"
        yield Problem("cluster.address", config.address, need)
    if config.kind == "local":
        given = {
            "cluster.interface": config.interface,
            "cluster.address": config.address,
        }
        for key, value in given.items():
            if value is not None:
                yield Problem(key, value, "needs cluster.kind=attached: local workers are reached by 127.0.0.1 alone")
        if config.arrival_timeout_s != ClusterConfig.arrival_timeout_s:
            need = "needs cluster.kind=attached: the driver starts local workers itself (cluster.start_timeout_s)"
            yield Problem("cluster.arrival_timeout_s", config.arrival_timeout_s, need)


# ---- evaluate --------------------------------------------------------------------------------------------


@dataclass
class SelectConfig:
    """The choice of the best version: the version with the highest mean score, among the evaluated versions within the
    KL budget."""

    max_kl: float | None = setting(None, above(0, ", or null for no budget"))
    """KL budget: largest allowed `eval/kl`, in nats per response; null: no budget."""


@dataclass
class EvaluateConfig:
    """Evaluation of published versions on held-out prompts, and the choice of the best version."""

    every: int | None = setting(None, at_least(0))
    """Versions between evaluations. The first and the last version are evaluated too. null: only these two; 0: no
    version is evaluated."""
    shards: int = setting(1, at_least(1))
    """Number of parts of an evaluation. Each part is generated and scored separately."""
    temperature: float | None = setting(None, at_least(0))
    """Sampling temperature; null: as in training. If the engine's draws are keyed (`Capabilities.draws`), all
    evaluations sample a prompt with the same noise, so that two evaluations can be compared prompt by prompt."""
    prompts: EvaluationPromptsConfig = field(default_factory=EvaluationPromptsConfig)
    reward: RewardPartsConfig = field(default_factory=RewardPartsConfig)
    """Reward of the held-out responses; empty: the reward of section `reward`."""
    select: SelectConfig = field(default_factory=SelectConfig)


def evaluate_problems(config: EvaluateConfig) -> Iterator[Problem]:
    """Yield the section's problems that do not involve other sections."""
    yield from parts_problems(config.reward, "evaluate.reward")
    yield from evaluation_prompts_problems(config.prompts)
    if config.every == 0:
        idle = "nothing is evaluated (evaluate.every=0): leave it out, or evaluate"
        if config.select.max_kl is not None:
            yield Problem("evaluate.select.max_kl", config.select.max_kl, idle)
        if config.temperature is not None:
            yield Problem("evaluate.temperature", config.temperature, idle)
        if config.prompts.url is not None:
            yield Problem("evaluate.prompts.url", config.prompts.url, idle)
        if config.reward.is_given:
            yield Problem("evaluate.reward", config.reward.kind or [*config.reward.parts], idle)


# ---- export ----------------------------------------------------------------------------------------------


@dataclass
class ExportConfig:
    """Exports of the policy in Hugging Face layout, for use outside the run."""

    every: int = setting(0, at_least(0))
    """Versions between exports in Hugging Face layout. The last version is always exported; 0: only the last."""


# ---- mismatch --------------------------------------------------------------------------------------------

FLOAT32_FLOOR_NATS = 0.01
BFLOAT16_FLOOR_NATS = 0.05
"""FLOAT32_FLOOR_NATS and BFLOAT16_FLOOR_NATS: smallest limits that the mismatch alarm can have if `mismatch.alarm_nats`
is null, in nats (`alarm_limit`). The alarm compares the log-probs of engine and trainer for the same tokens and
weights. FLOAT32_FLOOR_NATS applies if both compute in float32, and BFLOAT16_FLOOR_NATS otherwise. A difference of 0.05
nats means that probabilities differ by a factor of exp(0.05) = 1.05.

Differences measured on a healthy SmolLM2-135M, mean of 32 tokens: 6e-6 nats in float32. In bfloat16: 0.014 to 0.031
nats in the embedded engine, and up to 0.077 in vLLM. The 0.077 nats raise no alarm, although they are above the floor.
The limit is the larger of two numbers: the floor, and FACTOR times the difference at version 0.
"""
FACTOR = 3.0
"""Factor for the limit of the mismatch alarm, which compares the log-probs of engine and trainer at each version of the
weights. The limit is FACTOR times the difference at version 0, but at least FLOAT32_FLOOR_NATS or BFLOAT16_FLOOR_NATS
(`alarm_limit`). In healthy runs the differences at later versions were 0.6 to 1.3 times the difference at version 0."""
STALE_SHARE = 2 / 3
"""Factor that lowers the limit of the mismatch alarm in one case: the engine's log-probs suggest that it still computes
with older weights (`differs`). A smaller difference from the trainer then raises the alarm."""


@dataclass
class MismatchConfig:
    """Canaries: rows that engine and trainer both score with the same version."""

    rows: int = setting(4, at_least(0))
    """Number of canaries: rows on which the log-probs of engine and trainer are compared at every version. They are the
    first rows of a step's first shard, at most all its rows. 0: engine and trainer are not compared."""
    alarm_nats: float | None = setting(
        None, above(0, " nats, or null for a limit that follows from the difference at version 0")
    )
    """Mean absolute difference of the log-probs above which there is an alarm; null: the limit follows from the
    difference at version 0 (`alarm_limit`). The alarm is a warning, an event and a metric, and ends the run if
    `alarms.stop` lists `mismatch`."""


def alarm_limit(floor: float, first: float | None) -> float:
    """Return the mean absolute difference above which there is an alarm: max(floor, FACTOR * first).

    `first` is the difference at version 0, where engine and trainer certainly hold the same weights, so that only
    rounding causes it. For the limit of version 0 itself `first` is None, and the limit is FACTOR * floor.
    """
    return max(floor, FACTOR * (floor if first is None else first))


def differs(difference: float, limit: float, moved: float | None) -> bool:
    """Return True if the log-probs of engine and trainer differ by more than rounding explains:

        difference > limit    or    difference > STALE_SHARE * limit  and  moved < difference / 5

    The second condition finds an engine that did not load the new weights. The log-probs of such an engine change only
    by the rounding of another batch (the embedded engine's do not change at all), so `moved` is small. But the
    trainer's log-probs have changed, so `difference` is large. After a small update of long responses in bfloat16, a
    healthy engine's `moved` was a quarter of its `difference` (conf/run/grpo.yaml, seed 0: 0.0117 of 0.0467).

    Args:
        difference: mean absolute difference between the log-probs of engine and trainer for the same tokens, in nats.
        limit: limit of the alarm, in nats.
        moved: mean absolute change of the engine's log-probs since older weights sampled the tokens, in nats. None if
            the current weights sampled any of the tokens.
    """
    stale = moved is not None and moved < difference / 5
    return difference > (STALE_SHARE * limit if stale else limit)


def mismatch_problems(config: MismatchConfig) -> Iterator[Problem]:
    """Yield the section's problems that do not involve other sections."""
    if config.alarm_nats is not None and not config.rows:
        need = "without canaries (mismatch.rows=0) nothing is compared with it: set mismatch.rows, or null"
        yield Problem("mismatch.alarm_nats", config.alarm_nats, need)


# ---- rollout ---------------------------------------------------------------------------------------------


@dataclass
class RolloutConfig:
    """The rollout of a step: how many responses are generated, in how many parts, and by which weights."""

    rows: int = setting(32, at_least(1))
    """Responses per PPO step."""
    shards: int = setting(2, at_least(1))
    """Number of equal parts of a step's rows. Generation, scores, log-probs and values are computed separately for each
    part."""
    responses_per_prompt: int = setting(1, at_least(1))
    """Number of responses to each prompt of a step. It must divide the number of rows of a shard."""
    versions: Literal["exact", "latest", "inflight"] = "exact"
    """Version of the weights that samples step i. `exact`: max(0, i - staleness), so that a run is a function of its
    config. `latest`: the newest version that is published when a shard starts, never older than under `exact`.
    `inflight`: as `latest`, and a running shard also changes to each version that is published, from the next token
    on; its keys and values are recomputed from the new weights. Under `latest` and `inflight` a run depends on timing
    and does not repeat bit for bit."""


def rollout_problems(config: RolloutConfig) -> Iterator[Problem]:
    """Yield the section's problems that do not involve other sections."""
    yield from divides("rollout.shards", config.shards, "rollout.rows", config.rows)
    if config.shards >= 1:
        key, responses = "rollout.responses_per_prompt", config.responses_per_prompt
        yield from divides(key, responses, "rows of a shard", config.rows // config.shards)


# ---- tracking --------------------------------------------------------------------------------------------

SQLITE = "sqlite:///"
_SCHEMES = (SQLITE, "http://", "https://")
TRACKERS = ("tensorboard", "wandb")
"""Trackers of `tracking.also`; each is the name of the Python package that it needs."""
_NOT_IN_WANDB = "/\\#?%:"


@dataclass
class TrackingConfig:
    """Trackers: where MLflow logs the run and under which name, and which further trackers get its metrics."""

    uri: str | None = setting(
        "sqlite:///runs/mlflow.db",
        Constraint(
            "sqlite:///PATH (a file), or http:// or https:// (a server), or null for no tracking",
            lambda uri: uri.startswith(_SCHEMES),
        ),
    )
    """URI of MLflow's store or server; null: no tracking."""
    experiment: str = "stageline"
    """Name of the MLflow experiment."""
    parent: str | None = None
    """MLflow's id of the parent run, under which this run is shown; a sweep sets it."""
    register: str | None = setting(
        None,
        Constraint(
            "a name without / and :, or null for no registered model", lambda name: name and not set(name) & set("/:")
        ),
    )
    """Name of a registered model in MLflow. The last version of the weights becomes a version of that model. null: no
    registered model. Needs a sqlite:/// URI."""
    also: list[str] = setting([])
    """Further trackers that get the same metrics: `tensorboard` (an event file in `RUN/tensorboard`) and `wandb` (an
    offline run of Weights & Biases in `RUN/wandb`). Each needs the Python package of its name. Only MLflow gets traces,
    data sets and artifacts."""
    report: bool = True
    """True: at the end of the run, curves are drawn as PNG files, and `report.html` is written."""


def tracking_problems(config: TrackingConfig) -> Iterator[Problem]:
    """Yield the section's problems that do not involve other sections."""
    if config.register is not None and (config.uri is None or not config.uri.startswith(SQLITE)):
        need = "needs a tracking.uri of sqlite:///: a server takes no weights that lie on this host; or null"
        yield Problem("tracking.register", config.register, need)
    yield from unknown_problems("tracking.also", config.also, TRACKERS, "tracker")
    if config.also and config.uri is None:
        yield Problem("tracking.also", config.also, "they get what MLflow gets, and tracking.uri=null switches it off")
    if len({*config.also}) < len(config.also):
        yield Problem("tracking.also", config.also, "must name each tracker once")
    if "wandb" in config.also and not {*config.experiment}.isdisjoint(_NOT_IN_WANDB):
        need = f"Weights & Biases accepts no {_NOT_IN_WANDB} in the name of a project"
        yield Problem("tracking.experiment", config.experiment, need)
