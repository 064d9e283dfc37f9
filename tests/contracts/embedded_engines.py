"""How the contract's tests build an embedded engine, and what they compare. Imports no drafts, ranks or migration: the
plain engine's tests run without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.sampling.noise import gumbel, noise_keys
from stages.engines.protocol import GenerationEngine, Request
from stages.models.sampling import SamplingConfig
from tests.contracts.engine_contract import MAX_SEQ, oracle_logprobs, random_llama, trained_tensors
from tests.support.engine_settings import embedded
from tests.support.engines import by_row

CPU = torch.device("cpu")


def make_engine(
    path: Path | str, slots: int = 4, threads: int = 1, drafters: Sequence[object] = (), **config: object
) -> GenerationEngine:
    """An engine for MAX_SEQ tokens on the CPU; `config` as in `embedded`."""
    settings = embedded(slots, **config)
    return build_embedded(str(path), settings, max_seq=MAX_SEQ, threads=threads, device=CPU, drafters=drafters)


def check_update_in_flight(
    path: Path,
    drafters: Sequence[object] = (),
    learn: Callable[[], None] | None = None,
    **config: object,
) -> None:
    """Rows go on under the new weights, from the same tokens: every token is the draw of one whole version, the one
    that is recorded, as an oracle that is fed the row under that version's weights finds. Rows of uneven length, so
    that the eight in flight are never all between two rows. `learn`: called after some rows, before the others."""
    old, new = random_llama(0, tied=True), random_llama(1, tied=True)
    old.save_pretrained(path)
    requests = [
        Request(i, 11, 3, (3 + i % 90, 5), 0, SamplingConfig(n, n, temperature=0.8))
        for i, n in enumerate(30 + i % 13 for i in range(300))
    ]
    with closing(make_engine(path, 8, drafters=drafters, update="inflight", **config)) as engine:
        if learn is not None:
            by_row(engine.generate(requests[:30]))
            learn()
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
        noise = gumbel(noise_keys(11, 3, request.row, 2 + np.arange(num)), 96, CPU)
        for version, model in ((0, old), (1, new)):
            logprobs = oracle_logprobs(model, request, completion.tokens)
            made = completion.versions == version
            chosen = logprobs[range(num), completion.tokens.tolist()].numpy()
            np.testing.assert_allclose(completion.logprobs[made], chosen[made], atol=1e-4)
            np.testing.assert_array_equal(completion.tokens[made], (logprobs + noise).argmax(-1).numpy()[made])


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


def check_a_row_fails_alone(path: Path, **config: object) -> None:
    """Its call ends with an error that names it; calls of others go on, and later rows that get its blocks of the cache
    find nothing of it there: they are what they are in a plain engine that never had such a row. `forced`: one that
    fails at its sixth token, long after others have begun to share batches with it."""
    model = random_llama(0, tied=False)
    overflow_after(model)
    model.save_pretrained(path)
    sampling = SamplingConfig(20, 20, suppress_token_ids=(BAD_TOKEN,))
    good = [Request(row, 0, 0, (11, 12 + row, 13), 0, sampling) for row in range(12)]
    bad = Request(77, 0, 0, (*range(20, 50), BAD_TOKEN), 0, sampling)
    forced = Request(76, 0, 0, (5, 6, 5), 0, SamplingConfig(20, 20), forced=(6, 5, 6, 5, BAD_TOKEN, *[5] * 15))
    with closing(make_engine(path, 3, kernels=config.get("kernels", "auto"))) as engine:
        expected = by_row(engine.generate(good))
    with closing(make_engine(path, 3, **config)) as engine:
        others = engine.generate(good[:4])
        with pytest.raises(FloatingPointError, match="row 77: the model's output is not finite"):
            list(engine.generate([bad, replace(good[11], row=78)]))
        with pytest.raises(FloatingPointError, match="row 76:"):
            list(engine.generate([forced]))
        found = by_row(others)
        for again in range(3):  # the same prompt again: nothing of it is shared
            with pytest.raises(FloatingPointError, match=f"row {80 + again}:"):
                list(engine.generate([replace(bad, row=80 + again)]))
        found |= by_row(engine.generate(good[4:]))
        engine.load_weights(1, {})
        assert engine.version == 1
    assert found.keys() == expected.keys()
    for row, completion in found.items():
        np.testing.assert_array_equal(completion.tokens, expected[row].tokens)
        # oneDNN's products of widths like 36 depend on the number of rows in their last bit
        np.testing.assert_allclose(completion.logprobs, expected[row].logprobs, rtol=0, atol=1e-5)
