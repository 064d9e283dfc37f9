"""Read a run's directory with xarray and pandas: the interface of `import stageline` and of `stageline export
--rollouts`.

Writes nothing, starts nothing, and loads no torch if the store has the run's vocabulary. Only committed outputs count,
as in the run itself. A run that is still going may be opened; the next call sees more of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import xarray as xr

from pipeline.cli.answers import saved_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.observe.history import History
from pipeline.observe.journal import run_starts
from pipeline.observe.row_tables import no_rows, row_table, step_arrays, token_table
from pipeline.observe.rows import StageRows, shards_of_evaluation, shards_of_step, stored_steps, text_of_tokens
from storage.rollout_root import Decode


@dataclass(frozen=True)
class OpenedRun:
    """A run to read. Steps count from 0; `steps=None` means all steps with rows."""

    path: Path
    config: RunConfig
    history: History
    decode: Decode
    """A function from token ids to text, without special tokens."""

    @property
    def steps(self) -> list[int]:
        """Return the steps with rows that `storage.keep.rollouts` has not deleted."""
        return stored_steps(self.history)

    def rows(self, steps: Iterable[int] | None = None) -> pd.DataFrame:
        """Return one line per response that was or will be trained on. Missing numbers are NaN.

        step, shard, row, prompt_index; version_first and version_last of the weights that sampled it; prompt, response,
        finish_reason (stop, length); prompt_length, response_length in tokens; score and, before their weights,
        score.NAME of its parts; kl, nats per response to the reference; entropy_mean, value_mean, advantage_mean over
        its tokens; reward_sum; trained_on. Raises StoreError for damaged data.
        """
        shards = (shard for step in self._of(steps) for shard in shards_of_step(self.history, step))
        return self._joined(row_table, shards)

    def tokens(self, steps: Iterable[int] | None = None) -> pd.DataFrame:
        """Return one line per sampled token: step, row, position in the response, token, text, version,
        sampler_logprob, policy_logprob, ref_logprob, log_ratio to the reference, entropy, value, reward, advantage,
        return."""
        shards = (shard for step in self._of(steps) for shard in shards_of_step(self.history, step))
        return self._joined(token_table, shards)

    def evaluations(self) -> pd.DataFrame:
        """Return one line per held-out response: version, then the columns of `rows` that apply."""
        versions = sorted({address.step for address in self.history.ledger.addresses("evaluate")})
        shards = (shard for version in versions for shard in shards_of_evaluation(self.history, version))
        table = self._joined(row_table, shards)
        unasked = ["shard", "version_first", "version_last", "entropy_mean", "value_mean", "reward_sum"]
        unasked += ["advantage_mean", "trained_on"]
        return table.drop(columns=unasked, errors="ignore").rename(columns={"step": "version"})

    def metrics(self) -> pd.DataFrame:
        """Return one line per finished step with a column per metric. The index is the step."""
        starts = run_starts(RunPaths(self.path).events)
        lines = {step: self.history.step_metrics(step, starts) for step in self.history.steps_done()}
        return pd.DataFrame.from_dict(lines, orient="index").rename_axis("step")

    def arrays(self, steps: Iterable[int] | None = None) -> xr.Dataset:
        """Return every stored array of these steps over (step, row, token), with the text of prompts and responses, in
        memory. (`xarray.open_datatree` of `rollouts.zarr` reads lazily, and sees only files in their final place.)"""
        return step_arrays(self.history, self._of(steps), self.decode)

    def _joined(self, table: Callable[[StageRows, Decode], pd.DataFrame], shards: Iterable[StageRows]) -> pd.DataFrame:
        """Return the tables of all shards as one; without shards, an empty table with its columns."""
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
    """Open a run's directory. Raises ConfigError if it holds no run."""
    return opened(saved_config(os.fspath(path)))


def opened(config: RunConfig) -> OpenedRun:
    """Return the run of a config that its directory holds."""
    return OpenedRun(
        config.run_dir, config, open_history(config), text_of_tokens(str(config.run_dir), config.model.path)
    )
