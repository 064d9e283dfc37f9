"""The contract of generation engines, for the torch engine; and what only it promises."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.engines.config import EngineConfig, SamplingConfig, SpeculationConfig
from stages.engines.embedded.draft_tree import DraftTree, chain
from stages.engines.embedded.drafts.calibration import make_student
from stages.engines.embedded.drafts.draft_head import LearnedDrafter
from stages.engines.embedded.drafts.drafters import Draft, Drafter, NgramDrafter
from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.kernels.cpu.native import NoNativeKernelsError, load_native_kernels
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.rows import Row
from stages.engines.embedded.sampling.noise import gumbel, noise_keys
from stages.engines.embedded.scheduler import PASS_TOKENS
from stages.engines.protocol import Completion, GenerationEngine, Request, RequestError, WeightsError
from stages.models.hf_files import RANDOM_TINY, read_tokenizer
from tests.contracts.engine_contract import (
    MAX_SEQ,
    EngineContract,
    assert_close_in_bfloat16,
    make_requests,
    oracle_logprobs,
    random_llama,
    trained_tensors,
)
from tests.support.engines import assert_same_bits, by_row
from tests.support.paths import SMOLLM2
from tests.support.processors import KERNELS, needs_compiler

CPU = torch.device("cpu")


def make_engine(
    path: Path | str,
    slots: int = 4,
    threads: int = 1,
    drafter: Drafter | None = None,
    drafters: Sequence[Drafter] = (),
    **config: object,
) -> EmbeddedEngine:
    settings = EngineConfig(slots=slots, **config)
    drafters = drafters if drafter is None else [drafter]
    return EmbeddedEngine(str(path), settings, max_seq=MAX_SEQ, threads=threads, device=CPU, drafters=drafters)


class TestTorchEngineOnPlainTorch(EngineContract):
    def make(self, path: Path, slots: int = 4) -> GenerationEngine:
        return make_engine(path, slots, kernels="torch")


@needs_compiler
class TestTorchEngineOnNativeKernels(EngineContract):
    def make(self, path: Path, slots: int = 4) -> GenerationEngine:
        return make_engine(path, slots, kernels="native")


def test_is_a_generation_engine() -> None:
    with closing(make_engine(RANDOM_TINY)) as engine:
        assert isinstance(engine, GenerationEngine)


@pytest.mark.parametrize("kernels", KERNELS)
def test_bfloat16_weights_stay_close(kernels: str, tmp_path: Path) -> None:
    model = random_llama(0, tied=True)
    model.save_pretrained(tmp_path)
    requests = make_requests(6, min_new_tokens=16)
    with closing(make_engine(tmp_path, 6, dtype="bfloat16", kernels=kernels)) as engine:
        completions = by_row(engine.generate(requests))
    assert_close_in_bfloat16(model, requests, completions)


def test_incomplete_directory_is_refused(tmp_path: Path) -> None:
    """`load_weights` may bring some tensors; a model to start from must have all."""
    model = random_llama(0, tied=True)
    tensors = dict(model.state_dict())
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight is missing"):
        make_engine(tmp_path)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_in_any_batch(dtype: str, kernels: str) -> None:
    """Stronger than the contract, on a CPU: not only the tokens, every log-prob bit for bit."""
    requests = make_requests(7)
    with closing(make_engine(RANDOM_TINY, 7, dtype=dtype, kernels=kernels)) as engine:
        together = by_row(engine.generate(requests))
    with closing(make_engine(RANDOM_TINY, 2, dtype=dtype, kernels=kernels)) as engine:
        assert_same_bits(by_row(engine.generate(requests[::-1])), together)
        assert_same_bits(by_row(engine.generate(requests[4:5])), {4: together[4]})


@pytest.mark.parametrize("kernels", KERNELS)
def test_same_bits_with_two_threads(kernels: str) -> None:
    """Few tokens: two OpenMP threads on a busy machine spend their time waiting for each other."""
    requests = make_requests(3, max_new_tokens=2, min_new_tokens=2)
    with (
        closing(make_engine(RANDOM_TINY, kernels=kernels)) as one,
        closing(make_engine(RANDOM_TINY, threads=2, kernels=kernels)) as two,
    ):
        assert_same_bits(by_row(two.generate(requests)), by_row(one.generate(requests)))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 24), ("bfloat16", 48)])
def test_same_bits_when_rows_are_preempted(dtype: str, rows: int, kernels: str) -> None:
    """random:tiny: 2 tensors * 4 layers * 2 heads * 16 dims * 4 bytes = 1 KiB a token, so 1 MiB holds 64 blocks of 16
    (128 in bfloat16); rows of up to 60 tokens need 4 each. The rows that are sent back are prefilled again, response
    included."""
    settings = SamplingConfig(max_new_tokens=40, min_new_tokens=40)
    requests = [Request(i, 1, 1, tuple(range(3, 13 + i % 11)), 0, settings) for i in range(rows)]
    with closing(make_engine(RANDOM_TINY, rows, kv_budget_mb=16, dtype=dtype, kernels=kernels)) as engine:
        expected = by_row(engine.generate(requests))
        assert engine.stats().preemptions == 0
    with closing(make_engine(RANDOM_TINY, rows, kv_budget_mb=1, dtype=dtype, kernels=kernels)) as engine:
        assert_same_bits(by_row(engine.generate(requests)), expected)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.kv_peak_fraction == 1.0


@pytest.mark.parametrize("kernels", KERNELS)
def test_same_bits_with_a_shared_prompt(kernels: str) -> None:
    """Six rows of one prompt of 40 tokens: its first two blocks are computed once, also where the rows start in one
    pass; a row alone computes all of it."""
    prompt = tuple(range(10, 50))
    settings = SamplingConfig(max_new_tokens=8, min_new_tokens=8)
    requests = [Request(i, 1, 1, prompt, 0, settings) for i in range(6)]
    with closing(make_engine(RANDOM_TINY, 4, kernels=kernels)) as engine:
        together = by_row(engine.generate(requests))
        stats = engine.stats()
        assert (stats.shared_tokens, stats.prompt_tokens) == (5 * 32, 6 * 40 - 5 * 32)
        assert stats.preemptions == 0
        for request in requests:
            engine.sleep()  # forgets the prompt's blocks
            engine.wake()
            assert_same_bits(by_row(engine.generate([request])), {request.row: together[request.row]})
        assert engine.stats().shared_tokens == 0


@pytest.mark.parametrize("update", ["drain", "inflight"])
def test_a_prompt_is_fed_once_until_weights_or_memory_change(update: str, tmp_path: Path) -> None:
    """Rows that do not meet share the prompt's blocks too; not those of older weights, nor of memory given back."""
    random_llama(seed=1, tied=True).save_pretrained(tmp_path)
    prompt = tuple(range(3, 40))
    sampling = SamplingConfig(max_new_tokens=6)
    with closing(make_engine(tmp_path, 1, update=update)) as engine:

        def shared_tokens(row: int, version: int) -> int:
            engine.stats()
            (found,) = engine.generate([Request(row, 0, 0, prompt, version, sampling)])
            with closing(make_engine(tmp_path, 1)) as fresh:
                (expected,) = fresh.generate([Request(row, 0, 0, prompt, 0, sampling)])
            np.testing.assert_array_equal(found.logprobs, expected.logprobs)
            return engine.stats().shared_tokens

        assert [shared_tokens(row, 0) for row in range(3)] == [0, 32, 32]
        engine.load_weights(1, {})
        assert [shared_tokens(row, 1) for row in range(2)] == [0, 32]
        engine.sleep()
        engine.wake()
        assert shared_tokens(2, 1) == 0


def test_long_prompts_are_fed_in_pieces() -> None:
    """More prompt tokens than a pass takes: the tokens are those of every row alone."""
    settings = SamplingConfig(max_new_tokens=4, min_new_tokens=4)
    rng = np.random.default_rng(0)
    requests = [Request(i, 1, 1, tuple(rng.integers(3, 256, 60 - i).tolist()), 0, settings) for i in range(12)]
    assert sum(len(r.tokens) for r in requests) > PASS_TOKENS
    with closing(make_engine(RANDOM_TINY, 12)) as engine:
        together = by_row(engine.generate(requests))
        for request in requests[-3:]:
            assert_same_bits(by_row(engine.generate([request])), {request.row: together[request.row]})


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
    is not in the first line."""

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


SUPPRESSED = 9


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_same_bits_with_any_drafts(temperature: float, kernels: str) -> None:
    """Lossless and invisible: neither a token nor a bit of a log-prob tells whether there were drafts, or whose. Random
    weights at low temperature repeat themselves, so that the lookup finds something."""
    requests = make_requests(7, max_new_tokens=40, temperature=temperature, suppress_token_ids=[SUPPRESSED])
    with closing(make_engine(RANDOM_TINY, 4, kernels=kernels)) as engine:
        expected = by_row(engine.generate(requests))
        assert engine.stats().draft_lengths == {}
    speculation = SpeculationConfig(drafter="ngram", lengths="longest", max_tokens=5)
    for drafter in (None, WrongDrafter(), OracleDrafter(expected), BushyDrafter(expected)):
        engine = make_engine(RANDOM_TINY, 4, drafter=drafter, kernels=kernels, speculation=speculation)
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
        student = make_student(SpeculationConfig(head_vocab=48), str(path), CPU)
        own = load_native_kernels() if kernels == "native" else TorchKernels()
        super().__init__(student, own, torch.float32, branches=3)

    def train(self) -> bool:
        return False

    def learn(self, steps: int) -> None:
        for _ in range(steps):
            assert super().train()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["learned", "both"])
def test_same_bits_with_learned_drafts(kind: str, temperature: float, kernels: str) -> None:
    """Before the head has learned, after it has, and after the model has changed under it."""
    requests = make_requests(16, max_new_tokens=40, temperature=temperature, suppress_token_ids=[SUPPRESSED])
    changed = {"model.norm.weight": torch.linspace(0.5, 2.0, 64)}
    later = make_requests(16, version=1, max_new_tokens=40, temperature=temperature, suppress_token_ids=[SUPPRESSED])
    with closing(make_engine(RANDOM_TINY, 4, kernels=kernels)) as engine:
        expected = by_row(engine.generate(requests))
        engine.load_weights(1, changed)
        expected_later = by_row(engine.generate(later))
    head = TaughtDrafter(RANDOM_TINY, kernels)
    drafters = [head] if kind == "learned" else [NgramDrafter(), head]
    speculation = SpeculationConfig(lengths="longest", max_tokens=5)
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


def test_the_head_learns() -> None:
    """Rows of one model: the share of right drafts rises with training, by a tenth at least."""
    requests = make_requests(30, max_new_tokens=40, min_new_tokens=40, temperature=0.7)
    head = TaughtDrafter(RANDOM_TINY)
    speculation = SpeculationConfig(lengths="longest", max_tokens=2)
    rates = []
    with closing(make_engine(RANDOM_TINY, 8, drafters=[head], kernels="torch", speculation=speculation)) as engine:
        for steps in (16, 112, 0):
            by_row(engine.generate(requests))
            stats = engine.stats()
            if stats.drafted_tokens:
                rates.append(stats.accepted_tokens["learned"] / stats.drafted_tokens["learned"])
            head.learn(steps)
    assert rates[1] > 1.1 * rates[0]


def test_learned_drafts_of_preempted_rows() -> None:
    """Little memory, much drafting: see `test_same_bits_when_rows_are_preempted`."""
    settings = SamplingConfig(max_new_tokens=40, min_new_tokens=40)
    requests = [Request(i, 1, 1, tuple(range(3 + i, 13 + i + i % 11)), 0, settings) for i in range(24)]
    head = TaughtDrafter(RANDOM_TINY)
    with closing(make_engine(RANDOM_TINY, 24, drafters=[head], kernels="torch")) as engine:
        expected = by_row(engine.generate(requests))
        head.learn(32)
    speculation = SpeculationConfig(lengths="longest")
    engine = make_engine(RANDOM_TINY, 24, drafters=[head], kernels="torch", kv_budget_mb=1, speculation=speculation)
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


def test_rows_go_before_learning() -> None:
    """A row that arrives during a lesson is accepted meanwhile and runs next: no second lesson comes first. When it is
    done, learning goes on."""
    drafter = BusyDrafter()
    speculation = SpeculationConfig(train_share=1.0, lengths="longest")
    with closing(make_engine(RANDOM_TINY, drafter=drafter, speculation=speculation)) as engine:
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
    with closing(make_engine(RANDOM_TINY, 24, kv_budget_mb=1, drafter=kind(expected))) as engine:
        assert_same_bits(by_row(engine.generate(requests)), expected)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert sum(stats.drafted_tokens.values()) > 0


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
    speculation = SpeculationConfig(lengths="longest")
    head = TaughtDrafter(tmp_path)
    drafter = head if kind == "learned" else NgramDrafter()
    with closing(make_engine(tmp_path, 64, drafter=drafter, kernels="torch", speculation=speculation)) as engine:
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


def test_tied_head_comes_with_its_embedding_or_not_at_all(tmp_path: Path) -> None:
    model = random_llama(0, tied=True)
    model.save_pretrained(tmp_path)
    embedding = torch.randn_like(model.lm_head.weight)
    with closing(make_engine(tmp_path)) as engine:
        engine.load_weights(1, {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
        with pytest.raises(WeightsError, match=r"lm_head\.weight is tied"):
            engine.load_weights(2, {"lm_head.weight": embedding})
        assert engine.version == 1


def test_kv_budget_too_small_for_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.kv_budget_mb is 0; one row of 64 tokens needs 1"):
        make_engine(RANDOM_TINY, kv_budget_mb=0)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.warns(UserWarning, match="plain torch, which is slower: there is no C compiler"):
        engine = make_engine(RANDOM_TINY)
    with closing(engine):
        assert engine.kernels == "torch"
    with pytest.raises(NoNativeKernelsError, match="no C compiler"):
        make_engine(RANDOM_TINY, kernels="native")


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.slots is 0"):
        make_engine(RANDOM_TINY, slots=0)
    with pytest.raises(ValueError, match=r"max_seq is 257.* 256 tokens"):
        EmbeddedEngine(RANDOM_TINY, EngineConfig(), max_seq=257, threads=1, device=CPU)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        make_engine("nowhere")


def test_closed_iterator_takes_its_rows_with_it() -> None:
    """Six rows on one slot, closed after the first: the engine is free for the next call, and drains."""
    with closing(make_engine(RANDOM_TINY, slots=1)) as engine:
        requests = make_requests(6, min_new_tokens=16)
        running = engine.generate(requests)
        next(running)
        running.close()
        engine.load_weights(1, {})
        assert engine.stats().rows < 6


@pytest.mark.parametrize(
    ("drafter", "stages", "num_rows"), [("none", 1, 300), ("ngram", 1, 300), ("learned", 1, 100), ("learned", 2, 100)]
)
def test_update_in_flight(drafter: str, stages: int, num_rows: int, tmp_path: Path) -> None:
    """Rows go on under the new weights, from the same tokens: every token is the draw of one whole version, the one
    that is recorded, as an oracle that is fed the row under that version's weights finds. Also with drafts. Rows of
    uneven length, so that the eight in flight are never all between two rows; and so many of them that most are still
    to come when the new weights do: drafts that are learned take longer."""
    old, new = random_llama(0, tied=True), random_llama(1, tied=True)
    old.save_pretrained(tmp_path)
    requests = [
        Request(i, 11, 3, (3 + i % 90, 5), 0, SamplingConfig(n, n, temperature=0.8))
        for i, n in enumerate(30 + i % 13 for i in range(num_rows))
    ]
    head = TaughtDrafter(tmp_path)
    drafters = {"none": [], "ngram": [NgramDrafter()], "learned": [head]}[drafter]
    settings = {"update": "inflight", "speculation": SpeculationConfig(lengths="longest"), "pipeline_parallel": stages}
    engine = make_engine(tmp_path, 8, drafters=drafters, **settings)
    with closing(engine):
        if drafter == "learned":
            by_row(engine.generate(requests[:30]))
            head.learn(16)
        running = engine.generate(requests)
        done = next(running)
        engine.load_weights(1, trained_tensors(new))
        assert engine.version == 1
        rows = by_row(running) | {done.row: done}
    last = rows[num_rows - 1]
    assert len(rows) == num_rows
    assert set(done.versions.tolist()) == {0}
    assert set(last.versions.tolist()) == {1}
    both = [c for c in rows.values() if len(set(c.versions.tolist())) == 2]
    assert 1 <= len(both) <= 8
    for completion in [*both, done, last]:
        assert (np.diff(completion.versions) >= 0).all()
        request, num = requests[completion.row], len(completion.tokens)
        noise = gumbel(noise_keys(11, 3, request.row, 2 + np.arange(num)), 96, CPU)
        for version, model in ((0, old), (1, new)):
            logprobs = oracle_logprobs(model, request, completion.tokens)
            made = completion.versions == version
            chosen = logprobs[range(num), completion.tokens.tolist()].numpy()
            np.testing.assert_allclose(completion.logprobs[made], chosen[made], atol=1e-4)
            np.testing.assert_array_equal(completion.tokens[made], (logprobs + noise).argmax(-1).numpy()[made])


def test_update_in_flight_without_rows_and_with_bad_weights() -> None:
    with closing(make_engine(RANDOM_TINY, update="inflight")) as engine:
        with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
            engine.load_weights(1, {"model.norm.weight": torch.full((64,), float("nan"))})
        assert engine.version == 0
        engine.load_weights(2, {})
        assert engine.version == 2
        (row,) = engine.generate(make_requests(1))  # asks for version 0 or newer
        assert set(row.versions.tolist()) == {2}
        with pytest.raises(RequestError, match="version 2 is resident"):
            engine.generate([replace(request, version=3) for request in make_requests(1)])


def test_sleep_is_refused_with_rows_in_flight() -> None:
    with closing(make_engine(RANDOM_TINY, slots=1)) as engine:
        running = engine.generate(make_requests(6, min_new_tokens=16))
        next(running)
        with pytest.raises(RuntimeError, match="rows are in flight"):
            engine.sleep()
        assert len(list(running)) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_engine_tells_its_callers() -> None:
    """Finite weights whose products overflow: the callers get the reason instead of waiting for ever."""
    with closing(make_engine(RANDOM_TINY)) as engine:
        engine.load_weights(1, {"model.layers.0.mlp.down_proj.weight": torch.full((64, 176), 3e38)})
        with pytest.raises(RuntimeError, match="stopped") as caught:
            list(engine.generate(make_requests(3, version=1)))
        assert isinstance(caught.value.__cause__, FloatingPointError)
        with pytest.raises(RuntimeError, match="stopped"):
            engine.load_weights(2, {})


@pytest.mark.smollm2
def test_smollm2_greedy_equals_transformers() -> None:
    tokenizer = read_tokenizer(str(SMOLLM2))
    prompts = [tokenizer.encode("The capital of France is"), tokenizer.encode("I watched this film and")]
    with closing(make_engine(SMOLLM2)) as engine:
        requests = [Request(i, 0, 0, tuple(p), 0, SamplingConfig(12, temperature=0.0)) for i, p in enumerate(prompts)]
        completions = by_row(engine.generate(requests))
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert completions[i].tokens.tolist() == expected.tolist()
        assert "Paris" in tokenizer.decode(completions[0].tokens.tolist())
