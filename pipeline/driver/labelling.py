"""`stageline reward label`: a preference set from prompts, responses and a judge. A plain program, no graph.

    responses of a run, a file or a policy ──► responses.jsonl ──► pairs ──► judge ──► verdicts.jsonl ──► pairs.jsonl

    RUN/config.yaml   RUN/responses.jsonl   RUN/verdicts.jsonl   RUN/judge/ (its answers)   RUN/pairs.jsonl
    RUN/summary.json  RUN/rubric.txt (of a rubric that is in a file)

It may be interrupted anywhere and started again with the same config: responses are written whole or not at all, a
prompt whose line is in verdicts.jsonl is not judged again, and pairs.jsonl, which is written last, says that all is
done.

May import all of pipeline below the command line.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from pipeline.config.errors import ConfigError, refusal
from pipeline.config.labelling import LabelConfig
from pipeline.config.loading import flatten, load_label_config, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_writable, holds_run
from pipeline.config.reward_preflight import EXPORT
from pipeline.config.run import RunConfig
from pipeline.driver.candidates import of_file, of_run, read_back, sampled, written
from pipeline.driver.context import StageFailed
from pipeline.driver.lock import only_driver
from pipeline.observe.appending import LineFile
from pipeline.observe.plain import print_plain
from stages.rewards.judges.labels import TIE, Candidates, label, pairs_of
from stages.rewards.judges.rubric import Rubric
from stages.rewards.judges.verdicts import Ask
from stages.rewards.protocol import RewardFailed
from stages.rewards.registry import UnfitReward, build_reward, close_reward

PAIRS, RESPONSES, VERDICTS, RUBRIC = "pairs.jsonl", "responses.jsonl", "verdicts.jsonl", "rubric.txt"


class _Judge(Protocol):
    """What `judge` and `local_judge` have beside a reward's call."""

    rubric: Rubric
    ask: Ask


def label_responses(config: LabelConfig, source: RunConfig | None, console: Console) -> dict[str, Any]:
    """Labels, writes the pairs, and returns the summary. `source`: the run of `responses.run`.

    Raises:
        ConfigError: something that cannot work; nothing was asked.
        StageFailed: the judge refuses, or has vanished; what it answered is kept.
    """
    root = config.run_dir
    _check_directory(config)
    try:
        reward = build_reward(config.judge.kind, config.judge.args, "judge", directory=root)
    except UnfitReward as error:
        raise refusal(error.problem) from error
    torch.set_num_threads(config.threads)
    root.mkdir(parents=True, exist_ok=True)
    try:
        with only_driver(RunPaths(root)):
            _keep_rubric(config)
            _replace(root / "config.yaml", to_yaml(config))
            candidates = _candidates(config, source)
            _check_fields(cast(_Judge, reward).rubric, candidates)
            return _label_all(config, cast(_Judge, reward), candidates, console)
    except RewardFailed as error:
        raise StageFailed(f"{error}. Start it again with the same config to go on") from error
    finally:
        close_reward(reward)


def _check_directory(config: LabelConfig) -> None:
    root = config.run_dir
    if holds_run(RunPaths(root)) or (root / EXPORT).exists():
        need = f"{root} holds a run or a reward model: choose another name=..., or another runs_dir=..."
        raise ConfigError("name", f"given {config.name!r}; {need}")
    if (root / PAIRS).exists():
        need = f"{root} holds a finished preference set: choose another name=..., or remove that directory"
        raise ConfigError("name", f"given {config.name!r}; {need}")
    check_writable("runs_dir", config.runs_dir, root)
    if (root / RESPONSES).exists():
        before, now = flatten(load_label_config([root / "config.yaml"])), flatten(config)
        other = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key) and key not in _MAY)
        if other:
            need = f"{root} was begun with {before.get(other[0])}: put it back, or choose another name=..."
            raise ConfigError(other[0], f"given {now.get(other[0])}; {need}")


def _keep_rubric(config: LabelConfig) -> None:
    """Of one that is in a file, whose text may have changed since: half of the pairs would be labelled by another."""
    file = config.judge.args.get("rubric_file")
    if file is None:
        return
    kept, text = config.run_dir / RUBRIC, Path(file).read_text("utf8")
    if (config.run_dir / RESPONSES).exists() and kept.exists() and kept.read_text("utf8") != text:
        need = f"its text is not the one that it was begun with ({kept}): put it back, or choose another name=..."
        raise ConfigError("judge.args.rubric_file", f"given {str(file)!r}; {need}")
    _replace(kept, text)


_MAY = frozenset(
    {"runs_dir", "threads", "prompts_at_once"}
    | {f"judge.args.{name}" for name in ("url", "key_env", "concurrency", "timeout_s", "patience_s", "cache")}
)
"""Settings that no label depends on."""


def _candidates(config: LabelConfig, source: RunConfig | None) -> list[Candidates]:
    """As they were written down, or made and written down now."""
    file = config.run_dir / RESPONSES
    if not file.exists():
        if source is not None:
            made = of_run(source, config.responses.last_steps)
        else:
            made = of_file(config) if config.responses.url else sampled(config)
        _replace(file, _lines(written(made)))
    return read_back(_read(file))


def _check_fields(rubric: Rubric, candidates: Sequence[Candidates]) -> None:
    for number, one in enumerate(candidates):
        missing = sorted(rubric.fields - one.extra.keys() - {rubric.against})
        if missing:
            has = ", ".join(one.extra) or "no other fields"
            need = (
                f"its rubric reads the field {missing[0]!r} of the prompts, which prompt {number} lacks (it has {has})"
            )
            raise ConfigError("judge.args", need)


def _label_all(
    config: LabelConfig, judge: _Judge, candidates: Sequence[Candidates], console: Console
) -> dict[str, Any]:
    root = config.run_dir
    name = str(config.judge.args.get("model") or config.judge.args.get("path"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        LineFile(root / VERDICTS) as file,
        ProgressBar(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        done = {row["number"] for row in _read(root / VERDICTS)}
        task = bar.add_task("prompts", total=len(candidates), completed=len(done))
        left = [number for number in range(len(candidates)) if number not in done]
        for start in range(0, len(left), config.prompts_at_once):
            numbers = left[start : start + config.prompts_at_once]
            drawn = [pairs_of(candidates[n], n, config.seed, config.pairs_per_prompt) for n in numbers]
            asked = [(candidates[n], pairs) for n, (pairs, _) in zip(numbers, drawn, strict=True)]
            found = label(judge.rubric, judge.ask, asked, config.min_margin, name)
            for number, (rows, dropped), (_, before) in zip(numbers, found, drawn, strict=True):
                line = {"number": number, "rows": rows, "dropped": dict(dropped + before)}
                file.append(json.dumps(line, ensure_ascii=False))
            bar.update(task, advance=len(numbers))
    verdicts = sorted(_read(root / VERDICTS), key=lambda row: row["number"])
    rows = [row for of_prompt in verdicts for row in of_prompt["rows"]]
    summary = _summary(config, candidates, rows, sum((Counter(v["dropped"]) for v in verdicts), Counter()))
    _replace(root / "summary.json", json.dumps(summary, indent=2) + "\n")
    _replace(root / PAIRS, _lines(rows))
    _say(console, summary)
    return summary


def _summary(
    config: LabelConfig, candidates: Sequence[Candidates], rows: Sequence[dict[str, Any]], dropped: Counter[str]
) -> dict[str, Any]:
    """How many pairs there are, why others are none; of a pairwise judge how often the two orders agree."""
    both = [row["verdicts"] for row in rows if "chosen_shown_first" in row["verdicts"]]
    agree = [min(one["chosen_shown_first"], one["chosen_shown_last"]) > 0.5 for one in both]
    return {
        "prompts": len(candidates),
        "responses": sum(len(one.responses) for one in candidates),
        "pairs": len(rows),
        "dropped": dict(sorted(dropped.items())),
        "orders_agree": sum(agree) / len(agree) if agree else None,
        "file": str(config.run_dir / PAIRS),
    }


def _say(console: Console, summary: dict[str, Any]) -> None:
    dropped = ", ".join(f"{number} {why}" for why, number in summary["dropped"].items()) or "none"
    lines = [
        f"{summary['pairs']} pairs of {summary['prompts']} prompts with {summary['responses']} responses; left out: "
        f"{dropped}",
        f"the pairs are in {summary['file']}",
    ]
    if summary["orders_agree"] is not None:
        lines.insert(1, f"of those kept, both orders agree in {summary['orders_agree']:.1%}")
    if not summary["pairs"]:
        lines.insert(
            1, f"no pair is left: another rubric or judge, a smaller min_margin (see {TIE}), or more responses"
        )
    for line in lines:
        print_plain(console, line)


def _read(file: Path) -> list[dict[str, Any]]:
    """A line ends at a newline alone: the other separators that Unicode has may stand in a text (U+0085, U+2028)."""
    if not file.exists():
        return []
    with file.open(encoding="utf8") as lines:
        return [json.loads(line) for line in lines]


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def _replace(file: Path, text: str) -> None:
    """Whole or not at all."""
    staged = file.with_name(f".{file.name}")
    staged.write_text(text, "utf8")
    os.replace(staged, file)
