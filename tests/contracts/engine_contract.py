"""The contract of every `GenerationEngine`, in parts by its `Capabilities`. Subclass `EngineContract`, or the
classes that `contract_of` combines, and build the engine in `make`. The oracle is transformers, on small random
Llamas (tied and untied) that transformers itself initialised and saved."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from stages.engines.capabilities import Capabilities
from stages.engines.embedded.sampling import gumbel, noise_keys
from stages.engines.protocol import Completion, GenerationEngine, Request, RequestError, WeightsError
from stages.engines.remote.client import RemoteEngine
from stages.engines.remote.weights import ModelFiles
from stages.models.config import SamplingConfig
from storage.records import FinishReason
from tests.support.engines import by_row

VOCAB, EOS, MAX_SEQ = 96, 2, 64
GREEDY_TOKENS = 14
"""Tokens that each of `greedy_requests` asks for."""


def random_llama(seed: int, tied: bool, head_dim: int = 8) -> LlamaForCausalLM:
    """float32, 3 blocks, grouped queries, a head_dim that is not hidden / heads."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=36,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # transformers starts norms at 1, which would hide a norm that is left out
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


BAD_TOKEN = 7


def overflow_after(model: LlamaForCausalLM) -> None:
    """Changes finite weights so that a product overflows in the first block for rows that have BAD_TOKEN, and for no
    other: it alone has a number in hidden channel 0, which one feature of the MLP reads and multiplies with 3e38."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[BAD_TOKEN, 0] = 100.0
        first = model.model.layers[0]
        first.self_attn.o_proj.weight[0] = 0.0
        for product in (first.mlp.gate_proj, first.mlp.up_proj):
            product.weight[0] = 0.0
            product.weight[0, 0] = 10.0
        first.mlp.down_proj.weight[:, 0] = 3e38


def trained_tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_requests(num: int, version: int = 0, **sampling: object) -> list[Request]:
    """`num` rows with prompts of 1 to 12 tokens, and the same ones whatever `num` is."""
    settings = SamplingConfig(**{"max_new_tokens": 16, "temperature": 0.8, **sampling})
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(3, VOCAB, rng.integers(1, 13)).tolist()) for _ in range(num)]
    return [Request(row, 11, 3, prompt, version, settings) for row, prompt in enumerate(prompts)]


def greedy_requests(version: int = 0) -> list[Request]:
    """Prompts of up to 46 tokens: positions at which scaled and plain rotary embeddings differ."""
    rng = np.random.default_rng(7)
    sampling = SamplingConfig(GREEDY_TOKENS, GREEDY_TOKENS, temperature=0.0)
    prompts = [tuple(rng.integers(3, VOCAB, length).tolist()) for length in (1, 13, 30, 46)]
    return [Request(row, 11, 3, prompt, version, sampling) for row, prompt in enumerate(prompts)]


def oracle_logprobs(model: PreTrainedModel, request: Request, tokens: np.ndarray) -> torch.Tensor:
    """float64 log-probs [new, vocab] of the distribution each token should have been drawn from."""
    with torch.no_grad():
        logits = model(torch.tensor([[*request.tokens, *tokens.tolist()]])).logits[0].double()
    logits = logits[len(request.tokens) - 1 : -1]
    logits[:, request.sampling.suppress_token_ids] = -torch.inf
    logits[: request.sampling.min_new_tokens, EOS] = -torch.inf
    return (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)


def assert_logprobs(
    model: PreTrainedModel, request: Request, completion: Completion, atol: float = 1e-4
) -> torch.Tensor:
    """The completion's log-probs are the model's; returns those of every token, [new, vocab]."""
    expected = oracle_logprobs(model, request, completion.tokens)
    chosen = expected[range(len(completion.tokens)), completion.tokens.tolist()]
    np.testing.assert_allclose(completion.logprobs, chosen.numpy(), atol=atol)
    return expected


def assert_greedy_of(
    model: PreTrainedModel, completions: Mapping[int, Completion], requests: Sequence[Request]
) -> None:
    """The tokens that `greedy_requests` ask for, and their log-probs, are those of the model."""
    for request in requests:
        expected = assert_logprobs(model, request, completions[request.row])
        assert completions[request.row].tokens.tolist() == expected.argmax(-1).tolist()


def assert_close_in_bfloat16(
    model: LlamaForCausalLM, requests: list[Request], completions: dict[int, Completion]
) -> None:
    """16 new tokens a row: close to the float32 model's, and not the same."""
    errors = [
        np.abs(c.logprobs - oracle_logprobs(model, requests[row], c.tokens)[range(16), c.tokens.tolist()].numpy())
        for row, c in completions.items()
    ]
    assert 1e-5 < np.mean(errors) < 0.05


def assert_same_tokens(got: dict[int, Completion], expected: dict[int, Completion], atol: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for row, completion in got.items():
        np.testing.assert_array_equal(completion.tokens, expected[row].tokens)
        np.testing.assert_allclose(completion.logprobs, expected[row].logprobs, atol=atol)


def assert_a_row_fails_alone(engine: GenerationEngine, model: LlamaForCausalLM) -> None:
    """Load weights under which rows with BAD_TOKEN fail. The call of such a row ends with an error that names it, and
    other calls continue. Later rows that get its part of the cache find nothing of it there, and neither do rows of the
    next weights, the weights of `model`."""
    overflowing = copy.deepcopy(model)
    overflow_after(overflowing)
    can, version = engine.capabilities, engine.version + 1
    sampling = SamplingConfig(1, temperature=0.0)  # no good row reads BAD_TOKEN, which it may draw
    if can.distributions == "any":
        sampling = SamplingConfig(20, 20, temperature=0.0, suppress_token_ids=[BAD_TOKEN])

    def rows(numbers: Iterable[int]) -> list[Request]:
        return [Request(row, 0, 0, (11, 12 + row, 13), version, sampling) for row in numbers]

    def assert_fails(row: int, prompt: tuple[int, ...], *beside: Request, **changes: object) -> None:
        request = dataclasses.replace(Request(row, 0, 0, prompt, version, sampling), **changes)
        with pytest.raises(FloatingPointError, match=f"row {row}:? .*not finite"):
            list(engine.generate([request, *beside]))

    def assert_of(found: Mapping[int, Completion], requests: list[Request], weights: LlamaForCausalLM) -> None:
        for request in requests:
            completion = found[request.row]
            read = np.append(completion.tokens[:-1], 0)  # whatever the last one is, nothing follows it
            expected = oracle_logprobs(weights, request, read)
            assert completion.tokens.tolist() == expected.argmax(-1).tolist()
            np.testing.assert_allclose(completion.logprobs, expected.max(-1).values.numpy(), atol=1e-4)

    engine.load_weights(version, trained_tensors(overflowing))
    others = engine.generate(rows(range(4)))
    assert_fails(77, (*range(20, 50), BAD_TOKEN), *rows([78]))
    if can.scores:  # one that fails at its sixth token, long after others have begun to share batches with it
        late = (6, 5, 6, 5, BAD_TOKEN, *[5] * 15)
        assert_fails(76, (5, 6, 5), sampling=SamplingConfig(20, 20), forced=late)
    found = by_row(others)
    for row in range(80, 83):  # the same prompt again: nothing of it is shared
        assert_fails(row, (*range(20, 50), BAD_TOKEN))
        found |= by_row(engine.generate(rows(range(4 * (row - 79), 4 * (row - 78)))))
    assert_of(found, rows(range(16)), overflowing)
    version += 1
    engine.load_weights(version, trained_tensors(model))
    assert_of(by_row(engine.generate(rows(range(16)))), rows(range(16)), model)


def uneven_requests() -> list[Request]:
    """300 rows of 30 to 42 tokens."""
    lengths = [30 + i % 13 for i in range(300)]
    return [Request(i, 11, 3, (3 + i % 90, 5), 0, SamplingConfig(n, n, temperature=0.8)) for i, n in enumerate(lengths)]


def assert_updates_in_flight(engine: GenerationEngine, old: LlamaForCausalLM, new: LlamaForCausalLM) -> None:
    """Check an engine of eight rows that updates in flight, with the weights of `old` as version 0. Rows continue
    under the new weights from the same tokens. Every token must be the draw of the one version that is recorded for
    it: an oracle is fed the row under that version's weights. The rows have uneven lengths, so the eight in flight
    are never all between two rows."""
    requests = uneven_requests()
    running = engine.generate(requests)
    done = next(running)
    engine.load_weights(1, trained_tensors(new))
    assert engine.version == 1
    rows = by_row(running) | {done.row: done}
    assert len(rows) == 300
    assert set(done.versions.tolist()) == {0}
    assert set(rows[299].versions.tolist()) == {1}
    both = [c for c in rows.values() if len(set(c.versions.tolist())) == 2]
    assert 1 <= len(both) <= 8
    for completion in [*both, done, rows[299]]:
        assert (np.diff(completion.versions) >= 0).all()
        request, num = requests[completion.row], len(completion.tokens)
        noise = gumbel(noise_keys(11, 3, request.row, 2 + np.arange(num)), VOCAB, torch.device("cpu"))
        for version, model in ((0, old), (1, new)):
            logprobs = oracle_logprobs(model, request, completion.tokens)
            made = completion.versions == version
            chosen = logprobs[range(num), completion.tokens.tolist()].numpy()
            np.testing.assert_allclose(completion.logprobs[made], chosen[made], atol=1e-4)
            np.testing.assert_array_equal(completion.tokens[made], (logprobs + noise).argmax(-1).numpy()[made])


class CoreContract:
    """The promises of every engine. `make` builds one of version 0 over a Hugging Face directory, for MAX_SEQ
    tokens, in float32."""

    plain = False
    """True: rows may have no distribution but the softmax of the logits (`distributions: plain`)."""
    head_dim = 8
    """Head dimension of the model, one that the engine's attention supports."""
    knows_its_cache = True
    """True: the engine reports how much of the memory of keys and values is in use."""

    def requests(self, num: int, version: int = 0, **sampling: object) -> list[Request]:
        """Return the requests of `make_requests` that the engine can serve."""
        if self.plain:
            sampling = {"temperature": sampling.get("temperature", 1.0)}
        return make_requests(num, version, **sampling)

    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        raise NotImplementedError

    def llama(self, seed: int, like: LlamaForCausalLM) -> LlamaForCausalLM:
        """Another model of this shape."""
        return random_llama(seed, like.config.tie_word_embeddings, self.head_dim)

    @pytest.fixture(scope="class", params=[True, False], ids=["tied", "untied"])
    def model(self, request: pytest.FixtureRequest) -> LlamaForCausalLM:
        return random_llama(0, request.param, self.head_dim)

    @pytest.fixture(scope="class")
    def path(self, model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("llama")
        model.save_pretrained(directory)
        return directory

    @pytest.fixture
    def engine(self, path: Path) -> Iterator[GenerationEngine]:
        with closing(self.make(path)) as engine:
            yield engine

    @pytest.fixture
    def one_slot(self, path: Path) -> Iterator[GenerationEngine]:
        with closing(self.make(path, max_rows=1)) as engine:
            yield engine

    def test_greedy_equals_transformers(self, engine: GenerationEngine, model: LlamaForCausalLM) -> None:
        for request, completion in self._run(engine, self.requests(6, temperature=0.0)):
            prompt = torch.tensor([request.tokens])
            expected = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, len(request.tokens) :]
            assert completion.tokens.tolist() == expected.tolist()

    def test_noise_differs_between_rows_steps_and_seeds(self, engine: GenerationEngine) -> None:
        prompt, settings = (7, 8, 9), SamplingConfig(max_new_tokens=16, min_new_tokens=0 if self.plain else 16)
        keys = [(0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)]
        drawn = {
            tuple(next(iter(engine.generate([Request(row, seed, step, prompt, 0, settings)]))).tokens.tolist())
            for row, seed, step in keys
        }
        assert len(drawn) == len(keys)

    def test_refit_becomes_the_new_model(self, engine: GenerationEngine, model: LlamaForCausalLM) -> None:
        other = self.llama(1, model)
        before = by_row(engine.generate(self.requests(4)))
        engine.load_weights(7, trained_tensors(other))
        assert engine.version == 7
        changed = 0
        for request, completion in self._run(engine, self.requests(4, version=7)):
            assert_logprobs(other, request, completion)
            assert set(completion.versions.tolist()) == {7}
            changed += completion.tokens.tolist() != before[request.row].tokens.tolist()
        assert changed == 4

    @pytest.mark.parametrize(
        "part",
        ["model.layers.2.", "self_attn.k_proj", "mlp.up_proj", "layernorm", "o_proj", "embed_tokens", "model.norm"],
    )
    def test_refit_of_some_tensors_leaves_the_others(
        self, engine: GenerationEngine, model: LlamaForCausalLM, part: str
    ) -> None:
        """It may be one tensor of several that an engine has fused."""
        tensors = trained_tensors(model)
        new = {
            name: tensor
            for name, tensor in trained_tensors(random_llama(1, True, self.head_dim)).items()
            if part in name
        }
        assert new
        mixed = self.llama(0, model)
        mixed.load_state_dict(tensors | new, strict=False)
        engine.load_weights(1, new)
        for request, completion in self._run(engine, self.requests(3, version=1)):
            assert_logprobs(mixed, request, completion)

    def test_engine_keeps_no_view_of_the_tensors_it_was_given(
        self, engine: GenerationEngine, model: LlamaForCausalLM
    ) -> None:
        tensors = trained_tensors(model)
        engine.load_weights(1, tensors)
        before = by_row(engine.generate(self.requests(4, version=1)))
        for tensor in tensors.values():
            tensor.zero_()
        assert_same_tokens(by_row(engine.generate(self.requests(4, version=1))), before)

    @pytest.mark.parametrize("fault", ["unknown", "shape", "nan"])
    def test_bad_weights_change_nothing(self, engine: GenerationEngine, model: LlamaForCausalLM, fault: str) -> None:
        before = by_row(engine.generate(self.requests(4)))
        tensors = trained_tensors(self.llama(1, model))
        name = "model.layers.1.mlp.down_proj.weight"  # in the middle: those before it are good
        if fault == "unknown":
            name = "model.layers.3.mlp.down_proj.weight"
            tensors[name] = torch.zeros(36, 56)
        elif fault == "shape":
            tensors[name] = tensors[name].T.contiguous()
        else:
            tensors[name][3, 4] = float("nan")
        with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
            engine.load_weights(1, tensors)
        assert engine.version == 0
        assert_same_tokens(by_row(engine.generate(self.requests(4))), before)

    def test_load_waits_for_rows_in_flight(self, one_slot: GenerationEngine, model: LlamaForCausalLM) -> None:
        """One slot and 6 rows: when the first is out, five are queued or in flight. They finish under version 0, and a
        call that arrives while `load_weights` waits is served by version 1."""
        other = trained_tensors(self.llama(1, model))
        requests = self.requests(6, min_new_tokens=16)
        engine = one_slot
        with ThreadPoolExecutor(1) as thread:
            expected = by_row(engine.generate(requests))
            running = engine.generate(requests)
            first = next(running)
            loading = thread.submit(engine.load_weights, 1, other)
            rest = by_row(running)
            loading.result()
        assert engine.version == 1
        assert_same_tokens(rest | {first.row: first}, expected)
        assert all(set(c.versions.tolist()) == {0} for c in rest.values())
        after = by_row(engine.generate(self.requests(6, version=1)))
        assert all(set(c.versions.tolist()) == {1} for c in after.values())

    def test_load_returns_only_after_the_rows_in_flight(
        self, one_slot: GenerationEngine, model: LlamaForCausalLM
    ) -> None:
        running = one_slot.generate(self.requests(6, min_new_tokens=16))
        next(running)
        one_slot.load_weights(1, trained_tensors(model))
        assert one_slot.stats().rows == 6
        assert len(by_row(running)) == 5

    @pytest.mark.parametrize(
        ("prompt", "settings", "message"),
        [
            ((), SamplingConfig(4), "empty prompt"),
            ((3,) * 61, SamplingConfig(4), "61 prompt \\+ 4 new tokens.* 64"),
            ((3, VOCAB), SamplingConfig(4), f"outside the vocabulary of {VOCAB}"),
            ((3, -1), SamplingConfig(4), f"outside the vocabulary of {VOCAB}"),
            ((3,), SamplingConfig(0), "max_new_tokens 0"),
            ((3,), SamplingConfig(4, temperature=-0.5), "temperature -0.5"),
            ((3,), SamplingConfig(4, temperature=float("nan")), "temperature nan"),
            ((3,), SamplingConfig(4, min_new_tokens=5), "min_new_tokens 5"),
            ((3,), SamplingConfig(4, suppress_token_ids=[VOCAB]), "suppresses token ids outside"),
            ((3,), SamplingConfig(4, suppress_token_ids=list(range(VOCAB))), "suppresses every token"),
        ],
    )
    def test_refuses_the_whole_call_for_a_bad_row(
        self, engine: GenerationEngine, prompt: tuple[int, ...], settings: SamplingConfig, message: str
    ) -> None:
        with pytest.raises(RequestError, match=f"row 17 .*{message}"):
            list(engine.generate([*self.requests(2), Request(17, 1, 1, prompt, 0, settings)]))
        assert engine.stats().tokens == 0
        assert len(by_row(engine.generate(self.requests(2)))) == 2

    def test_refuses_a_version_that_is_not_resident(self, engine: GenerationEngine) -> None:
        with pytest.raises(RequestError, match=r"row 0 asks for version 3 .* version 0 is resident"):
            list(engine.generate(self.requests(1, version=3)))

    def test_a_row_that_fails_fails_alone(self, engine: GenerationEngine, model: LlamaForCausalLM) -> None:
        assert_a_row_fails_alone(engine, model)

    def test_no_requests_no_rows(self, engine: GenerationEngine) -> None:
        assert list(engine.generate([])) == []

    def test_an_iterator_closed_before_its_first_row_takes_its_rows_with_it(
        self, one_slot: GenerationEngine, model: LlamaForCausalLM
    ) -> None:
        one_slot.stats()
        results = one_slot.generate(self.requests(12, min_new_tokens=16))
        assert isinstance(results, Generator)
        results.close()
        one_slot.load_weights(1, trained_tensors(model))  # when no row is in flight
        assert one_slot.stats().rows < 12

    def test_sleep_and_wake(self, engine: GenerationEngine, model: LlamaForCausalLM) -> None:
        before = by_row(engine.generate(self.requests(4)))
        engine.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            list(engine.generate(self.requests(4)))
        with pytest.raises(RuntimeError, match="asleep"):
            engine.load_weights(1, trained_tensors(model))
        engine.wake()
        assert_same_tokens(by_row(engine.generate(self.requests(4))), before)

    def test_stats_count_since_the_last_call(self, engine: GenerationEngine, model: LlamaForCausalLM) -> None:
        engine.stats()
        completions = by_row(engine.generate(self.requests(4, min_new_tokens=16)))
        stats = engine.stats()
        assert (stats.rows, stats.tokens) == (4, sum(len(c.tokens) for c in completions.values()))
        assert stats.tokens == 64 or self.plain
        assert 0 < stats.mean_occupancy <= 1
        assert (0 < stats.kv_peak_fraction <= 1) or not self.knows_its_cache
        assert stats.busy_s > 0
        assert engine.stats().tokens == 0
        engine.load_weights(1, trained_tensors(model))
        assert engine.stats().refit_s > 0

    def test_close_stops_and_releases(self, path: Path) -> None:
        num_threads = threading.active_count()
        engine = self.make(path, max_rows=1)
        # so many rows that the engine cannot finish them before it is closed, however busy the machine is
        running = engine.generate(self.requests(300, min_new_tokens=16))
        next(running)
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="stopped"):
            list(running)
        with pytest.raises(RuntimeError, match="stopped"):
            engine.generate(self.requests(1))
        assert threading.active_count() == num_threads

    def _run(self, engine: GenerationEngine, requests: list[Request]) -> list[tuple[Request, Completion]]:
        completions = by_row(engine.generate(requests))
        assert sorted(completions) == [r.row for r in requests]
        return [(r, completions[r.row]) for r in requests]


class KeyedContract:
    """`draws: keyed`, and tokens that are the same in any company (law 4)."""

    company_atol = 1e-5
    """Largest difference of a token's log-prob in other company."""

    def test_token_is_argmax_of_logprob_plus_keyed_noise(
        self, engine: GenerationEngine, model: LlamaForCausalLM
    ) -> None:
        """Law 4, from transformers' log-probs: nothing of the engine but its choice enters."""
        for request, completion in self._run(engine, make_requests(6)):
            position = len(request.tokens) + np.arange(len(completion.tokens))
            noise = gumbel(noise_keys(11, 3, request.row, position), VOCAB, torch.device("cpu"))
            expected = (oracle_logprobs(model, request, completion.tokens) + noise).argmax(-1)
            assert completion.tokens.tolist() == expected.tolist()

    def test_tokens_do_not_depend_on_company_slots_or_calls(self, engine: GenerationEngine, path: Path) -> None:
        requests = make_requests(9)
        together = by_row(engine.generate(requests))
        alone = {r.row: next(iter(engine.generate([r]))) for r in requests}
        assert_same_tokens(alone, together, self.company_atol)
        with closing(self.make(path, max_rows=9)) as wide:
            assert_same_tokens(by_row(wide.generate(requests[::-1])), together, self.company_atol)
        with ThreadPoolExecutor(3) as threads:
            parts = list(threads.map(lambda i: by_row(engine.generate(requests[i::3])), range(3)))
        assert_same_tokens(parts[0] | parts[1] | parts[2], together, self.company_atol)


class ScoringContract:
    """`scores`: tokens that are given."""

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_given_tokens_come_back_with_their_logprobs(
        self, engine: GenerationEngine, model: LlamaForCausalLM, temperature: float
    ) -> None:
        """In one batch with rows that draw, which are not disturbed; what was drawn before has the same log-probs when
        it is given."""
        drawn = make_requests(4, temperature=temperature, suppress_token_ids=[5], min_new_tokens=3)
        free = by_row(engine.generate(drawn))
        rng = np.random.default_rng(8)
        given = [tuple(int(t) for t in rng.choice(np.arange(6, VOCAB), n)) for n in (1, 7, 12)]
        settings = [
            SamplingConfig(len(g), min(3, len(g)), temperature=temperature, suppress_token_ids=[5]) for g in given
        ]
        forced = [Request(20 + i, 11, 3, (7, 8 + i), 0, settings[i], given[i]) for i in range(3)]
        again = [
            dataclasses.replace(
                request,
                row=40 + request.row,
                sampling=dataclasses.replace(request.sampling, max_new_tokens=len(free[request.row].tokens)),
                forced=tuple(free[request.row].tokens.tolist()),
            )
            for request in drawn
        ]
        found = by_row(engine.generate([*drawn, *forced, *again]))
        assert_same_tokens({row: found[row] for row in free}, free)
        for request in forced:
            completion = found[request.row]
            assert tuple(completion.tokens.tolist()) == request.forced
            assert_logprobs(model, request, completion)
        assert_same_tokens({row: found[40 + row] for row in free}, free)

    @pytest.mark.parametrize(
        ("forced", "message"),
        [
            ((7, 8), "given 2 tokens of its response, and max_new_tokens 3"),
            ((7, 8, VOCAB), f"outside the vocabulary of {VOCAB}"),
            ((7, 5, 8), "cannot be sampled there"),
            ((EOS, 7, 8), "cannot be sampled there"),
        ],
    )
    def test_refuses_tokens_that_no_response_has(
        self, engine: GenerationEngine, forced: tuple[int, ...], message: str
    ) -> None:
        settings = SamplingConfig(3, 2, suppress_token_ids=[5])
        with pytest.raises(RequestError, match=f"row 17 is given .*{message.removeprefix('given ')}"):
            list(engine.generate([Request(17, 1, 1, (3,), 0, settings, forced)]))


class AnyDistributionContract:
    """`distributions: any`: temperature, suppressed tokens, minimum length."""

    def test_logprobs_are_of_the_sampled_distribution(self, engine: GenerationEngine, model: LlamaForCausalLM) -> None:
        requests = make_requests(6, temperature=0.7, suppress_token_ids=[5, 40, 41], min_new_tokens=6)
        for request, completion in self._run(engine, requests):
            assert_logprobs(model, request, completion)
            assert not {5, 40, 41} & set(completion.tokens.tolist())

    def test_end_of_sequence_and_length(self, engine: GenerationEngine) -> None:
        def finish(allowed: set[int], min_new_tokens: int) -> Completion:
            suppressed = [t for t in range(VOCAB) if t not in allowed]
            settings = SamplingConfig(5, min_new_tokens, suppress_token_ids=suppressed)
            return next(iter(engine.generate([Request(0, 1, 1, (7,), 0, settings)])))

        stopped = finish({EOS}, 0)
        assert (stopped.tokens.tolist(), stopped.finish_reason) == ([EOS], FinishReason.STOP)
        assert stopped.logprobs.tolist() == [0.0]
        cut = finish({9}, 0)
        assert (cut.tokens.tolist(), cut.finish_reason) == ([9] * 5, FinishReason.LENGTH)
        late = finish({EOS, 9}, 4)
        assert late.tokens.tolist()[:4] == [9] * 4
        assert late.finish_reason == (FinishReason.STOP if late.tokens[-1] == EOS else FinishReason.LENGTH)
        assert (late.tokens.dtype, late.logprobs.dtype, late.versions.dtype) == (np.int32, np.float32, np.int32)


class InFlightContract:
    """`updates: inflight`, of an engine that draws by law 4. `make_in_flight` builds one with `in_flight`
    and eight rows; otherwise as `CoreContract.make`."""

    def make_in_flight(self, path: Path) -> GenerationEngine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def in_flight(self, path: Path) -> Iterator[GenerationEngine]:
        with closing(self.make_in_flight(path)) as engine:
            yield engine

    def test_updates_in_flight(self, in_flight: GenerationEngine, model: LlamaForCausalLM) -> None:
        """Then without rows, and with weights that are refused; prompts of older weights are not in the cache."""
        engine = in_flight
        other = self.llama(1, model)
        assert_updates_in_flight(engine, model, other)
        tensors = trained_tensors(model)
        tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
        with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
            engine.load_weights(2, tensors)
        for version, weights in ((1, other), (3, model)):
            if version == 3:
                engine.load_weights(3, trained_tensors(model))
            assert engine.version == version
            requests = greedy_requests()  # which ask for version 0 or newer
            found = by_row(engine.generate(requests))
            assert_greedy_of(weights, found, requests)
            assert all(set(completion.versions.tolist()) == {version} for completion in found.values())
        with pytest.raises(RequestError, match="version 3 is resident"):
            engine.generate(make_requests(1, version=4))


class EngineContract(KeyedContract, ScoringContract, AnyDistributionContract, CoreContract):
    """The contract of an engine with all capabilities."""


class OneServer:
    """For engines in a process of their own, before the contract's classes: one serves all tests of a model. Each test
    starts with the first model."""

    @pytest.fixture(scope="class")
    def shared(self, path: Path) -> Iterator[RemoteEngine]:
        with closing(self.make(path)) as engine:
            yield engine

    @pytest.fixture
    def engine(self, shared: RemoteEngine, path: Path, model: LlamaForCausalLM) -> Iterator[GenerationEngine]:
        shared.stats()
        yield shared
        if shared.version:
            shared.load_weights(0, trained_tensors(model))
            shared._files = ModelFiles(str(path))  # what its own files say is true again

    @pytest.fixture
    def one_slot(self, engine: GenerationEngine) -> GenerationEngine:
        """Four: of the tests' six rows two are left when the first is out, as rows of one length end together."""
        return engine


def contract_of(can: Capabilities) -> type:
    """The parts of the contract that an engine with these capabilities is held to."""
    parts = (
        *((KeyedContract,) if can.draws == "keyed" and can.invariance != "none" else ()),
        *((ScoringContract,) if can.scores else ()),
        *((AnyDistributionContract,) if can.distributions == "any" else ()),
        *((InFlightContract,) if "inflight" in can.updates and can.draws == "keyed" else ()),
    )
    return type("Contract", (*parts, CoreContract), {"plain": can.distributions == "plain"})
