"""The configurations of a reward model's training and of a labelling, and the functions that find problems in them.

In a labelling a judge makes a preference set from prompts and responses. Both configurations share sections with the
configuration of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pipeline.config.sections import TrackingConfig, tracking_problems
from stages.engines.config import OTHER_ENVIRONMENTS, EngineConfig, engine_problems
from stages.models.config import (
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    SamplingConfig,
    model_problems,
    sampling_problems,
)
from stages.models.layouts import gang_problems
from stages.preferences.config import RewardTrainingConfig, TeacherConfig, teacher_problems
from stages.rewards.config import JUDGES
from storage.config import PreferencesConfig, PromptsConfig, preferences_problems, prompts_problems
from storage.problems import (
    Problem,
    above,
    at_least,
    local_directory,
    plain_name,
    setting,
    setting_problems,
    unread_problems,
)


@dataclass
class ScorerConfig:
    """The model to train: a causal language model that gets a scalar head, or a reward model that is trained
    further."""

    path: str = "???"
    """A directory in Hugging Face layout, with a model of a family in `stages.models.spec`; or `random:tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward; master weights are float32."""
    blocks: int | None = setting(None, at_least(1))
    """Number of the model's lowest blocks to keep, to train a student that is smaller than the model; null: all."""
    frozen_blocks: int = setting(0, at_least(0))
    """Number of the lowest blocks that are frozen, with the embeddings. The output of these blocks is computed once per
    row and kept."""
    trunk_cache_mb: int = setting(1024, at_least(0))
    """Memory of each rank for the outputs of the frozen blocks, in units of 2^20 bytes."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    products: Literal["auto", "torch", "onednn"] = "auto"
    """The same as `model.products` of a run."""
    kernels: Literal["auto", "native", "torch", "portable"] = "auto"
    """The same as `model.kernels` of a run."""


@dataclass
class RewardModelConfig:
    """The config for training a reward model: the model, the preference data, the optimizer, and the directory for the
    results."""

    name: str = setting("???", plain_name())
    """Name of the training's directory."""
    runs_dir: str = setting("runs", local_directory())
    """Parent of the training's directory."""
    seed: int = setting(0, at_least(0))
    """Seed of three things: the division of the judgements into training, validation and held-out judgements; the
    groups of texts (`data.group_texts`); the initial weights of a new head."""
    model: ScorerConfig = field(default_factory=ScorerConfig)
    data: PreferencesConfig = field(default_factory=PreferencesConfig)
    train: RewardTrainingConfig = field(default_factory=RewardTrainingConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-4))
    """The optimizer. Its settings in steps mean optimizer steps here, because a training has no PPO steps."""
    workers: int = setting(1, at_least(1))
    """Number of ranks. They are processes on this host."""
    threads: int = setting(1, at_least(1))
    """CPU threads of each rank."""
    collective_timeout_s: float = setting(600.0, above(0, " seconds"))
    """Seconds that ranks wait in a collective for a missing rank. After that the training ends."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def start_path(self) -> str:
        """Directory of the model that training starts from. For a student (`model.blocks`) the training itself makes
        this directory, with a copy of the lowest blocks."""
        return self.model.path if self.model.blocks is None else str(self.run_dir / ".student")

    def trained_model(self, path: str | None = None) -> ModelConfig:
        """Return the model's config for the trainer. The trainer treats the model as a critic. `path` replaces
        `model.path`."""
        model = self.model
        return ModelConfig(
            path=model.path if path is None else path,
            dtype=model.dtype,
            frozen_blocks=model.frozen_blocks,
            trunk_cache_mb=model.trunk_cache_mb,
            lora=model.lora,
            products=model.products,
            kernels=model.kernels,
            critic=self.optimizer,
        )


def reward_model_problems(config: RewardModelConfig) -> Iterator[Problem]:
    """Yield the problems of the training's own settings, of each section, and across sections. Reads no model and no
    data."""
    yield from setting_problems(config)
    for problem in model_problems(config.trained_model()):
        key, need = (text.replace("model.critic.", "optimizer.") for text in (problem.key, problem.need))
        yield Problem(key, problem.given, need)
    yield from preferences_problems(config.data)
    yield from teacher_problems(config.teacher, config.train.loss)
    yield from gang_problems(config.layout, config.workers)
    yield from tracking_problems(config.tracking)
    if config.optimizer.micro_batch_rows is not None:
        need = "micro-batches hold whole groups of rows: null, and optimizer.micro_batch_tokens"
        yield Problem("optimizer.micro_batch_rows", config.optimizer.micro_batch_rows, need)
    if config.train.loss == "regression" and config.data.kind == "pairs":
        yield Problem("train.loss", "regression", "pairs have no ratings: bradley_terry, or data.kind=ratings")


# ---- Labelling -------------------------------------------------------------------------------------------


@dataclass
class JudgeConfig:
    """The judge that grades or compares responses, to make a preference set: its kind and arguments."""

    kind: str = "???"
    """Kind of the judge: `judge` (a model behind an endpoint) or `local_judge` (a model in this process)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the judge, the same as for a reward of this kind."""


@dataclass
class ResponsesConfig:
    """The responses to label: exactly one of `run`, `url` and `model`."""

    run: str | None = None
    """A run's directory. The responses of its rollouts are labelled, grouped by prompt. `--from RUN` sets it."""
    last_steps: int | None = setting(None, at_least(1))
    """Number of the run's last steps to take responses from; null: all."""
    url: str | None = None
    """A .jsonl or .parquet file: rows with a prompt (a text, or messages) and a list of responses."""
    prompt: str = "prompt"
    """Field with the prompt in each row of `url`."""
    responses: str = "responses"
    """Field with the list of responses in each row of `url`."""
    model: str | None = None
    """Policy that samples responses to `prompts`: a directory in Hugging Face layout, or random:tiny."""
    per_prompt: int = setting(4, at_least(2, ": one is compared with another"))
    """Responses sampled per prompt."""


@dataclass
class LabelConfig:
    """A labelling: a judge makes a preference set from prompts and responses."""

    name: str = setting("???", plain_name())
    """Name of the directory below `runs_dir` in which the labelled pairs of responses are stored."""
    runs_dir: str = setting("runs", local_directory())
    """Parent of the labelling's directory."""
    seed: int = setting(0, at_least(0))
    """Seed of the sampling and of the choice of pairs."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    prompts: PromptsConfig = field(default_factory=lambda: PromptsConfig(url="", held_out=0))
    """Prompts to sample responses for."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pairs_per_prompt: int | None = setting(None, at_least(1))
    """Maximum number of pairs per prompt that the judge compares, drawn from all pairs; null: all."""
    min_margin: float = setting(0.0, at_least(0))
    """Number that the margin of a pair must exceed. Other pairs count as ties and are left out. If the judge grades
    each response, the margin is the difference between the two grades. If the judge compares the responses, the margin
    is |2 w - 1|, where w is its preference for the first response, from 0 to 1."""
    prompts_at_once: int = setting(64, at_least(1))
    """Prompts per round. In a round the judge is asked about all responses to these prompts, and then all labels are
    written."""
    threads: int = setting(1, at_least(1))
    """CPU threads."""

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def labelling_problems(config: LabelConfig) -> Iterator[Problem]:
    """Yield the problems of the labelling's own settings and of each section. Reads no data."""
    sampled = ("prompts.", "sampling.", "engine.")
    yield from (one for one in setting_problems(config) if config.responses.model or not one.key.startswith(sampled))
    if config.judge.kind not in JUDGES:
        yield Problem("judge.kind", config.judge.kind, f"must be {' or '.join(JUDGES)}")
    if config.judge.args.get("against") not in (None, "group"):
        need = "responses are compared with one another: group, or null (each is graded)"
        yield Problem("judge.args.against", config.judge.args["against"], need)
    given = {name: getattr(config.responses, name) for name in ("run", "url", "model")}
    named = [name for name, value in given.items() if value]
    if len(named) != 1:
        need = "give one of responses.run (or --from RUN), responses.url and responses.model"
        yield Problem("responses", {name: value for name, value in given.items() if value}, need)
    if config.responses.model:
        if not config.prompts.url:
            yield Problem("prompts.url", config.prompts.url, "responses.model needs prompts to answer")
        yield from prompts_problems(config.prompts)
        yield from sampling_problems(config.sampling)
        yield from engine_problems(config.engine)
        if config.engine.kind in OTHER_ENVIRONMENTS:
            yield Problem("engine.kind", config.engine.kind, "labelling samples with the embedded engine")
    yield from _unread_problems(config)


def _unread_problems(config: LabelConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that is given but not read. Each of these settings belongs to one source of
    responses (`responses.run`, `url` or `model`), and the config gives another source."""
    responses, of_kind = (
        config.responses,
        {"run": ("last_steps",), "url": ("prompt", "responses"), "model": ("per_prompt",)},
    )
    for kind, names in of_kind.items():
        if not getattr(responses, kind):
            yield from unread_problems("responses", responses, f"only responses.{kind} reads it: give that", names)
    if not responses.model:
        why = "only responses.model reads it, whose responses are sampled: give that"
        if config.prompts.url:
            yield Problem("prompts.url", config.prompts.url, f"{why}; or leave it out")
        read = [one.name for one in fields(PromptsConfig) if one.name not in ("url", "held_out")]
        yield from unread_problems("prompts", config.prompts, why, read)
        yield from unread_problems("sampling", config.sampling, why)
        yield from unread_problems("engine", config.engine, why)
