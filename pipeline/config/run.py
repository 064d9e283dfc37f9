"""The configuration of a run as a whole: its sections, values derived from them, and checks across sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.config.engine_needs import EngineNeeds, engine_needs
from pipeline.config.errors import refusal, together
from pipeline.config.placement import PlacementConfig, default_placement, gang_of, placed_gangs, placement_problems
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
    alarms_problems,
    checkpoint_problems,
    cluster_problems,
    evaluate_problems,
    mismatch_problems,
    rollout_problems,
    tracking_problems,
)
from pipeline.config.slurm import SlurmConfig, slurm_placement_problems, slurm_problems
from pipeline.graph.graph import Gang, GraphSpec
from stages.engines.capabilities import Capabilities, Device, capabilities_of
from stages.engines.config import EngineConfig, engine_problems
from stages.models.config import ModelConfig, SamplingConfig, model_problems, sampling_problems
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.spec import stored_bytes
from stages.ppo.config import GROUPED, PPOConfig, has_critic, ppo_problems, resolve_proximal
from stages.rewards.config import (
    JUDGE_BUDGET,
    JUDGES,
    REASONING_SCHEME,
    RewardConfig,
    RewardPartsConfig,
    judge_notes,
    judge_problems,
    reward_model_parts,
    reward_problems,
    source_problems,
)
from storage.config import Layout, Layouts, PromptsConfig, StorageConfig, prompts_problems
from storage.problems import (
    Constraint,
    Problem,
    at_least,
    divides,
    local_directory,
    mentions,
    plain_name,
    setting,
    setting_problems,
    unread_problems,
)

_START_S = 300.0
_SLOW_DISK_BYTES_PER_S = 1e8
"""A network filesystem that many nodes read at once."""


@dataclass
class RunConfig:
    """A whole run."""

    name: str = setting("???", plain_name())
    """Name of the run and of its directory."""
    runs_dir: str = setting("runs", local_directory())
    """Directory of the runs' directories."""
    seed: int = setting(0, Constraint("from 0 to 2^63 - 1", lambda seed: 0 <= seed < 2**63))
    """Seed of the prompts' order, the sampling noise, the held-out split, the minibatches and new heads."""
    steps: int = setting(10, at_least(1))
    """PPO steps."""
    staleness: int = setting(1, at_least(0, ": 0 is synchronous PPO, 1 or more overlaps"))
    """The staleness bound eta: version max(0, i - eta) generates step i, or a newer one (`rollout.versions`)."""
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
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)

    # ---- Derived values ------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

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
        """Number of held-out prompts. 0 if the config leaves it open and `preflight` has not chosen it yet."""
        return self.prompts.held_out or 0

    def weights_dir(self, gang: str) -> str | None:
        """Return the directory of published weights on a gang's host; None: in shared memory."""
        return self.placement.gangs[gang].weights_dir or self.cluster.weights_dir

    def alarm_nats(self, first: float | None) -> float:
        """Return the mean absolute difference of canaries' log-probs above which there is an alarm. `first`: the
        difference at version 0; None: this is version 0."""
        if self.mismatch.alarm_nats is not None:
            return self.mismatch.alarm_nats
        return alarm_limit(FLOAT32_FLOOR_NATS if self._float32 else BFLOAT16_FLOOR_NATS, first)

    @property
    def _float32(self) -> bool:
        """True if engine and trainer both compute in float32, so that their log-probs agree to rounding (for an engine
        that states its numerics)."""
        return self.model.dtype == self.engine.dtype == "float32"

    @property
    def proximal(self) -> Literal["recompute", "loglinear", "sampler"]:
        """`ppo.proximal`, with `auto` resolved."""
        exact = self._float32 and self.capabilities().invariance != "none"
        return resolve_proximal(self.ppo, staleness=self.staleness, exact=exact)

    def capabilities(self, device: Device = "cpu") -> Capabilities:
        """Return the engine's capabilities. Its numerics may depend on the device."""
        return capabilities_of(self.engine, device)

    @property
    def engine_start_s(self) -> float:
        """Seconds for an engine in an environment of its own to start: less than its worker's start timeout, so that
        the error is the engine's own, with the end of its log."""
        return 0.8 * self.start_timeout_s

    @property
    def start_timeout_s(self) -> float:
        """`cluster.start_timeout_s`, or if it is null a time in which even a slow disk reads the largest model."""
        if self.cluster.start_timeout_s is not None:
            return self.cluster.start_timeout_s
        paths = {self.model.path_of(role) for role in MODEL_ROLES}
        paths |= {str(args["path"]) for args in self.scoring_models().values() if "path" in args}
        return _START_S + max(map(stored_bytes, paths)) / _SLOW_DISK_BYTES_PER_S

    @property
    def has_canaries(self) -> bool:
        """True if engine and trainer are compared at every version. An engine that cannot score given tokens has only
        the log-probs of its own sampling, which can be compared only if no row is stale."""
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
    def held_out_reward(self) -> tuple[str, RewardPartsConfig]:
        """(Key path, section) of the reward that scores held-out responses."""
        given = self.evaluate.reward.given
        return ("evaluate.reward", self.evaluate.reward) if given else ("reward", self.reward)

    def reward_models(self) -> dict[str, Mapping[str, Any]]:
        """Return the arguments of every reward of kind `model`, by their key path. Needs parts that can be built."""
        return self._rewards_of(("model",))

    def scoring_models(self) -> dict[str, Mapping[str, Any]]:
        """Return the same for every reward with a model in the scoring worker, local judges included."""
        return self._rewards_of(("model", "local_judge"))

    def answer_caches(self) -> dict[str, str]:
        """Return the answer directories that lie outside the run's directory, by the key path of the judge's
        setting."""
        judges = self._rewards_of(JUDGES)
        return {f"{where}.cache": str(args["cache"]) for where, args in judges.items() if args.get("cache") is not None}

    def judge_budgets(self) -> frozenset[str]:
        """Return the key paths of all judges' budgets."""
        return frozenset(f"{where}.{name}" for where in self._rewards_of(("judge",)) for name in JUDGE_BUDGET)

    def judge_notes(self) -> list[str]:
        """Return notes for the user about the run's judges."""
        sections = (("reward", self.reward), ("evaluate.reward", self.evaluate.reward))
        return [note for name, section in sections for note in judge_notes(section, name)]

    def rubric_files(self) -> dict[str, str]:
        """Return the rubric files of judges, by the key path of the setting."""
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
            canaries=self.has_canaries,
            critic=self.has_critic,
            latest=self.rollout.versions == "latest",
        )

    def layouts(self) -> Layouts:
        step = Layout(self.rollout.shards, self.rows_per_shard, self.seq)
        held_out, shards = self.held_out, self.evaluate.shards
        if self.evaluate.every == 0 and (not held_out or held_out % shards):  # else it may have evaluated earlier
            return Layouts(step)
        return Layouts(step, Layout(self.evaluate.shards, self.eval_rows_per_shard, self.seq))

    def gangs(self) -> list[Gang]:
        return placed_gangs(self.placement, critic=self.has_critic)

    def takes_turns(self, gang: str) -> bool:
        """Return True if a gang takes turns with others on the same devices."""
        return any(gang in group for group in self.placement.device_sharing)


def validate(config: RunConfig) -> None:
    """Raise ConfigError with every value that cannot work. Reads no model and no data; `preflight` does."""
    problems = list(run_problems(config))
    if problems:
        raise together([refusal(problem) for problem in problems])


def run_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of each setting and section, and those across sections that involve none of these."""
    problems = _section_problems(config)
    yield from problems
    wrong = [problem.key for problem in problems]
    sound, replaced = _without_problems(config, wrong) if wrong else (config, [])
    yield from (problem for problem in _problems_across(sound) if not mentions(problem, [*wrong, *replaced]))


def _without_problems(config: RunConfig, wrong: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Return the config with these settings at their defaults, so that the others can be checked across sections; and
    the sections that had to be replaced as a whole, since they would still have problems."""
    sound, usual = deepcopy(config), _sound()
    replaced = {key.partition(".")[0] for key in wrong if not set_default(sound, key)}
    for section in replaced:
        setattr(sound, section, getattr(usual, section))
    for section in {problem.key.partition(".")[0] for problem in _section_problems(sound)}:
        setattr(sound, section, getattr(usual, section))
        replaced.add(section)
    return sound, sorted(replaced)


def _sound() -> RunConfig:
    """Return a config without problems."""
    reward, placement = RewardConfig(kind="characters"), default_placement()
    return RunConfig(name="run", reward=reward, placement=placement)


def set_default(config: RunConfig, key: str) -> bool:
    """Set a setting to its default. Return False if it is no setting of a section."""
    *path, name = key.split(".")
    owner: Any = config
    for part in path:
        owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
    if not is_dataclass(owner) or not hasattr(owner, name):
        return False
    kind: Any = type(owner)
    setattr(owner, name, getattr(kind(), name))
    return True


def _section_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of each setting, and those inside each section."""
    return [
        *setting_problems(config),
        *model_problems(config.model),
        *prompts_problems(config.prompts),
        *rollout_problems(config.rollout),
        *sampling_problems(config.sampling),
        *engine_problems(config.engine),
        *reward_problems(config.reward),
        *ppo_problems(config.ppo),
        *placement_problems(config.placement, critic=config.has_critic),
        *evaluate_problems(config.evaluate),
        *mismatch_problems(config.mismatch),
        *alarms_problems(config.alarms),
        *checkpoint_problems(config.checkpoint),
        *tracking_problems(config.tracking),
        *cluster_problems(config.cluster),
        *slurm_problems(config.slurm),
    ]


def _problems_across(config: RunConfig) -> Iterator[Problem]:
    for section, parts in (("reward", config.reward), ("evaluate.reward", config.evaluate.reward)):
        yield from source_problems(parts, section, config.prompts.url)
    responses, deadline_s = config.rollout.responses_per_prompt, config.cluster.deadline_s
    yield from judge_problems(config.reward, "reward", responses, deadline_s)
    if config.evaluate.every:
        key, held_out_reward = config.held_out_reward
        yield from judge_problems(held_out_reward, key, 1, deadline_s)
    yield from divides("ppo.minibatches", config.ppo.minibatches, "rollout.rows", config.rollout.rows)
    if config.ppo.advantage in GROUPED and config.rollout.responses_per_prompt < 2:
        need = (
            f"ppo.advantage={config.ppo.advantage} compares the responses to a prompt: 2 or more (4 to 16 are usual), "
            "or ppo.advantage=reinforce_pp, which compares with the whole step"
        )
        yield Problem("rollout.responses_per_prompt", config.rollout.responses_per_prompt, need)
    yield from _normalize_problems(config)
    yield from _unread_problems(config)
    yield from _reuse_problems(config)
    yield from slurm_placement_problems(config.slurm, config.placement, config.replica_ranks)
    warmup = config.ppo.critic_warmup_steps
    if warmup >= config.steps:
        need = f"must be below steps = {config.steps}: in no other step is the policy trained"
        yield Problem("ppo.critic_warmup_steps", warmup, need)
    if config.evaluate.every != 0:
        held_out = config.prompts.held_out
        if held_out is not None:
            if held_out < 2:
                need = "evaluation needs 2 or more (evaluate.every=0: none)"
                yield Problem("prompts.held_out", held_out, need)
            yield from divides("evaluate.shards", config.evaluate.shards, "prompts.held_out", held_out)
        heat = config.evaluate.temperature
        if config.evaluate.select.max_kl is not None and heat not in (None, config.sampling.temperature):
            need = (
                f"must be null or sampling.temperature ({config.sampling.temperature:g}) under evaluate.select.max_kl: "
                "else the KL of held-out responses is not the policy's"
            )
            yield Problem("evaluate.temperature", heat, need)
    for gang in config.gangs():
        if gang.ordered:
            yield from _gang_problems(config, gang)
    yield from _engine_problems(config)
    if config.engine.update == "inflight" and config.rollout.versions == "exact":
        need = (
            "rows in flight take newer weights, which rollout.versions=exact does not allow: rollout.versions=latest, "
            "or drain"
        )
        yield Problem("engine.update", config.engine.update, need)
    if config.alarms.staleness_steps is not None and config.rollout.versions == "exact":
        need = "every row is at the bound by design under rollout.versions=exact: latest, or null"
        yield Problem("alarms.staleness_steps", config.alarms.staleness_steps, need)
    below = config.cluster.migrate_rows_below
    generating = config.placement.roles[Role.GENERATE]
    workers = config.placement.gangs[generating].workers
    if below and workers == 1:
        key = f"placement.gangs.{generating}.workers"
        need = f"needs {key} of 2 or more (given {workers}); with one replica set it to 0"
        yield Problem("cluster.migrate_rows_below", below, need)


def _unread_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the settings that settings of other sections leave without effect."""
    if config.rollout.versions == "latest" and not config.staleness:
        need = "no version is newer than the one that a step waits for under staleness=0: exact, or a higher staleness"
        yield Problem("rollout.versions", config.rollout.versions, need)
    if "critic" in config.alarms.stop and not config.has_critic:
        need = f"ppo.advantage={config.ppo.advantage} trains no critic: leave it out"
        yield Problem("alarms.stop", "critic", need)
    if not config.takes_turns(gang_of(config.placement, Role.GENERATE)):
        why = "the engine releases memory only while other gangs use its devices: name them in placement.device_sharing"
        yield from unread_problems("engine.vllm", config.engine.vllm, why, ("sleep_level",))
        yield from unread_problems("engine.tensorrt_llm", config.engine.tensorrt_llm, why, ("unload_engine_train",))
    if config.prompts.url.startswith(REASONING_SCHEME):
        why = f"problems of {REASONING_SCHEME} are made, not read from a field: a file as prompts.url"
        yield from unread_problems("prompts", config.prompts, why, ("field",))


def _normalize_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if the advantage cancels a normalization."""
    normalize, ppo = config.reward.normalize, config.ppo
    if normalize.scale and normalize.clip is None and ppo.advantage == "group" and ppo.group_scale == "std":
        need = (
            "ppo.advantage=group divides by the deviation of each prompt's rewards, so that another division before it "
            "changes nothing: false, a reward.normalize.clip, or ppo.group_scale=none"
        )
        yield Problem("reward.normalize.scale", True, need)
    if normalize.mean and normalize.clip is None and ppo.advantage in GROUPED:
        need = (
            f"ppo.advantage={config.ppo.advantage} subtracts the mean of each prompt's responses, so that another one "
            "before it changes nothing: false, or a reward.normalize.clip, which is around that mean"
        )
        yield Problem("reward.normalize.mean", True, need)


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of settings that the engine cannot satisfy."""
    yield from engine_needs(
        EngineNeeds(
            engine=config.engine,
            model_path=config.model.path,
            sampling=config.sampling,
            evaluated_at=None if config.evaluate.every == 0 else config.evaluate.temperature,
            moves_rows=config.cluster.migrate_rows_below,
            stops_at_mismatch=config.mismatch.stop and config.staleness > 0,
            takes_turns=config.takes_turns(gang_of(config.placement, Role.GENERATE)),
        )
    )


def _reuse_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of `reuse_forward`: an update can reuse a forward only if its micro-batches are the same."""
    for role, optimizer in ((Role.POLICY, config.model.policy), (Role.CRITIC, config.model.critic)):
        if not optimizer.reuse_forward or (role is Role.CRITIC and not config.has_critic):
            continue
        gang = config.placement.gangs[config.placement.roles[role]]
        needs: dict[str, tuple[object, object]] = {
            "ppo.minibatches": (config.ppo.minibatches, 1),
            "rollout.shards": (config.rollout.shards, 1),
            "its gang's layout.pipeline": (gang.layout.pipeline, 1),
            "its gang's offload": (gang.offload, "none"),
        }
        if role is Role.POLICY:
            needs["ppo.proximal"] = (config.ppo.proximal, "recompute")
        for key, (given, wanted) in needs.items():
            if given != wanted:
                need = (
                    f"the update's micro-batches must be those that were computed: needs {key}={wanted} (given {given})"
                )
                yield Problem(f"model.{role}.reuse_forward", True, need)


def _gang_problems(config: RunConfig, gang: Gang) -> Iterator[Problem]:
    """Yield the problems of an ordered gang's layout with its rows, and of its offload with LoRA."""
    key, layout = f"placement.gangs.{gang.name}", config.placement.gangs[gang.name].layout
    data = gang.workers // (layout.tensor * layout.pipeline)
    minibatch_rows = config.rollout.rows // config.ppo.minibatches
    if minibatch_rows % data or config.rows_per_shard % data:
        yield Problem(
            f"{key}.workers",
            gang.workers,
            f"gives {data} data-parallel ranks, which must divide the rows of a shard ({config.rows_per_shard}) and of "
            f"a minibatch ({minibatch_rows})",
        )
    if config.model.lora.rank and config.placement.gangs[gang.name].offload == "idle":
        need = (
            "the roles share their frozen weights under model.lora.rank > 0, so that none can leave: none or gradients"
        )
        yield Problem(f"{key}.offload", "idle", need)
