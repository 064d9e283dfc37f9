"""The generate stage against an engine that answers from a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.protocol import Completion, Request
from stages.generate import generate
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY
from storage.records import FinishReason, PromptBatch

PROMPTS = PromptBatch(
    row=np.array([40, 41], np.int64),
    prompt_index=np.array([7, 3], np.int64),
    tokens=np.array([[11, 12, 0], [21, 22, 23]], np.int32),
    prompt_lengths=np.array([2, 3], np.int32),
)
ANSWERS = {
    40: Completion(
        40, np.array([5, 6, 2], np.int32), np.array([-1, -2, -3], np.float32), np.array([4, 4, 4], np.int32),
        FinishReason.STOP,
    ),
    41: Completion(
        41, np.array([8], np.int32), np.array([-0.5], np.float32), np.array([4], np.int32), FinishReason.LENGTH
    ),
}  # fmt: skip
SAMPLING = SamplingConfig(max_new_tokens=3)


class TableEngine:
    """Answers the rows it was given, last first, and keeps what it was asked."""

    def __init__(self, answers: Iterable[Completion]) -> None:
        self.answers = list(answers)
        self.asked: list[Request] = []

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        self.asked = list(requests)
        return iter(self.answers[::-1])


def test_arrays_are_laid_out_as_the_record_says() -> None:
    engine = TableEngine(ANSWERS.values())
    rollout = generate(engine, PROMPTS, seed=1, step=2, version=4, sampling=SAMPLING, seq=6, pad_id=99)
    assert engine.asked == [Request(40, 1, 2, (11, 12), 4, SAMPLING), Request(41, 1, 2, (21, 22, 23), 4, SAMPLING)]
    np.testing.assert_array_equal(rollout.row, [40, 41])
    np.testing.assert_array_equal(rollout.prompt_index, [7, 3])
    np.testing.assert_array_equal(rollout.tokens, [[11, 12, 5, 6, 2, 99], [21, 22, 23, 8, 99, 99]])
    np.testing.assert_array_equal(rollout.prompt_lengths, [2, 3])
    np.testing.assert_array_equal(rollout.response_lengths, [3, 1])
    np.testing.assert_array_equal(rollout.response_mask, [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(rollout.sampler_logprobs, [[0, 0, -1, -2, -3, 0], [0, 0, 0, -0.5, 0, 0]])
    np.testing.assert_array_equal(rollout.token_versions, [[-1, -1, 4, 4, 4, -1], [-1, -1, -1, 4, -1, -1]])
    np.testing.assert_array_equal(rollout.finish_reason, [0, 1])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([ANSWERS[40]], r"no response for rows \[41\]"),
        ([ANSWERS[40], ANSWERS[41], ANSWERS[40]], "row 40 twice"),
        ([ANSWERS[40], replace(ANSWERS[41], row=9)], "row 9"),
    ],
)
def test_rows_must_come_back_once_each(answers: list[Completion], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        generate(TableEngine(answers), PROMPTS, seed=1, step=2, version=4, sampling=SAMPLING, seq=6)


def test_prompts_that_cannot_work_are_refused() -> None:
    engine = TableEngine(ANSWERS.values())
    with pytest.raises(ValueError, match="6 tokens, seq is 5"):
        generate(engine, PROMPTS, seed=1, step=2, version=4, sampling=SAMPLING, seq=5)
    twins = PROMPTS.rows(np.array([0, 0]))
    with pytest.raises(ValueError, match="same row number"):
        generate(engine, twins, seed=1, step=2, version=4, sampling=SAMPLING, seq=6)
    assert engine.asked == []


def test_shards_of_a_step_equal_the_whole_step() -> None:
    """Law 4 as a run uses it: how a step is cut into shards changes no token."""
    settings = EngineConfig(max_rows=3)
    with closing(build_embedded(RANDOM_TINY, settings, max_seq=6, threads=1, device=torch.device("cpu"))) as engine:
        whole, *shards = [
            generate(engine, PROMPTS.rows(part), seed=1, step=2, version=0, sampling=SAMPLING, seq=6)
            for part in (slice(0, 2), slice(0, 1), slice(1, 2))
        ]
    for i, shard in enumerate(shards):
        for name, array in shard.arrays().items():
            np.testing.assert_array_equal(array[0], whole.arrays()[name][i])
