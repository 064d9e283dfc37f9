"""Masks, the one shift, and the weights that make losses independent of how rows are cut."""

from __future__ import annotations

import pytest
import torch

from stages.ppo.masks import (
    last_token_index,
    last_token_mask,
    masked_mean,
    masked_var,
    masked_whiten,
    predictions_of_tokens,
    state_values,
    token_weights,
)

NAN = float("nan")
# Three rows: two sampled tokens at offset 1, one at the end, none.
MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)


def test_predictions_move_one_to_the_right_and_nothing_predicts_token_zero() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert predictions_of_tokens(x).tolist() == [[0.0, 1.0, 2.0]]
    logits_RTV = torch.arange(6.0).reshape(1, 3, 2)
    assert predictions_of_tokens(logits_RTV).tolist() == [[[0.0, 0.0], [0.0, 1.0], [2.0, 3.0]]]


def test_last_token() -> None:
    assert last_token_mask(MASK).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert last_token_index(MASK).tolist() == [2, 3, 0]


def test_state_values_are_of_the_state_before_each_token_and_after_the_last() -> None:
    head = torch.tensor([[10.0, 11.0, 12.0, 13.0], [20.0, 21.0, 22.0, 23.0], [30.0, 31.0, 32.0, 33.0]])
    values, bootstrap = state_values(head, MASK)
    assert values.tolist() == [[0.0, 10.0, 11.0, 0.0], [0.0, 0.0, 0.0, 22.0], [0.0, 0.0, 0.0, 0.0]]
    assert bootstrap.tolist() == [12.0, 23.0, 0.0]


def test_moments_and_whitening_read_only_the_mask() -> None:
    x = torch.tensor([[NAN, 1.0, 3.0, NAN], [NAN, NAN, NAN, 8.0], [NAN] * 4], dtype=torch.float64)
    assert masked_mean(x, MASK).item() == 4.0
    assert masked_var(x, MASK).item() == pytest.approx((9 + 1 + 16) / 3)
    std = (26 / 3) ** 0.5
    expected = torch.tensor([[0, -3, -1, 0], [0, 0, 0, 4], [0, 0, 0, 0]], dtype=torch.float64) / std
    torch.testing.assert_close(masked_whiten(x, MASK), expected, atol=1e-8, rtol=0)
    torch.testing.assert_close(
        masked_whiten(x, MASK, keep_mean=True), torch.where(MASK, expected + 4, 0), atol=1e-8, rtol=0
    )


def test_empty_mask_gives_zeros() -> None:
    x, none = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(x, none).item() == 0
    assert masked_whiten(x, none).abs().sum().item() == 0
    assert token_weights(none, "token").sum().item() == token_weights(none, "sequence").sum().item() == 0


def test_token_weights_by_hand() -> None:
    third = 1 / 3
    expected = {
        "token": [[0, third, third, 0], [0, 0, 0, third], [0, 0, 0, 0]],
        "sequence": [[0, 0.25, 0.25, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]],
    }
    for aggregation, weights in expected.items():
        torch.testing.assert_close(
            token_weights(MASK, aggregation, torch.float64), torch.tensor(weights, dtype=torch.float64)
        )
