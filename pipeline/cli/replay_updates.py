"""`stageline replay RUN --updates A:B`: updates A to B - 1 of both models again, from the stored rollouts.

    start weights, or the newest checkpoint at or before A ──► updates to A ──► update A ──► ... ──► update B - 1
                                                                                 └ digest beside the committed one

It runs in this process, one model after the other: what an update reads (rollouts, advantages, values, log-probs) is
stored, so that neither needs the other. Nothing is written to the run. Updates of a gang of several ranks may differ in
their last bits here, and then the answer says so; so may those of a device that does not repeat its bits.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.cli.answers import print_line
from pipeline.cli.exit_codes import DONE, STAGE_FAILED
from pipeline.cli.one_process import alone, held_in_one_process, runtime_for
from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.graph.graph import UPDATE_STAGE, GraphSpec, step_nodes
from pipeline.workers.parts import required
from stages.models.numerics import repeats_bits
from stages.models.protocol import Role
from storage.address import Address
from storage.checkpoints import Checkpoints

_TRAINING = ("generate", "score", "reference", "logprob", "value", "advantage", "update_policy", "update_critic")
"""Stages whose outputs a step must have before its updates can run again."""
_RANGE = re.compile(r"(\d+):(\d+)")


def update_range(config: RunConfig, text: str) -> range:
    """The steps of "A:B", which are A to B - 1. Raises ConfigError for another form, and for steps of which something
    is not there, naming it."""
    match = _RANGE.fullmatch(text)
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps:
        raise ConfigError("--updates", f"given {text!r}; write A:B for updates A to B - 1, for example 0:40")
    there = set(open_history(config).ledger.addresses())
    spec = config.graph()
    whole = next((step for step in range(spec.steps) if _missing(spec, step, there)), spec.steps)
    if steps.stop > spec.steps:
        raise ConfigError("--updates", f"given {text!r}; the run has updates 0:{whole}")
    for step in steps:
        missing = _missing(spec, step, there)
        if missing:
            raise ConfigError("--updates", f"given {text!r}; {missing[0]} is not there (from 0 on it has 0:{whole})")
    return steps


def _missing(spec: GraphSpec, step: int, there: set[Address]) -> list[Address]:
    nodes = (node for node in step_nodes(spec, step) if node.stage in _TRAINING)
    return [node.address for node in nodes if node.address not in there]


def replay_updates(config: RunConfig, steps: range) -> int:
    """Runs the updates again, prints each digest beside the committed one, and at the end "identical" or the first
    difference. Returns the exit code.

    Raises:
        MissingOutput: what an update reads, between the checkpoint and the range, is not there any more.
        ReplayMismatch: an update between the checkpoint and the range gave other weights.
    """
    differing: list[Address] = []
    for role, stage in UPDATE_STAGE.items():
        for step, committed, made in _replayed(config, role, steps):
            same = "same" if committed == made else "DIFFERS"
            print_line(f"{Address(stage, step)}  committed {committed}  replayed {made}  {same}")
            if committed != made:
                differing.append(Address(stage, step))
    if not differing:
        print_line(f"identical: updates {steps.start}:{steps.stop} of policy and critic, in this process")
        return DONE
    first = min(differing, key=lambda address: address.step)
    if held_in_one_process(config, [*UPDATE_STAGE]) and repeats_bits(config.model):
        print_line(f"first difference: {first}")
        return STAGE_FAILED
    print_line(
        f"first difference: {first}; another layout, or a device that does not repeat its bits: digests may differ"
    )
    return DONE


def _replayed(config: RunConfig, role: Role, steps: range) -> Iterator[tuple[int, str, str]]:
    """See `ExactlyOnceUpdates.replay_all`."""
    saved = Checkpoints(RunPaths(config.run_dir).checkpoints, config.storage.durability())
    start = next(iter(saved.newest_first(str(role), steps.start)), 0)
    print_line(f"{role}: from {f'the checkpoint of version {start}' if start else 'the start weights'}")
    with tempfile.TemporaryDirectory(prefix="stageline-replay-") as name:
        scratch = Path(name)
        with runtime_for(alone(config, scratch), role) as runtime:
            yield from required(runtime.parts.updates).replay_all(role, steps)
