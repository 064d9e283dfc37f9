"""A run's rows as one Parquet file, for people without Zarr: every column of `row_table`, and lists of the tokens with
their numbers. A step is read, written as a row group, and forgotten, so that the memory is that of one step.

May import numpy, pyarrow, storage and pipeline.observe.{history, row_views, rows}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from pipeline.observe.history import History
from pipeline.observe.row_views import prompt_ids, response_ids, row_table, score_column
from pipeline.observe.rows import StageRows, shards_of_step
from storage.address import Address
from storage.records import Scores
from storage.vocabulary import Decode

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
"""Columns of one list a row; all but `prompt_ids` have an element for each token of the response."""
_FIELDS = {"versions": "token_versions", "entropies": "entropy"}
"""Of these columns that are called otherwise: the field of the records."""
_TEXTS = ("prompt", "response", "finish_reason")
_WHOLE = ("step", "shard", "row", "prompt_index", "version_first", "version_last", "prompt_length", "response_length")


def write_rows(path: Path, history: History, steps: Iterable[int], decode: Decode) -> int:
    """Writes the rows of these steps; returns how many. The file is there only if it is whole. Raises what
    `shards_of_step` raises."""
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
    """The columns of the parts of a score, which are the same in all steps that are scored."""
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
    """What a stage has not made yet is left out."""
    arrays = {column: rows.array(_FIELDS.get(column, column)) for column in _LISTS}
    made = {
        column: [row[mask] for row, mask in zip(array, rows.rollout.response_mask, strict=True)]
        for column, array in arrays.items()
        if array is not None
    }
    return {"prompt_ids": prompt_ids(rows.rollout), "response_ids": response_ids(rows.rollout), **made}
