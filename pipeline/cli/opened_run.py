"""Read a run's directory with pandas and xarray: the interface of `import stageline` and of `stageline export
--rollouts`.

The run's directory is not changed, and no process is started. torch is imported only if the store lacks the run's
vocabulary. Only committed outputs are read. A run may be opened while it runs. Each call then reads the outputs that
are committed at that time.

- `row_table`, `token_table`: a table with one line per row or per sampled token of a shard. Missing outputs are NaN.
- `step_arrays`: all arrays of some steps as one data set.
- `write_rows`: one Parquet file for users without Zarr. It has the columns of `row_table`. Further columns have lists
  with one element per token. Each step becomes a row group, so only one step is in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import xarray as xr

from pipeline.cli.answers import read_saved_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.observe.history import History
from pipeline.observe.journal import read_run_starts
from pipeline.observe.rows import (
    StageRows,
    prompt_ids,
    read_evaluation_shards,
    read_step_shards,
    response_ids,
    row_columns,
    score_column,
    stored_steps,
    token_decoder,
)
from storage.address import Address
from storage.commits import Commit
from storage.records import Rollout, Scores, describe
from storage.rollouts import Decode

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
"""Column of `token_table` -> name of the stored array with its values, one per token. The arrays are outputs of stages:
rollout, log-probs, values and advantages."""
STEP_STAGES = ("generate", "score", "reference", "logprob", "value", "advantage")
"""Stages whose arrays are stored in the Zarr group of their step."""


def row_table(rows: StageRows, decode: Decode) -> pd.DataFrame:
    """Return the columns of `row_columns` as a table with one line per row."""
    return pd.DataFrame(row_columns(rows, decode))


def empty_rows() -> StageRows:
    """Return a shard with zero rows, for empty tables with the usual columns."""
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


def token_table(rows: StageRows, decode: Decode) -> pd.DataFrame:
    """Return a table with one line per sampled token. Columns: the token's step, row, position in the response (from
    0), id, text and weight version, the numbers of `TOKEN_COLUMNS`, and `log_ratio` (policy log-prob minus reference
    log-prob)."""
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
    arrays = {column: rows.find_array(name) for column, name in TOKEN_COLUMNS.items()} | {"log_ratio": rows.log_ratio}
    return pd.DataFrame(table | {n: missing if a is None else a[where, at] for n, a in arrays.items()})


def step_arrays(history: History, steps: Iterable[int], decode: Decode) -> xr.Dataset:
    """Return every array of these steps, and the text of prompts and responses. All arrays have the dimensions step and
    row. Arrays with one value per token also have the dimension token.

    Missing outputs are NaN, -1 or False. All arrays are in memory at once."""
    numbers = [*steps]
    arrays: dict[str, np.ndarray] = {}
    texts = {name: np.full((len(numbers), history.rows_per_step), "", object) for name in ("prompt", "response")}
    for position, step in enumerate(numbers):
        for stage in STEP_STAGES:
            for commit in _commits(history, stage, step):
                record = history.store.read(commit.address)
                start = commit.address.shard * commit.rows  # a stage without shards has shard 0
                of_shard = slice(start, start + commit.rows)
                for name, array in record.arrays().items():
                    whole = arrays.setdefault(name, _missing_values(array, len(numbers), history.rows_per_step))
                    whole[position, of_shard] = array
                if isinstance(record, Rollout):
                    texts["prompt"][position, of_shard] = [decode(ids.tolist()) for ids in prompt_ids(record)]
                    texts["response"][position, of_shard] = [decode(ids.tolist()) for ids in response_ids(record)]
    dimensions = ("step", "row", "token")
    variables = {name: (dimensions[: array.ndim], array, describe(name)) for name, array in arrays.items()}
    variables.pop("row", None)
    texted = {name: (dimensions[:2], array, {"long_name": f"text of the {name}"}) for name, array in texts.items()}
    return xr.Dataset(variables | texted, {"step": numbers, "row": np.arange(history.rows_per_step)})


def _commits(history: History, stage: str, step: int) -> Iterator[Commit]:
    for shard in range(1 if stage == "advantage" else history.spec.shards):
        commit = history.ledger.find(Address(stage, step, shard))
        if commit is not None:
            yield commit


def _missing_values(array: np.ndarray, num_steps: int, num_rows: int) -> np.ndarray:
    """Return an array for all rows of the steps, with the type of a shard's `array` and the store's fill value."""
    fill: Any = {"f": np.nan, "i": -1}.get(array.dtype.kind, False)
    return np.full((num_steps, num_rows, *array.shape[1:]), fill, array.dtype)


# ---- Parquet file ----------------------------------------------------------------------------------------

_LIST_COLUMNS: Mapping[str, pyarrow.DataType] = {
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
"""Column with a list per row -> type of the list's elements. The list in `prompt_ids` has one element per token of the
prompt. The other lists have one element per token of the response."""
_FIELDS = {"versions": "token_versions", "entropies": "entropy"}
"""Column -> field of the records, for the columns that have another name than their field."""
_TEXT_COLUMNS = ("prompt", "response", "finish_reason")
_INTEGER_COLUMNS = (
    "step",
    "shard",
    "row",
    "prompt_index",
    "version_first",
    "version_last",
    "prompt_length",
    "response_length",
)


def write_rows(path: Path, history: History, steps: Iterable[int], decode: Decode) -> int:
    """Write the rows of these steps to a Parquet file, and return the number of rows.

    The file appears only when it is complete. Errors of `read_step_shards` are passed on."""
    numbers, written = [*steps], 0
    staged = path.with_name(f".{path.name}.part")
    schema = _schema(_score_columns(history, numbers))
    try:
        with pyarrow.parquet.ParquetWriter(staged, schema, compression="zstd") as file:
            for step in numbers:
                tables = [_file_table(shard, decode, schema) for shard in read_step_shards(history, step)]
                if tables:
                    table = pyarrow.concat_tables(tables)
                    file.write_table(table)
                    written += table.num_rows
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    return written


def _score_columns(history: History, steps: Iterable[int]) -> list[str]:
    """Return the names of the table columns for the parts of the score. A part that is an ensemble of reward models
    also has a column for the disagreement between its members. The names are the same in all scored steps. Return an
    empty list if none of these steps is scored."""
    for step in steps:
        commit = history.ledger.find(Address("score", step, 0))
        if commit is not None:
            none = {name: np.zeros(0, np.float32) for name in commit.arrays}
            scores = Scores.from_arrays(none)
            return [score_column(name) for name in scores.arrays() if name != "scores"]
    return []


def _schema(score_columns: Iterable[str]) -> pyarrow.Schema:
    fields = [(name, pyarrow.int64()) for name in _INTEGER_COLUMNS]
    fields += [(name, pyarrow.string()) for name in _TEXT_COLUMNS]
    numbers = ("score", *score_columns, "kl", "entropy_mean", "value_mean", "reward_sum", "advantage_mean")
    fields += [(name, pyarrow.float64()) for name in numbers]
    fields += [("trained_on", pyarrow.bool_())]
    return pyarrow.schema([*fields, *((name, pyarrow.list_(kind)) for name, kind in _LIST_COLUMNS.items())])


def _file_table(rows: StageRows, decode: Decode, schema: pyarrow.Schema) -> pyarrow.Table:
    frame = row_table(rows, decode)
    columns: dict[str, Any] = {name: frame[name].to_numpy() for name in frame} | _list_columns(rows)
    missing = [None] * len(frame)
    arrays = [
        pyarrow.array(columns.get(field.name, missing), field.type, from_pandas=True, safe=False) for field in schema
    ]
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _list_columns(rows: StageRows) -> dict[str, list[Any]]:
    """Return the columns that have a list per row. A column is left out if its stage has no output yet."""
    arrays = {column: rows.find_array(_FIELDS.get(column, column)) for column in _LIST_COLUMNS}
    made = {
        column: [row[mask] for row, mask in zip(array, rows.rollout.response_mask, strict=True)]
        for column, array in arrays.items()
        if array is not None
    }
    return {"prompt_ids": prompt_ids(rows.rollout), "response_ids": response_ids(rows.rollout), **made}


@dataclass(frozen=True, repr=False)
class OpenedRun:
    """A run whose outputs can be read. Steps are numbered from 0. In the methods, `steps=None` means all steps with
    rows."""

    path: Path
    config: RunConfig
    history: History
    decode: Decode
    """A function from token ids to text, without special tokens."""

    def __repr__(self) -> str:
        return f"<run {self.path}: {len(self.history.finished_steps())} of {self.config.steps} steps done>"

    @property
    def steps(self) -> list[int]:
        """Return the steps whose rows are stored. Steps whose rows `storage.keep.rollouts` has deleted are left out."""
        return stored_steps(self.history)

    def rows(self, steps: Iterable[int] | None = None) -> pd.DataFrame:
        """Return a table with one line per response of these steps. Missing numbers are NaN. Columns:

        - step, shard, row, prompt_index
        - version_first, version_last: oldest and newest version of the weights that sampled the response
        - prompt, response, finish_reason (stop or length)
        - prompt_length, response_length: in tokens
        - score, and score.NAME for each part of the score before its weight is applied
        - disagreement.NAME for each disagreement that is stored with the scores
        - kl: KL to the reference, in nats per response
        - entropy_mean, value_mean, advantage_mean: means over the sampled tokens
        - reward_sum, trained_on

        Raises:
            ValueError: the run has no rows of one of these steps.
            StoreError: stored data is damaged.
        """
        shards = (shard for step in self._steps_or_all(steps) for shard in read_step_shards(self.history, step))
        return self._join_tables(row_table, shards)

    def tokens(self, steps: Iterable[int] | None = None) -> pd.DataFrame:
        """Return a table with one line per sampled token. Columns: step, row, position (in the response, from 0),
        token, text, version, sampler_logprob, policy_logprob, ref_logprob, log_ratio (policy log-prob minus reference
        log-prob), entropy, value, reward, advantage, return."""
        shards = (shard for step in self._steps_or_all(steps) for shard in read_step_shards(self.history, step))
        return self._join_tables(token_table, shards)

    def evaluations(self) -> pd.DataFrame:
        """Return a table with one line per held-out response. The first column is the evaluated version. The other
        columns are the columns of `rows` that an evaluation has."""
        versions = sorted({address.step for address in self.history.ledger.addresses("evaluate")})
        shards = (shard for version in versions for shard in read_evaluation_shards(self.history, version))
        table = self._join_tables(row_table, shards)
        unasked = ["shard", "version_first", "version_last", "entropy_mean", "value_mean", "reward_sum"]
        unasked += ["advantage_mean", "trained_on"]
        return table.drop(columns=unasked, errors="ignore").rename(columns={"step": "version"})

    def metrics(self) -> pd.DataFrame:
        """Return a table with one line per finished step and one column per metric. The table's index is the step."""
        starts = read_run_starts(RunPaths(self.path).events)
        lines = {step: self.history.read_step_metrics(step, starts) for step in self.history.finished_steps()}
        return pd.DataFrame.from_dict(lines, orient="index").rename_axis("step")

    def arrays(self, steps: Iterable[int] | None = None) -> xr.Dataset:
        """Return every stored array of these steps, as `step_arrays` describes. All arrays are in memory at once.

        To read lazily, use `xarray.open_datatree` on `rollouts.zarr`. xarray cannot find committed files that are still
        in the directory `attempts/`."""
        return step_arrays(self.history, self._steps_or_all(steps), self.decode)

    def _join_tables(
        self, table: Callable[[StageRows, Decode], pd.DataFrame], shards: Iterable[StageRows]
    ) -> pd.DataFrame:
        """Return the tables of all shards as one table. Without shards, return an empty table with the same columns."""
        tables = [table(shard, self.decode) for shard in shards]
        return pd.concat(tables or [table(empty_rows(), self.decode)], ignore_index=True)

    def _steps_or_all(self, steps: Iterable[int] | None) -> list[int]:
        finished = self.steps
        asked = finished if steps is None else [int(step) for step in steps]
        unknown = [step for step in asked if step not in finished]
        if unknown:
            known = f"{finished[0]} to {finished[-1]}" if finished else "none yet"
            raise ValueError(f"{self.path} has no rows of steps {unknown}: it has {known}")
        return asked


def open_run(path: str | os.PathLike[str]) -> OpenedRun:
    """Open a run's directory. Raises ConfigError if the directory holds no run."""
    return open_configured_run(read_saved_config(os.fspath(path)))


def open_configured_run(config: RunConfig) -> OpenedRun:
    """Return the run in the directory that a config names."""
    return OpenedRun(config.run_dir, config, open_history(config), token_decoder(config.stored.root, config.model.path))
