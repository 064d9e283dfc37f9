"""Responses before and after training: from the first and the last evaluation, cut where they end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline.graph.graph import GraphSpec
from pipeline.observe.history import History
from pipeline.observe.rows import ResponsePair, chosen, response_pairs, samples_table
from storage.address import Address
from storage.commits import Provenance
from storage.config import Layout, Layouts
from storage.ledger import Ledger
from storage.records import Rollout, Scores
from storage.rollouts import RolloutStore

PAIRS = [ResponsePair("a", "b", -0.5, "cde", 0.75), ResponsePair("fg", "hi", 0.25, "é", 1.0)]


@pytest.fixture
def history(tmp_path: Path) -> History:
    ledger, layout = Ledger(str(tmp_path / "ledger")), Layout(2, 1, 6)
    spec = GraphSpec(steps=4, shards=1, staleness=1, eval_every=2, eval_shards=1)
    return History(spec, ledger, RolloutStore(str(tmp_path), ledger, Layouts(layout, layout)), rows=2)


def evaluate(history: History, version: int, texts: list[tuple[str, str]], scores: list[float]) -> None:
    """Commits an evaluation; a token is a character, 0 pads."""
    tokens = np.zeros((len(texts), 6), np.int32)
    for row, (prompt, response) in enumerate(texts):
        tokens[row, : len(prompt + response)] = [ord(c) for c in prompt + response]
    starts, lengths = (np.array([len(text[i]) for text in texts], np.int32) for i in (0, 1))
    mask = (np.arange(6) >= starts[:, None]) & (np.arange(6) < (starts + lengths)[:, None])
    rollout = Rollout(
        row=np.arange(len(texts)),
        prompt_index=np.arange(len(texts)),
        tokens=tokens,
        prompt_lengths=starts,
        response_lengths=lengths,
        response_mask=mask,
        sampler_logprobs=np.where(mask, -1, 0).astype(np.float32),
        token_versions=np.where(mask, version, -1).astype(np.int32),
        finish_reason=np.zeros(len(texts), np.int8),
    )
    provenance = Provenance((), (), 0, "test", "w", "h", 1, 1.0)
    history.store.write(Address("evaluate", version), rollout, provenance)
    history.store.write(Address("evaluate_score", version), Scores(np.array(scores, np.float32)), provenance)


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_the_first_evaluation_is_paired_with_the_last(history: History) -> None:
    evaluate(history, 0, [("a", "b"), ("fg", "hi")], [-0.5, 0.25])
    assert response_pairs(history, decode) == [], "there is nothing after it yet"
    evaluate(history, 2, [("a", "xx"), ("fg", "y")], [9.0, 9.0])
    evaluate(history, 4, [("a", "cde"), ("fg", "é")], [0.75, 1.0])
    assert response_pairs(history, decode) == PAIRS


def test_those_shown_are_chosen_by_how_much_the_score_changed() -> None:
    pairs = [ResponsePair("p", "b", 0.0, "a", change) for change in (0.5, -1.0, 2.0, 0.25, 1.0)]
    assert [pair.after_score for pair in chosen(pairs)] == [2.0, 0.5, -1.0]
    assert [pair.after_score for pair in chosen(pairs[:2])] == [0.5, -1.0]
    assert chosen(pairs[:1]) == pairs[:1]
    assert chosen([]) == []


def test_the_table_is_one_that_mlflow_reads() -> None:
    assert json.loads(samples_table(PAIRS)) == {
        "columns": ["prompt", "before", "after", "before_score", "after_score", "before_kl", "after_kl"],
        "data": [["a", "b", "cde", -0.5, 0.75, None, None], ["fg", "hi", "é", 0.25, 1.0, None, None]],
    }
    assert "é" in samples_table(PAIRS)
