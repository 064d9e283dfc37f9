"""A trial of a run's rewards before the run starts: score short made-up responses to a few of the run's prompts, with
the code of the `score` stage. Rewards that load a model or ask a judge are left out."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipeline.config.preflight import Preflight, errors_of_others, prompts_scored_by, read_prompts
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError, refusals, run_checks
from stages.rewards.config import RewardPartsConfig
from stages.rewards.protocol import Part, RewardFailed
from stages.rewards.registry import UnfitReward, build_parts, close_parts
from stages.score import score
from storage.records import FinishReason, Rollout

COSTLY = frozenset({"ensemble", "judge", "local_judge", "model"})
"""Kinds of reward that load a model or ask a judge."""
RESPONSES = ("", "42", "I do not know.")
"""The made-up responses. The last one counts as cut. The others end with an EOS if the tokenizer has one and there is
room for it within `sampling.max_new_tokens`."""
NUM_PROMPTS = 4


@dataclass(frozen=True)
class TrialResult:
    """The result of a reward part's trial."""

    key: str
    kind: str
    lowest: float
    highest: float
    num_rows: int

    def __str__(self) -> str:
        if self.lowest < self.highest:
            scores = f"scores from {self.lowest:.4g} to {self.highest:.4g} on {self.num_rows} made-up responses"
        else:
            scores = (
                f"the score {self.lowest:.4g} for each of {self.num_rows} made-up responses. That is right if none of "
                "them earns more; a run learns only if its own responses get different scores"
            )
        return f"{self.key} ({self.kind}): {scores}"


def try_rewards(config: RunConfig, checked: Preflight) -> list[TrialResult]:
    """Score a few made-up responses with each part of `reward`, and of `evaluate.reward` if it is given. Parts that
    load a model or ask a judge (`COSTLY`) are left out. Return one result per part that was tried. Raises ConfigError
    with the key path of every part that fails."""
    sections = {"reward": config.reward} | dict([config.held_out_reward])
    results = run_checks(*(partial(_try_section, config, checked, *one) for one in sections.items()))
    return [tried for of_section in results for tried in of_section]


def trial_errors(config: RunConfig, refused: Collection[str]) -> list[ConfigError]:
    """Return the errors of trying the rewards of a config in which the settings `refused` are wrong. Errors that name
    one of these settings are left out. If the prompts cannot be read or a reward cannot be built, nothing is tried, and
    the list is empty: the checks that found the wrong settings report these errors too."""
    try:
        checked = read_prompts(config)
        return errors_of_others(refusals(lambda: try_rewards(config, checked)), refused)
    except (ConfigError, UnfitReward):
        return []


def _try_section(config: RunConfig, checked: Preflight, key: str, section: RewardPartsConfig) -> list[TrialResult]:
    rows = _trial_rows(config, checked, key)
    parts = build_parts(section, key, trust_answers=config.reward.trust_answers)
    named = section.parts_by_name(key)
    try:
        cheap = [part for part in parts if named[part.name][1].kind not in COSTLY]
        where = [(part, *named[part.name]) for part in cheap]
        return run_checks(*(partial(_try_part, checked, rows, part, at, one.kind) for part, at, one in where))
    finally:
        close_parts(parts)


def _try_part(checked: Preflight, rows: Rollout, part: Part, key: str, kind: str) -> TrialResult:
    fields_of_rows, chats = checked.prompts.for_reward(rows.prompt_index)
    try:
        scores = score([part], checked.tokenizer, rows, fields_of_rows, chats).scores
    except RewardFailed as error:
        # If a prompt lacks a field, `check_fields` refuses `args`. With the same key, the fault is reported once.
        at_fault = "args" if any(part.reward.fields - fields.keys() for fields in fields_of_rows) else "kind"
        need = f"given {kind!r}; it failed on {rows.num_rows} made-up responses to prompts of this run: {error}"
        raise ConfigError(f"{key}.{at_fault}", need) from error
    return TrialResult(key, kind, float(scores.min()), float(scores.max()), rows.num_rows)


def _trial_rows(config: RunConfig, checked: Preflight, section: str) -> Rollout:
    """Return made-up rows on which rewards are tried: all made-up responses to the first `NUM_PROMPTS` prompts of each
    set that the rewards of `section` score (training, held out)."""
    prompts = checked.prompts
    numbers = [int(number) for part in prompts_scored_by(config, prompts, section) for number in part[:NUM_PROMPTS]]
    responses = [*_responses(config, checked)]
    rows = [(number, ids, reason) for number in numbers for ids, reason in responses]
    seq = max(int(prompts.lengths[number]) + len(ids) for number, ids, _ in rows)
    tokens = np.full((len(rows), seq), prompts.pad_id, np.int32)
    mask = np.zeros((len(rows), seq), bool)
    for row, (number, ids, _) in enumerate(rows):
        start = int(prompts.lengths[number])
        tokens[row, :start] = prompts.tokens[number, :start]
        tokens[row, start : start + len(ids)] = ids
        mask[row, start : start + len(ids)] = True
    return Rollout(
        row=np.arange(len(rows)),
        prompt_index=np.array([number for number, _, _ in rows], np.int64),
        tokens=tokens,
        prompt_lengths=np.array([prompts.lengths[number] for number, _, _ in rows], np.int32),
        response_lengths=mask.sum(axis=1).astype(np.int32),
        response_mask=mask,
        sampler_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        token_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.array([reason for _, _, reason in rows], np.int8),
    )


def _responses(config: RunConfig, checked: Preflight) -> Iterator[tuple[list[int], FinishReason]]:
    """Yield tokens and finish reason of each made-up response, repeated or cut to the allowed length. The empty text
    cannot be repeated, and is left out if it would be too short."""
    least, most, tokenizer = config.sampling.min_new_tokens, config.sampling.max_new_tokens, checked.tokenizer
    for text in RESPONSES:
        ids = tokenizer.encode(text)
        ids = ids * max(1, -(-least // max(1, len(ids))))
        cut = text == RESPONSES[-1] or len(ids) >= most or not tokenizer.eos_ids
        ids = ids[:most] if cut else [*ids, tokenizer.eos_ids[0]]
        if len(ids) >= max(1, least):
            yield ids, FinishReason.LENGTH if cut else FinishReason.STOP
