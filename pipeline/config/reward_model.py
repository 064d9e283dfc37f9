"""The configuration of a reward model's training, and what of it cannot work. It shares sections with a run's.

May import the sections beside it and those of stages and storage; nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.config.errors import refusal, together
from pipeline.config.tracking import TrackingConfig, tracking_problems
from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig, model_problems
from stages.models.layouts import gang_problems
from stages.preferences.config import RewardTrainingConfig, TeacherConfig, teacher_problems, training_problems
from storage.preferences_config import PreferencesConfig, preferences_problems
from storage.problems import Problem, above, at_least, local_directory, plain_name


@dataclass
class ScorerConfig:
    """The causal language model that gets a scalar head, or a reward model that learns on."""

    path: str = "???"
    """A directory in Hugging Face layout (a family of `stages.models.spec`), or `random:tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of forward and backward; master weights and optimizer state are float32."""
    blocks: int | None = None
    """Lowest blocks that the scorer consists of: a student that is smaller than what it starts from; null: all."""
    frozen_blocks: int = 0
    """Lowest blocks, and the embeddings, that are not trained: computed once per row and kept."""
    trunk_cache_mb: int = 1024
    """Of the frozen blocks' outputs kept on a rank."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    products: Literal["auto", "torch", "onednn"] = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    """As in a run's `model`."""


@dataclass
class RewardModelConfig:
    """A training."""

    name: str = "???"
    runs_dir: str = "runs"
    seed: int = 0
    """Of the split, the groups and the head."""
    model: ScorerConfig = field(default_factory=ScorerConfig)
    data: PreferencesConfig = field(default_factory=PreferencesConfig)
    train: RewardTrainingConfig = field(default_factory=RewardTrainingConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-4))
    """Steps are optimizer steps here."""
    workers: int = 1
    """Ranks: processes of this host."""
    threads: int = 1
    """Of each."""
    collective_timeout_s: float = 600.0
    """After which ranks that do not come to a collective end the training."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def start_path(self) -> str:
        """Where the model that is trained starts from: of a student the directory of its blocks."""
        return self.model.path if self.model.blocks is None else str(self.run_dir / ".student")

    def trained_model(self, path: str | None = None) -> ModelConfig:
        """The model as the trainer knows it: a critic. `path`: in place of `model.path`."""
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


def validate_reward_model(config: RewardModelConfig) -> None:
    """Raises ConfigError with every value that cannot work. Reads no model and no data."""
    problems = list(reward_model_problems(config))
    if problems:
        raise together([refusal(problem) for problem in problems])


def reward_model_problems(config: RewardModelConfig) -> Iterator[Problem]:
    """What cannot work: of the training's own settings, of each section, and across them."""
    yield from plain_name("name", config.name)
    yield from local_directory("runs_dir", config.runs_dir)
    yield from at_least(0, {"seed": config.seed})
    yield from at_least(1, {"workers": config.workers, "threads": config.threads})
    yield from above(0, {"collective_timeout_s": config.collective_timeout_s}, " seconds")
    for problem in model_problems(config.trained_model()):
        yield Problem(problem.key.replace("model.critic.", "optimizer."), problem.given, _own_keys(problem.need))
    yield from preferences_problems(config.data)
    yield from training_problems(config.train)
    yield from teacher_problems(config.teacher, config.train.loss)
    yield from at_least(1, {"model.blocks": config.model.blocks})
    yield from gang_problems(config.layout, config.workers)
    yield from tracking_problems(config.tracking)
    if config.optimizer.reuse_forward:
        yield Problem("optimizer.reuse_forward", True, "a reward model has no forward before its update: false")
    if config.optimizer.micro_batch_rows is not None:
        need = "micro-batches hold whole groups of rows: null, and optimizer.micro_batch_tokens"
        yield Problem("optimizer.micro_batch_rows", config.optimizer.micro_batch_rows, need)
    if config.train.loss == "regression" and config.data.kind == "pairs":
        yield Problem("train.loss", "regression", "pairs have no ratings: bradley_terry, or data.kind=ratings")


def _own_keys(need: str) -> str:
    return need.replace("model.critic.", "optimizer.")
