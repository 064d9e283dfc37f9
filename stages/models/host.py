"""`MegatronHost`: the models of one rank of a gang, as an implementation of the protocol `ModelHost`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from stages.models import minibatches as minibatch_losses
from stages.models import parallel, publication
from stages.models import weights as gather
from stages.models.build import DTYPES, Blueprint, build_role, build_trunk, output_weight, reset_role
from stages.models.checkpoints import write_snapshot
from stages.models.config import LayoutConfig, ModelConfig, Offload, OptimizerConfig, SamplingConfig
from stages.models.forward import KeptForwards, MicroBatch, Trunk, head_values, response_logprobs, run_forward
from stages.models.hf_weights import lease_tensors, read_weights, write_model
from stages.models.kernels.blocks import choose_kernels
from stages.models.kernels.fused import with_fusions
from stages.models.layouts import check_layout
from stages.models.lora import ADAPTERS, FrozenWeights, write_adapters
from stages.models.minibatches import MinibatchLoss, peak_of_a_rank, rank_micro_batches, work_of
from stages.models.numerics import choose_products, peak_bytes, set_numerics
from stages.models.offload import OffloadableTensors, has_own_memory
from stages.models.protocol import MODEL_ROLES, CriticBatch, PolicyBatch, Rank, Role, StateError
from stages.models.publication import Slab
from stages.models.spec import ModelSpec, padded, read_eos_ids, read_spec
from stages.models.token_logprobs import Distribution, Entropy
from stages.models.trainer import Minibatch, Trainer, learning_rate
from stages.models.work import UpdateWork, synchronise
from stages.ppo.config import PPOConfig
from stages.ppo.masks import state_values
from stages.ppo.micro_batches import minibatch_rows
from storage.checkpoints import FileSum
from storage.records import PolicyLogprobs, ReferenceLogprobs, Rollout, Values
from storage.weights import Manifest, WeightBoard


class MegatronHost:
    """Owns the models and optimizers of this rank, and the rank's membership of the gang's process group. Implements
    ModelHost; stages/models/protocol.py says what each method promises."""

    def __init__(
        self,
        model: ModelConfig,
        sampling: SamplingConfig,
        ppo: PPOConfig,
        layout: LayoutConfig,
        roles: frozenset[Role],
        rank: Rank,
        *,
        seed: int,
        total_steps: int,
        offload: Offload = "none",
        fsync: bool = True,
    ) -> None:
        """Join the gang and build the models of `roles`. Block until every rank has joined.

        `fsync`: True if `save` must sync its files to the disk. Raises ValueError, naming the key, for settings that
        cannot work."""
        if sampling.temperature <= 0:
            raise ValueError(f"sampling.temperature = {sampling.temperature}: training needs one above 0")
        spec = read_spec(model.path)
        self._paths = {role: model.path_of(role) for role in MODEL_ROLES}
        specs = {role: read_spec(self._paths[role]) for role in MODEL_ROLES & roles}
        check_layout(model, specs, layout, rank.size)
        self._ppo = ppo
        self._fsync = fsync
        self._seed = seed
        self._total_steps = total_steps
        self._distribution = _distribution(sampling, model, spec, layout)
        if offload == "idle" and not has_own_memory():
            raise ValueError("offload = idle needs a GPU: a CPU's memory is the host's. Use none or gradients")
        set_numerics(model)
        self._trainers: dict[Role, Trainer] = {}
        self._parallel_rank = parallel.join(rank, layout, seed)
        with ExitStack() as undo:  # if the models cannot be built, the process leaves the gang
            undo.callback(self.close)
            # a separate group for the threads that write checkpoints: their collectives must not mix with other calls
            self._writers = dist.new_group(backend="gloo")
            self._threads = rank.threads
            self.product_choice = choose_products(model.products, DTYPES[model.dtype], self._parallel_rank.device)
            """The implementation of matrix products. The last bits of a run depend on it."""
            self._kernels = with_fusions(
                choose_kernels(model.kernels, DTYPES[model.dtype], self._parallel_rank.device),
                model,
                self._parallel_rank.device,
            )
            self._blueprint = Blueprint(
                model, spec, layout, self._parallel_rank, self._kernels, self.product_choice.products, seed
            )
            self._blueprints = {role: replace(self._blueprint, spec=of_role) for role, of_role in specs.items()}
            self._offload = offload
            self._build_models(roles)
            self._peak_flops = rank.size * peak_of_a_rank(self._blueprint) if self._trainers else 0.0
            self._last_updates: dict[Role, UpdateWork] = {}
            undo.pop_all()

    def _build_models(self, roles: frozenset[Role]) -> None:
        model = self._blueprint.model
        read = model.frozen_blocks or any(self._paths[role] == model.path for role in roles & self._paths.keys())
        weights = read_weights(model.path) if read else {}
        kept = model.trunk_cache_mb << 20
        self._trunk = Trunk(build_trunk(self._blueprint, weights), kept) if model.frozen_blocks else None
        self._frozen: dict[str, FrozenWeights] = {}
        self._reference = self._build(Role.REFERENCE, weights) if Role.REFERENCE in roles else None
        self._reference_weights = OffloadableTensors(
            self._reference.parameters if self._reference is not None else list
        )
        self._all_weights = OffloadableTensors(lambda: _weights(self._reference, self._trunk, *self._trainers.values()))
        for role, optimizer in ((Role.POLICY, model.policy), (Role.CRITIC, model.critic)):
            if role in roles:
                self._put_to_sleep(but=role)
                built = self._build(role, weights)
                self._trainers[role] = Trainer(role, built, optimizer, self._blueprints[role], self._offload)

    def collectives_of(self, where: str) -> AbstractContextManager[None]:
        return self._parallel_rank.missing_ranks.collectives_of(where)

    def policy_logprobs(self, rollout: Rollout) -> PolicyLogprobs | None:
        trainer = self._clean(Role.POLICY)
        logprobs = self._logprobs(trainer.model, rollout, trainer.config, "value", trainer.kept)
        return None if logprobs is None else PolicyLogprobs(*logprobs)

    def ref_logprobs(self, rollout: Rollout) -> ReferenceLogprobs | None:
        if self._reference is None:
            raise StateError("the reference is not placed on this gang")
        self._put_to_sleep(but=Role.REFERENCE)
        self._reference_weights.wake()
        logprobs = self._logprobs(self._reference, rollout, self._blueprint.model.policy, "none")
        return None if logprobs is None else ReferenceLogprobs(logprobs[0])

    def values(self, rollout: Rollout) -> Values | None:
        trainer = self._clean(Role.CRITIC)

        def read(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return state_values(head_values(hidden, batch, trainer.model.output_layer), batch.mask)

        batches = rank_micro_batches(rollout, np.arange(rollout.num_rows), trainer.config, self._blueprint)
        outputs = run_forward(trainer.model, self._trunk, batches, read, trainer.kept)
        values, bootstrap = np.zeros(rollout.tokens.shape, np.float32), np.zeros(rollout.num_rows, np.float32)
        for batch, (of_tokens, of_end) in zip(batches if outputs else [], outputs, strict=True):
            _fill(values, batch, of_tokens)
            bootstrap[batch.rows] = of_end.cpu().numpy()
        answer = gather.collect_rows(self._parallel_rank, values, bootstrap)
        return None if answer is None else Values(*answer)

    def update_policy(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        model = self._clean(Role.POLICY).model
        loss = minibatch_losses.policy_loss_of(
            batch,
            self._ppo,
            step=step,
            device=self._parallel_rank.device,
            logprobs=lambda rows, hidden: response_logprobs(
                hidden,
                rows,
                output_weight(model, self._trunk),
                self._distribution,
                self.product_choice.products,
                self._kernels,
                entropy="gradient" if self._ppo.entropy_coef != 0 else "value",
            ),
        )
        return self._update(Role.POLICY, step, batch, loss)

    def update_critic(self, step: int, batch: CriticBatch) -> dict[str, float]:
        model = self._clean(Role.CRITIC).model
        loss = minibatch_losses.value_loss_of(
            batch,
            self._ppo,
            device=self._parallel_rank.device,
            head=lambda rows, hidden: head_values(hidden, rows, model.output_layer),
        )
        return self._update(Role.CRITIC, step, batch, loss)

    def numerics(self) -> dict[str, str]:
        return {"model.kernels": self._kernels.name, "model.products": str(self.product_choice.products)}

    def last_update(self, role: Role) -> dict[str, float]:
        work = self._last_updates.get(role)
        return {} if work is None else work.metrics()

    def trunk_counts(self) -> dict[str, float]:
        return {} if self._trunk is None else self._trunk.counts()

    def version(self, role: Role) -> int:
        return self._placed(role).version

    def dirty(self, role: Role) -> bool:
        return self._placed(role).dirty

    def mark_clean(self, role: Role) -> None:
        self._placed(role).dirty = False

    def digest(self, role: Role) -> str:
        return gather.digest_of(self._trainer(role).model, self._blueprints[role])

    def save(self, role: Role, directory: Path) -> Callable[[], dict[str, FileSum] | None]:
        taken = self._clean(role, whole=True).snapshot()
        return partial(write_snapshot, taken, directory, self._writers, self._threads, fsync=self._fsync)

    def load(self, role: Role, directory: Path | None) -> None:
        trainer = self._trainer(role, whole=True)
        if directory is None:
            reset_role(trainer.model, self._blueprints[role], read_weights(self._paths[role]))
            trainer.restart()
        else:
            trainer.load(directory)

    def publish(self, board: WeightBoard, version: int) -> Manifest | None:
        return publication.publish(self._clean(Role.POLICY).model, self._blueprint, board, version)

    def published_blocks(self) -> Iterator[tuple[Slab, slice, np.ndarray]]:
        """Yield what this rank writes when the policy is published, in blocks of rows: (part of a published tensor,
        rows of this part, the rows as an array)."""
        model = self._clean(Role.POLICY).model
        return publication.own_blocks(model, self._blueprint, publication.own_slabs(model, self._blueprint))

    def export(self, board: WeightBoard, directory: Path) -> Callable[[], None]:
        policy, model = self._clean(Role.POLICY), self._blueprint.model
        if not gather.from_all_ranks(board.has(policy.version))[0]:
            self.publish(board, policy.version)
        adapters = gather.trained_tensors(policy.model, self._blueprint, merged=False) if model.lora.rank else {}
        if dist.get_rank():
            return lambda: None
        lease = board.open(policy.version)

        def write() -> None:
            with closing(lease):
                write_model(directory, model.path, lease_tensors(lease), model.dtype)
            if adapters:
                write_adapters(directory / ADAPTERS, model, self._blueprint.spec, adapters)

        return write

    def state_bytes(self) -> dict[str, int]:
        """Return the measured bytes of this rank's parameters, gradients, float32 masters and moments, under the
        names of `memory.state_bytes`. The moments exist after the first update."""
        models = [self._reference, self._trunk.model if self._trunk else None]
        models += [trainer.model for trainer in self._trainers.values()]
        parameters = {p.data_ptr(): p.nbytes for model in models if model is not None for p in model.parameters()}
        measured = Counter({"parameters": sum(parameters.values())})
        for trainer in self._trainers.values():
            measured.update(trainer.state_bytes())
        return dict(measured)

    def sleep(self) -> None:
        for trainer in self._trainers.values():
            trainer.drop_work()
            if has_own_memory():
                trainer.optimizer_state.sleep()  # before the weights, since it compares addresses with theirs
        if has_own_memory():
            self._all_weights.sleep()  # all roles at once, since roles may share weights
            if self._trunk is not None:
                self._trunk.forget()

    def close(self) -> None:
        for trainer in self._trainers.values():
            trainer.close()
        self._trainers.clear()
        self._reference = self._trunk = None
        self._reference_weights = self._all_weights = OffloadableTensors(list)
        parallel.leave()

    def _build(self, role: Role, weights: Mapping[str, Tensor]) -> GPTModel:
        """Return a role's model at version 0. `weights`: the weights of `model.path`."""
        path = self._paths[role]
        own = weights if path == self._paths[Role.POLICY] else read_weights(path)
        return build_role(self._blueprints[role], role, weights=own, shared=self._frozen.setdefault(path, {}))

    def _placed(self, role: Role) -> Trainer:
        if role not in self._trainers:
            raise StateError(f"{role} is not placed on this gang")
        return self._trainers[role]

    def _trainer(self, role: Role, *, whole: bool = False) -> Trainer:
        """Return the role's trainer, with the role's weights on the device. `whole`: True if the optimizer state must
        be there too. Under `offload = idle`, first offload the other roles."""
        trainer = self._placed(role)
        self._put_to_sleep(but=role)
        trainer.weights.wake()
        if whole:
            trainer.optimizer_state.wake()
        return trainer

    def _put_to_sleep(self, *, but: Role) -> None:
        """Offload all roles except `but` if the setting `offload` is "idle". Under every setting, first bring back the
        weights that the method `sleep` moved to the host's memory."""
        self._all_weights.wake()
        if self._offload != "idle":
            return
        if but is not Role.REFERENCE:
            self._reference_weights.sleep()
        for role, trainer in self._trainers.items():
            if role is not but:
                trainer.sleep()

    def _clean(self, role: Role, *, whole: bool = False) -> Trainer:
        trainer = self._trainer(role, whole=whole)
        if trainer.dirty:
            raise StateError(f"{role} is dirty: an update to version {trainer.version} was not committed; load it")
        return trainer

    def _logprobs(
        self,
        model: GPTModel,
        rollout: Rollout,
        config: OptimizerConfig,
        entropy: Entropy,
        kept: KeptForwards | None = None,
    ) -> tuple[np.ndarray, ...] | None:
        """Return (log-probs, entropies) [rows, seq] on rank 0, None on the other ranks."""

        def read(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            weight = output_weight(model, self._trunk)
            return response_logprobs(
                hidden, batch, weight, self._distribution, self.product_choice.products, self._kernels, entropy=entropy
            )

        batches = rank_micro_batches(rollout, np.arange(rollout.num_rows), config, self._blueprint)
        outputs = run_forward(model, self._trunk, batches, read, kept)
        logprobs, entropies = np.zeros((2, *rollout.tokens.shape), np.float32)
        for batch, (of_tokens, of_distributions) in zip(batches if outputs else [], outputs, strict=True):
            _fill(logprobs, batch, of_tokens)
            _fill(entropies, batch, of_distributions)
        return gather.collect_rows(self._parallel_rank, logprobs, entropies)

    def _update(self, role: Role, step: int, batch: PolicyBatch | CriticBatch, loss: MinibatchLoss) -> dict[str, float]:
        """Train a role from version `step` to version `step` + 1 on the rows of the batch, and return metrics. While
        the critic warms up, the policy only advances its version. After training, the metric `peak_memory_bytes` is the
        maximum, over the ranks, of the process's peak memory so far."""
        trainer = self._clean(role, whole=True)
        if trainer.version != step:
            raise StateError(f"{role} is at version {trainer.version}; update {step} needs version {step}")
        held = self._ppo.critic_warmup_steps if role is Role.POLICY else 0
        self._last_updates.pop(role, None)
        if step < held:
            return prefix_metrics(role, trainer.advance(step))
        cut = minibatch_rows(batch.rollout.num_rows, self._ppo.minibatches, self._ppo.epochs, self._seed, step)
        work = [self._minibatch(batch, rows, trainer.config, loss) for epoch in cut for rows in epoch]
        lr = learning_rate(trainer.config, step - held, self._total_steps - held)
        target_kl = self._ppo.target_kl if role is Role.POLICY else None
        started = time.perf_counter()
        stats, metrics = trainer.train(step, lr, self._trunk, work, target_kl)
        synchronise(self._parallel_rank.device)
        computed = [minibatch.rows for minibatch in work if not minibatch.empty][: len(stats)]
        if computed:
            rows, seconds = np.concatenate(computed), time.perf_counter() - started
            self._last_updates[role] = work_of(
                self._blueprints[role], role, batch.rollout.response_mask[rows], seconds, self._peak_flops
            )
        metrics["peak_memory_bytes"] = float(max(gather.from_all_ranks(peak_bytes())))
        return gather.summarise_over_ranks(self._parallel_rank, stats) | prefix_metrics(role, metrics)

    def _minibatch(
        self, batch: PolicyBatch | CriticBatch, rows: np.ndarray, config: OptimizerConfig, loss: MinibatchLoss
    ) -> Minibatch:
        rollout, empty = batch.rollout, not batch.advantages.loss_mask[rows].any()
        return Minibatch(
            rows,
            rollout.row,
            [] if empty else rank_micro_batches(rollout, rows, config, self._blueprint, never_empty=True),
            partial(loss, rows),
            empty,
        )


def _distribution(sampling: SamplingConfig, model: ModelConfig, spec: ModelSpec, layout: LayoutConfig) -> Distribution:
    """Return the distribution that tokens are sampled from. It suppresses the tokens that pad the vocabulary."""
    return Distribution(
        temperature=sampling.temperature,
        suppressed=(*sampling.suppress_token_ids, *range(spec.vocab_size, padded(spec, layout.tensor).vocab_size)),
        eos=tuple(model.eos_token_ids) or read_eos_ids(model.path),
        min_new_tokens=sampling.min_new_tokens,
    )


def prefix_metrics(role: Role, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{role}/{name}": value for name, value in metrics.items()}


def _weights(*owners: GPTModel | Trunk | Trainer | None) -> Iterator[Tensor]:
    """Yield the parameters of models, and of the models that trunks and trainers own."""
    for owner in owners:
        model = owner.model if isinstance(owner, Trunk | Trainer) else owner
        yield from model.parameters() if model is not None else ()


def _fill(array: np.ndarray, batch: MicroBatch, values: Tensor) -> None:
    """Write `values`, which have one row for each row of a micro-batch, into the same rows of an array [rows, seq]."""
    width = min(array.shape[1], values.shape[1])
    array[batch.rows, :width] = values[:, :width].cpu().numpy()
