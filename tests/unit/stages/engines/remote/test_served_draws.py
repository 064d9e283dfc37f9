"""Law 4's draw as engines of other projects make it: the same tokens by C and by torch, bans and given tokens kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.engines.embedded.sampling import gumbel, noise_keys
from stages.engines.remote.serving.adapter import ServedRow
from stages.engines.remote.serving.draws import draw, fastest_choice

VOCAB = 4_801


def row(number: int, *, temperature: float, forced: tuple[int, ...] = (), suppress: tuple[int, ...] = ()) -> ServedRow:
    return ServedRow(number, number, 7, 3, (5, 6, 7), 9, 2, temperature, suppress, (11, 12), forced)


ROWS = [
    row(0, temperature=1.0),
    row(1, temperature=0.0),
    row(2, temperature=0.7, suppress=(1, 2, 3)),
    row(3, temperature=1.0, forced=(40, 41, 42)),
]
MADE = [0, 5, 1, 2]


def logits() -> torch.Tensor:
    """Less what an engine padded the vocabulary with."""
    return torch.randn(len(ROWS), 4_864, generator=torch.Generator().manual_seed(1)).mul(3)[:, :VOCAB]


def test_the_token_and_its_logprob_are_those_of_the_definition() -> None:
    """Against float64: the arg max of log p + noise of (seed, step, row, position), of what is not banned."""
    name, choose = fastest_choice("cpu")
    assert name == "native"
    tokens, logprobs = draw(logits(), ROWS, MADE, choose)
    for at, (one, made) in enumerate(zip(ROWS, MADE, strict=True)):
        scores = logits()[at].double()
        for token in (*one.suppress, *(one.stop if made < one.min_new_tokens else ())):
            scores[token] = float("-inf")
        log_p = torch.log_softmax(scores / (one.temperature or 1.0), 0)
        noise = gumbel(noise_keys(one.seed, one.step, one.row, 3 + made), VOCAB, torch.device("cpu"))[0].double()
        token = one.forced[made] if one.forced else int((log_p + noise * (one.temperature > 0)).argmax())
        assert (int(tokens[at]), float(logprobs[at])) == (token, pytest.approx(float(log_p[token]), abs=1e-5))


def test_without_a_compiler_torch_draws_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, native = fastest_choice("cpu")
    with monkeypatch.context() as patched:
        patched.setenv("CC", "no-such-compiler")
        name, plain = fastest_choice.__wrapped__("cpu")
    assert name == "torch"
    assert "drawn by torch, which is slower: there is no C compiler" in capsys.readouterr().out
    (tokens, logprobs), (others, their) = (draw(logits(), ROWS, MADE, choose) for choose in (native, plain))
    assert np.array_equal(tokens, others)
    assert torch.allclose(logprobs, their, atol=1e-5)


def test_on_a_gpu_torch_draws() -> None:
    assert fastest_choice("cuda")[0] == "torch"
