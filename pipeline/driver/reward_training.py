"""Train a reward model: a plain program without a graph. This process is rank 0. With `workers` of 2 or more it starts
the other ranks, which read the same files and make the same calls.

    check ──► ranks join ──► steps, validations ──► best state ──► measure ──► export, summary, plot ──► MLflow
                                 └ after each: metrics, progress

    RUN/config.yaml   RUN/model/ (Hugging Face)   RUN/summary.json   RUN/held_out.jsonl   RUN/plots/reward_model.png

A training cannot be resumed: if it was interrupted, it starts from the beginning.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress as ProgressBar

from pipeline.config.loading import flatten, write_config
from pipeline.config.paths import RunPaths
from pipeline.config.reward_model import RewardModelConfig
from pipeline.config.reward_preflight import EXPORT, already_trained_error, check_training, read_parts
from pipeline.driver.session import handle_signals, hold_driver_lock
from pipeline.errors import StageFailed
from pipeline.observe.text import print_plain, progress_bar
from pipeline.observe.tracking import MlflowTracker, Tracker, opening_hint, sink_hints
from stages.models.config import LoraConfig
from stages.models.hf_weights import write_lowest_blocks
from stages.models.parallel import ParallelRank, join, leave
from stages.models.protocol import Rank, RanksMissing
from stages.models.reward_model import RewardModel, TokenRows
from stages.preferences.training import (
    PartFigures,
    TrainingFailed,
    TrainingOutcome,
    TrainingParts,
    TrainingProgress,
    add_teacher_scores,
    summary_of,
    train_reward_model,
    training_steps,
)
from stages.rewards.learned import PROCESS_MODELS, LoadSettings, ModelKind

PLOT = "plots/reward_model.png"
_TIMED_ROWS, _TIMED_TOKENS = 1024, 4096
"""Maximum number of rows on which teacher and student are timed, and maximum number of tokens in one forward pass."""


@dataclass
class _Display:
    """Owns the display of a training: the terminal's progress bar, lines of text, metrics, and the curves."""

    console: Console
    tracker: Tracker
    bar: ProgressBar
    started_at: float = field(default_factory=time.monotonic)
    curves: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> metrics of this step."""
    task: Any = None

    def report(self, progress: TrainingProgress) -> None:
        step, metrics = progress.step, progress.metrics
        self.curves.setdefault(step, {}).update(metrics)
        self.tracker.log_metrics(step, metrics)
        if self.task is None:
            self.task = self.bar.add_task("optimizer steps", total=progress.total_steps)
        self.bar.update(self.task, completed=step)
        if "validation/accuracy" in metrics:
            text = " ".join(f"{name.partition('/')[2]} {value:.4f}" for name, value in metrics.items())
            elapsed = time.monotonic() - self.started_at
            print_plain(self.console, f"step {step}/{progress.total_steps} ({elapsed:.0f} s): validation {text}")


def train_and_export(config: RewardModelConfig, console: Console) -> dict[str, Any]:
    """Train, export and measure a reward model. Return the summary.

    Raises:
        ConfigError: the config cannot work; nothing was started.
        StageFailed: gradients or scores were not finite, or a rank was lost.
    """
    parts = check_training(config)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    with hold_driver_lock(RunPaths(config.run_dir)), handle_signals():
        return _train_with_lock(config, parts, console)


def _train_with_lock(config: RewardModelConfig, parts: TrainingParts, console: Console) -> dict[str, Any]:
    """Do the work of `train_and_export`. The caller holds the directory's lock."""
    root = config.run_dir
    if (root / EXPORT).exists():  # may have appeared since the check
        raise already_trained_error(config)
    (root / "plots").mkdir(parents=True, exist_ok=True)
    for left in root.glob("mlflow_spool*"):  # an interrupted training leaves spools and a partial export
        left.unlink()
    shutil.rmtree(root / f".{EXPORT}", ignore_errors=True)
    write_config(root / "config.yaml", config)
    started, cpu = time.monotonic(), time.process_time()
    with _open_tracker(config, root) as tracker, progress_bar(console) as bar:
        shown = _Display(console, tracker, bar)
        outcome = _train_here(config, parts, shown)
        summary = summary_of(outcome, parts) | {
            "seconds": round(time.monotonic() - started, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),  # of rank 0
            "model": str(root / EXPORT),
        }
        if config.teacher.paths:
            summary["speed"] = speeds = _speeds(config, parts.held_out.rows)
            tracker.log_metrics(outcome.steps, speeds)
        _write_results(config, parts, outcome, shown, summary)
        tracker.log_metrics(
            outcome.steps, {f"held_out/{name}": value for name, value in outcome.held_out.metrics.items()}
        )
        for name in ("summary.json", *([PLOT] if config.tracking.report else [])):
            tracker.log_artifact(root / name, "")
        if config.tracking.register is not None:
            tracker.log_model(config.tracking.register, root / EXPORT)
    _print_summary(console, config, summary)
    return summary


def _train_here(config: RewardModelConfig, parts: TrainingParts, shown: _Display) -> TrainingOutcome:
    """Train with rank 0 in this process and each other rank in a process of its own. Return rank 0's outcome."""
    if config.model.blocks is not None:
        shutil.rmtree(config.start_path, ignore_errors=True)
        write_lowest_blocks(Path(config.start_path), config.model.path, config.model.blocks)
    rendezvous = config.run_dir.resolve() / f".rendezvous-{uuid.uuid4().hex}"
    try:
        with _other_ranks(config, f"file://{rendezvous}"):
            return _train_rank(config, parts, 0, f"file://{rendezvous}", shown)
    except (TrainingFailed, RanksMissing) as error:
        raise StageFailed(str(error).replace("cluster.collective_timeout_s", "collective_timeout_s")) from error
    finally:
        rendezvous.unlink(missing_ok=True)
        if config.model.blocks is not None:
            shutil.rmtree(config.start_path, ignore_errors=True)


def _train_rank(
    config: RewardModelConfig, parts: TrainingParts, index: int, rendezvous: str, shown: _Display | None
) -> TrainingOutcome:
    epochs = training_steps(parts.train, config.data, config.train, config.seed)
    rank = Rank(index, config.workers, rendezvous, config.threads, index, config.collective_timeout_s)
    joined = join(rank, config.layout, config.seed)
    try:
        with joined.missing_ranks.collectives_of("the training of the reward model"):
            if config.teacher.paths:
                parts = add_teacher_scores(
                    parts, [_open_teacher(config, path, rank, joined) for path in config.teacher.paths]
                )
            model = RewardModel(
                config.trained_model(config.start_path),
                config.layout,
                rank,
                seed=config.seed,
                total_steps=sum(map(len, epochs)),
                joined=joined,
            )
            report = shown.report if shown is not None else lambda progress: None
            outcome = train_reward_model(model, parts, epochs, config.train, report)
            staged = config.run_dir / f".{EXPORT}"
            model.export(staged)
            if index == 0:
                staged.rename(config.run_dir / EXPORT)
            model.close()
            return outcome
    finally:
        leave()


def _open_teacher(config: RewardModelConfig, path: str, rank: Rank, joined: ParallelRank) -> RewardModel:
    """Return the teacher at `path`: a reward model that is not trained, divided among the ranks as the student is."""
    model = dataclasses.replace(config.trained_model(path), dtype=config.teacher.dtype or config.model.dtype)
    plain = dataclasses.replace(model, frozen_blocks=0, lora=LoraConfig())
    return RewardModel(plain, config.layout, rank, seed=config.seed, joined=joined)


def _speeds(config: RewardModelConfig, rows: TokenRows) -> dict[str, float]:
    """Return the CPU seconds per row of the exported student (`student_cpu_s`) and of its teacher (`teacher_cpu_s`),
    and the teacher's seconds divided by the student's (`speed_up`). The seconds of several teachers are added up. The
    models are timed alternately, with the same packing, in this process alone."""
    student = LoadSettings(ModelKind.REWARD, str(config.run_dir / EXPORT), config.model.dtype, _TIMED_TOKENS)
    dtype = config.teacher.dtype or config.model.dtype
    teachers = [LoadSettings(ModelKind.REWARD, path, dtype, _TIMED_TOKENS) for path in config.teacher.paths]
    number = min(len(rows.lengths), _TIMED_ROWS)
    spent = {loading: 0.0 for loading in (student, *teachers)}
    models = {loading: PROCESS_MODELS.acquire(loading) for loading in spent}
    try:
        chunks = [TokenRows(rows.tokens[part], rows.lengths[part]) for part in np.array_split(np.arange(number), 4)]
        for timed in (False, True):  # the first pass touches weights and buffers, and is not timed
            for chunk in chunks[:1] if not timed else chunks:
                for loading, model in models.items():
                    before = time.process_time()
                    model.scores(chunk)
                    spent[loading] += (time.process_time() - before) * timed
    finally:
        for loading in models:
            PROCESS_MODELS.release(loading)
    per_row = {"student_cpu_s": spent[student] / number, "teacher_cpu_s": sum(spent[t] for t in teachers) / number}
    return per_row | {"speed_up": per_row["teacher_cpu_s"] / per_row["student_cpu_s"]}


def _rank_main(config: RewardModelConfig, index: int, rendezvous: str) -> None:
    """Run one rank, as the main function of its process."""
    _train_rank(config, read_parts(config), index, rendezvous, None)


@contextmanager
def _other_ranks(config: RewardModelConfig, rendezvous: str) -> Iterator[None]:
    """Run ranks 1 and above as processes that end with this block."""
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    sys.warnoptions.append("ignore::UserWarning")  # warnings of libraries: rank 0 shows them
    try:
        processes: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(config, index, rendezvous), daemon=True)
            for index in range(1, config.workers)
        ]
        for process in processes:
            process.start()
    finally:
        sys.warnoptions.pop()
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    try:
        yield
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def _open_tracker(config: RewardModelConfig, root: Path) -> Iterator[Tracker]:
    if config.tracking.uri is None:
        yield Tracker()
        return
    settings = config.tracking
    tags = {"stageline.kind": "reward model"}
    if settings.parent is not None:
        tags["mlflow.parentRunId"] = settings.parent
    with MlflowTracker(
        config.tracking.uri, settings.experiment, config.name, flatten(config), tags, root / "mlflow_spool.jsonl",
        further_trackers=settings.also,
    ) as tracker:  # fmt: skip
        yield tracker


def _write_results(
    config: RewardModelConfig,
    parts: TrainingParts,
    outcome: TrainingOutcome,
    shown: _Display,
    summary: Mapping[str, Any],
) -> None:
    root = config.run_dir
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    held_out = parts.held_out
    with (root / "held_out.jsonl").open("w", encoding="utf8") as stream:
        for number, (text, score) in enumerate(zip(held_out.texts, outcome.held_out.scores.tolist(), strict=True)):
            row: dict[str, Any] = {"text": text, "score": score}
            if held_out.ratings is not None:
                row["rating"] = float(held_out.ratings[number])
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    if config.tracking.report:
        plots = importlib.import_module("pipeline.observe.plots")  # matplotlib loads slowly
        figures: PartFigures = outcome.held_out
        plots.plot_reward_model(shown.curves, figures.margins, figures.reliability, root / PLOT, config.name)


def _teacher_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a list with the line that compares a student with its teacher. Empty if there is no teacher."""
    if "speed" not in summary:
        return []
    held_out, speed = summary["held_out"], summary["speed"]
    return [
        f"beside its teacher: {held_out['accuracy_of_teachers']:.4f} of its accuracy "
        f"{held_out['teacher_accuracy']:.4f}, agreement {held_out['agreement']:.4f}, spearman "
        f"{held_out['spearman']:.4f}; {speed['student_cpu_s'] * 1e3:.2f} and "
        f"{speed['teacher_cpu_s'] * 1e3:.2f} CPU ms a row: {speed['speed_up']:.1f} times as fast"
    ]


def _print_summary(console: Console, config: RewardModelConfig, summary: Mapping[str, Any]) -> None:
    held_out, size = summary["held_out"], summary["sizes"]["held_out"]
    lines = [
        f"held out: accuracy {held_out['accuracy']:.4f} ± {held_out['accuracy_se']:.4f} on {size['pairs']} pairs of "
        f"{size['prompts']} unseen prompts",
        "".join(
            f"{name} {held_out[name]:.4f}  "
            for name in ("ece", "margin", "correlation", "best_accuracy")
            if name in held_out
        ),
        *_teacher_lines(summary),
        f"the model is in {summary['model']}; {summary['seconds']:.0f} s",
    ]
    if config.tracking.uri is not None:
        where = {"MLflow": opening_hint(config.tracking.uri)}
        where |= sink_hints(config.tracking.also, config.run_dir)
        lines += [f"{label}: {command}" for label, command in where.items()]
    for line in lines:
        print_plain(console, line)
