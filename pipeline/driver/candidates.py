"""Prompts and responses that are to be labelled: of a run's rollouts, of a file, or sampled here.

May import pipeline below the driver, stages and storage; an engine when responses are sampled.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipeline.config.errors import ConfigError
from pipeline.config.labelling import LabelConfig
from pipeline.config.paths import RunPaths
from pipeline.config.role_models import check_output_layer, read_model
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from stages.generate import generate
from stages.models.hf_files import Tokenizer, read_tokenizer
from stages.prompts import PromptTable, read_source, tokenise
from stages.rewards.judges.labels import Candidates
from storage.address import Address
from storage.errors import DroppedOutput
from storage.prompts import PromptsError, is_chat
from storage.records import PromptBatch
from storage.row_files import Row, RowsError, read_rows

_ROWS_AT_ONCE = 1024
"""That are sampled in one call of the engine."""


def of_run(source: RunConfig, last_steps: int | None) -> list[Candidates]:
    """The responses of a run's rollouts, by prompt, each text once. Raises ConfigError where it has none."""
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
    return [_of_table(table, tokenizer, index, list(texts[index])) for index in sorted(texts)]


def of_file(config: LabelConfig) -> list[Candidates]:
    """Rows with a prompt and a list of responses. Raises ConfigError, naming file, line and field."""
    given = config.responses
    assert given.url is not None
    try:
        found = [_of_row(config, row) for row in read_rows(given.url)]
    except RowsError as error:
        raise ConfigError("responses.url", str(error)) from error
    if not found:
        raise ConfigError("responses.url", f"{given.url} holds no prompts")
    return found


def sampled(config: LabelConfig) -> list[Candidates]:
    """`per_prompt` responses to each prompt, by the embedded engine: a pure function of config and model."""
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
    found: dict[int, list[str]] = {}
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
                found.setdefault(index, []).append(tokenizer.decode(ids))
    finally:
        engine.close()
    return [_of_table(table, tokenizer, index, responses) for index, responses in found.items()]


def _of_table(table: PromptTable, tokenizer: Tokenizer, index: int, responses: list[str]) -> Candidates:
    text = tokenizer.decode(table.tokens[index, : int(table.lengths[index])].tolist())
    prompt: str | list[dict[str, str]] = text if table.messages is None else table.messages[index]
    return Candidates(prompt, text, responses, table.extra[index])


def _of_row(config: LabelConfig, row: Row) -> Candidates:
    where, fields = row
    given = config.responses
    for key, name in (("prompt", given.prompt), ("responses", given.responses)):
        if name not in fields:
            raise ConfigError(f"responses.{key}", f"{where}: given {name!r}, available: {', '.join(fields)}")
    prompt, responses = fields[given.prompt], fields[given.responses]
    if not is_chat(prompt) and not (isinstance(prompt, str) and prompt.strip()):
        need = f"{given.prompt!r} must be a text that is not blank, or a list of messages"
        raise ConfigError("responses.prompt", f"{where}: {need}, given {prompt!r:.80}")
    if not isinstance(responses, list) or len(responses) < 2 or not all(isinstance(text, str) for text in responses):
        need = f"{given.responses!r} must be a list of two texts or more"
        raise ConfigError("responses.responses", f"{where}: {need}, given {responses!r:.80}")
    extra: Mapping[str, Any] = {name: v for name, v in fields.items() if name not in (given.prompt, given.responses)}
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return Candidates(prompt, text, list(responses), dict(extra))


def written(candidates: list[Candidates]) -> Iterator[dict[str, Any]]:
    """As rows of a file that `read_back` reads."""
    for one in candidates:
        yield {"prompt": one.prompt, "text": one.text, "responses": one.responses, "extra": one.extra}


def read_back(rows: list[dict[str, Any]]) -> list[Candidates]:
    return [Candidates(row["prompt"], row["text"], row["responses"], row["extra"]) for row in rows]
