"""What of a config tracking gets: what the run reads; and which metrics say nothing under it."""

from pathlib import Path

from pipeline.config.loading import flatten
from pipeline.driver.tracked_config import off_metrics, tracked_params
from tests.support.runs import configure, placement

THREE = placement("{generate: {slots: 2}, score: {}, train: {}}", generate="generate", score="score", others="train")
LATEST = ("rollout.versions=latest", "staleness=2", "ppo.kl.target=6", "ppo.entropy_coef=0.01")


def test_metrics_that_say_nothing(tmp_path: Path) -> None:
    exact = off_metrics(configure(tmp_path, "a"))
    assert {"kl/coef", "policy/surrogate", "critic/peak_memory_bytes", "mismatch/mean_abs"} <= exact
    assert {"staleness/fraction_0", "staleness/fraction_1"} <= exact
    assert "staleness/max" not in exact
    assert off_metrics(configure(tmp_path, "b", *LATEST)) == {"critic/peak_memory_bytes"}
    synchronous = off_metrics(configure(tmp_path, "c", "staleness=0"))
    assert {"staleness/max", "mismatch/mean_abs_all"} <= synchronous
    assert "mismatch/mean_abs" not in synchronous


def test_parameters_that_the_run_reads(tmp_path: Path) -> None:
    config = configure(tmp_path, "a", THREE)
    every, kept = flatten(config), tracked_params(config)
    assert kept.items() <= every.items()
    assert kept["placement.gangs.train.layout.tensor"] == "1"
    assert kept["placement.gangs.generate.slots"] == "2"
    left_out = every.keys() - kept.keys()
    assert {"placement.gangs.generate.layout.tensor", "placement.gangs.train.slots", "cluster.port"} <= left_out
    assert {"model.lora.alpha", "model.loss_scale.initial", "slurm.partition"} <= left_out
    assert not {key for key in left_out if key.startswith(("ppo.", "model.policy.", "sampling.", "reward."))}
