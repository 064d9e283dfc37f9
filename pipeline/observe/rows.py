"""The rows of a run with the outputs of all stages, and the forms in which people read them.

- `StageRows`: the rows of a shard, a step or an evaluation. Only committed arrays are read, each checked against its
  CRC-32 (storage/rollouts.py), so arrays of a dead or late attempt are never seen.
- `row_table`, `token_table`, `step_arrays`: tables with one line per row or per sampled token, and all arrays of some
  steps as one data set. Missing outputs are NaN. The tables need the memory of one shard or step.
- `write_rows`: one Parquet file for users without Zarr, with the columns of `row_table` and lists of the tokens and
  their numbers. Each step becomes a row group, so memory use is that of one step.
- `response_pairs`: the responses to the held-out prompts before and after training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import xarray as xr

from pipeline.observe.history import History
from storage.address import Address
from storage.commits import Commit
from storage.errors import StoreError
from storage.records import (
    SCORE_PREFIX,
    Advantages,
    FinishReason,
    PolicyLogprobs,
    ReferenceLogprobs,
    Rollout,
    Scores,
    Values,
    describe,
)
from storage.rollout_root import Decode


@dataclass(frozen=True)
class StageRows:
    """Rows with the output of each stage; None if a stage has not run yet or does not run in this run."""

    step: int
    shard: int
    """The shard; 0 for a whole step."""
    rollout: Rollout
    scores: Scores | None = None
    reference: ReferenceLogprobs | None = None
    policy: PolicyLogprobs | None = None
    values: Values | None = None
    advantages: Advantages | None = None

    @cached_property
    def log_ratio(self) -> np.ndarray | None:
        """log pi - log pi_ref per token, float32 [rows seq]; zero outside the response. pi is the trainer's policy at
        the step's start or, if its log-probs are not recomputed, the sampler's policy."""
        if self.reference is None:
            return None
        ours = self.rollout.sampler_logprobs if self.policy is None else self.policy.policy_logprobs
        return np.where(self.rollout.response_mask, ours - self.reference.ref_logprobs, 0.0)

    @cached_property
    def kl(self) -> np.ndarray | None:
        """KL to the reference per row, nats per response: the sum of the log-ratio over its tokens, float64 [rows]."""
        return None if self.log_ratio is None else self.log_ratio.sum(axis=1, dtype=np.float64)

    @cached_property
    def mismatch(self) -> np.ndarray | None:
        """log pi_trainer - log mu_sampler per token, float32 [rows seq]; zero outside the response."""
        if self.policy is None:
            return None
        difference = self.policy.policy_logprobs - self.rollout.sampler_logprobs
        return np.where(self.rollout.response_mask, difference, 0.0)

    def array(self, name: str) -> np.ndarray | None:
        """Return the array of a record by its name, or None if it is missing. Scores are not searched."""
        for record in (self.rollout, self.reference, self.policy, self.values, self.advantages):
            if record is not None and name in record.arrays():
                return np.asarray(record.arrays()[name])
        return None


def no_rows() -> StageRows:
    """Return zero rows; their tables have all columns."""
    none, ints, floats = np.zeros((0, 1), bool), np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32)
    number, whole = np.zeros(0, np.int32), np.zeros(0, np.int64)
    rollout = Rollout(
        row=whole,
        prompt_index=whole,
        tokens=ints,
        prompt_lengths=number,
        response_lengths=number,
        response_mask=none,
        sampler_logprobs=floats,
        token_versions=ints,
        finish_reason=np.zeros(0, np.int8),
    )
    return StageRows(0, 0, rollout)


def stored_steps(history: History, *, whole: bool = False) -> list[int]:
    """Return the steps with committed rows that were not deleted (`storage.keep.rollouts`), ascending.

    `whole`: only the steps with all their rows."""
    addresses = history.ledger.addresses("generate", history.store.dropped_before())
    shards = Counter(address.step for address in addresses)
    return sorted(step for step, number in shards.items() if not whole or number == history.spec.shards)


def whole_step(history: History, step: int) -> StageRows:
    """Return all rows of a step. Raises StoreError if the rollouts cannot be read. The output of another stage is None
    if it cannot be read."""

    def read(stage: str, shards: int = history.spec.shards) -> Any:
        there = all(history.ledger.find(Address(stage, step, shard)) is not None for shard in range(shards))
        try:
            return history.store.read_step(stage, step, shards) if there else None
        except StoreError:
            return None

    rollout = history.store.read_step("generate", step, history.spec.shards)
    scores, reference = read("score"), read("reference")
    return StageRows(step, 0, rollout, scores, reference, read("logprob"), read("value"), read("advantage", 1))


def shards_of_step(history: History, step: int) -> Iterator[StageRows]:
    """Yield the generated shards of a step. Raises StoreError if an array differs from its commit, DroppedOutput if it
    was deleted."""
    advantages = _read(history, "advantage", step)
    for shard in range(history.spec.shards):
        rollout = _read(history, "generate", step, shard)
        if rollout is not None:
            yield StageRows(
                step,
                shard,
                rollout,
                _read(history, "score", step, shard),
                _read(history, "reference", step, shard),
                _read(history, "logprob", step, shard),
                _read(history, "value", step, shard),
                None if advantages is None else advantages.rows(rollout.row),
            )


def shards_of_evaluation(history: History, version: int) -> Iterator[StageRows]:
    """Yield the generated shards of the evaluation of a version."""
    for shard in range(history.spec.eval_shards):
        rollout = _read(history, "evaluate", version, shard)
        if rollout is not None:
            scores = _read(history, "evaluate_score", version, shard)
            yield StageRows(version, shard, rollout, scores, _read(history, "evaluate_reference", version, shard))


def _read(history: History, stage: str, step: int, shard: int = 0) -> Any:
    """Return an output, or None if it has no commit."""
    address = Address(stage, step, shard)
    return None if history.ledger.find(address) is None else history.store.read(address)


# ---- tables and data set ---------------------------------------------------------------------------------

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
"""Prefix of the columns of a score's parts."""
OF_STEP = ("generate", "score", "reference", "logprob", "value", "advantage")
"""Stages whose arrays are stored in a step's group."""


def row_table(rows: StageRows, decode: Decode) -> pd.DataFrame:
    """Return a table with one line per row: its origin, its text and its numbers. Sums and means are over the sampled
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
    """Return the column of an array of `Scores`: `score.NAME` for a part, or `disagreement.NAME`."""
    return array.replace(SCORE_PREFIX, PART_COLUMN, 1)


def token_table(rows: StageRows, decode: Decode) -> pd.DataFrame:
    """Return a table with one line per sampled token: its position in the response (from 0), its text and its
    numbers."""
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
    """Return the prompt's tokens of each row, as they are stored."""
    return [row[:length] for row, length in zip(rollout.tokens, rollout.prompt_lengths, strict=True)]


def response_ids(rollout: Rollout) -> list[np.ndarray]:
    """Return the response's tokens of each row, special tokens and the EOS included."""
    return [row[mask] for row, mask in zip(rollout.tokens, rollout.response_mask, strict=True)]


def step_arrays(history: History, steps: Iterable[int], decode: Decode) -> xr.Dataset:
    """Return every array of these steps over (step, row, token), with the text of prompts and responses.

    Missing outputs are NaN, -1 or False. All arrays are in memory at once."""
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
    """Return an array for all rows of some steps, filled with the store's value for missing elements."""
    fill: Any = {"f": np.nan, "i": -1}.get(array.dtype.kind, False)
    return np.full((num_steps, num_rows, *array.shape[1:]), fill, array.dtype)


def _sum(array: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the sum of each row over the sampled tokens."""
    return np.where(mask, array, 0.0).sum(axis=1, dtype=np.float64)


def _or_missing(array: np.ndarray | None, rollout: Rollout) -> np.ndarray:
    return np.full(rollout.num_rows, np.nan, np.float32) if array is None else array


# ---- Parquet file ----------------------------------------------------------------------------------------

_LISTS: Mapping[str, pyarrow.DataType] = {
    "prompt_ids": pyarrow.int32(),
    "response_ids": pyarrow.int32(),
    "versions": pyarrow.int32(),
    "sampler_logprobs": pyarrow.float32(),
    "policy_logprobs": pyarrow.float32(),
    "ref_logprobs": pyarrow.float32(),
    "entropies": pyarrow.float32(),
    "values": pyarrow.float32(),
    "rewards": pyarrow.float32(),
    "advantages": pyarrow.float32(),
    "returns": pyarrow.float32(),
}
"""Columns with a list per row. All but `prompt_ids` have one element per token of the response."""
_FIELDS = {"versions": "token_versions", "entropies": "entropy"}
"""Column -> field of the records, for the columns with another name."""
_TEXTS = ("prompt", "response", "finish_reason")
_WHOLE = ("step", "shard", "row", "prompt_index", "version_first", "version_last", "prompt_length", "response_length")


def write_rows(path: Path, history: History, steps: Iterable[int], decode: Decode) -> int:
    """Write the rows of these steps and return their number. The file appears only when it is complete. Raises
    StoreError and DroppedOutput as `shards_of_step` does."""
    numbers, written = [*steps], 0
    staged = path.with_name(f".{path.name}.part")
    schema = _schema(_score_columns(history, numbers))
    try:
        with pyarrow.parquet.ParquetWriter(staged, schema, compression="zstd") as file:
            for step in numbers:
                tables = [_whole_table(shard, decode, schema) for shard in shards_of_step(history, step)]
                if tables:
                    table = pyarrow.concat_tables(tables)
                    file.write_table(table)
                    written += table.num_rows
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    return written


def _score_columns(history: History, steps: Iterable[int]) -> list[str]:
    """Return the columns of the score's parts, which are the same in all scored steps."""
    for step in steps:
        commit = history.ledger.find(Address("score", step, 0))
        if commit is not None:
            none = {name: np.zeros(0, np.float32) for name in commit.arrays}
            scores = Scores.from_arrays(none)
            return [score_column(name) for name in scores.arrays() if name != "scores"]
    return []


def _schema(score_columns: Iterable[str]) -> pyarrow.Schema:
    fields = [(name, pyarrow.int64()) for name in _WHOLE]
    fields += [(name, pyarrow.string()) for name in _TEXTS]
    numbers = ("score", *score_columns, "kl", "entropy_mean", "value_mean", "reward_sum", "advantage_mean")
    fields += [(name, pyarrow.float64()) for name in numbers]
    fields += [("trained_on", pyarrow.bool_())]
    return pyarrow.schema([*fields, *((name, pyarrow.list_(kind)) for name, kind in _LISTS.items())])


def _whole_table(rows: StageRows, decode: Decode, schema: pyarrow.Schema) -> pyarrow.Table:
    frame = row_table(rows, decode)
    columns: dict[str, Any] = {name: frame[name].to_numpy() for name in frame} | _lists(rows)
    missing = [None] * len(frame)
    arrays = [
        pyarrow.array(columns.get(field.name, missing), field.type, from_pandas=True, safe=False) for field in schema
    ]
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _lists(rows: StageRows) -> dict[str, list[Any]]:
    """Return the list columns, without those that have no output yet."""
    arrays = {column: rows.array(_FIELDS.get(column, column)) for column in _LISTS}
    made = {
        column: [row[mask] for row, mask in zip(array, rows.rollout.response_mask, strict=True)]
        for column, array in arrays.items()
        if array is not None
    }
    return {"prompt_ids": prompt_ids(rows.rollout), "response_ids": response_ids(rows.rollout), **made}


# ---- responses before and after --------------------------------------------------------------------------


@dataclass(frozen=True)
class ResponsePair:
    """The responses of two versions of the weights to one held-out prompt."""

    prompt: str
    before: str
    before_score: float
    after: str
    after_score: float
    before_kl: float | None = None
    """KL to the reference, nats per response; None until the reference has scored it."""
    after_kl: float | None = None


def response_pairs(history: History, decode: Decode) -> list[ResponsePair]:
    """Return the held-out prompts with the responses of the first and the last evaluated version; empty if fewer than
    two versions are evaluated."""
    evaluations = history.evaluations()
    if len(evaluations) < 2:
        return []
    versions = [evaluations[i].version for i in (0, -1)]
    (rows, scores), (rows_after, scores_after) = map(history.evaluated, versions)
    kl, kl_after = (history.evaluated_kl(v, r) for v, r in zip(versions, (rows, rows_after), strict=True))
    return [
        ResponsePair(
            prompt=decode(rows.tokens[row, : rows.prompt_lengths[row]].tolist()),
            before=_response(rows, row, decode),
            before_score=float(scores.scores[row]),
            after=_response(rows_after, row, decode),
            after_score=float(scores_after.scores[row]),
            before_kl=None if kl is None else kl[row],
            after_kl=None if kl_after is None else kl_after[row],
        )
        for row in range(rows.num_rows)
    ]


def chosen(pairs: Sequence[ResponsePair]) -> list[ResponsePair]:
    """Return three pairs by change of the score: the largest gain, the median and the largest loss; all if there are
    fewer. A fixed choice of prompts could look like success or failure by chance."""
    by_change = sorted(pairs, key=lambda pair: pair.before_score - pair.after_score)
    places = dict.fromkeys((0, (len(by_change) - 1) // 2, len(by_change) - 1)) if by_change else ()
    return [by_change[place] for place in places]


def samples_table(pairs: Sequence[ResponsePair]) -> str:
    """Return the responses as a table for MLflow: pandas' "split" JSON."""
    columns = ("prompt", "before", "after", "before_score", "after_score", "before_kl", "after_kl")
    rows = [[getattr(pair, column) for column in columns] for pair in pairs]
    return json.dumps({"columns": columns, "data": rows}, ensure_ascii=False, indent=1)


def _response(rollout: Rollout, row: int, decode: Decode) -> str:
    start = int(rollout.prompt_lengths[row])
    return decode(rollout.tokens[row, start : start + int(rollout.response_lengths[row])].tolist())
