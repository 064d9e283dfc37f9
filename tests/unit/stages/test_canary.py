"""The tokens of canaries, the requests to an engine, and the comparison's results, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from stages.engines.protocol import Completion, Request
from stages.forward import CANARY_STEP, canary_logprob, canary_rows, compared, engine_logprobs, sampled_by
from stages.models.config import SamplingConfig
from storage.records import FinishReason, PolicyLogprobs, Rollout
from tests.support.sampled_rows import rollout_of

SAMPLING = SamplingConfig(max_new_tokens=4, min_new_tokens=3, temperature=0.5)
SEQ = 6
TOKENS = np.array([[9, 5, 6, 7, 8, 0], [9, 9, 4, 2, 0, 0], [9, 3, 3, 3, 3, 0]], np.int32)
MASK = np.array([[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]], bool)
ROLLOUT = rollout_of(
    TOKENS, MASK, version=1, row=np.array([4, 5, 6]), sampler_logprobs=np.where(MASK, np.float32(-2), 0)
)


class FakeEngine:
    """Says -1 of every token it is given."""

    def __init__(self, version: int = 2, tokens: tuple[int, ...] | None = None) -> None:
        self.asked: list[Request] = []
        self._version, self._tokens = version, tokens

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        for request in requests:
            self.asked.append(request)
            tokens = np.array(self._tokens or request.forced, np.int32)
            num = len(tokens)
            yield Completion(
                request.row, tokens, np.full(num, -1, np.float32), np.full(num, self._version, np.int32),
                FinishReason.LENGTH,
            )  # fmt: skip


def run(engine: FakeEngine, policy: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
    part = canary_rows(ROLLOUT, 2, 3)
    found = engine_logprobs(engine, part, SAMPLING, seed=7, version=2)  # type: ignore[arg-type]
    record, metrics = compared(found, part, policy, ROLLOUT.num_rows)
    return record.canary_logprobs, metrics


def test_the_first_tokens_of_the_first_rows() -> None:
    part = canary_rows(ROLLOUT, 2, 3)
    assert part.response_mask.tolist() == [[False, True, True, True, False, False], MASK[1].tolist()]
    assert part.response_lengths.tolist() == [3, 2]
    assert part.token_versions[0].tolist() == [-1, 1, 1, 1, -1, -1]
    assert canary_rows(ROLLOUT, 9, 9).response_mask.tolist() == MASK.tolist(), "more than there are: all of them"


def test_rows_of_one_version_have_been_scored_by_it() -> None:
    part = canary_rows(ROLLOUT, 2, 3)
    assert sampled_by(part, 1)
    assert not sampled_by(part, 2)
    versions = part.token_versions.copy()
    versions[1, 3] = 2  # weights that came while the row was generated
    assert not sampled_by(dataclasses.replace(part, token_versions=versions), 1)


def test_an_engine_is_given_the_tokens_and_their_distribution() -> None:
    engine = FakeEngine()
    found, metrics = run(engine, np.full((3, SEQ), -1.5, np.float32))
    settings = [dataclasses.replace(SAMPLING, max_new_tokens=n, min_new_tokens=n) for n in (3, 2)]
    assert engine.asked == [
        Request(4, 7, CANARY_STEP, (9,), 2, settings[0], (5, 6, 7)),
        Request(5, 7, CANARY_STEP, (9, 9), 2, settings[1], (4, 2)),
    ]
    assert found.tolist() == [[0, -1, -1, -1, 0, 0], [0, 0, -1, -1, 0, 0], [0] * SEQ]
    assert metrics == pytest.approx(
        {
            "mismatch/canary_mean_abs": 0.5,  # -1 against -1.5
            "mismatch/canary_max_abs": 0.5,
            "mismatch/canary_k3": np.exp(-0.5) - 1 + 0.5,
            "mismatch/canary_moved": 1.0,  # -1 against the sampler's -2
        }
    )


def test_only_the_canaries_count() -> None:
    policy = np.full((3, SEQ), 99.0, np.float32)
    policy[:2] = np.where(canary_rows(ROLLOUT, 2, 3).response_mask, -1.0, 99.0)
    policy[0, 2] = -1.25
    _, metrics = run(FakeEngine(), policy)
    assert (metrics["mismatch/canary_mean_abs"], metrics["mismatch/canary_max_abs"]) == (0.05, 0.25)


def test_an_engine_that_does_something_else_is_found_out() -> None:
    policy = np.zeros((3, SEQ), np.float32)
    with pytest.raises(RuntimeError, match="did not score the tokens that it was given in row 4"):
        run(FakeEngine(tokens=(5, 6, 8)), policy)
    with pytest.raises(RuntimeError, match=r"row 4 was scored by versions \{1\}"):
        run(FakeEngine(version=1), policy)


def test_the_trainer_scores_the_same_tokens() -> None:
    class FakeHost:
        def policy_logprobs(self, rollout: Rollout) -> PolicyLogprobs:
            logprobs = np.where(rollout.response_mask, -3.0, 0).astype(np.float32)
            return PolicyLogprobs(logprobs, logprobs)

    record = canary_logprob(FakeHost(), ROLLOUT, rows=2, tokens=3)  # type: ignore[arg-type]
    assert record.canary_policy_logprobs.tolist() == [[0, -3, -3, -3, 0, 0], [0, 0, -3, -3, 0, 0], [0] * SEQ]
