"""The runtime of a worker process: how it runs a call.

    call ──► committed already? ──yes──► return the reference
               │no, or the node's first call
               └► read inputs from the store ──► the stage's pure function ──► write, commit ──► reference
                                                 └─ its turn (turns.py) ─┘

`stages.py` maps each stage to its function, and `parts.py` builds the engine and models that a worker needs. The
functions of stages that change or publish weights look for the commit, and write it, themselves.

`runtime_for` gives `replay` and `export` a runtime in their own process, which writes nothing to the run.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from distributed import Worker

from pipeline.config.loading import to_yaml
from pipeline.config.placement import gang_of_role
from pipeline.config.preflight import check_secrets
from pipeline.config.run import RunConfig
from pipeline.graph.graph import STAGE_ROLES
from pipeline.workers.early_rows import RowSender
from pipeline.workers.entry import Runtime
from pipeline.workers.messages import Call, Outcome, WorkerSpec
from pipeline.workers.parts import build_parts
from pipeline.workers.stages import ComputedStage, StageOutput, binding_of, early_scorer
from pipeline.workers.turns import ComputeTurn, ComputeTurns
from pipeline.workers.weight_transfer import Fetcher
from stages.models.config import LayoutConfig
from stages.models.protocol import MODEL_ROLES, Role
from storage.commits import Commit


class StageRuntime(Runtime):
    """Owns a worker's engine and models."""

    def __init__(self, spec: WorkerSpec, *, same_layout: bool = True) -> None:
        """Build the worker's engine and models.

        `same_layout`: True if the models are divided over processes in the same way as when the run's updates were
        committed. Then a repeated update must give the digest in its commit. Raises UnboundStage if a stage has no
        function.
        """
        for stage in STAGE_ROLES:
            binding_of(stage)
        # Megatron recommends Transformer Engine and Apex in warnings. Its errors are still shown.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
        self.parts = build_parts(spec, same_layout=same_layout)
        self.numerics, self.rows = self.parts.numerics, self.parts.rows
        self._last_sequence = -1
        self._turns = ComputeTurns()
        self._threads = torch.get_num_threads()

    def run(self, call: Call) -> Outcome:
        """Return the outcome of a call. Run the call's node first, unless the node has a commit already."""
        with self._turns.queued() if self.parts.gang.is_ordered else nullcontext(ComputeTurn()) as turn:
            return self._run(call, turn)

    def _run(self, call: Call, turn: ComputeTurn) -> Outcome:
        spec, clock = self.parts.spec, self.parts.clock
        if spec.size > 1 and call.sequence is not None:
            assert call.sequence > self._last_sequence, f"{call.address}: the gang's order was broken"
            self._last_sequence = call.sequence
        binding = binding_of(call.address.stage)
        inputs_are_read = self.parts.read_ahead(call)
        turn.wait()
        if self.parts.gang.is_ordered:  # OpenMP keeps the number for each thread, and calls come in two of them
            torch.set_num_threads(self._threads)
        started, clock.seconds = time.time(), 0.0
        with self.parts.name_collectives(call):
            if isinstance(binding, ComputedStage):
                commit = self._commit_once(call, binding, inputs_are_read, turn)
            else:
                inputs_are_read()
                commit = binding.run(self.parts, call, turn)
        ref = commit.ref() if commit is not None and (spec.size == 1 or spec.index == 0) else None
        warned, self.parts.warnings = tuple(self.parts.warnings), []
        return Outcome(
            call.address, call.attempt, ref, spec.name, spec.index, started, time.time(), clock.seconds, warned
        )

    def _commit_once(
        self, call: Call, binding: ComputedStage, inputs_are_read: Callable[[], None], turn: ComputeTurn
    ) -> Commit | None:
        """Return the node's commit. If the node has no commit, compute its output and commit it first. Return None on a
        rank that holds no part of the output. `inputs_are_read`: waits until the node's inputs are in the store's
        cache. `turn`: ends when the output is computed."""
        parts = self.parts
        commit = None if call.is_first else parts.find_commit(call.address, closed=False)
        if commit is not None:
            return commit
        inputs_are_read()
        started = time.time()
        output = binding.compute(parts, call)
        turn.end()
        if output.record is None:
            return None
        with parts.clock.bookkeeping():
            return parts.store.write(
                call.address,
                output.record,
                parts.provenance(call, started, output.weight_versions),
                attempt=parts.attempt_name(call),
                mask=output.mask,
                metrics=output.metrics,
                state=output.state,
            )

    def compute(self, call: Call) -> StageOutput:
        """Return the output of a stage for its stored inputs, without writing it. Updates and publications change or
        publish weights, so they cannot run this way."""
        binding = binding_of(call.address.stage)
        assert isinstance(binding, ComputedStage), f"{call.address.stage} cannot be computed without being committed"
        return binding.compute(self.parts, call)

    def connect(self, worker: Worker) -> None:
        if self.parts.config.scores_early and self.parts.engine is not None:
            self.parts.row_sender = RowSender(worker)
        if self.parts.config.scores_early and self.parts.scorer is not None:
            self.parts.early_scorer = early_scorer(self.parts)
            self.parts.early_scorer.open(worker)

    def set_fetcher(self, fetcher: Fetcher) -> None:
        self.parts.fetcher = fetcher

    def load_in_flight(self, version: int) -> None:
        if self.parts.engine is not None:
            self.parts.engine.load_in_flight(version)

    def sleep(self) -> None:
        self.parts.sleep()

    def close(self) -> None:
        self.parts.close()


# ---- in one process --------------------------------------------------------------------------------------


def local_config(config: RunConfig, scratch: Path) -> RunConfig:
    """Return a config for this process alone, with a separate directory (in `scratch`) for published weights."""
    single = copy.deepcopy(config)
    single.cluster.weights_dir = str(scratch / "board")
    for gang in single.placement.gangs.values():
        gang.weights_dir = None
    return single


def was_held_in_one_process(config: RunConfig, roles: Collection[Role]) -> bool:
    """Return True if the run held the model of each of these roles in one process. Roles without a model are ignored.

    If True, this process can add numbers in the same order as the run did. So a repeated computation can give the same
    bits. In other layouts the sums may differ by rounding.
    """
    gangs = [config.placement.gangs[config.placement.roles[role.value]] for role in roles if role in MODEL_ROLES]
    return all(gang.workers == 1 for gang in gangs)


@contextmanager
def runtime_for(config: RunConfig, roles: Role | Collection[Role]) -> Iterator[StageRuntime]:
    """Yield a runtime in this process that has only the engine and models which these roles need. The runtime uses as
    many threads as a worker of the first role's gang."""
    check_secrets(config)
    held = [roles] if isinstance(roles, Role) else [*roles]
    only = copy.deepcopy(config)
    gangs = [gang_of_role(only.placement, role) for role in held]
    settings = only.placement.gangs[gangs[0]]
    one_rank = was_held_in_one_process(config, held)
    settings.workers, settings.layout, settings.offload = 1, LayoutConfig(), "none"
    only.cluster.migrate_rows = False  # there is no other replica
    only.placement.device_sharing = []
    only.placement.gangs = {"replay": settings, "elsewhere": replace(settings, device="auto")}
    only.placement.roles = {r.value: "replay" if r in held else "elsewhere" for r in Role}
    only.placement.gangs["replay"].concurrent_shards = 1
    only.placement.gangs["elsewhere"].concurrent_shards = 1
    spec = WorkerSpec(
        gang="replay",
        index=0,
        size=1,
        incarnation=0,
        runtime="",
        config_yaml=to_yaml(only),
    )
    runtime = StageRuntime(spec, same_layout=one_rank)
    try:
        yield runtime
    finally:
        runtime.close()
