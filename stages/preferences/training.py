"""Train a reward model: epochs of optimizer steps with validations between them. The model's state with the best
validation accuracy is kept, and measured on the held-out set. Every rank of the gang runs the training.

    consumes   judged rows of training, validation and held-out set (the same on every rank)
    reports    a `TrainingProgress` after every optimizer step and every validation; on every rank
    returns    a `TrainingOutcome`, with the best state in the model
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stages.models.reward_model import GroupedRows, RewardModel
from stages.preferences.config import RewardTrainingConfig
from stages.preferences.data import Group, JudgedRows, epoch_groups, step_groups
from stages.preferences.losses import (
    LOSS,
    Reliability,
    best_accuracy,
    dyadic_standard_error,
    pair_loss_of,
    rating_loss_of,
    reliability,
    right_order,
    spearman,
)
from storage.config import PreferencesConfig


class TrainingFailed(RuntimeError):
    """The training cannot go on. The message says why."""


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of the training of a reward model. It is reported after every optimizer step and every validation."""

    step: int
    """Number of optimizer steps so far."""
    total_steps: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class PartFigures:
    """Scores of one part of the split, and measures of their agreement with people."""

    scores: np.ndarray
    """float32 [rows]: the model's scores."""
    margins: np.ndarray
    """float64 [pairs]: score of the better row minus score of the worse row."""
    metrics: dict[str, float]
    """Always: accuracy, accuracy_se, margin. With the Bradley-Terry loss: loss, ece. With a teacher: agreement,
    spearman, teacher_accuracy, accuracy_of_teachers (see `_beside_teacher`). With ratings: correlation. With standard
    errors of the ratings: best_accuracy."""
    reliability: Reliability | None
    """Calibration of Bradley-Terry scores. None for other losses."""


@dataclass(frozen=True)
class TrainingOutcome:
    """Result of a whole training."""

    best_step: int
    """Number of optimizer steps that led to the kept state."""
    steps: int
    validation: PartFigures
    held_out: PartFigures
    bias: float
    """Number that normalisation added to all scores."""
    train_mean: float
    train_std: float
    """Standard deviation of the training rows' scores before normalisation; `train_mean` is their mean."""


MAX_SKIPPED_STEPS = 3
"""Training fails after this number of optimizer steps in a row with a gradient that is not finite. Three in a row are
caused by the learning rate or the data, not by chance."""


@dataclass(frozen=True)
class TrainingParts:
    """The judged rows of a reward-model training: the training, validation and held-out sets."""

    train: JudgedRows
    validation: JudgedRows
    held_out: JudgedRows


def training_steps(
    train: JudgedRows, data: PreferencesConfig, config: RewardTrainingConfig, seed: int
) -> list[list[list[Group]]]:
    """Return the groups of each optimizer step of each epoch. A pure function of its arguments."""
    return [
        step_groups(epoch_groups(train, data, seed=seed, epoch=epoch), config.rows_per_step)
        for epoch in range(config.epochs)
    ]


def train_reward_model(
    model: RewardModel,
    parts: TrainingParts,
    epochs: list[list[list[Group]]],
    config: RewardTrainingConfig,
    report: Callable[[TrainingProgress], None],
) -> TrainingOutcome:
    """Train the model, and go back to the state with the best validation accuracy (the earliest if several are equal).
    If `config.normalise` is true, set the bias so that the scores of the training rows have mean 0. Then measure the
    model on the validation set and on the held-out set.

    Args:
        model: the model to train.
        parts: the judged rows.
        epochs: the groups of each optimizer step of each epoch (`training_steps`).
        config: section `train` of the config.
        report: called with the progress after every optimizer step and every validation.

    Raises:
        TrainingFailed: MAX_SKIPPED_STEPS gradients in a row were not finite, or a score is not finite.
    """
    total = sum(map(len, epochs))
    best, best_step, step, worse, skipped = -math.inf, 0, 0, 0, 0
    for groups, validates in _steps(epochs, config.validations_per_epoch):
        metrics = model.train(step, _grouped(parts.train, groups, config))
        metrics["loss"] = metrics.pop(LOSS)
        step += 1
        skipped = skipped + 1 if metrics["skipped_steps"] else 0
        if skipped == MAX_SKIPPED_STEPS:
            raise TrainingFailed(
                f"{skipped} optimizer steps in a row had a gradient that is not finite, the "
                f"last is step {step} of {total}: a lower optimizer.lr, or model.dtype=float32, may help"
            )
        report(TrainingProgress(step, total, {f"train/{name}": value for name, value in metrics.items()}))
        if not validates:
            continue
        measured = figures(model, parts.validation, config)
        report(TrainingProgress(step, total, {f"validation/{name}": value for name, value in measured.metrics.items()}))
        worse += 1
        if measured.metrics["accuracy"] > best:
            best, best_step, worse = measured.metrics["accuracy"], step, 0
            model.keep()
        if worse == config.patience:
            break
    model.restore()
    of_train = _finite(model.scores(parts.train.rows))
    bias = -float(of_train.mean(dtype=np.float64)) if config.normalise else 0.0
    model.shift(bias)
    return TrainingOutcome(
        best_step,
        step,
        figures(model, parts.validation, config),
        figures(model, parts.held_out, config),
        bias,
        float(of_train.mean(dtype=np.float64)),
        float(of_train.std(dtype=np.float64)),
    )


def figures(model: RewardModel, judged: JudgedRows, config: RewardTrainingConfig) -> PartFigures:
    """Score the rows of one part of the split, and compare the scores with the judgements of this part. All ranks must
    call this function together. Raises TrainingFailed if a score is not finite."""
    scores = _finite(model.scores(judged.rows))
    better, worse = judged.pairs.better, judged.pairs.worse
    margins = scores[better].astype(np.float64) - scores[worse]
    right = right_order(margins)
    units = judged.units
    metrics: dict[str, float] = {
        "accuracy": float(right.mean()),
        "accuracy_se": dyadic_standard_error(right, units[better], units[worse]),
        "margin": float(margins.mean()),
    }
    calibration = None
    if config.loss == "bradley_terry":
        calibration = reliability(margins)
        metrics |= {"loss": float(np.logaddexp(0, -margins).mean()), "ece": calibration.ece}
    if judged.targets is not None:
        metrics |= _beside_teacher(scores, judged, judged.targets)
    if judged.ratings is not None:
        metrics["correlation"] = float(np.corrcoef(scores, judged.ratings)[0, 1])
        if judged.standard_errors is not None:
            metrics["best_accuracy"] = best_accuracy(judged.ratings, judged.standard_errors, better, worse)
    return PartFigures(scores, margins, metrics, calibration)


def _beside_teacher(scores: np.ndarray, judged: JudgedRows, targets: np.ndarray) -> dict[str, float]:
    """Compare a student's scores with the mean scores of its teachers (`targets`). The accuracy is the share of judged
    pairs that scores order as people did; `accuracy_of_teachers` is the student's as a share of the teachers'."""
    better, worse = judged.pairs.better, judged.pairs.worse
    of_student, of_teacher = (right_order(of[better].astype(np.float64) - of[worse]) for of in (scores, targets))
    teacher = float(of_teacher.mean())
    return {
        "agreement": float((of_student == of_teacher).mean()),
        "spearman": spearman(scores, targets),
        "teacher_accuracy": teacher,
        "accuracy_of_teachers": float(of_student.mean()) / teacher if teacher else math.inf,
    }


def add_teacher_scores(parts: TrainingParts, teachers: Sequence[RewardModel]) -> TrainingParts:
    """Return the parts with targets: for each row, the mean of the teachers' scores. All ranks must call this
    together."""

    def scored(judged: JudgedRows) -> JudgedRows:
        scores = [_finite(teacher.scores(judged.rows)).astype(np.float64) for teacher in teachers]
        return replace(judged, targets=np.mean(scores, axis=0))

    return TrainingParts(scored(parts.train), scored(parts.validation), scored(parts.held_out))


def summary_of(outcome: TrainingOutcome, parts: TrainingParts) -> dict[str, Any]:
    """Return a training's result, to be written to a file and shown to people."""
    sizes = {
        name: {"rows": len(part.texts), "prompts": int(part.units.max()) + 1, "pairs": len(part.pairs)}
        for name, part in (("train", parts.train), ("validation", parts.validation), ("held_out", parts.held_out))
    }
    if parts.train.ratings is not None:
        del sizes["train"]["pairs"]  # every epoch has its own pairs
    return {
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "held_out": outcome.held_out.metrics,
        "validation": outcome.validation.metrics,
        "normalisation": {"bias": outcome.bias, "train_mean": outcome.train_mean, "train_std": outcome.train_std},
        "sizes": sizes,
    }


def _steps(epochs: list[list[list[Group]]], validations: int) -> Iterator[tuple[list[Group], bool]]:
    """Yield each optimizer step's groups, and True if a validation follows: evenly spread, one after each epoch's last
    step."""
    for steps in epochs:
        after = {math.ceil(len(steps) * (number + 1) / validations) for number in range(validations)}
        for number, groups in zip(itertools.count(1), steps):
            yield groups, number in after


def _grouped(train: JudgedRows, groups: list[Group], config: RewardTrainingConfig) -> GroupedRows:
    if config.loss == "distill":
        assert train.targets is not None, "distill is refused without a teacher"
        loss = rating_loss_of(groups, train.targets)
    elif config.loss == "regression":
        assert train.ratings is not None, "regression is refused for pairs"
        loss = rating_loss_of(groups, train.ratings)
    else:
        loss = pair_loss_of(groups, len(train.texts))
    return GroupedRows(train.rows, [group.rows for group in groups], loss)


def _finite(scores: np.ndarray) -> np.ndarray:
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        raise TrainingFailed(f"the score of {bad.size} rows is not finite: a lower optimizer.lr may help")
    return scores
