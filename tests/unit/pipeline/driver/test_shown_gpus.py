"""GPUs that the workers of a run on one host are shown."""

from __future__ import annotations

from pipeline.config.loading import load_config
from pipeline.driver.cluster import visible_gpus_of_workers
from tests.support.paths import TINY

PLACED = ("placement.gangs.train.workers=2", "placement.gangs.generate.workers=1", "engine.tensor_parallel=4")
SHARED = "placement.device_sharing=[[generate,train]]"


def test_gangs_that_share_devices_are_shown_the_same_ones() -> None:
    config = load_config([TINY], [*PLACED, SHARED])
    shown = {("generate", 0): "4,5,6,7", ("train", 0): "4", ("train", 1): "5", ("score", 0): ""}
    assert visible_gpus_of_workers(config, 4, "4,5,6,7") == shown
    assert visible_gpus_of_workers(config, 4, None)["train", 1] == "1"


def test_the_others_are_shown_their_own() -> None:
    shown = visible_gpus_of_workers(load_config([TINY], [*PLACED]), 8, None)
    assert shown == {("generate", 0): "0,1,2,3", ("train", 0): "4", ("train", 1): "5", ("score", 0): ""}
