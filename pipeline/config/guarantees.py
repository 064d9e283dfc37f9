"""What a run may not prove with the engine that it has, and why: said at its start, by `check` and by `replay`.

    Capabilities of the engine, on the device of its workers ──► sentences
                                                                   ├─► line and event at the start, tag in MLflow
                                                                   ├─► `stageline check CONFIG` and `check RUN`
                                                                   └─► beside the verdict of `stageline replay`

May import this folder and stages.engines.capabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.config.identity import Identity
from pipeline.config.placement import gang_of
from pipeline.config.run import RunConfig
from stages.engines.capabilities import Capabilities, Device
from stages.models.protocol import Role

DEVICE_ITEM, ENGINE_DEVICE_ITEM = "device", "engine.device"
"""Of a worker's numerics: there where it has a GPU (stages/models/fingerprint.py); what an engine in an environment of
its own says."""


def device_of(numerics: Mapping[str, str]) -> Device:
    """What the engine of a worker with these numerics computes on."""
    return "cuda" if numerics.get(ENGINE_DEVICE_ITEM) == "cuda" or DEVICE_ITEM in numerics else "cpu"


def devices_of(config: RunConfig, identity: Identity | None) -> list[Device]:
    """What a run's engines have computed on, by what was stated of them; a CPU where nothing was."""
    gang = gang_of(config.placement, Role.GENERATE)
    known = [] if identity is None else identity.numerics_of(gang)
    found: list[Device] = sorted({device_of(one.items) for one in known})
    return found or ["cpu"]


def engine_line(config: RunConfig, device: Device) -> str:
    """The engine and what it can do, in one line."""
    return f"engine {config.engine.kind} on {device}: {config.capabilities(device)}"


def unproven(config: RunConfig, device: Device) -> list[str]:
    """What a run of the config may not prove, each with its reason; empty: all that there is to prove."""
    can = config.capabilities(device)
    return [*_of_draws(can), *_of_weights(config), *_of_canaries(config, can), *_of_corrections(config, can)]


def replay_problem(can: Capabilities) -> str | None:
    """Why the tokens of a shard cannot be drawn again; None: they can."""
    if can.draws == "keyed":
        return None
    how = "repeat in the same engine alone" if can.draws == "seeded" else "never repeat"
    return f"its draws are {can.draws}, not keyed by the row: they {how}"


def _of_draws(can: Capabilities) -> Iterator[str]:
    problem = replay_problem(can)
    if problem is not None:
        yield f"generate and evaluate cannot be replayed, and shards that are made anew have other tokens: {problem}"
        yield "evaluations of two versions are paired by prompt alone, not by noise: differences are known less well"
    elif can.invariance != "bits":
        yield (
            "the run repeats to rounding, not to the bit: the engine's sums depend on which rows run together, so a "
            "token may differ, and all after it, where two candidates lie within rounding"
        )


def _of_weights(config: RunConfig) -> Iterator[str]:
    if config.engine.update == "inflight":
        yield "shards of several versions cannot be replayed: weights came in as they were published (inflight)"
    elif config.rollout.versions == "latest" and config.staleness:
        yield "which version sampled a shard depends on when nodes ended (rollout.versions=latest)"


def _of_canaries(config: RunConfig, can: Capabilities) -> Iterator[str]:
    if config.mismatch.rows and not config.has_canaries:
        yield (
            "that the engine has taken its weights is not proven: it cannot score tokens that it is given, and under "
            "staleness no row is fresh (no canaries; staleness=0 has them)"
        )


def _of_corrections(config: RunConfig, can: Capabilities) -> Iterator[str]:
    """Law 5: mu is the engine's, pi_prox the trainer's; what they differ by is the weight w = pi_prox / mu."""
    if config.ppo.anchor == "proximal" and config.ppo.correction == "none":
        stale = " and of stale rows" if config.staleness else ""
        yield f"the difference of engine and trainer{stale} is not corrected for (ppo.correction=none)"
