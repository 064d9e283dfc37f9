"""The runtime of a worker process: what its roles need, and how each stage is bound to it.

    call ──► committed already? ──yes──► return the reference
               │no
               └► read inputs from the store ──► the stage's pure function ──► write, commit ──► reference

A worker builds only what its gang's roles need: an engine for `generate`, a reward and a tokenizer for `score`, a model
host for `policy`, `value` and `reference`. One process may hold all of them.

May import storage and stages; engines, models and rewards are imported when a role needs them: each costs seconds.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pipeline.config.paths import RunPaths
from pipeline.config.schema import config_hash, load_yaml
from pipeline.graph.graph import STAGE_ROLES
from pipeline.observe.engine_metrics import counts
from pipeline.workers.bookkeeping import Clock
from pipeline.workers.entry import Visit
from pipeline.workers.messages import LONGEST_SILENCE_S, Call, WorkerSpec
from pipeline.workers.replica_rows import ReplicaRows
from pipeline.workers.updates import UPDATE_STAGE, Trainer
from pipeline.workers.versioned_engine import VersionedEngine
from pipeline.workers.weight_transfer import Fetched, Fetcher
from stages.advantage import advantage
from stages.engines.config import SamplingConfig
from stages.engines.embedded.migration.protocol import RowsLost
from stages.generate import generate
from stages.logprob import logprob
from stages.models.hf_files import read_tokenizer
from stages.models.protocol import MODEL_ROLES, Rank, Role
from stages.prompts import EVALUATION_STEP, PromptTable, held_out_prompts, training_prompts
from stages.publish import is_published, publish
from stages.reference import reference
from stages.score import score
from stages.value import value
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.ledger import Commit, Ledger, Provenance, provenance_here
from storage.records import Record, Rollout
from storage.rollouts import RolloutStore
from storage.weight_copies import is_copy
from storage.weights import WeightBoard

RECENT_BYTES = 64 << 20
"""Of records that a worker keeps: `reference`, `logprob`, `value` and both updates of a step read the same rows."""


@dataclass
class Output:
    """What a stage made: a record to store, or None on ranks that hold no part of the answer."""

    record: Record | None
    metrics: dict[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    weight_versions: tuple[int, ...] = ()
    mask: np.ndarray | None = None
    """Response mask that says where the record's log-probs must not be zero."""


def _part(path: str) -> Any:
    """A class or function by `module:name`: the one place where the runtime's heavy parts are imported."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class StageRuntime:
    """Owns a worker's engine and models."""

    def __init__(self, spec: WorkerSpec, *, same_layout: bool = True) -> None:
        """`same_layout`: the models are laid out as those that made the run's commits, whose checkpoints then fit, and
        whose digests a replayed update must have."""
        config = self._config = load_yaml(spec.config_yaml)
        gang = next(g for g in config.gangs() if g.name == spec.gang)
        settings = config.placement.gangs[spec.gang]
        torch.set_num_threads(settings.threads)
        # What it would rather have (Transformer Engine, Apex) is no news to whoever runs this; its errors still are.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
        self._spec = spec
        self._paths = RunPaths(config.run_dir)
        self._config_hash = config_hash(config)
        self._ledger = Ledger(str(self._paths.ledger))
        self._store = RolloutStore(str(self._paths.root), self._ledger, config.layouts(), recent_bytes=RECENT_BYTES)
        self._board = WeightBoard(self._paths.board(config.weights_dir(gang.name)))
        # What a killed run left on this host; of weights that were published here, the driver judges.
        self._board.tidy(lambda manifest: not is_copy(manifest) or is_published(self._ledger, manifest))
        self._fetcher: Fetcher | None = None
        self._clock = Clock()
        self._prompts = PromptTable.load(self._paths.prompts) if gang.roles & {Role.GENERATE, Role.SCORE} else None
        self._engine: VersionedEngine | None = None
        self._rows: ReplicaRows | None = None
        self._trainer: Trainer | None = None
        self._last_sequence = -1
        if Role.SCORE in gang.roles:
            self._reward = _part("stages.rewards.registry:build_reward")(config.reward)
            self._tokenizer = read_tokenizer(config.model.path)
        if Role.GENERATE in gang.roles:
            engine = _part("stages.engines.embedded.engine:EmbeddedEngine")
            self._engine = VersionedEngine(
                engine(
                    config.model.path,
                    config.engine,
                    max_seq=config.seq,
                    threads=settings.threads,
                    device=_first_device(config.replica_ranks, spec.index),
                    eos_token_ids=config.model.eos_token_ids,
                    on_lost=_end_process,
                ),
                self._board,
                in_flight=config.engine.update == "inflight",
                fetch=self._fetch,
            )
            if config.cluster.move_rows_below:
                silence_s = min(LONGEST_SILENCE_S, config.cluster.deadline_s / 4)
                self._rows = ReplicaRows(self._engine, config.cluster.move_rows_below, silence_s)
        if gang.ordered:
            host = _part("stages.models.host:MegatronHost")(
                config.model,
                config.sampling,
                config.ppo,
                settings.layout,
                gang.roles & MODEL_ROLES,
                Rank(spec.index, spec.size, spec.rendezvous, settings.threads),
                seed=config.seed,
                total_steps=config.steps,
            )
            self._trainer = Trainer(
                host,
                rank=spec.index,
                ranks=spec.size,
                store=self._store,
                ledger=self._ledger,
                checkpoints=Checkpoints(self._paths.checkpoints) if same_layout else None,
                shards=config.rollout.shards,
                recompute_logprobs=config.ppo.proximal == "recompute",
                checkpoint_every=config.checkpoint.every,
                checkpoint_keep=config.checkpoint.keep,
                staleness=config.staleness,
                bookkeeping=self._clock.bookkeeping,
            )

    # ---- one call ------------------------------------------------------------------------------------------------

    def run(self, call: Call) -> Visit:
        """Runs a node, or finds that its output is committed."""
        self._clock.seconds = 0.0
        if self._spec.size > 1 and call.sequence is not None:
            assert call.sequence > self._last_sequence, f"{call.address}: the gang's order was broken"
            self._last_sequence = call.sequence
        stage = call.address.stage
        if stage in UPDATE_STAGE.values():
            return self._run_update(call)
        if stage == "publish":
            return self._run_publish(call)
        found = self._find(call.address)
        if found is not None:
            return self._visit(found, reused=True)
        started = time.time()
        output = self.compute(call)
        if output.record is None:
            return Visit(None, self._clock.seconds, reused=False)
        with self._clock.bookkeeping():
            commit = self._store.write(
                call.address,
                output.record,
                self._provenance(call, started, output.weight_versions),
                attempt=self._attempt_name(call),
                mask=output.mask,
                metrics=output.metrics,
                state=output.state,
            )
        return self._visit(commit, reused=False)

    @property
    def rows(self) -> ReplicaRows | None:
        """Of a replica whose rows may move to others."""
        return self._rows

    def fetch_with(self, fetcher: Fetcher) -> None:
        """From now on versions that this host lacks are brought from others."""
        self._fetcher = fetcher

    def _fetch(self, version: int) -> None:
        if self._fetcher is not None:
            self._fetcher.fetch(version)

    @property
    def reward_repeats(self) -> bool:
        """Whether scoring again must give the same scores."""
        return self._reward.deterministic

    def compute(self, call: Call) -> Output:
        """What a stage makes of its stored inputs; nothing is written. Updates and publications are not among these:
        they change or give away weights."""
        output: Output = getattr(self, f"_{call.address.stage}")(call)
        return output

    @property
    def trainer(self) -> Trainer:
        """The models of a worker that has any."""
        assert self._trainer is not None, f"{self._spec.name} holds no models"
        return self._trainer

    def _find(self, address: Address) -> Commit | None:
        """The commit at an address; where all ranks run the node, rank 0 looks, so that they act alike."""
        with self._clock.bookkeeping():
            if self._trainer is None or STAGE_ROLES[address.stage] not in MODEL_ROLES:
                return self._ledger.find(address)
            return self._trainer.agree(lambda: self._ledger.find(address))

    def _visit(self, commit: Commit, *, reused: bool) -> Visit:
        ref = commit.ref() if self._spec.size == 1 or self._spec.index == 0 else None
        return Visit(ref, self._clock.seconds, reused)

    def _attempt_name(self, call: Call) -> str:
        """A name that no other run of the same call has: Dask may run a task twice."""
        return f"{call.attempt}-{self._spec.incarnation}-{threading.get_native_id()}"

    def _provenance(self, call: Call, started: float, weight_versions: tuple[int, ...]) -> Provenance:
        commits = [self._ledger.find(address) for address in call.inputs]
        return provenance_here(
            inputs=[commit for commit in commits if commit is not None],
            weight_versions=weight_versions,
            seed=self._config.seed,
            config_hash=self._config_hash,
            worker=self._spec.name,
            started=started,
        )

    def _read(self, address: Address) -> Any:
        with self._clock.bookkeeping():
            return self._store.read(address)

    def _read_step(self, stage: str, step: int) -> Any:
        with self._clock.bookkeeping():
            return self._store.read_step(stage, step, self._config.rollout.shards)

    # ---- the stages ----------------------------------------------------------------------------------------------

    def _generate(self, call: Call) -> Output:
        config, where = self._config, call.address
        assert self._prompts is not None
        prompts = training_prompts(
            self._prompts,
            seed=config.seed,
            step=where.step,
            shard=where.shard,
            rows=config.rollout.rows,
            shards=config.rollout.shards,
            responses_per_prompt=config.rollout.responses_per_prompt,
        )
        return self._sample(call, prompts, step=where.step, sampling=config.sampling)

    def _evaluate(self, call: Call) -> Output:
        config = self._config
        assert self._prompts is not None
        sampling = config.sampling
        if config.evaluate.temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=config.evaluate.temperature)
        prompts = held_out_prompts(self._prompts, shard=call.address.shard, shards=config.evaluate.shards)
        return self._sample(call, prompts, step=EVALUATION_STEP, sampling=sampling, exact=True)

    def _sample(self, call: Call, prompts: Any, *, step: int, sampling: SamplingConfig, exact: bool = False) -> Output:
        assert self._engine is not None
        assert self._prompts is not None
        keys = [(self._config.seed, step, row) for row in prompts.row.tolist()]
        with nullcontext() if self._rows is None else self._rows.shard(call.address, keys) as shard:
            rollout = None
            while rollout is None:
                with suppress(RowsLost), self._engine.at(call.version, self._clock, exact=exact) as engine:
                    rollout = generate(
                        engine,
                        prompts,
                        seed=self._config.seed,
                        step=step,
                        version=call.version,
                        sampling=sampling,
                        seq=self._config.seq,
                        pad_id=self._prompts.pad_id,
                    )
        fetched = self._fetcher.fetched() if self._fetcher is not None else Fetched()
        metrics = {
            "generate/tokens": float(rollout.response_lengths.sum()),
            "generate/rows_finished_elsewhere": float(shard.finished_elsewhere) if shard is not None else 0.0,
            **counts(engine.stats(), fetched.seconds, fetched.num_bytes),
        }
        versions = tuple(np.unique(rollout.token_versions[rollout.response_mask]).tolist())
        return Output(rollout, metrics, weight_versions=versions, mask=rollout.response_mask)

    def _score(self, call: Call) -> Output:
        rollout: Rollout = self._read(call.inputs[0])
        assert self._prompts is not None
        extras = [self._prompts.extra[i] for i in rollout.prompt_index]
        record = score(self._reward, self._tokenizer, rollout, extras)
        return Output(record, {"score/mean": float(record.scores.mean())})

    _evaluate_score = _score

    def _reference(self, call: Call) -> Output:
        rollout: Rollout = self._read(call.inputs[0])
        return Output(reference(self.trainer.host, rollout), weight_versions=(0,), mask=rollout.response_mask)

    def _logprob(self, call: Call) -> Output:
        host, rollout = self.trainer.at(Role.POLICY, call.version), self._read(call.inputs[0])
        return Output(logprob(host, rollout), weight_versions=(call.version,), mask=rollout.response_mask)

    def _value(self, call: Call) -> Output:
        host = self.trainer.at(Role.CRITIC, call.version)
        return Output(value(host, self._read(call.inputs[0])), weight_versions=(call.version,))

    def _advantage(self, call: Call) -> Output:
        step = call.address.step
        before = self._ledger.find(Address("advantage", step - 1)) if step else None
        policy = self._read_step("logprob", step) if self._config.ppo.proximal == "recompute" else None
        record, state, metrics = advantage(
            self._read_step("generate", step),
            self._read_step("score", step),
            self._read_step("reference", step),
            policy,
            self._read_step("value", step),
            self._config.ppo,
            step,
            self._config.staleness,
            before.state if before is not None else {},
        )
        return Output(record, metrics, state)

    # ---- stages that change or give away weights -------------------------------------------------------------------

    def _run_update(self, call: Call) -> Visit:
        role = next(role for role, stage in UPDATE_STAGE.items() if stage == call.address.stage)
        started = time.time()
        committed = False

        def commit(metrics: dict[str, float], digest: str) -> Commit:
            nonlocal committed
            committed = True
            with self._clock.bookkeeping():
                return self._store.commit_only(
                    call.address,
                    self._provenance(call, started, (call.version,)),
                    attempt=self._attempt_name(call),
                    metrics=metrics,
                    digest=digest,
                )

        winner = self.trainer.update(role, call.address.step, commit)
        if winner is None:
            return Visit(None, self._clock.seconds, reused=False)
        return self._visit(winner, reused=not committed)

    def _run_publish(self, call: Call) -> Visit:
        """Publishes again where the commit is there but the weights, which live in memory, are not."""
        version, config = call.version, self._config
        started = time.time()
        host = self.trainer.at(Role.POLICY, version)
        found = self._find(call.address)
        export = version == config.steps or bool(config.export.every and version % config.export.every == 0)
        if export and version:
            self._export(version)
        with self._clock.bookkeeping():
            manifest = publish(host, self._board, version)
            if manifest is None:
                return Visit(None, self._clock.seconds, reused=False)
            if found is None:
                found = self._store.commit_only(
                    call.address,
                    self._provenance(call, started, (version,)),
                    attempt=self._attempt_name(call),
                    metrics={"publish/bytes": float(manifest.num_bytes)},
                    digest=manifest.digest,
                )
        return self._visit(found, reused=False)

    def _export(self, version: int) -> None:
        """The whole policy in Hugging Face layout; a half-written one never has the final name."""
        target = self._paths.weights(version)
        staged = target.with_name(f".{target.name}")

        def begin() -> bool:
            shutil.rmtree(staged, ignore_errors=True)  # of a process that died over it
            return target.is_dir()

        if self.trainer.agree(begin):
            return
        self.trainer.host.export(staged)
        if self._spec.index == 0:
            staged.rename(target)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._trainer is not None:
            self._trainer.host.close()


def _first_device(ranks: int, index: int) -> torch.device | None:
    """Of a replica that spans ranks, where there are GPUs: each has the next so many to itself."""
    return torch.device("cuda", index * ranks) if ranks > 1 and torch.cuda.is_available() else None


def _end_process(reason: str) -> None:
    """A replica that has lost a rank is lost as a whole: as if its own process had died, it is built anew."""
    print(f"{reason}: its replica ends", file=sys.stderr, flush=True)
    os._exit(1)
