"""The configuration of labelling: a judge makes a preference set of prompts and responses. What of it cannot work.

May import the sections beside it and those of stages and storage; nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.errors import refusal, together
from stages.engines.config import OTHER_ENVIRONMENTS, EngineConfig, engine_problems
from stages.models.sampling import SamplingConfig, sampling_problems
from stages.rewards.config import JUDGES
from storage.config import PromptsConfig, prompts_problems
from storage.problems import Problem, at_least, local_directory, plain_name


@dataclass
class JudgeConfig:
    """Who labels."""

    kind: str = "???"
    """`judge` or `local_judge`."""
    args: dict[str, Any] = field(default_factory=dict)
    """As of a reward of that kind."""


@dataclass
class ResponsesConfig:
    """What is labelled: exactly one of `run`, `url` and `model`."""

    run: str | None = None
    """A run's directory: the responses of its rollouts, by prompt. `--from RUN` sets it."""
    last_steps: int | None = None
    """Of a run: only those of its last so many steps; null: all."""
    url: str | None = None
    """A .jsonl or .parquet file: rows with a prompt (a text, or messages) and a list of responses."""
    prompt: str = "prompt"
    responses: str = "responses"
    """Fields of that file."""
    model: str | None = None
    """A policy that responses to `prompts` are sampled from: a directory in Hugging Face layout, or random:tiny."""
    per_prompt: int = 4
    """Responses that are sampled for each prompt."""


@dataclass
class LabelConfig:
    """A labelling."""

    name: str = "???"
    runs_dir: str = "runs"
    seed: int = 0
    """Of the sampling, and of which pairs are asked for."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    prompts: PromptsConfig = field(default_factory=lambda: PromptsConfig(url="", held_out=0))
    """Of sampled responses."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pairs_per_prompt: int | None = None
    """Pairs that are asked for, at most, drawn from all; null: all."""
    min_margin: float = 0.0
    """A pair whose margin is not above it is a tie, and left out."""
    prompts_at_once: int = 64
    """Whose questions are asked together, and whose labels are then written down."""
    threads: int = 1

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def validate_labelling(config: LabelConfig) -> None:
    """Raises ConfigError with every value that cannot work. Reads no data."""
    problems = list(labelling_problems(config))
    if problems:
        raise together([refusal(problem) for problem in problems])


def labelling_problems(config: LabelConfig) -> Iterator[Problem]:
    """What cannot work: of the labelling's own settings, and of each section."""
    yield from plain_name("name", config.name)
    yield from local_directory("runs_dir", config.runs_dir)
    yield from at_least(0, {"seed": config.seed, "min_margin": config.min_margin})
    counts = {
        "threads": config.threads,
        "pairs_per_prompt": config.pairs_per_prompt,
        "prompts_at_once": config.prompts_at_once,
        "responses.last_steps": config.responses.last_steps,
    }
    yield from at_least(1, counts)
    yield from at_least(2, {"responses.per_prompt": config.responses.per_prompt}, ": one is compared with another")
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
    elif config.prompts.url:
        need = f"of responses.model alone: responses.{named[0] if named else 'url'} brings its own prompts"
        yield Problem("prompts.url", config.prompts.url, need)
