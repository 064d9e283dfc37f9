"""The parts that a worker process is built from: engine, reward and tokenizer, model host, stores.

`generate` needs an engine, `score` a reward and a tokenizer, and `policy`, `critic` and `reference` a model host. Every
stage needs the ledger and the stores. A worker builds only the parts that the roles of its gang need.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from pipeline.config.identity import fingerprint
from pipeline.config.loading import config_hash, load_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.config.sections import collective_timeout_s
from pipeline.graph.graph import STAGE_ROLES, Gang, lineage_of
from pipeline.workers.attached import clear_exit_reason, write_exit_reason
from pipeline.workers.early_rows import EarlyScorer, RowSender
from pipeline.workers.messages import MESSAGE_TIMEOUT_S, Call, WorkerSpec
from pipeline.workers.replica_rows import ReplicaRows
from pipeline.workers.updates import ExactlyOnceUpdates, broadcast_from_rank_0
from pipeline.workers.versioned_engine import Clock, VersionedEngine
from pipeline.workers.weight_transfer import Fetcher
from pipeline.workers.worker_process import bind_to_gpus
from stages.engines.protocol import GenerationEngine
from stages.models.hf_files import Tokenizer, read_tokenizer
from stages.models.protocol import MODEL_ROLES, ModelHost, Rank, Role
from stages.native.fingerprint import machine_numerics
from stages.native.software import software
from stages.prompts import PromptTable
from stages.publish import is_published
from stages.rewards.learned import PROCESS_MODELS
from stages.rewards.protocol import Part
from storage.address import Address
from storage.commits import Commit, Provenance, provenance_here
from storage.files import Writeback
from storage.ledger import Ledger
from storage.rollouts import RolloutStore
from storage.weight_copies import is_copy
from storage.weights import Manifest, WeightBoard, owner_alive

RECENT_BYTES = 64 << 20
"""Maximum number of bytes of records that a worker keeps in memory. Records are kept because `reference`, `logprob`,
`value` and both updates of a step read the same rows."""

Held = TypeVar("Held")


@dataclass(frozen=True)
class Scorer:
    """Owns the rewards and the tokenizer of `score`."""

    training: tuple[Part, ...]
    held_out: tuple[Part, ...]
    """Reward parts that score evaluations. They are the parts in `training` if evaluations have no reward of their own.
    """
    tokenizer: Tokenizer

    def parts(self, *, held_out: bool) -> tuple[Part, ...]:
        """Return the parts that score evaluations (`held_out`), or the parts that score training."""
        return self.held_out if held_out else self.training

    @property
    def is_deterministic(self) -> bool:
        return all(part.reward.deterministic for part in (*self.training, *self.held_out))

    def close(self) -> None:
        for part in {id(part): part for part in (*self.training, *self.held_out)}.values():
            part.reward.close()


@dataclass(eq=False)
class WorkerParts:
    """Owns a worker's engine and models. A part that none of the gang's roles needs is None."""

    spec: WorkerSpec
    gang: Gang
    config: RunConfig
    config_hash: str
    paths: RunPaths
    ledger: Ledger
    store: RolloutStore
    board: WeightBoard
    writeback: Writeback
    """Thread that moves the files of a committed record to their final place in the store. The next node computes
    meanwhile."""
    clock: Clock = field(default_factory=Clock)
    prompts: PromptTable | None = None
    scorer: Scorer | None = None
    early_scorer: EarlyScorer | None = None
    """Scores rows before their shard is complete. None if no reward of the run can, or if the worker does not score."""
    row_sender: RowSender | None = None
    """Sends finished rows to scoring workers. None if no reward of the run scores rows early, or if the worker does not
    generate."""
    engine: VersionedEngine | None = None
    rows: ReplicaRows | None = None
    """The rows of a replica, if they may migrate to other replicas; otherwise None."""
    updates: ExactlyOnceUpdates | None = None
    """The models and their updates, if the gang has models."""
    scoring_ranks: Any = None
    """This rank's place in its gang (a `ParallelRank`) for reward models that are divided over the gang's ranks. None
    if the gang does not divide its reward models."""
    fetcher: Fetcher | None = None
    """Gets versions of the weights from other hosts if this host lacks them."""
    numerics: dict[str, str] = field(default_factory=dict)
    """Name -> fact on which the last bits of this worker's results depend (stages/native/fingerprint.py)."""
    warnings: list[str] = field(default_factory=list)
    """Warnings for people, which the driver has not received yet."""

    def warn(self, text: str) -> None:
        """Write a warning to the worker's log now, and send it to the run's journal with the next node's outcome."""
        print(f"{self.spec.name}: {text}", file=sys.stderr, flush=True)
        self.warnings.append(text)

    def fetch_weights(self, version: int) -> None:
        """Copy a version of the weights to this host. Does nothing if this worker has no fetcher."""
        if self.fetcher is not None:
            self.fetcher.fetch(version)

    def find_commit(self, address: Address, *, closed: bool = True) -> Commit | None:
        """Return the commit at an address, or None (`closed`: see `Ledger.find`). If several ranks run the node, only
        rank 0 reads the ledger and broadcasts what it found, so that all ranks act alike."""
        with self.clock.bookkeeping():
            ranks = self.gang.ranks_of(STAGE_ROLES[address.stage])
            return broadcast_from_rank_0(
                lambda: self.ledger.find(address, closed=closed), rank=self.spec.index, ranks=ranks
            )

    def read_ahead(self, call: Call) -> Callable[[], None]:
        """Begin to read the stored inputs of a call into the store's cache, if the store is an object store. Return a
        function that waits until the inputs are in the cache."""
        if self.config.storage.url is None:
            return lambda: None
        thread = ThreadPoolExecutor(1)
        read = thread.submit(self.store.prefetch, lineage_of(call.address, call.inputs, (call.version,)))
        thread.shutdown(wait=False)

        def wait() -> None:
            with self.clock.bookkeeping():
                read.result()

        return wait

    def read_record(self, address: Address) -> Any:
        """Return the record at an address."""
        with self.clock.bookkeeping():
            return self.store.read(address)

    def read_step(self, stage: str, step: int) -> Any:
        """Return the records of all shards of a step, joined into one record."""
        with self.clock.bookkeeping():
            return self.store.read_step(stage, step, self.config.rollout.shards)

    def name_collectives(self, call: Call) -> AbstractContextManager[None]:
        """Return a context for a call on a rank of a gang. If a collective fails in this context, its error names the
        call and the missing ranks."""
        if self.spec.size == 1:
            return nullcontext()
        watched = (
            self.scoring_ranks.missing_ranks if self.scoring_ranks is not None else require_part(self.updates).host
        )
        return watched.collectives_of(f"{call.address} (number {call.sequence} of gang {call.gang})")

    def attempt_name(self, call: Call) -> str:
        """Return the name under which a call commits its output. The name is unique even if Dask runs a call twice."""
        return f"{call.attempt}-{self.spec.incarnation}-{threading.get_native_id()}"

    def provenance(self, call: Call, started: float, weight_versions: tuple[int, ...]) -> Provenance:
        """Return the provenance to store in a commit. Raises MissingOutput if an input has no commit."""
        return provenance_here(
            inputs=[self.ledger.get(address) for address in lineage_of(call.address, call.inputs, weight_versions)],
            weight_versions=weight_versions,
            seed=self.config.seed,
            config_hash=self.config_hash,
            worker=self.spec.name,
            started=started,
            numerics=fingerprint(self.numerics),
        )

    def sleep(self) -> None:
        """Release the devices until the next call needs them."""
        if self.engine is not None:
            self.engine.sleep()
        if self.updates is not None:
            self.updates.host.sleep()
        if self.scorer is not None:
            PROCESS_MODELS.sleep()

    def close(self) -> None:
        if self.early_scorer is not None:
            self.early_scorer.close()
        if self.scorer is not None:
            self.scorer.close()
        if self.scoring_ranks is not None:
            PROCESS_MODELS.leave_gang()
        if self.engine is not None:
            self.engine.close()
        try:
            self.writeback.close()
        finally:
            if self.updates is not None:
                self.updates.close()


def require_part(part: Held | None) -> Held:
    """Return `part`, an optional field of `WorkerParts` such as the engine. Raises AssertionError if it is None. In
    that case the worker was not built for the role of the call."""
    assert part is not None, "this worker was built for other roles than the call's"
    return part


def build_parts(spec: WorkerSpec, *, same_layout: bool) -> WorkerParts:
    """Build the parts that the roles of a worker's gang need. `same_layout`: see `StageRuntime.__init__`."""
    config = load_yaml(spec.config_yaml)
    bind_to_gpus(_gpu_addresses())
    torch.set_num_threads(config.placement.gangs[spec.gang].threads)
    paths = RunPaths(config.run_dir)
    stored = replace(config.stored, durability=config.storage.durability(unseen=True))
    ledger, writeback = stored.ledger(), Writeback()
    store = RolloutStore(
        stored.place,
        ledger,
        config.layouts(),
        recent_bytes=RECENT_BYTES,
        durability=stored.durability,
        writeback=writeback,
    )
    gang = next(g for g in config.gangs() if g.name == spec.gang)
    parts = WorkerParts(
        spec=spec,
        gang=gang,
        config=config,
        config_hash=config_hash(config),
        paths=paths,
        ledger=ledger,
        store=store,
        writeback=writeback,
        board=WeightBoard(paths.board(config.weights_dir(spec.gang)) if spec.mirror is None else spec.mirror.board),
        numerics=software() | machine_numerics(),
    )
    # Remove weights that a killed run left on this host. Published weights stay, and so do weights that a living
    # process may still commit.
    parts.board.tidy(lambda manifest: is_published(ledger, manifest) or _is_being_published(parts.board, manifest))
    if gang.roles & {Role.GENERATE, Role.SCORE}:
        parts.prompts = PromptTable.load(paths.prompts)
    if Role.SCORE in gang.roles:
        parts.scorer = _build_scorer(config)
    if gang.divides_scorers:
        parts.scoring_ranks = PROCESS_MODELS.join_gang(_rank(config, spec), config.placement.gangs[spec.gang].layout)
    if Role.GENERATE in gang.roles:
        engine = _build_engine(config, spec)
        parts.numerics |= {f"engine.{name}": value for name, value in engine.numerics.items()}
        parts.engine = VersionedEngine(engine, parts.board, in_flight=config.in_flight, fetch=parts.fetch_weights)
        if config.cluster.migrate_rows:
            parts.rows = ReplicaRows(parts.engine, min(MESSAGE_TIMEOUT_S, config.cluster.deadline_s / 4))
    if gang.roles & MODEL_ROLES:
        parts.updates = _build_updates(parts, _build_host(config, spec, gang.roles & MODEL_ROLES), same_layout)
        parts.numerics |= parts.updates.host.numerics()
    if config.shares_devices(spec.gang):
        parts.sleep()  # another gang may hold the devices; the first call wakes the models
    return parts


def _gpu_addresses() -> list[str]:
    """Return the PCI addresses of this process's GPUs."""
    if not torch.cuda.is_available():
        return []
    numbers = range(torch.cuda.device_count())
    gpus: list[Any] = [torch.cuda.get_device_properties(number) for number in numbers]  # torch's stubs lack pci_*
    return [f"{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0" for one in gpus]


def _build_scorer(config: RunConfig) -> Scorer:
    registry = importlib.import_module("stages.rewards.registry")
    build = partial(registry.build_parts, directory=config.run_dir, trust_answers=config.reward.trust_answers)
    training: tuple[Part, ...] = build(config.reward, "reward")
    key, section = config.held_out_reward
    held_out = training if section is config.reward else build(section, key)
    return Scorer(training, held_out, read_tokenizer(config.model.path))


def _is_being_published(board: WeightBoard, manifest: Manifest) -> bool:
    """Return True if this host's publisher of the version lives, and may still commit it."""
    return not is_copy(manifest) and owner_alive(board.directory / manifest.file)


def _build_engine(config: RunConfig, spec: WorkerSpec) -> GenerationEngine:
    clear_exit_reason(spec.log)
    make = importlib.import_module("stages.engines.build").build_engine
    engine: GenerationEngine = make(
        config.model.path,
        config.engine,
        max_seq=config.seq,
        threads=config.placement.gangs[spec.gang].threads,
        eos_token_ids=config.model.eos_token_ids,
        migratable=config.cluster.migrate_rows,
        in_flight=config.in_flight,
        device_sharing=config.shares_devices(spec.gang),
        on_lost=partial(_end_process, spec.log),
        log=Path(spec.log) if spec.log is not None else None,
        start_s=config.engine_start_s,
    )
    return engine


def _build_host(config: RunConfig, spec: WorkerSpec, roles: frozenset[Role]) -> ModelHost:
    settings = config.placement.gangs[spec.gang]
    make = importlib.import_module("stages.models.host").MegatronHost
    host: ModelHost = make(
        config.model,
        config.sampling,
        config.ppo,
        settings.layout,
        roles,
        _rank(config, spec),
        seed=config.seed,
        total_steps=config.steps,
        offload=settings.offload,
        fsync=config.storage.fsync,
    )
    return host


def _rank(config: RunConfig, spec: WorkerSpec) -> Rank:
    return Rank(
        spec.index,
        spec.size,
        spec.rendezvous,
        config.placement.gangs[spec.gang].threads,
        collective_timeout_s=collective_timeout_s(config.cluster),
        listening=spec.listening,
    )


def _build_updates(parts: WorkerParts, host: ModelHost, same_layout: bool) -> ExactlyOnceUpdates:
    config = parts.config
    repeats_bits = importlib.import_module("stages.models.numerics").repeats_bits
    return ExactlyOnceUpdates(
        host,
        rank=parts.spec.index,
        ranks=parts.spec.size,
        store=parts.store,
        ledger=parts.ledger,
        checkpoints=config.stored.checkpoints(),
        shards=config.rollout.shards,
        recompute_logprobs=config.ppo.proximal == "recompute",
        checkpoint_every=config.checkpoint.every,
        checkpoint_keep=config.checkpoint.keep,
        checkpoint_keep_every=config.checkpoint.keep_every,
        staleness=config.staleness,
        same_layout=same_layout and repeats_bits(config.model),
        bookkeeping=parts.clock.bookkeeping,
        warn=parts.warn,
    )


def _end_process(log: str | None, reason: str) -> None:
    """Write the reason beside the log, and end this process: a replica that lost an engine process is built again."""
    print(f"{reason}: its replica ends", file=sys.stderr, flush=True)
    write_exit_reason(log, reason)
    os._exit(1)
