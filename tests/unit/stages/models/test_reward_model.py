"""A reward model's scores, gradients and files, against transformers on the same weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from stages.models.assets import rated_rows
from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig
from stages.models.hf_conversion import named_by_block, to_hf
from stages.models.protocol import Rank
from stages.models.reward_model import GroupedRows, RewardModel, TokenRows, ended, new_head
from stages.models.spec import SCORE_WEIGHT, VALUE_HEAD_WEIGHT
from stages.preferences.data import Group, Pairs
from stages.preferences.losses import LOSS, pair_loss_of
from tests.support.families import FAMILIES, random_model
from tests.support.models import opened, random_rollout

GROUPS = [
    Group(np.array([0, 1, 2]), Pairs(np.array([0, 0, 1]), np.array([1, 2, 2]))),
    Group(np.array([3, 4]), Pairs(np.array([4]), np.array([3]))),
]


def some_rows(rng: np.random.Generator, count: int = 5) -> TokenRows:
    return TokenRows.of([rng.integers(3, 250, size).tolist() for size in rng.integers(2, 12, count)])


@contextlib.contextmanager
def reward_model(directory: Path, model: ModelConfig, *, trained: bool = False) -> Iterator[RewardModel]:
    rank = Rank(0, 1, f"file://{directory}/rendezvous", 1)
    host = RewardModel(model, LayoutConfig(), rank, seed=5, total_steps=4 if trained else None)
    try:
        yield host
    finally:
        host.close()
        (directory / "rendezvous").unlink(missing_ok=True)


def by_transformers(model: PreTrainedModel, rows: TokenRows) -> torch.Tensor:
    """Row by row: no padding."""
    texts = zip(rows.tokens, rows.lengths, strict=True)
    scores = [model(torch.from_numpy(row[None, :length]).long()).logits[0, 0] for row, length in texts]
    return torch.stack(scores) + model.config.reward_bias


def trained_model(path: str | Path, **changes: object) -> ModelConfig:
    optimizer = OptimizerConfig(lr=1e-2, decay="constant", max_grad_norm=0.0, micro_batch_tokens=16)
    return ModelConfig(path=str(path), critic=optimizer, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_gives_the_same_scores(tmp_path: Path, family: str) -> None:
    """After a step and with a bias, in every family; padded rows too, whose end transformers finds by the pad token."""
    random_model(family).save_pretrained(tmp_path / "start")
    rows = some_rows(np.random.default_rng(0))
    with reward_model(tmp_path, trained_model(tmp_path / "start", frozen_blocks=1), trained=True) as host:
        before = host.scores(rows)
        host.train(0, GroupedRows(rows, [group.rows for group in GROUPS], pair_loss_of(GROUPS, 5)))
        host.shift(0.25)
        scores = host.scores(rows)
        host.export(tmp_path / "model")
    assert np.abs(scores - before).max() > 0.3
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert model.config.num_labels == 1
    with torch.no_grad():
        np.testing.assert_allclose(scores, by_transformers(model, rows), atol=2e-5)
        tokens = np.where(np.arange(rows.tokens.shape[1]) < rows.lengths[:, None], rows.tokens, 0)
        padded = model(torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(tokens != 0).long()).logits
    np.testing.assert_allclose(scores, padded[:, 0] + model.config.reward_bias, atol=2e-5)
    with reward_model(tmp_path, ModelConfig(path=str(tmp_path / "model"))) as again:
        np.testing.assert_allclose(again.scores(rows), scores, atol=1e-6)


def test_gradients_equal_transformers(tmp_path: Path) -> None:
    """The gradients are those of the Bradley-Terry loss, cut into micro-batches of 16 tokens, for every trained
    tensor."""
    random_model("Qwen 3").save_pretrained(tmp_path / "start")
    rows = some_rows(np.random.default_rng(1))
    with reward_model(tmp_path, trained_model(tmp_path / "start"), trained=True) as host:
        host.export(tmp_path / "model")
        metrics = host.train(0, GroupedRows(rows, [group.rows for group in GROUPS], pair_loss_of(GROUPS, 5)))
        found = {
            name: gradient
            for part, block, parameter in named_by_block(host._model, 0)
            for name, gradient in to_hf(part, block, parameter.main_grad, host._blueprint.spec, lambda t: [t])
        }
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    scores = by_transformers(model, rows)
    better, worse, weights = [0, 0, 1, 4], [1, 2, 2, 3], torch.tensor([1 / 6] * 3 + [1 / 2])
    loss = -(weights * torch.nn.functional.logsigmoid(scores[better] - scores[worse])).sum()
    loss.backward()
    np.testing.assert_allclose(metrics[LOSS], loss.item(), rtol=1e-5)
    expected = dict(model.named_parameters())
    assert len(expected) > 20
    for name, parameter in expected.items():
        assert parameter.grad is not None
        theirs = found[VALUE_HEAD_WEIGHT if name == SCORE_WEIGHT else name]
        torch.testing.assert_close(theirs, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_frozen_blocks_and_adapters_leave_the_rest_as_it_was(tmp_path: Path) -> None:
    random_model("Llama 2").save_pretrained(tmp_path / "start")
    rows = some_rows(np.random.default_rng(1))
    config = trained_model(tmp_path / "start", lora=LoraConfig(rank=4))
    with reward_model(tmp_path, config, trained=True) as host:
        host.train(0, GroupedRows(rows, [group.rows for group in GROUPS], pair_loss_of(GROUPS, 5)))
        host.train(1, GroupedRows(rows, [group.rows for group in GROUPS], pair_loss_of(GROUPS, 5)))
        scores = host.scores(rows)
        host.export(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        np.testing.assert_allclose(scores, by_transformers(model, rows), atol=2e-5)
    start = random_model("Llama 2").state_dict()
    differ = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, start.get(name, tensor))}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in differ} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_the_best_state_comes_back(tmp_path: Path) -> None:
    rows = some_rows(np.random.default_rng(1))
    batch = GroupedRows(rows, [group.rows for group in GROUPS], pair_loss_of(GROUPS, 5))
    with reward_model(tmp_path, trained_model("random:tiny"), trained=True) as host:
        host.train(0, batch)
        host.keep()
        kept = host.scores(rows)
        host.train(1, batch)
        assert np.abs(host.scores(rows) - kept).max() > 0.1
        host.restore()
        np.testing.assert_array_equal(host.scores(rows), kept)


def test_a_critic_starts_from_a_reward_model(tmp_path: Path) -> None:
    """Its values are that model's scores at every prefix, head and bias included; so they are again at version 0."""
    with reward_model(tmp_path, trained_model("random:tiny"), trained=True) as host:
        host.shift(0.5)
        host.export(tmp_path / "model")
    rollout = random_rollout(np.random.default_rng(0), 6, 12)
    config = ModelConfig(path="random:tiny", critic_path=str(tmp_path / "model"), critic=OptimizerConfig(lr=1e-2))
    with opened(tmp_path, config) as gang:
        found = gang.values(rollout)
    at = np.argwhere(rollout.response_mask)
    prefixes = TokenRows.of([rollout.tokens[row, :place].tolist() for row, place in at])
    with reward_model(tmp_path, ModelConfig(path=str(tmp_path / "model"))) as host:
        np.testing.assert_allclose(found.values[rollout.response_mask], host.scores(prefixes), atol=1e-5)
    ends = TokenRows.of(
        [
            row[:length].tolist()
            for row, length in zip(rollout.tokens, rollout.prompt_lengths + rollout.response_lengths, strict=True)
        ]
    )
    with reward_model(tmp_path, ModelConfig(path=str(tmp_path / "model"))) as host:
        np.testing.assert_allclose(found.bootstrap_values, host.scores(ends), atol=1e-5)


def test_a_new_head_has_scores_of_about_one() -> None:
    weight = new_head(4096, 0)[SCORE_WEIGHT]
    assert weight.shape == (1, 4096)
    assert abs(float(weight.std()) * math.sqrt(4097) - 1) < 0.05
    assert torch.equal(weight, new_head(4096, 0)[SCORE_WEIGHT])
    assert not torch.equal(weight, new_head(4096, 1)[SCORE_WEIGHT])


@pytest.mark.parametrize(("row", "expected"), [([5, 6], [5, 6, 2]), ([5, 2], [5, 2]), ([5, 3], [5, 3])])
def test_a_row_ends_once(row: Sequence[int], expected: list[int]) -> None:
    assert ended(row, (2, 3)) == expected


def test_mean_and_spread_are_those_of_the_ratings_and_a_snippet_is_there_once() -> None:
    """1, 2, 3, 2: mean 2, sum of squares 2, of n - 1 = 3 degrees of freedom."""
    reviews = [["7", "2.01", "A film."], ["8", "-4", "B film."], ["9", "1", "A film."]]
    ratings = [["8", "-4", "0", "[-4, -4]"], ["9", "1", "0", "[1, 1]"], ["7", "2.0", "0.7", "[1, 2, 3, 2]"]]
    assert [*rated_rows(reviews, ratings)] == [
        "7\t2.000000\t0.816497\t4\tA film.",
        "8\t-4.000000\t0.000000\t2\tB film.",
    ]
