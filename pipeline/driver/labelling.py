"""`stageline reward label`: make a preference set from prompts, responses and a judge. A plain program without a graph.

    responses of a run, a file or a policy ──► responses.jsonl ──► pairs ──► judge ──► verdicts.jsonl ──► pairs.jsonl

    RUN/config.yaml   RUN/responses.jsonl   RUN/verdicts.jsonl   RUN/judge/ (the judge's answers)   RUN/pairs.jsonl
    RUN/summary.json  RUN/rubric.txt (if the rubric comes from a file)

The program may be interrupted anywhere and started again with the same config. responses.jsonl is written whole or not
at all. A prompt whose line is in verdicts.jsonl is not judged again. pairs.jsonl is written last, and marks the end.
Prompts and responses come from a run's rollouts or from a file, or responses to given prompts are sampled here.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from rich.console import Console

from pipeline.config.loading import flatten, load_label_config, write_config
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_writable, holds_run
from pipeline.config.reward_model import LabelConfig
from pipeline.config.reward_preflight import EXPORT
from pipeline.config.role_models import check_output_layer, read_model
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.driver.session import handle_signals, hold_driver_lock
from pipeline.errors import ConfigError, StageFailed, refusal
from pipeline.observe.journal import LineFile
from pipeline.observe.text import print_plain, progress_bar
from stages.generate import generate
from stages.models.hf_files import Tokenizer, read_tokenizer
from stages.prompts import PromptTable, read_source, tokenise
from stages.rewards.config import JUDGE_BUDGET, undelimited_note
from stages.rewards.judges.labels import TIE, Candidates, comparable_pairs, label_pairs
from stages.rewards.judges.rubric import Ask, Rubric
from stages.rewards.protocol import BudgetSpent, RewardFailed
from stages.rewards.registry import UnfitReward, build_reward
from storage import files
from storage.address import Address
from storage.errors import DroppedOutput
from storage.prompts import PromptsError, Row, RowsError, is_chat, read_rows
from storage.records import PromptBatch

PAIRS, RESPONSES, VERDICTS, RUBRIC = "pairs.jsonl", "responses.jsonl", "verdicts.jsonl", "rubric.txt"


class _Judge(Protocol):
    """The part of the rewards `judge` and `local_judge` that labelling uses."""

    rubric: Rubric
    ask: Ask

    def counts(self) -> Mapping[str, float]:
        """Return the counts of requests and costs, as `Reward.counts` does."""
        ...


def label_responses(config: LabelConfig, source: RunConfig | None, console: Console) -> dict[str, Any]:
    """Label the responses, write the pairs, and return the summary. `source`: config of the run that `responses.run`
    names; None if the responses come from elsewhere.

    Raises:
        ConfigError: the config cannot work. The judge was not asked.
        StageFailed: the judge refuses or cannot be reached, or its budget is spent. The judge's answers so far are
            kept.
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
        with hold_driver_lock(RunPaths(root)), handle_signals():
            _store_rubric(config)
            write_config(root / "config.yaml", config)
            candidates = _candidates(config, source)
            _check_fields(cast(_Judge, reward).rubric, candidates)
            if config.judge.args.get("delimit") is False:
                print_plain(console, f"WARNING: {undelimited_note('judge.args')}")
            return _label_all(config, cast(_Judge, reward), candidates, console)
    except BudgetSpent as error:
        raise StageFailed(f"{error}. Start it again with a larger budget to go on") from error
    except RewardFailed as error:
        raise StageFailed(f"{error}. Start it again with the same config to go on") from error
    finally:
        reward.close()


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
        other = sorted(
            key for key in before.keys() | now.keys() if before.get(key) != now.get(key) and key not in _CHANGEABLE_KEYS
        )
        if other:
            need = f"{root} was begun with {before.get(other[0])}: put it back, or choose another name=..."
            raise ConfigError(other[0], f"given {now.get(other[0])}; {need}")


def _store_rubric(config: LabelConfig) -> None:
    """Copy the judge's rubric file, if the config names one, into the labelling's directory. Raise ConfigError if the
    file's text has changed since labelling began, because some pairs would then be labelled by another rubric."""
    file = config.judge.args.get("rubric_file")
    if file is None:
        return
    kept, text = config.run_dir / RUBRIC, Path(file).read_text("utf8")
    if (config.run_dir / RESPONSES).exists() and kept.exists() and kept.read_text("utf8") != text:
        need = f"its text is not the one that it was begun with ({kept}): put it back, or choose another name=..."
        raise ConfigError("judge.args.rubric_file", f"given {str(file)!r}; {need}")
    files.write_local(kept, text.encode())


_CHANGEABLE_KEYS = frozenset(
    {"runs_dir", "threads", "prompts_at_once"}
    | {
        f"judge.args.{name}"
        for name in ("url", "key_env", "concurrency", "timeout_s", "retry_s", "cache", *JUDGE_BUDGET)
    }
)
"""Settings that may differ when a labelling is started again, because no label depends on them."""


def _candidates(config: LabelConfig, source: RunConfig | None) -> list[Candidates]:
    """Return the candidates (prompts with their responses) in responses.jsonl. If this file does not exist, first make
    the candidates and write the file."""
    file = config.run_dir / RESPONSES
    if not file.exists():
        if source is not None:
            made = candidates_of_run(source, config.responses.last_steps)
        else:
            made = candidates_of_file(config) if config.responses.url else sample_candidates(config)
        files.write_local(file, _lines(map(vars, made)).encode())
    return [Candidates(**row) for row in _read_rows(file)]


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
    with LineFile(root / VERDICTS) as file, progress_bar(console) as bar:
        done = {row["number"] for row in _read_rows(root / VERDICTS)}
        task = bar.add_task("prompts", total=len(candidates), completed=len(done))
        left = [number for number in range(len(candidates)) if number not in done]
        for start in range(0, len(left), config.prompts_at_once):
            numbers = left[start : start + config.prompts_at_once]
            drawn = [comparable_pairs(candidates[n], n, config.seed, config.pairs_per_prompt) for n in numbers]
            asked = [(candidates[n], pairs) for n, (pairs, _) in zip(numbers, drawn, strict=True)]
            labelled = label_pairs(judge.rubric, judge.ask, asked, config.min_margin, name)
            for number, (rows, dropped), (_, before) in zip(numbers, labelled, drawn, strict=True):
                line = {"number": number, "rows": rows, "dropped": dict(dropped + before)}
                file.append(json.dumps(line, ensure_ascii=False))
            bar.update(task, advance=len(numbers))
    verdicts = sorted(_read_rows(root / VERDICTS), key=lambda row: row["number"])
    rows = [row for of_prompt in verdicts for row in of_prompt["rows"]]
    summary = _summary(config, candidates, rows, sum((Counter(v["dropped"]) for v in verdicts), Counter()))
    summary["judge"] = dict(judge.counts())
    files.write_local(root / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    files.write_local(root / PAIRS, _lines(rows).encode())
    _print_summary(console, summary)
    return summary


def _summary(
    config: LabelConfig, candidates: Sequence[Candidates], rows: Sequence[dict[str, Any]], dropped: Counter[str]
) -> dict[str, Any]:
    """Return the content of summary.json. `orders_agree` is the share of the pairs judged in both orders of
    presentation in which the judge preferred the same response; None if there are none."""
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


def _print_summary(console: Console, summary: dict[str, Any]) -> None:
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


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, if it exists. Only a newline ends a line: texts may hold U+0085 and U+2028."""
    if not file.exists():
        return []
    with file.open(encoding="utf8") as lines:
        return [json.loads(line) for line in lines]


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


# ---- Candidates: prompts with their responses ------------------------------------------------------------

_ROWS_AT_ONCE = 1024
"""Maximum number of rows that one call of the engine samples."""


def candidates_of_run(source: RunConfig, last_steps: int | None) -> list[Candidates]:
    """Return each prompt of a run's rollouts with its responses, without duplicates. `last_steps`: number of newest
    complete steps to read; None for all. Steps whose arrays were deleted (`storage.keep.rollouts`) add nothing. Raises
    ConfigError if there are no responses."""
    history, tokenizer = open_history(source), read_tokenizer(source.model.path)
    table = PromptTable.load(RunPaths(source.run_dir).prompts)
    shards = range(source.rollout.shards)
    steps = [
        step
        for step in range(source.steps)
        if all(history.ledger.find(Address("generate", step, shard)) is not None for shard in shards)
    ]
    texts: dict[int, dict[str, None]] = {}
    dropped = 0
    for step in steps if last_steps is None else steps[-last_steps:]:
        try:
            rollout = history.store.read_step("generate", step, source.rollout.shards)
        except DroppedOutput:
            dropped += 1
            continue
        for i, index in enumerate(rollout.prompt_index.tolist()):
            start = int(rollout.prompt_lengths[i])
            ids = rollout.tokens[i, start : start + int(rollout.response_lengths[i])].tolist()
            texts.setdefault(index, {})[tokenizer.decode(ids)] = None
    if not texts:
        need = (
            f"it has no rollouts ({dropped} steps were not kept: storage.keep.rollouts)" if dropped else "it has none"
        )
        raise ConfigError("responses.run", f"given {str(source.run_dir)!r}; {need}")
    return [_candidates_of_prompt(table, tokenizer, index, list(texts[index])) for index in sorted(texts)]


def candidates_of_file(config: LabelConfig) -> list[Candidates]:
    """Return the candidates in a file whose rows have a prompt and a list of responses. Raises ConfigError if the file
    or a row cannot be used. The error names the file and, for a row, its line and field."""
    source = config.responses
    assert source.url is not None
    try:
        candidates = [_candidates_of_row(config, row) for row in read_rows(source.url)]
    except RowsError as error:
        raise ConfigError("responses.url", str(error)) from error
    if not candidates:
        raise ConfigError("responses.url", f"{source.url} holds no prompts")
    return candidates


def sample_candidates(config: LabelConfig) -> list[Candidates]:
    """Sample `responses.per_prompt` responses to each prompt with the embedded engine, and return the candidates. The
    result depends on config and model only. Raises ConfigError if the prompts or the model cannot be used."""
    path, per_prompt = config.responses.model, config.responses.per_prompt
    assert path is not None
    spec = read_model("responses.model", path)
    check_output_layer("responses.model", path)
    try:
        tokenizer = read_tokenizer(path)
        table = tokenise(read_source(config.prompts), tokenizer, config.prompts, config.seed)
    except PromptsError as error:
        key, _, rest = str(error).partition(": ")
        raise ConfigError(key, rest) from error
    except (OSError, ValueError) as error:
        raise ConfigError("responses.model", f"given {path!r}; no usable tokenizer there: {error}") from error
    seq = config.prompts.max_tokens + config.sampling.max_new_tokens
    if seq > spec.max_positions:
        need = f"with sampling.max_new_tokens a row has {seq} tokens, the model's context is {spec.max_positions}"
        raise ConfigError("prompts.max_tokens", f"given {config.prompts.max_tokens}; {need}")
    build = importlib.import_module("stages.engines.build").build_engine
    engine = build(path, config.engine, max_seq=seq, threads=config.threads)
    responses_of: dict[int, list[str]] = {}
    try:
        indices = np.repeat(np.sort(np.concatenate([table.train, table.held_out])), per_prompt)
        for start in range(0, len(indices), _ROWS_AT_ONCE):
            part = indices[start : start + _ROWS_AT_ONCE]
            rows = np.arange(start, start + len(part), dtype=np.int64)
            batch = PromptBatch(rows, part.astype(np.int64), table.tokens[part], table.lengths[part])
            rollout = generate(
                engine,
                batch,
                seed=config.seed,
                step=0,
                version=0,
                sampling=config.sampling,
                seq=seq,
                pad_id=table.pad_id,
            )
            for i, index in enumerate(part.tolist()):
                first = int(rollout.prompt_lengths[i])
                ids = rollout.tokens[i, first : first + int(rollout.response_lengths[i])].tolist()
                responses_of.setdefault(index, []).append(tokenizer.decode(ids))
    finally:
        engine.close()
    return [_candidates_of_prompt(table, tokenizer, index, responses) for index, responses in responses_of.items()]


def _candidates_of_prompt(table: PromptTable, tokenizer: Tokenizer, index: int, responses: list[str]) -> Candidates:
    text = tokenizer.decode(table.tokens[index, : int(table.lengths[index])].tolist())
    prompt: str | list[dict[str, str]] = (table.messages[index] if table.messages is not None else []) or text
    return Candidates(prompt, text, responses, table.extra[index])


def _candidates_of_row(config: LabelConfig, row: Row) -> Candidates:
    where, fields = row
    source = config.responses
    for key, name in (("prompt", source.prompt), ("responses", source.responses)):
        if name not in fields:
            raise ConfigError(f"responses.{key}", f"{where}: given {name!r}, available: {', '.join(fields)}")
    prompt, responses = fields[source.prompt], fields[source.responses]
    if not is_chat(prompt) and not (isinstance(prompt, str) and prompt.strip()):
        need = f"{source.prompt!r} must be a text that is not blank, or a list of messages"
        raise ConfigError("responses.prompt", f"{where}: {need}, given {prompt!r:.80}")
    if not isinstance(responses, list) or len(responses) < 2 or not all(isinstance(text, str) for text in responses):
        need = f"{source.responses!r} must be a list of two texts or more"
        raise ConfigError("responses.responses", f"{where}: {need}, given {responses!r:.80}")
    extra: Mapping[str, Any] = {name: v for name, v in fields.items() if name not in (source.prompt, source.responses)}
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return Candidates(prompt, text, list(responses), dict(extra))
