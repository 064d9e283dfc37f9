"""Runs to plan: a config with the architectures of its models, on a cluster that is not here."""

from __future__ import annotations

from pipeline.config.hardware import read_cluster
from pipeline.config.loading import load_config
from pipeline.config.memory import PlannedRun, planned_run
from pipeline.config.role_models import read_model, role_models
from pipeline.graph.graph import Node, step_nodes
from pipeline.plan.calibration import Calibration, StageSpeed
from pipeline.plan.cost import Costs, costs_of
from tests.support.paths import ROOT

PEAKS = Calibration(description="at the peaks", hardware="any")
"""Speeds with which every node takes as long as its roofline."""
HALF = StageSpeed(efficiency=0.5)


def planned(name: str, *changes: str, on_gpus: bool) -> PlannedRun:
    """Return the planned run of a config in conf/run. Its weights need not be there."""
    config = load_config([ROOT / "conf/run" / f"{name}.yaml"], changes)
    models = role_models(config, read_model("model.path", config.model.path, weights=False), weights=False)
    return planned_run(config, models, on_gpus=on_gpus)


def costs(name: str, cluster: str, *changes: str, calibration: Calibration = PEAKS) -> Costs:
    there = read_cluster(cluster)
    return costs_of(planned(name, *changes, on_gpus=there.gpus > 0), there, calibration)


def nodes_by_stage(of: Costs, step: int = 1) -> dict[str, Node]:
    """The first node of each stage in a step."""
    found: dict[str, Node] = {}
    for node in step_nodes(of.run.config.graph(), step):
        found.setdefault(node.stage, node)
    return found


def seconds(of: Costs, stage: str, lengths: list[int]) -> float:
    return of.seconds(nodes_by_stage(of)[stage], lengths)
