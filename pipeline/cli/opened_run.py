"""A run's directory as xarray and pandas: what `import stageline` gives, and `stageline export --rollouts` reads by.

Nothing is written, nothing is started, and no torch is loaded where the store has the run's vocabulary. What is
committed counts, as it does for a run itself; a run that goes on may be opened meanwhile, and the next call sees more
of it. May import everything below.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import xarray as xr

from pipeline.cli.sources import saved_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.observe.history import History
from pipeline.observe.journal import run_starts
from pipeline.observe.row_views import row_table, step_arrays, token_table
from pipeline.observe.rows import StageRows, no_rows, shards_of_evaluation, shards_of_step, stored_steps
from storage import files
from storage.store_root import read_root_array
from storage.vocabulary import BYTES, OFFSETS, Decode, Vocabulary


@dataclass(frozen=True)
class OpenedRun:
    """A run to look at. Steps count from 0; `steps=None` is all that have rows."""

    path: Path
    config: RunConfig
    history: History
    decode: Decode
    """Token ids -> text, without special tokens."""

    @property
    def steps(self) -> list[int]:
        """Those that have rows, and whose rows `storage.keep.rollouts` has not let go."""
        return stored_steps(self.history)

    def rows(self, steps: Iterable[int] | None = None) -> pd.DataFrame:
        """One line for each response that was trained on or will be. Numbers that are not there yet are NaN.

        step, shard, row, prompt_index; version_first and version_last, of the weights that sampled it; prompt,
        response, finish_reason (stop, length); prompt_length, response_length in tokens; score and, before their
        weights, score.NAME of its parts; kl, nats per response to the reference; entropy_mean, value_mean,
        advantage_mean over its tokens; reward_sum; trained_on. Raises StoreError for what is damaged.
        """
        shards = (shard for step in self._of(steps) for shard in shards_of_step(self.history, step))
        return self._joined(row_table, shards)

    def tokens(self, steps: Iterable[int] | None = None) -> pd.DataFrame:
        """One line for each sampled token: step, row, position in the response, token, text, version,
        sampler_logprob, policy_logprob, ref_logprob, log_ratio to the reference, entropy, value, reward, advantage,
        return."""
        shards = (shard for step in self._of(steps) for shard in shards_of_step(self.history, step))
        return self._joined(token_table, shards)

    def evaluations(self) -> pd.DataFrame:
        """One line for each held-out response: version, then as in `rows`, as far as that applies."""
        versions = sorted({address.step for address in self.history.ledger.addresses("evaluate")})
        shards = (shard for version in versions for shard in shards_of_evaluation(self.history, version))
        table = self._joined(row_table, shards)
        unasked = ["shard", "version_first", "version_last", "entropy_mean", "value_mean", "reward_sum"]
        unasked += ["advantage_mean", "trained_on"]
        return table.drop(columns=unasked, errors="ignore").rename(columns={"step": "version"})

    def metrics(self) -> pd.DataFrame:
        """One line for each finished step, a column for each metric of it; the index is the step."""
        starts = run_starts(RunPaths(self.path).events)
        lines = {step: self.history.step_metrics(step, starts) for step in self.history.steps_done()}
        return pd.DataFrame.from_dict(lines, orient="index").rename_axis("step")

    def arrays(self, steps: Iterable[int] | None = None) -> xr.Dataset:
        """Every stored array of these steps over (step, row, token), with the text of prompts and responses, in
        memory. (`xarray.open_datatree` of `rollouts.zarr` reads lazily, and sees what is in place there.)"""
        return step_arrays(self.history, self._of(steps), self.decode)

    def _joined(self, table: Callable[[StageRows, Decode], pd.DataFrame], shards: Iterable[StageRows]) -> pd.DataFrame:
        """The tables of all shards as one; of none, its columns."""
        tables = [table(shard, self.decode) for shard in shards]
        return pd.concat(tables or [table(no_rows(), self.decode)], ignore_index=True)

    def _of(self, steps: Iterable[int] | None) -> list[int]:
        there = self.steps
        asked = there if steps is None else [int(step) for step in steps]
        unknown = [step for step in asked if step not in there]
        if unknown:
            known = f"{there[0]} to {there[-1]}" if there else "none yet"
            raise ValueError(f"{self.path} has no rows of steps {unknown}: it has {known}")
        return asked


def open_run(path: str | os.PathLike[str]) -> OpenedRun:
    """Opens a run's directory. Raises ConfigError for one that holds no run."""
    return opened(saved_config(os.fspath(path)))


def opened(config: RunConfig) -> OpenedRun:
    """The run of a config that a run's directory holds."""
    return OpenedRun(config.run_dir, config, open_history(config), text_of_tokens(config))


def text_of_tokens(config: RunConfig) -> Decode:
    """What turns a run's tokens into text: the vocabulary in its store, else the tokenizer of `model.path`."""
    root = files.open_root(str(config.run_dir))
    data, offsets = (read_root_array(root, name) for name in (BYTES, OFFSETS))
    if data is not None and offsets is not None:
        return Vocabulary.from_arrays(data, offsets).text
    tokenizers = importlib.import_module("stages.models.hf_files")  # torch and transformers take seconds to import
    decode: Decode = tokenizers.read_tokenizer(config.model.path).decode
    return decode
