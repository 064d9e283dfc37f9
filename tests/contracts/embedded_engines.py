"""Embedded engines for the contract's tests, and comparisons. Imports no drafts, ranks or migration: the plain
engine's tests run without them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from stages.engines.embedded.build import build_embedded
from stages.engines.protocol import GenerationEngine
from tests.contracts.engine_contract import (
    MAX_SEQ,
    assert_a_row_fails_alone,
    random_llama,
)
from tests.support.engine_settings import embedded

CPU = torch.device("cpu")


def make_engine(
    path: Path | str,
    max_rows: int = 4,
    threads: int = 1,
    drafters: Sequence[object] = (),
    *,
    in_flight: bool = False,
    **config: object,
) -> GenerationEngine:
    """An engine for MAX_SEQ tokens on the CPU; `config` as in `embedded`."""
    settings = embedded(max_rows, **config)
    more = {"drafters": drafters, "in_flight": in_flight}
    return build_embedded(str(path), settings, max_seq=MAX_SEQ, threads=threads, device=CPU, **more)


def check_a_row_fails_alone(path: Path, **config: object) -> None:
    """See `assert_a_row_fails_alone`, with three rows at once."""
    model = random_llama(0, tied=False)
    model.save_pretrained(path)
    with closing(make_engine(path, 3, **config)) as engine:
        assert_a_row_fails_alone(engine, model)
