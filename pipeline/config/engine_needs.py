"""Check a run's requirements against the capabilities of its engine (`Capabilities`).

`preflight.py` tells which guarantees an accepted run lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stages.engines.capabilities import Capabilities, able, capabilities_of
from stages.engines.config import EngineConfig
from stages.models.config import SamplingConfig
from stages.models.spec import is_random
from storage.problems import Problem

PLAIN_TEMPERATURES = (0.0, 1.0)
"""Temperatures at which a token is drawn from the softmax of the unscaled logits (1) or is their arg max (0)."""


@dataclass(frozen=True)
class EngineNeeds:
    """The parts of a run's config that require something of its engine."""

    engine: EngineConfig
    model_path: str
    sampling: SamplingConfig
    evaluated_at: float | None
    """Temperature of evaluations; None: there are no evaluations, or they use training's."""
    moves_rows: int
    """`cluster.migrate_rows_below`."""
    stops_at_mismatch: bool
    """True if an alarm at stale rows ends the run."""
    takes_turns: bool = False
    """True if other gangs take turns on the engine's devices."""


def engine_needs(needs: EngineNeeds) -> Iterator[Problem]:
    """Yield the requirements that the engine cannot meet. The capabilities checked do not depend on the device."""
    can = capabilities_of(needs.engine, "cpu")
    update = needs.engine.update
    if update not in can.updates:
        ways = " or ".join(sorted(can.updates))
        need = f"it cannot take weights in so: must be {ways}{_or(needs, lambda c: update in c.updates)}"
        yield _problem(needs, "engine.update", update, need)
    if needs.moves_rows and not can.migration:
        need = f"its rows cannot move between replicas: must be 0{_or(needs, lambda c: c.migration)}"
        yield _problem(needs, "cluster.migrate_rows_below", needs.moves_rows, need)
    if is_random(needs.model_path) and "tensors" not in can.sources:
        need = "it reads the model itself: needs a Hugging Face directory"
        yield _problem(needs, "model.path", needs.model_path, need)
    if can.distributions == "plain":
        yield from _plain_problems(needs)
    if needs.takes_turns and can.sleeps == "nothing":
        need = f"it gives no memory back while others have its devices{_or(needs, lambda c: c.sleeps != 'nothing')}"
        yield _problem(needs, "placement.device_sharing", "its gang", need)
    if needs.stops_at_mismatch and not can.scores:
        need = "it cannot score given tokens, so stale rows have no canaries to stop at: must be false, or staleness=0"
        yield _problem(needs, "mismatch.stop", True, need)


def _plain_problems(needs: EngineNeeds) -> Iterator[Problem]:
    """Yield the problems of an engine whose log-probs ignore changes of the logits before the draw."""
    sampling, other = needs.sampling, _or(needs, lambda c: c.distributions == "any")
    if sampling.temperature != 1:
        need = f"its log-probs are those of temperature 1, whatever it draws at: must be 1{other}"
        yield _problem(needs, "sampling.temperature", sampling.temperature, need)
    if sampling.suppress_token_ids:
        need = f"its log-probs know nothing of tokens that are taken out: must be []{other}"
        yield _problem(needs, "sampling.suppress_token_ids", sampling.suppress_token_ids, need)
    if sampling.min_new_tokens:
        need = f"its log-probs know nothing of an EOS that is not allowed yet: must be 0{other}"
        yield _problem(needs, "sampling.min_new_tokens", sampling.min_new_tokens, need)
    if needs.evaluated_at not in (None, *PLAIN_TEMPERATURES):
        need = f"its log-probs are those of temperature 1: must be 0, 1 or null{other}"
        yield _problem(needs, "evaluate.temperature", needs.evaluated_at, need)


def _problem(needs: EngineNeeds, key: str, given: object, need: str) -> Problem:
    return Problem(key, given, f"engine.kind={needs.engine.kind}: {need}")


def _or(needs: EngineNeeds, can: Callable[[Capabilities], bool]) -> str:
    """Return the part of a message that suggests other engines, or ""."""
    others = able(needs.engine, "cpu", can)
    return f" (or engine.kind={' or '.join(others)})" if others else ""
