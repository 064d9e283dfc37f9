"""The rows of a run with the outputs of all stages.

- `StageRows`: the rows of a shard, a step or an evaluation. Only committed arrays are read, and each array is checked
  against its CRC-32 (storage/rollouts.py). So the arrays of an attempt that died or came too late are never read.
- `row_columns`: the numbers and texts of each row. pipeline/cli/opened_run.py makes tables and files from them.
- `response_pairs`: the responses to the held-out prompts before and after training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.observe.history import History
from stages.models.hf_files import read_tokenizer
from storage import files
from storage.address import Address
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
)
from storage.rollouts import BYTES, OFFSETS, Decode, Vocabulary, read_root_array


@dataclass(frozen=True)
class StageRows:
    """Rows with the output of each stage. An output is None if the stage does not run in this config, or if its output
    is incomplete or cannot be read."""

    step: int
    shard: int
    """Number of the shard. 0 if these are the rows of a whole step."""
    rollout: Rollout
    scores: Scores | None = None
    reference: ReferenceLogprobs | None = None
    policy: PolicyLogprobs | None = None
    values: Values | None = None
    advantages: Advantages | None = None

    @cached_property
    def log_ratio(self) -> np.ndarray | None:
        """log pi - log pi_ref per token, float32 [rows seq]. Zero outside the response. None without `reference`.

        pi is the trainer's policy at the start of the step. If the run does not recompute the trainer's log-probs, pi
        is the policy that sampled the token."""
        if self.reference is None:
            return None
        ours = self.rollout.sampler_logprobs if self.policy is None else self.policy.policy_logprobs
        return np.where(self.rollout.response_mask, ours - self.reference.ref_logprobs, 0.0)

    @cached_property
    def kl(self) -> np.ndarray | None:
        """KL to the reference in nats per response: the sum of the log-ratio over the tokens of each row, float64
        [rows]. None without `reference`."""
        return None if self.log_ratio is None else self.log_ratio.sum(axis=1, dtype=np.float64)

    @cached_property
    def mismatch(self) -> np.ndarray | None:
        """log pi_trainer - log mu_sampler per token, float32 [rows seq]. Zero outside the response. None without
        `policy`."""
        if self.policy is None:
            return None
        difference = self.policy.policy_logprobs - self.rollout.sampler_logprobs
        return np.where(self.rollout.response_mask, difference, 0.0)

    def find_array(self, name: str) -> np.ndarray | None:
        """Return the array with this name from the rollout or from any output except the scores. Return None if none of
        them has such an array."""
        for record in (self.rollout, self.reference, self.policy, self.values, self.advantages):
            if record is not None and name in record.arrays():
                return np.asarray(record.arrays()[name])
        return None


def stored_steps(history: History, *, complete_only: bool = False) -> list[int]:
    """Return the numbers of the steps with committed rows, ascending. Steps whose rows were deleted
    (`storage.keep.rollouts`) are left out.

    If `complete_only` is true, only steps with all their rows are returned."""
    addresses = history.ledger.addresses("generate", history.store.dropped_before())
    shards = Counter(address.step for address in addresses)
    return sorted(step for step, number in shards.items() if not complete_only or number == history.spec.shards)


def read_step(history: History, step: int) -> StageRows:
    """Return all rows of a step. The output of a stage is None if it is incomplete or cannot be read.

    Raises:
        StoreError: the rollouts cannot be read."""

    def read(stage: str, shards: int = history.spec.shards) -> Any:
        is_complete = all(history.ledger.find(Address(stage, step, shard)) is not None for shard in range(shards))
        try:
            return history.store.read_step(stage, step, shards) if is_complete else None
        except StoreError:
            return None

    rollout = history.store.read_step("generate", step, history.spec.shards)
    scores, reference = read("score"), read("reference")
    return StageRows(step, 0, rollout, scores, reference, read("logprob"), read("value"), read("advantage", 1))


def read_step_shards(history: History, step: int) -> Iterator[StageRows]:
    """Yield the generated shards of a step, each with the outputs of the other stages.

    Raises:
        StoreError: an array is missing or damaged.
        DroppedOutput: the arrays were deleted."""
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


def read_evaluation_shards(history: History, version: int) -> Iterator[StageRows]:
    """Yield the generated shards of an evaluation, each with its scores and the log-probs of the reference."""
    for shard in range(history.spec.eval_shards):
        rollout = _read(history, "evaluate", version, shard)
        if rollout is not None:
            scores = _read(history, "evaluate_score", version, shard)
            yield StageRows(version, shard, rollout, scores, _read(history, "evaluate_reference", version, shard))


def _read(history: History, stage: str, step: int, shard: int = 0) -> Any:
    """Return the output of a stage, or None if it has no commit."""
    address = Address(stage, step, shard)
    return None if history.ledger.find(address) is None else history.store.read(address)


def token_decoder(root: files.Root, model: str) -> Decode:
    """Return a function that turns token ids into text and leaves out special tokens.

    The vocabulary comes from the run's store. If the store has no vocabulary, the tokenizer of the model is loaded,
    which takes seconds."""
    data, offsets = (read_root_array(root, name) for name in (BYTES, OFFSETS))
    if data is not None and offsets is not None:
        return Vocabulary(data.tobytes(), offsets).text
    decode: Decode = read_tokenizer(model).decode
    return decode


# ---- columns ---------------------------------------------------------------------------------------------

PART_COLUMN = "score."
"""Prefix of the columns for the parts of a score."""


def row_columns(rows: StageRows, decode: Decode) -> dict[str, Any]:
    """Return the columns of a table with one line per row: the row's origin, its texts and its numbers.

    Sums and means are over the sampled tokens, in float64. `kl` is the sum of the log-ratios to the reference, nats per
    response. If the output of a stage is None, its columns of numbers are NaN. Without scores, the columns for the
    parts of the score are left out. Without advantages, `trained_on` is false."""
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
    trained = rows.find_array("loss_mask")
    table["kl"] = _or_missing(rows.kl, rollout)
    for column, name in (("entropy_mean", "entropy"), ("value_mean", "values"), ("advantage_mean", "advantages")):
        array = rows.find_array(name)
        table[column] = _or_missing(None if array is None else _sum(array, mask) / lengths, rollout)
    rewards = rows.find_array("rewards")
    table["reward_sum"] = _or_missing(None if rewards is None else _sum(rewards, mask), rollout)
    table["trained_on"] = np.zeros(rollout.num_rows, bool) if trained is None else trained.any(axis=1)
    return table


def score_column(array: str) -> str:
    """Return the name of the column for an array of `Scores`. It is `score.NAME` for a part of the score, and
    `disagreement.NAME` for a disagreement."""
    return array.replace(SCORE_PREFIX, PART_COLUMN, 1)


def prompt_ids(rollout: Rollout) -> list[np.ndarray]:
    """Return the stored prompt tokens of each row."""
    return [row[:length] for row, length in zip(rollout.tokens, rollout.prompt_lengths, strict=True)]


def response_ids(rollout: Rollout) -> list[np.ndarray]:
    """Return the response tokens of each row. Special tokens and the EOS are included."""
    return [row[mask] for row, mask in zip(rollout.tokens, rollout.response_mask, strict=True)]


def _sum(array: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the sum over the sampled tokens of each row."""
    return np.where(mask, array, 0.0).sum(axis=1, dtype=np.float64)


def _or_missing(array: np.ndarray | None, rollout: Rollout) -> np.ndarray:
    return np.full(rollout.num_rows, np.nan, np.float32) if array is None else array


# ---- responses before and after --------------------------------------------------------------------------


@dataclass(frozen=True)
class ResponsePair:
    """The responses to one held-out prompt before and after training."""

    prompt: str
    before: str
    before_score: float
    after: str
    after_score: float
    before_kl: float | None = None
    """KL of the response `before` to the reference, in nats. None until the reference has scored it."""
    after_kl: float | None = None


def prompt_text(rollout: Rollout, row: int, decode: Decode, user_messages: Sequence[str] | None) -> str:
    """Return the prompt of a row for readers: the last user message of the prompt, or the whole prompt if it has no
    user message.

    `user_messages` is None if all prompts are plain text. Otherwise it has the last user message of each prompt, which
    is empty if the prompt has no user message."""
    last = "" if user_messages is None else user_messages[int(rollout.prompt_index[row])]
    return last or decode(rollout.tokens[row, : rollout.prompt_lengths[row]].tolist())


def response_pairs(history: History, decode: Decode, user_messages: Sequence[str] | None = None) -> list[ResponsePair]:
    """Return the responses of the first and of the last evaluated version to each held-out prompt. Empty if fewer than
    two versions are evaluated. `user_messages` is used as in `prompt_text`."""
    evaluations = history.read_evaluations()
    if len(evaluations) < 2:
        return []
    versions = [evaluations[i].version for i in (0, -1)]
    (rows, scores), (rows_after, scores_after) = map(history.read_evaluated_rows, versions)
    kl, kl_after = (history.evaluated_kl(v, r) for v, r in zip(versions, (rows, rows_after), strict=True))
    return [
        ResponsePair(
            prompt=prompt_text(rows, row, decode, user_messages),
            before=_response(rows, row, decode),
            before_score=float(scores.scores[row]),
            after=_response(rows_after, row, decode),
            after_score=float(scores_after.scores[row]),
            before_kl=None if kl is None else kl[row],
            after_kl=None if kl_after is None else kl_after[row],
        )
        for row in range(rows.num_rows)
    ]


def choose_pairs(pairs: Sequence[ResponsePair]) -> list[ResponsePair]:
    """Return three pairs of responses: the pairs with the largest gain in score, the median change and the largest
    drop, in this order. Return all pairs if there are fewer than three.

    A pair consists of the responses to one prompt before and after training. The prompts are not fixed beforehand,
    because a run could then look like a success or a failure by chance.
    """
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
