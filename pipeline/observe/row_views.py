"""A run's rows as tables: what every stage made of each response, one line per row, per sampled token, per held-out
prompt; and the arrays of its steps as one data set.

What a stage has not made yet is NaN. Everything is read step by step, so that whoever asks for a few steps needs the
memory of these alone.

May import numpy, pandas, xarray, storage and pipeline.observe.{history, rows}.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from pipeline.observe.history import History
from pipeline.observe.rows import StageRows
from storage.address import Address
from storage.commits import Commit
from storage.descriptions import describe
from storage.records import SCORE_PREFIX, FinishReason, Rollout
from storage.vocabulary import Decode

TOKEN_COLUMNS = {
    "sampler_logprob": "sampler_logprobs",
    "policy_logprob": "policy_logprobs",
    "ref_logprob": "ref_logprobs",
    "entropy": "entropy",
    "value": "values",
    "reward": "rewards",
    "advantage": "advantages",
    "return": "returns",
}
"""Column of `token_table` -> field of the records."""
PART_COLUMN = "score."
"""What the names of the columns of a score's parts begin with."""
OF_STEP = ("generate", "score", "reference", "logprob", "value", "advantage")
"""Stages whose arrays a step's group has."""


def row_table(rows: StageRows, decode: Decode) -> pd.DataFrame:
    """One line for each row: where it is from, its text, and what it came to. Sums and means are over the sampled
    tokens, in float64; `kl` is the sum of the log-ratios to the reference, nats per response."""
    rollout, mask = rows.rollout, rows.rollout.response_mask
    lengths = rollout.response_lengths.astype(np.int64)
    sampled_by = np.where(mask, rollout.token_versions, -1)
    first = np.where(mask, rollout.token_versions, np.iinfo(np.int32).max).min(axis=1)
    table: dict[str, Any] = {
        "step": np.full(rollout.num_rows, rows.step),
        "shard": np.full(rollout.num_rows, rows.shard),
        "row": rollout.row,
        "prompt_index": rollout.prompt_index,
        "version_first": first,
        "version_last": sampled_by.max(axis=1),
        "prompt": [decode(ids.tolist()) for ids in prompt_ids(rollout)],
        "response": [decode(ids.tolist()) for ids in response_ids(rollout)],
        "finish_reason": [FinishReason(code).name.lower() for code in rollout.finish_reason],
        "prompt_length": rollout.prompt_lengths,
        "response_length": rollout.response_lengths,
        "score": _or_missing(None if rows.scores is None else rows.scores.scores, rollout),
    }
    if rows.scores is not None:
        parts = {name: array for name, array in rows.scores.arrays().items() if name != "scores"}
        table |= {score_column(name): array for name, array in parts.items()}
    trained = rows.array("loss_mask")
    table["kl"] = _or_missing(rows.kl, rollout)
    for column, name in (("entropy_mean", "entropy"), ("value_mean", "values"), ("advantage_mean", "advantages")):
        array = rows.array(name)
        table[column] = _or_missing(None if array is None else _sum(array, mask) / lengths, rollout)
    rewards = rows.array("rewards")
    table["reward_sum"] = _or_missing(None if rewards is None else _sum(rewards, mask), rollout)
    table["trained_on"] = np.zeros(rollout.num_rows, bool) if trained is None else trained.any(axis=1)
    return pd.DataFrame(table)


def score_column(array: str) -> str:
    """The column of an array of `Scores`: `score.NAME` of a part, `disagreement.NAME`."""
    return array.replace(SCORE_PREFIX, PART_COLUMN, 1)


def token_table(rows: StageRows, decode: Decode) -> pd.DataFrame:
    """One line for each sampled token: its place in the response (from 0), what it is, and its numbers."""
    rollout = rows.rollout
    where, at = np.nonzero(rollout.response_mask)
    ids = rollout.tokens[where, at]
    table: dict[str, Any] = {
        "step": np.full(len(where), rows.step),
        "row": rollout.row[where],
        "position": at - rollout.prompt_lengths[where],
        "token": ids,
        "text": [decode([token]) for token in ids.tolist()],
        "version": rollout.token_versions[where, at],
    }
    missing = np.full(len(where), np.nan, np.float32)
    arrays = {column: rows.array(name) for column, name in TOKEN_COLUMNS.items()} | {"log_ratio": rows.log_ratio}
    return pd.DataFrame(table | {n: missing if a is None else a[where, at] for n, a in arrays.items()})


def prompt_ids(rollout: Rollout) -> list[np.ndarray]:
    """Of each row, as they are stored."""
    return [row[:length] for row, length in zip(rollout.tokens, rollout.prompt_lengths, strict=True)]


def response_ids(rollout: Rollout) -> list[np.ndarray]:
    """Of each row, special tokens and the EOS included."""
    return [row[mask] for row, mask in zip(rollout.tokens, rollout.response_mask, strict=True)]


def step_arrays(history: History, steps: Iterable[int], decode: Decode) -> xr.Dataset:
    """Every array of these steps over (step, row, token), with the text of prompts and responses. Where nothing is
    committed there is NaN, -1 or False. Holds all of them in memory."""
    numbers = [*steps]
    arrays: dict[str, np.ndarray] = {}
    texts = {name: np.full((len(numbers), history.rows), "", object) for name in ("prompt", "response")}
    for position, step in enumerate(numbers):
        for stage in OF_STEP:
            for commit in _commits(history, stage, step):
                record = history.store.read(commit.address)
                start = commit.address.shard * commit.rows  # a whole step is shard 0
                of_shard = slice(start, start + commit.rows)
                for name, array in record.arrays().items():
                    whole = arrays.setdefault(name, _blank(array, len(numbers), history.rows))
                    whole[position, of_shard] = array
                if isinstance(record, Rollout):
                    texts["prompt"][position, of_shard] = [decode(ids.tolist()) for ids in prompt_ids(record)]
                    texts["response"][position, of_shard] = [decode(ids.tolist()) for ids in response_ids(record)]
    dimensions = ("step", "row", "token")
    variables = {name: (dimensions[: array.ndim], array, describe(name)) for name, array in arrays.items()}
    variables.pop("row", None)
    texted = {name: (dimensions[:2], array, {"long_name": f"text of the {name}"}) for name, array in texts.items()}
    return xr.Dataset(variables | texted, {"step": numbers, "row": np.arange(history.rows)})


def _commits(history: History, stage: str, step: int) -> Iterator[Commit]:
    for shard in range(1 if stage == "advantage" else history.spec.shards):
        commit = history.ledger.find(Address(stage, step, shard))
        if commit is not None:
            yield commit


def _blank(array: np.ndarray, num_steps: int, num_rows: int) -> np.ndarray:
    """For every row of some steps, filled as plain readers of the store see what is not there."""
    fill: Any = {"f": np.nan, "i": -1}.get(array.dtype.kind, False)
    return np.full((num_steps, num_rows, *array.shape[1:]), fill, array.dtype)


def _sum(array: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Of each row over the sampled tokens."""
    return np.where(mask, array, 0.0).sum(axis=1, dtype=np.float64)


def _or_missing(array: np.ndarray | None, rollout: Rollout) -> np.ndarray:
    return np.full(rollout.num_rows, np.nan, np.float32) if array is None else array
