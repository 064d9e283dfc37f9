"""The promise of drafts in an embedded engine: the same bits, sooner."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.engines.config import SpeculationConfig
from stages.engines.embedded.drafts import calibration
from stages.engines.embedded.drafts.calibration import make_student
from stages.engines.embedded.drafts.draft_head import LearnedDrafter
from stages.engines.embedded.drafts.drafters import Draft, NgramDrafter
from stages.engines.embedded.kernels.cpu.native import load_native_kernels
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.rows import DraftTree, Row, chain
from stages.engines.protocol import Completion, Request
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY
from tests.contracts.embedded_engines import CPU, check_a_row_fails_alone, make_engine
from tests.contracts.engine_contract import (
    assert_updates_in_flight,
    make_requests,
    oracle_logprobs,
    random_llama,
    uneven_requests,
)
from tests.support.engines import assert_same_bits, by_row
from tests.support.processors import KERNELS

SUPPRESSED = 9


class WrongDrafter:
    """Drafts that no row can get, since the token is suppressed."""

    kinds = ("wrong",)
    by_position = False
    wants_hidden = False
    generation = 0

    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        return [Draft(chain((SUPPRESSED,) * length), "wrong") for length in longest]

    def observe(self, row: Row, hidden: np.ndarray) -> None: ...

    def finish(self, row: Row) -> None: ...

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def train(self) -> bool:
        return False


class OracleDrafter(WrongDrafter):
    """Knows the rows' tokens, and sometimes says something else."""

    kinds = ("oracle",)

    def __init__(self, known: dict[int, Completion]) -> None:
        self._known = known

    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        return [self._guess(row, length) for row, length in zip(rows, longest, strict=True)]

    def _guess(self, row: Row, longest: int) -> Draft | None:
        tokens = self._known[row.request.row].tokens[row.num_new : row.num_new + longest].tolist()
        if row.num_new % 3 == 0:
            tokens[-1] = SUPPRESSED
        return Draft(chain(tokens), "oracle") if row.num_new % 5 else None


class BushyDrafter(OracleDrafter):
    """Knows the rows' tokens, and says wrong things beside and behind them: of three positions in four the right guess
    is not in the main chain."""

    kinds = ("bushy",)

    def _guess(self, row: Row, longest: int) -> Draft | None:
        right = self._known[row.request.row].tokens[row.num_new : row.num_new + longest].tolist()
        tokens, parents, last = [], [], -1
        for depth, token in enumerate(right):
            pair = [token, SUPPRESSED] if (row.num_new + depth) % 4 == 0 else [SUPPRESSED, token]
            tokens += pair
            parents += [last, last]
            last = len(tokens) - 2 + pair.index(token)
            if depth % 2:  # something behind the wrong one
                tokens.append(3)
                parents.append(len(tokens) - 2 - pair.index(token))
        return Draft(DraftTree(tuple(tokens), tuple(parents)), "bushy")


@pytest.mark.usefixtures("longest_drafts")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_same_bits_with_any_drafts(temperature: float, kernels: str) -> None:
    """Lossless and invisible: neither a token nor a bit of a log-prob tells whether there were drafts, or whose. Random
    weights at low temperature repeat themselves, so that the lookup finds something."""
    requests = make_requests(7, max_new_tokens=40, temperature=temperature, suppress_token_ids=[SUPPRESSED])
    with closing(make_engine(RANDOM_TINY, 4, kernels=kernels)) as engine:
        expected = by_row(engine.generate(requests))
        assert engine.stats().draft_lengths == {}
    speculation = SpeculationConfig(drafter="ngram", max_tokens=5)
    for drafter in (None, WrongDrafter(), OracleDrafter(expected), BushyDrafter(expected)):
        drafters = [] if drafter is None else [drafter]
        engine = make_engine(RANDOM_TINY, 4, drafters=drafters, kernels=kernels, speculation=speculation)
        with closing(engine):
            assert_same_bits(by_row(engine.generate(requests)), expected)
            stats = engine.stats()
            drafted, accepted = sum(stats.drafted_tokens.values()), sum(stats.accepted_tokens.values())
            assert drafted > 0
            assert stats.tokens == sum(len(c.tokens) for c in expected.values())
            if type(drafter) is WrongDrafter:
                assert accepted == 0
            if type(drafter) is OracleDrafter:
                assert accepted > drafted / 2
            if isinstance(drafter, BushyDrafter):
                assert accepted > drafted / 3
                assert max(stats.accepted_positions) == 4
            assert_same_bits(by_row(engine.generate(requests)), expected)
            if drafter is None:  # the responses of the first time are drafts for the second
                again = engine.stats()
                assert again.accepted_tokens["earlier-3"] > 0.9 * again.drafted_tokens["earlier-3"]


class TaughtDrafter(LearnedDrafter):
    """Owns a draft head that learns when a test says so, and not while an engine is idle."""

    def __init__(self, path: Path | str, kernels: str = "torch") -> None:
        student = make_student(str(path), CPU, head_vocab=48)
        own = load_native_kernels() if kernels == "native" else TorchKernels()
        super().__init__(student, own, torch.float32, branches=3)

    def train(self) -> bool:
        return False

    def learn(self, steps: int) -> None:
        for _ in range(steps):
            assert super().train()


@pytest.mark.usefixtures("longest_drafts")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["learned", "both"])
def test_same_bits_with_learned_drafts(kind: str, temperature: float, kernels: str) -> None:
    """Before the head has learned, after it has, and after the model has changed under it."""
    requests = make_requests(24, max_new_tokens=40, temperature=temperature, suppress_token_ids=[SUPPRESSED])
    changed = {"model.norm.weight": torch.linspace(0.5, 2.0, 64)}
    later = make_requests(24, version=1, max_new_tokens=40, temperature=temperature, suppress_token_ids=[SUPPRESSED])
    with closing(make_engine(RANDOM_TINY, 4, kernels=kernels)) as engine:
        expected = by_row(engine.generate(requests))
        engine.load_weights(1, changed)
        expected_later = by_row(engine.generate(later))
    head = TaughtDrafter(RANDOM_TINY, kernels)
    drafters = [head] if kind == "learned" else [NgramDrafter(), head]
    speculation = SpeculationConfig(max_tokens=5)
    with closing(make_engine(RANDOM_TINY, 4, drafters=drafters, kernels=kernels, speculation=speculation)) as engine:
        assert_same_bits(by_row(engine.generate(requests)), expected)
        assert "learned" not in engine.stats().drafted_tokens
        head.learn(48)
        assert_same_bits(by_row(engine.generate(requests)), expected)
        stats = engine.stats()
        assert stats.accepted_tokens["learned"] > 0.02 * stats.drafted_tokens["learned"]
        assert sum(stats.accepted_positions.values()) == sum(stats.accepted_tokens.values())
        engine.load_weights(1, changed)
        assert_same_bits(by_row(engine.generate(later)), expected_later)
        assert engine.stats().drafted_tokens["learned"] > 0
        head.learn(16)


@pytest.mark.usefixtures("longest_drafts")
def test_the_head_learns() -> None:
    """Rows of one model: the share of right drafts rises with training, by a tenth at least."""
    requests = make_requests(30, max_new_tokens=40, min_new_tokens=40, temperature=0.7)
    head = TaughtDrafter(RANDOM_TINY)
    speculation = SpeculationConfig(max_tokens=2)
    rates = []
    with closing(make_engine(RANDOM_TINY, 8, drafters=[head], kernels="torch", speculation=speculation)) as engine:
        for steps in (16, 112, 0):
            by_row(engine.generate(requests))
            stats = engine.stats()
            if stats.drafted_tokens:
                rates.append(stats.accepted_tokens["learned"] / stats.drafted_tokens["learned"])
            head.learn(steps)
    assert rates[1] > 1.1 * rates[0]


@pytest.mark.usefixtures("longest_drafts")
def test_learned_drafts_of_preempted_rows() -> None:
    """Little memory, much drafting: see `test_same_bits_when_rows_are_preempted`."""
    settings = SamplingConfig(max_new_tokens=40, min_new_tokens=40)
    requests = [Request(i, 1, 1, tuple(range(3 + i, 13 + i + i % 11)), 0, settings) for i in range(24)]
    head = TaughtDrafter(RANDOM_TINY)
    with closing(make_engine(RANDOM_TINY, 24, drafters=[head], kernels="torch")) as engine:
        expected = by_row(engine.generate(requests))
        head.learn(32)
    engine = make_engine(RANDOM_TINY, 24, drafters=[head], kernels="torch", kv_budget_mb=1)
    with closing(engine):
        assert_same_bits(by_row(engine.generate(requests)), expected)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.accepted_tokens["learned"] > 0


class BusyDrafter(WrongDrafter):
    """Learns once, until it is let go, and notes what it is called for."""

    wants_hidden = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.learning, self.let_go = threading.Event(), threading.Event()

    def observe(self, row: Row, hidden: np.ndarray) -> None:
        self.log.append("observe")

    def train(self) -> bool:
        self.log.append("train")
        self.learning.set()
        return self.let_go.wait(60)


@pytest.mark.usefixtures("longest_drafts")
def test_rows_go_before_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that arrives during a lesson is accepted meanwhile and runs next, before a second lesson. Learning
    continues when the row is done."""
    drafter = BusyDrafter()
    for share in ("TRAIN_SHARE", "BUSY_TRAIN_SHARE"):
        monkeypatch.setattr(calibration, share, 1.0)
    with closing(make_engine(RANDOM_TINY, drafters=[drafter])) as engine:
        by_row(engine.generate(make_requests(1, max_new_tokens=1)))
        assert drafter.learning.wait(60)
        drafter.log.clear()
        running = engine.generate(make_requests(2, max_new_tokens=1))
        drafter.learning.clear()
        drafter.let_go.set()
        assert len(by_row(running)) == 2
        assert drafter.log[:2] == ["observe", "observe"]
        assert drafter.learning.wait(60)


@pytest.mark.parametrize("kind", [OracleDrafter, BushyDrafter])
def test_drafts_of_preempted_rows(kind: type[OracleDrafter]) -> None:
    """Little memory, much drafting: see `test_same_bits_when_rows_are_preempted`."""
    settings = SamplingConfig(max_new_tokens=40, min_new_tokens=40, temperature=0.5)
    requests = [Request(i, 1, 1, tuple(range(3, 13 + i % 11)), 0, settings) for i in range(24)]
    with closing(make_engine(RANDOM_TINY, 24)) as engine:
        expected = by_row(engine.generate(requests))
    with closing(make_engine(RANDOM_TINY, 24, kv_budget_mb=1, drafters=[kind(expected)])) as engine:
        assert_same_bits(by_row(engine.generate(requests)), expected)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert sum(stats.drafted_tokens.values()) > 0


@pytest.mark.usefixtures("longest_drafts")
@pytest.mark.parametrize("kind", ["lookup-2", "learned"])
def test_drafted_tokens_have_the_exact_distribution(kind: str, tmp_path: Path) -> None:
    """Second tokens of 4000 rows, drafted by lookup in the prompt or by a trained head, against the model's
    probabilities. With 4000 rows a token that is drafted too often by 0.05 in probability (of at most 1/2) shifts its
    count by 200, more than six standard deviations; the 1e-4 quantile keeps a right engine out."""
    model = random_llama(0, tied=True)
    model.save_pretrained(tmp_path)
    allowed = [5, 9, 40]
    rows, prompt = 4000, (9, 5, 40, 9, 9, 40, 5, 9)  # whichever comes first, 9 was followed by it before
    suppressed = [t for t in range(96) if t not in allowed]
    settings = SamplingConfig(3, 3, suppress_token_ids=suppressed)
    requests = [Request(i, 1, 1, prompt, 0, settings) for i in range(rows)]
    head = TaughtDrafter(tmp_path)
    drafter = head if kind == "learned" else NgramDrafter()
    with closing(make_engine(tmp_path, 64, drafters=[drafter], kernels="torch")) as engine:
        if kind == "learned":
            by_row(engine.generate([Request(i, 1, 2, prompt, 0, settings) for i in range(400)]))
            head.learn(64)
        completions = by_row(engine.generate(requests))
        assert engine.stats().drafted_tokens[kind] > rows / 2
    pairs = {(a, b): 0 for a in allowed for b in allowed}
    for completion in completions.values():
        a, b, _ = completion.tokens.tolist()
        pairs[a, b] += 1
    statistic = 0.0
    for a in allowed:
        logprobs = oracle_logprobs(model, requests[0], np.array([a, 5]))
        for b in allowed:
            expected = rows * float((logprobs[0, a] + logprobs[1, b]).exp())
            statistic += (pairs[a, b] - expected) ** 2 / expected
    assert statistic < 31.8  # chi-squared with 8 degrees of freedom: 1e-4 above


@pytest.mark.usefixtures("longest_drafts")
@pytest.mark.parametrize(("kind", "stages"), [("ngram", 1), ("learned", 1), ("learned", 2)])
def test_update_in_flight_with_drafts(kind: str, stages: int, tmp_path: Path) -> None:
    old = random_llama(0, tied=True)
    old.save_pretrained(tmp_path)
    head = TaughtDrafter(tmp_path)
    drafters = [NgramDrafter()] if kind == "ngram" else [head]
    with closing(make_engine(tmp_path, 8, drafters=drafters, in_flight=True, pipeline_parallel=stages)) as engine:
        if kind == "learned":
            by_row(engine.generate(uneven_requests()[:30]))
            head.learn(16)
        assert_updates_in_flight(engine, old, random_llama(1, tied=True))


@pytest.mark.usefixtures("longest_drafts")
def test_a_row_that_fails_fails_alone_with_drafts(tmp_path: Path) -> None:
    check_a_row_fails_alone(tmp_path, speculation=SpeculationConfig(drafter="both"))
