"""`stageline plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.config.loading import load_config
from tests.support.paths import ROOT, TINY, TINY_PROMPTS

CONFIG = (str(TINY), f"prompts.url={TINY_PROMPTS}")


def test_the_written_plan_is_a_config_that_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    assert main(["plan", *CONFIG, "--devices", "2xcpu", "--write", str(file)]) == 0
    assert "asynchrony loses" in capsys.readouterr().out
    config = load_config([str(file)], [])
    assert config.predicted_s["step"] > 0
    assert {"generate", "update_policy", "publish"} < config.predicted_s.keys()
    assert config.rollout.rows == 16
    assert {gang.name for gang in config.gangs()} >= {"generate", "score", "train"}
    assert main(["check", str(file), f"runs_dir={tmp_path}"]) == 0
    assert main(["plan", str(file), "--devices", "2xcpu", "--write", str(file)]) == 2, "a file of one's own is kept"


def test_a_plan_for_several_nodes_has_a_job(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    given = ["rollout.rows=64", "rollout.shards=4", "ppo.minibatches=1"]
    assert main(["plan", *CONFIG, *given, "--devices", "4xH100-80", "--nodes-of", "1", "--write", str(file)]) == 0
    config = load_config([str(file)], [])
    assert config.cluster.kind == "attached"
    assert 2 <= sum(gang.nodes or 0 for gang in config.slurm.gangs.values()) <= 4
    assert main(["check", str(file), "--as", "4x1xH100-80"]) == 0


def test_the_example_of_a_node_with_an_engine_that_takes_no_turns_has_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    assert main(["plan", str(ROOT / "conf/run/8xh100_8b.yaml"), "--devices", "8xH100-80", "--write", str(file)]) == 0
    assert load_config([str(file)], []).placement.device_sharing == []
    assert main(["check", str(file), "--as", "8xH100-80"]) == 0


def test_the_time_to_a_number_of_samples_counts_the_price_of_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--devices", "2xcpu", "--objective", "time_to_samples", "--samples", "1600"]
    assert main(["plan", *CONFIG, *given, "--staleness-price", "1000"]) == 0
    out = capsys.readouterr().out
    assert "time to 1,600 samples" in out
    first = next(line for line in out.splitlines() if line.startswith("1 "))
    assert first.split()[-6] == "0", "staleness of the best plan"
    assert "(" in first.split()[-3], "the seconds with the price"


@pytest.mark.parametrize("devices", ["2xcpu", "8xH100-80"])
def test_the_table_of_plans_fits_into_80_columns(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *CONFIG, "--devices", devices]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    said = " ".join(lines)
    slow, fast = (float(number) for number in re.findall(r"synchronous: ([\d.]+) s", said))
    (bound,) = re.findall(r"with staleness (\d)", said)
    (price,) = re.findall(r"asynchrony loses if one version of staleness needs ([\d.]+)%", said)
    gain = float(price) / 100 * int(bound)
    assert gain >= (slow / fast - 1) * 0.98, "by the time of a step, however many devices a plan takes"
    table = lines[lines.index("Plans") : next(n for n, line in enumerate(lines) if line.startswith("1: "))]
    assert all(len(line) <= 80 and "…" not in line for line in table)
    rows = table[3:]  # after the title and two lines of headings
    assert [row.split()[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)], "a line each"


def test_a_plan_without_a_config_and_without_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--devices", "2xcpu"]) == 2
    assert "--from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--devices", "8"], "--devices"),
        (["--devices", "0xH100-80"], "--devices"),
        (["--devices", "8xH1000"], "--devices"),
        (["--devices", "2x8xH100-80"], "2x8xH100-80"),
        (["--devices", "12xH100-80"], "8xH100-80"),
        (["--devices", "8xH100-80", "--nodes-of", "9"], "--nodes-of"),
        (["--devices", "1000xcpu", "--nodes-of", "100"], "cores"),
        (["--devices", "2xcpu", "--staleness-price", "-1"], "--staleness-price"),
        (["--devices", "2xcpu", "--objective", "time_to_samples"], "--samples"),
        (["--devices", "2xcpu", "--samples", "100"], "--samples"),
        (["--devices", "2xnone.yaml"], "--devices"),
        (["--devices", "2xcpu", "--from", "runs/one"], "--from"),
        (["--devices", "2xcpu", "--write", "plan.txt"], "--write"),
        (["--devices", "2xcpu", "--lengths", "fixed:9"], "sampling.max_new_tokens"),
        (["--devices", "2xcpu", "--seed", "-1"], "--seed"),
        (["--devices", "2xcpu", "--write", "/proc/plan.yaml"], "--write"),
    ],
)
def test_refusals_name_what_was_given(given: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *CONFIG, *given]) == 2
    assert named in capsys.readouterr().err
