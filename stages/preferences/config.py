"""How a reward model is trained, and what of that cannot work. May import the standard library and storage.problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from storage.problems import Problem, at_least


@dataclass
class RewardTrainingConfig:
    """Loss and length of a training."""

    loss: Literal["bradley_terry", "regression", "distill"] = "bradley_terry"
    """bradley_terry: chosen above rejected; regression: the score is the rating (of ratings only); distill: the score
    is that of `teacher`, whatever the judgements say, which are then only what both are measured by."""
    epochs: int = 1
    """Passes over the training rows: more than one or two overfit a model of pairs (Ouyang et al. 2022)."""
    rows_per_step: int = 64
    """Rows of an optimizer step, at least: groups that are compared are never cut."""
    validations_per_epoch: int = 1
    patience: int | None = None
    """Validations in a row without a better one after which training ends; null: never before the last epoch."""
    normalise: bool = True
    """Whether the bias is set at the end so that the training rows' scores have mean 0."""
    max_skipped_steps: int = 3
    """Optimizer steps in a row without a finite gradient that are an error."""


@dataclass
class TeacherConfig:
    """Whose scores are learnt under `train.loss: distill`."""

    paths: list[str] = field(default_factory=list)
    """Directories of reward models, whose mean score it is."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of their forward; null: `model.dtype`."""


def teacher_problems(config: TeacherConfig, loss: str) -> Iterator[Problem]:
    """What of the section `teacher` does not suit the loss."""
    if loss == "distill" and not config.paths:
        yield Problem("teacher.paths", config.paths, "train.loss=distill needs a teacher: [RUN/model], or several")
    if loss != "distill" and config.paths:
        need = f"a teacher's scores are learnt by train.loss=distill (given {loss}); or teacher.paths=[]"
        yield Problem("teacher.paths", config.paths, need)


def training_problems(config: RewardTrainingConfig) -> Iterator[Problem]:
    """What of the section `train` cannot work by itself."""
    values = {
        "train.epochs": config.epochs,
        "train.validations_per_epoch": config.validations_per_epoch,
        "train.patience": config.patience,
        "train.max_skipped_steps": config.max_skipped_steps,
    }
    yield from at_least(1, values)
    yield from at_least(2, {"train.rows_per_step": config.rows_per_step}, ": one pair has two")
