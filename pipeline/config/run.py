"""The configuration of a run as a whole: its sections, and values derived from them. `rules.py` checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.config.placement import PlacementConfig, placed_gangs
from pipeline.config.sections import (
    BFLOAT16_FLOOR_NATS,
    FLOAT32_FLOOR_NATS,
    AlarmsConfig,
    CheckpointConfig,
    ClusterConfig,
    EvaluateConfig,
    ExportConfig,
    MismatchConfig,
    RolloutConfig,
    TrackingConfig,
    alarm_limit,
)
from pipeline.config.slurm import SlurmConfig
from pipeline.config.stored import RunStorage
from pipeline.graph.graph import STAGE_ROLES, Gang, GraphSpec, Mode
from stages.engines.capabilities import Capabilities, Device, capabilities_of
from stages.engines.config import EngineConfig
from stages.models.config import ModelConfig, SamplingConfig
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.spec import stored_bytes
from stages.ppo.config import PPOConfig, has_critic, resolve_proximal
from stages.rewards.config import (
    EARLY_KINDS,
    JUDGE_BUDGET,
    JUDGES,
    SCORING_MODELS,
    RewardConfig,
    RewardPartsConfig,
    judge_notes,
    reward_model_parts,
)
from storage.config import Layout, Layouts, PromptsConfig, StorageConfig
from storage.problems import (
    Constraint,
    at_least,
    local_directory,
    plain_name,
    setting,
)

_START_S = 300.0
_SLOW_DISK_BYTES_PER_S = 1e8
"""Bytes a second that a host reads from a network filesystem while many other hosts read from it too."""


@dataclass(repr=False)
class RunConfig:
    """The configuration of a run."""

    name: str = setting("???", plain_name())
    """Name of the run and of its directory."""
    runs_dir: str = setting("runs", local_directory())
    """Parent of the runs' directories."""
    seed: int = setting(0, Constraint("from 0 to 2^63 - 1", lambda seed: 0 <= seed < 2**63))
    """Seed of the prompts' order, the sampling noise, the choice of held-out prompts, the division into minibatches,
    and the initial weights of new heads."""
    steps: int = setting(10, at_least(1))
    """PPO steps."""
    staleness: int = setting(1, at_least(0, ": 0 is synchronous PPO, 1 or more overlaps"))
    """The staleness bound eta. Version max(0, i - eta) of the weights, or a newer one (`rollout.versions`), generates
    the rows of step i."""
    model: ModelConfig = field(default_factory=ModelConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=lambda: PPOConfig(proximal="auto"))
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    predicted_s: dict[str, float] = setting(
        {},
        Constraint(
            "seconds above 0 of stages of the graph, and of `step`",
            lambda given: all(s > 0 and (name == "step" or name in STAGE_ROLES) for name, s in given.items()),
        ),
    )
    """Predicted seconds of each stage, summed over its nodes of one step. The key `step` has the predicted seconds from
    one step to the next. `stageline plan --write` sets these numbers, and the summary compares them with the measured
    seconds."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)

    def __repr__(self) -> str:
        return f"<config of run {self.name}: {self.model.path}, {self.steps} steps of {self.rollout.rows} responses>"

    # ---- Derived values ------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def stored(self) -> RunStorage:
        """Return the place of the run's ledger and rollouts."""
        return RunStorage(self.run_dir, self.storage.url, self.storage.durability())

    @property
    def seq(self) -> int:
        """Tokens of a stored row: longest prompt + longest response."""
        return self.prompts.max_tokens + self.sampling.max_new_tokens

    @property
    def rows_per_shard(self) -> int:
        return self.rollout.rows // self.rollout.shards

    @property
    def eval_rows_per_shard(self) -> int:
        return self.held_out // self.evaluate.shards

    @property
    def held_out(self) -> int:
        """Number of evaluated prompts. 0 if the config leaves it open and `preflight` has not chosen it yet."""
        own = self.evaluate.prompts
        return (self.prompts.held_out if own.url is None else own.max) or 0

    @property
    def evaluation_source(self) -> PromptsConfig | None:
        """Settings of the evaluations' own source of prompts; None if the evaluated prompts are held out of
        `prompts.url`."""
        return self.evaluate.prompts.source(self.prompts)

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """Settings of the sampling in evaluations."""
        heat = self.evaluate.temperature
        return self.sampling if heat is None else replace(self.sampling, temperature=heat)

    def weights_dir(self, gang: str) -> str | None:
        """Return the directory of published weights on a gang's host; None: the default one in shared memory."""
        return self.placement.gangs[gang].weights_dir or self.cluster.weights_dir

    def alarm_nats(self, first: float | None) -> float:
        """Return the limit of the mismatch alarm, in nats. The alarm compares the engine's and the trainer's log-probs
        of the same tokens (canaries). It is raised if their mean absolute difference is above the limit. If
        `mismatch.alarm_nats` is set, it is the limit. Otherwise `alarm_limit` computes the limit.

        `first`: the difference at version 0; None: return the limit for version 0 itself.
        """
        if self.mismatch.alarm_nats is not None:
            return self.mismatch.alarm_nats
        return alarm_limit(FLOAT32_FLOOR_NATS if self._float32 else BFLOAT16_FLOOR_NATS, first)

    @property
    def _float32(self) -> bool:
        """True if engine and trainer both compute in float32, so that their log-probs can agree to rounding."""
        return self.model.dtype == self.engine.dtype == "float32"

    @property
    def proximal(self) -> Literal["recompute", "loglinear", "sampler"]:
        """`ppo.proximal`, with `auto` resolved."""
        exact = self._float32 and self.capabilities().invariance != "none"
        return resolve_proximal(self.ppo, staleness=self.staleness, exact=exact)

    @property
    def in_flight(self) -> bool:
        """True if engines load new weights while rows are in flight. Otherwise they first wait until these rows have
        finished."""
        return self.rollout.versions == "inflight"

    def capabilities(self, device: Device = "cpu") -> Capabilities:
        """Return the engine's capabilities. Some may differ between devices."""
        return capabilities_of(self.engine, device)

    @property
    def engine_start_s(self) -> float:
        """Seconds that an engine in an environment of its own may take to start. This is less than the start timeout of
        its worker. So the user sees the engine's error, with the end of the engine's log, before the worker's error."""
        return 0.8 * self.start_timeout_s

    @property
    def start_timeout_s(self) -> float:
        """Seconds that a worker may take to start: `cluster.start_timeout_s`. If that is null: time enough for a slow
        disk to read the largest model."""
        if self.cluster.start_timeout_s is not None:
            return self.cluster.start_timeout_s
        paths = {self.model.path_of(role) for role in MODEL_ROLES}
        paths |= {str(args["path"]) for args in self.scoring_models().values()}
        return _START_S + max(map(stored_bytes, paths)) / _SLOW_DISK_BYTES_PER_S

    @property
    def has_canaries(self) -> bool:
        """True if engine and trainer are compared at every version, on the log-probs of a few rows (canaries). This
        needs `mismatch.rows` above 0. It also needs an engine that can score given tokens, or a staleness of 0. At
        staleness 0 the current version has sampled all rows, so the log-probs from the sampling can be compared."""
        return self.mismatch.rows > 0 and (self.capabilities().scores or self.staleness == 0)

    @property
    def has_critic(self) -> bool:
        """True if a critic is trained. Otherwise `model.critic.*`, `model.critic_path`, `model.critic_blocks` and
        `placement.roles.critic` are not read, and gangs that only serve the critic are not started."""
        return has_critic(self.ppo)

    @property
    def replica_ranks(self) -> int:
        """Processes of one replica of the engine."""
        return self.engine.tensor_parallel * self.engine.pipeline_parallel

    @property
    def scores_early(self) -> bool:
        """True if rows may be scored while others of their shard are still generated. Such a row is sent to the worker
        that will score its shard. This worker is known early enough if the scoring gang is a pool of its own."""
        gangs = {role: gang for gang in self.gangs() for role in gang.roles}
        scoring = gangs[Role.SCORE]
        if scoring == gangs[Role.GENERATE] or scoring.mode(Role.SCORE) is not Mode.FREE:
            return False
        sections = [section.parts_by_name(key) for key, section in (("reward", self.reward), self.held_out_reward)]
        kinds = [part.kind for parts in sections for _, part in parts.values()]
        return any(":" in kind or kind in EARLY_KINDS for kind in kinds)

    @property
    def held_out_reward(self) -> tuple[str, RewardPartsConfig]:
        """(Key path, section) of the reward that scores held-out responses."""
        has_own = self.evaluate.reward.is_given
        return ("evaluate.reward", self.evaluate.reward) if has_own else ("reward", self.reward)

    def reward_models(self) -> dict[str, Mapping[str, Any]]:
        """Return key path -> arguments, for every reward of kind `model`. Assumes that the rewards can be built."""
        return self._rewards_of(("model",))

    def scoring_models(self) -> dict[str, Mapping[str, Any]]:
        """Return key path -> arguments, for every reward with a model in the scoring worker (kinds `model` and
        `local_judge`). Assumes that the rewards can be built."""
        return self._rewards_of(SCORING_MODELS)

    def answer_caches(self) -> dict[str, str]:
        """Return a dictionary: key path of a judge's setting `cache` (such as `reward.args.cache`) -> the directory in
        which this judge stores its answers. Judges without the setting are left out: they store their answers in the
        run's directory."""
        judges = self._rewards_of(JUDGES)
        return {f"{where}.cache": str(args["cache"]) for where, args in judges.items() if args.get("cache") is not None}

    def judge_budgets(self) -> frozenset[str]:
        """Return the key paths of the budget settings, for all rewards of kind `judge`."""
        return frozenset(f"{where}.{name}" for where in self._rewards_of(("judge",)) for name in JUDGE_BUDGET)

    def judge_notes(self) -> list[str]:
        """Return warnings for the user about settings of judges that are allowed but risky: one for each judge with
        `delimit: false`. Such a judge cannot tell where the response ends and the rubric begins."""
        sections = (("reward", self.reward), ("evaluate.reward", self.evaluate.reward))
        return [note for name, section in sections for note in judge_notes(section, name)]

    def rubric_files(self) -> dict[str, str]:
        """Return key path of `rubric_file` -> the file, for every judge that has this setting."""
        judges = self._rewards_of(JUDGES)
        return {
            f"{where}.rubric_file": str(args["rubric_file"]) for where, args in judges.items() if "rubric_file" in args
        }

    def _rewards_of(self, kinds: tuple[str, ...]) -> dict[str, Mapping[str, Any]]:
        sections = (("reward", self.reward), ("evaluate.reward", self.evaluate.reward))
        return {key: args for name, section in sections for key, args in reward_model_parts(section, name, kinds)}

    def graph(self) -> GraphSpec:
        return GraphSpec(
            steps=self.steps,
            shards=self.rollout.shards,
            staleness=self.staleness,
            recompute_logprobs=self.proximal == "recompute",
            eval_every=self.steps if self.evaluate.every is None else self.evaluate.every,
            eval_shards=self.evaluate.shards,
            has_canaries=self.has_canaries,
            has_critic=self.has_critic,
            uses_latest=self.rollout.versions != "exact",
        )

    def exports(self, version: int) -> bool:
        """Return True if a version is exported when it is published: the last version, and every version that is a
        multiple of `export.every`, except version 0. Under `storage.keep.rollouts` versions cannot be rebuilt later.
        Then every evaluated version is exported too, because it may become the best."""
        return version > 0 and any(version % period == 0 for period in self._export_periods)

    @property
    def exports_in_training(self) -> bool:
        """True if a version before the last one is exported."""
        return min(self._export_periods) < self.steps

    @property
    def _export_periods(self) -> list[int]:
        """Periods of the exports, in versions. A version is exported if it is a multiple of one of them."""
        evaluated = self.graph().eval_every if self.storage.keep.rollouts is not None else 0
        return [period for period in (self.steps, self.export.every, evaluated) if period]

    def layouts(self) -> Layouts:
        step = Layout(self.rollout.shards, self.rows_per_shard, self.seq)
        held_out, shards = self.held_out, self.evaluate.shards
        if self.evaluate.every == 0 and (not held_out or held_out % shards):  # an earlier config may have evaluated
            return Layouts(step)
        return Layouts(step, Layout(self.evaluate.shards, self.eval_rows_per_shard, self.seq))

    def gangs(self) -> list[Gang]:
        return placed_gangs(
            self.placement,
            critic=self.has_critic,
            replica_ranks=self.replica_ranks,
            scoring_models=bool(self.scoring_models()),
        )

    def shares_devices(self, gang: str) -> bool:
        """Return True if a gang shares devices with others."""
        return any(gang in group for group in self.placement.device_sharing)
