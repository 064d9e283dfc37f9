"""An embedded engine whose rows may migrate: the contract, and rows that continue where the model is divided
differently. tests/unit/stages/engines/embedded/migration tests what migration itself can get wrong."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from stages.engines.build import build_engine
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.migration import MigratingEngine, key_of
from stages.engines.protocol import GenerationEngine, Request
from stages.engines.row_loads import MigrationRequest
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY
from tests.contracts.embedded_engines import CPU
from tests.contracts.engine_contract import MAX_SEQ, EngineContract, assert_same_tokens
from tests.support.engine_settings import embedded
from tests.support.engines import assert_same_bits, by_row
from tests.support.migrating_engines import carry
from tests.support.processors import needs_compiler


@needs_compiler
class TestMigratingEngine(EngineContract):
    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        settings = embedded(max_rows, kernels="native")
        return build_engine(str(path), settings, max_seq=MAX_SEQ, threads=1, device=CPU, migratable=True)


def test_rows_can_migrate_where_it_is_asked_for() -> None:
    for migratable in (True, False):
        engine = build_engine(RANDOM_TINY, embedded(2), max_seq=MAX_SEQ, threads=1, device=CPU, migratable=migratable)
        with closing(engine):
            assert isinstance(engine, MigratingEngine) == migratable


@pytest.mark.processes
@pytest.mark.parametrize("config", [{"pipeline_parallel": 2}, {"tensor_parallel": 2}], ids=["pipeline", "tensor"])
def test_rows_migrate_to_an_engine_of_another_layout_and_back(config: dict[str, int]) -> None:
    """Their keys and values are joined from those of all ranks, and divided again."""
    lengths = [4, *[200] * 5]
    requests = [Request(i, 1, 2, (5 + i,) * (i + 1), 0, SamplingConfig(n, n)) for i, n in enumerate(lengths)]

    def engine(**config: int) -> MigratingEngine:
        settings = embedded(8, **config)
        return build_embedded(RANDOM_TINY, settings, max_seq=250, threads=1, device=CPU, migratable=True)

    with closing(engine()) as whole, closing(engine(**config)) as divided:
        expected = by_row(whole.generate(requests))
        for source, target in ((divided, whole), (whole, divided)):
            running = source.generate(requests)
            first = next(running)  # now all have begun
            migrated = source.migrate_out([MigrationRequest(key_of(request), True) for request in requests[1:]])
            assert len(migrated) == 5
            assert all(one.cache is not None for one in migrated)
            carry(source, target, migrated)
            got = by_row(running) | {first.row: first}
            assert_same_tokens(got, expected)
            if "pipeline_parallel" in config:
                assert_same_bits(got, expected)
