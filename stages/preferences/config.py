"""Settings of a reward model's training, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from storage.problems import Problem, at_least, setting, unread_problems


@dataclass
class RewardTrainingConfig:
    """Loss and length of a reward model's training."""

    loss: Literal["bradley_terry", "regression", "distill"] = "bradley_terry"
    """Training target. bradley_terry: to score the chosen response above the rejected one. regression: to predict
    the rating (only if the data are ratings). distill: to predict the mean score of the teachers; the judgements serve
    only to measure model and teachers."""
    epochs: int = setting(1, at_least(1))
    """Passes over the training rows. With pairs, more than one or two passes overfit (Ouyang et al. 2022)."""
    rows_per_step: int = setting(64, at_least(2, ": one pair has two"))
    """Minimum number of rows of an optimizer step; the last step of an epoch may have fewer. Rows that are compared
    with one another are never divided between steps."""
    validations_per_epoch: int = setting(1, at_least(1))
    """Validations per epoch, evenly spread; the last one ends the epoch."""
    patience: int | None = setting(None, at_least(1))
    """Training ends after this number of validations in a row that do not raise the best accuracy; null: training runs
    all epochs."""
    normalise: bool = True
    """true: at the end, set the bias so that the scores of the training rows have mean 0."""


@dataclass
class TeacherConfig:
    """The reward models whose scores are learnt under `train.loss: distill`."""

    paths: list[str] = field(default_factory=list)
    """Directories of the teachers, which are reward models. The new reward model learns the mean of their scores."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the teachers' forward passes; null: `model.dtype`."""


def teacher_problems(config: TeacherConfig, loss: str) -> Iterator[Problem]:
    """Yield the problems of section `teacher` under this loss."""
    if loss == "distill" and not config.paths:
        yield Problem("teacher.paths", config.paths, "train.loss=distill needs a teacher: [RUN/model], or several")
    if loss != "distill" and config.paths:
        need = f"a teacher's scores are learnt by train.loss=distill (given {loss}); or teacher.paths=[]"
        yield Problem("teacher.paths", config.paths, need)
    if not config.paths:
        yield from unread_problems("teacher", config, "there is no teacher: give teacher.paths", ("dtype",))
