"""A sample of the kill matrix (`make test-faults` runs the whole). Processes of a run are killed in the middle of their
work, one after the other, among them the driver with all that it started. The results are those of an undisturbed
run."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from pipeline.config.run import RunConfig
from tests.support.kill_matrix import STRIKES_PER_RUN, Case, compare, run_struck
from tests.support.strikes import DRIVER, GROUP, Strike, draw

pytestmark = pytest.mark.processes

SAMPLE = [
    Strike("generate-1", "file", 2, "generate-1"),
    Strike(DRIVER, "event", 8, DRIVER),
    Strike("score-0", "built", 1, "score-0"),
    Strike("train-0", "minibatch", 3, "train-0"),
    Strike("train-0", "board", 1, GROUP),
]
"""A replica, a scorer, a rank, the driver and the whole group. The replica first, since nobody says which of two has a
row once few are left; none is stopped, since that costs its deadline."""


@pytest.fixture(scope="module")
def reference(folder: Path) -> RunConfig:
    config, undisturbed = run_struck(folder, "undisturbed", 2, [])
    assert undisturbed.faults == []
    return config


@pytest.mark.parametrize(
    ("name", "strikes"), [("struck", SAMPLE), ("unexported", [Strike("train-0", "export", 2, GROUP)])]
)
def test_killed_without_a_loss(folder: Path, reference: RunConfig, name: str, strikes: list[Strike]) -> None:
    """One case kills while the last version is trained and not yet exported."""
    config, struck = run_struck(folder, name, 2, strikes)
    compare(struck, config, reference)
    assert struck.faults == [], str(struck)
    assert struck.fired == strikes, str(struck)


def test_killed_while_going_back_to_a_checkpoint_and_writing_the_summary(folder: Path, reference: RunConfig) -> None:
    """Half of the commits are in the archive then; the same command again and again comes to the same run."""
    older = folder / "older"
    shutil.copytree(reference.run_dir, older)
    for newest in older.glob("checkpoints/*/v000004"):
        shutil.rmtree(newest)
    strikes = [
        Strike(DRIVER, "preparing", 20, GROUP),
        Strike(DRIVER, "preparing", 9, DRIVER),
        Strike(DRIVER, "concluding write", 1, GROUP),
    ]
    config, struck = run_struck(folder, "archived", 2, strikes, Case(made_from=older, resume=("--from-checkpoint",)))
    compare(struck, config, reference)
    assert struck.faults == [], str(struck)
    assert len(struck.fired) >= len(strikes) - 1, str(struck)


def test_a_seed_draws_the_same_strikes_again_and_seeds_go_round_all_processes() -> None:
    runs = [draw(seed, STRIKES_PER_RUN) for seed in range(12)]
    assert runs == [draw(seed, STRIKES_PER_RUN) for seed in range(12)]
    kinds = Counter(strike.target.partition("-")[0] for strikes in runs for strike in strikes)
    assert kinds == {"generate": 10, "score": 10, "train": 20, "driver": 10, "group": 10}
    assert {strike.signal for strikes in runs for strike in strikes} == {"SIGKILL", "SIGSTOP"}
