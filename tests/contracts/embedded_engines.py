"""How the contract's tests build an embedded engine, and what they compare. Imports no drafts, ranks or migration: the
plain engine's tests run without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

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
