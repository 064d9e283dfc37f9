"""The plain loop needs neither drafts nor ranks nor migration: the contract of engines holds where none of them can be
imported. An import of one, anywhere in the loop, the model, the kernels or the sampling, fails here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "tests.support.plain_engine_only"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("tests", ["OnPlainTorch", pytest.param("not OnPlainTorch", marks=pytest.mark.full)])
def test_the_contract_holds_without_drafts_ranks_and_migration(tests: str) -> None:
    chosen = ("-k", tests, "-m", "not smollm2")
    done = run("-m", "pytest", "-p", PLUGIN, *chosen, "tests/contracts/test_engine_contract.py")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert int(passed[1]) > 20, done.stdout  # of those that are no class, should there be no C compiler


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        ("drafts", "config.embedded.speculation.drafter = 'ngram'"),
        ("ranks", "config.pipeline_parallel = 2"),
        ("migration", "settings['migratable'] = True"),
    ],
    ids=["drafts", "ranks", "migration"],
)
def test_whoever_asks_for_a_removed_part_hears_of_it(part: str, asked: str) -> None:
    """This shows that the parts are really removed in the test above."""
    program = f"""
import {PLUGIN}
from stages.engines.build import build_engine
from stages.engines.config import EngineConfig

config, settings = EngineConfig(max_rows=1), {{"max_seq": 16, "threads": 1}}
build_engine("random:tiny", config, **settings).close()
{asked}
build_engine("random:tiny", config, **settings)
"""
    done = run("-c", program)
    assert done.returncode == 1
    assert done.stderr.endswith(f"ModuleNotFoundError: stages.engines.embedded.{part} has been removed\n")
