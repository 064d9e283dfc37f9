"""The models of one rank of a gang behind the `ModelHost` protocol.

May import numpy, torch, megatron.core, storage, stages.ppo and this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from stages.models import gather, minibatch_losses, parallel
from stages.models.build import DTYPES, Blueprint, build_role, build_trunk, output_weight, reset_role
from stages.models.checkpoint_files import write_snapshot
from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig
from stages.models.errors import StateError
from stages.models.forward import (
    MicroBatch,
    cut_micro_batches,
    head_values,
    response_logprobs,
    row_lengths,
    run_forward,
)
from stages.models.hf_config import read_eos_ids
from stages.models.hf_files import read_weights, write_model
from stages.models.kernels.choice import choose_kernels
from stages.models.lora import FrozenWeights
from stages.models.minibatch_losses import MinibatchLoss
from stages.models.padding import padded
from stages.models.peak_memory import peak_bytes
from stages.models.peft_files import ADAPTERS, write_adapters
from stages.models.products import choose_products
from stages.models.protocol import CriticBatch, PolicyBatch, Rank, Role
from stages.models.sampling import SamplingConfig
from stages.models.spec import read_spec
from stages.models.token_logprobs import Distribution, Entropy
from stages.models.trainer import Minibatch, Trainer, UpdateLimits, learning_rate
from stages.models.trunk import Trunk
from stages.ppo.config import PPOConfig
from stages.ppo.masks import state_values
from stages.ppo.micro_batches import balanced, minibatches
from storage.checkpoints import FileSum
from storage.records import PolicyLogprobs, ReferenceLogprobs, Rollout, Values


class MegatronHost:
    """Owns this rank's models, their optimizers and its membership of the gang's process group. Implements ModelHost:
    see stages/models/protocol.py for what each method promises."""

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
    ) -> None:
        """Joins the gang and builds the roles placed on it; blocks until every rank has come. Raises ValueError, naming
        the key, for settings that cannot work."""
        if sampling.temperature <= 0:
            raise ValueError(f"sampling.temperature = {sampling.temperature}: training needs one above 0")
        spec = read_spec(model.path)
        parallel.check_layout(model, spec, layout, rank.size)
        self._ppo = ppo
        self._seed = seed
        self._total_steps = total_steps
        self._distribution = Distribution(
            temperature=sampling.temperature,
            suppressed=(
                *sampling.suppress_token_ids,
                *range(spec.vocab_size, padded(spec, layout.tensor).vocab_size),
            ),
            eos=tuple(model.eos_token_ids) or read_eos_ids(model.path),
            min_new_tokens=sampling.min_new_tokens,
        )
        self._parallel_rank = parallel.join(rank, layout, seed)
        # of CPU tensors, for the threads that write checkpoints: the ranks' other calls must not get in between
        self._writers = dist.new_group(backend="gloo")
        self._threads = rank.threads
        self.product_choice = choose_products(model.products, DTYPES[model.dtype], self._parallel_rank.device)
        """What the gang multiplies with; the last bits of a run depend on it."""
        self._kernels = choose_kernels(model.kernels, DTYPES[model.dtype], self._parallel_rank.device)
        self._blueprint = Blueprint(
            model, spec, layout, self._parallel_rank, self._kernels, self.product_choice.products, seed
        )
        weights = read_weights(model.path)
        self._trunk = Trunk(build_trunk(self._blueprint, weights)) if model.frozen_blocks else None
        shared: FrozenWeights = {}
        build = partial(build_role, self._blueprint, weights=weights, shared=shared)
        self._reference = build(Role.REFERENCE) if Role.REFERENCE in roles else None
        self._trainers = {
            role: Trainer(role, build(role), optimizer, self._blueprint)
            for role, optimizer in ((Role.POLICY, model.policy), (Role.CRITIC, model.critic))
            if role in roles
        }

    def collectives_of(self, where: str) -> AbstractContextManager[None]:
        return self._parallel_rank.roll_call.collectives_of(where)

    def policy_logprobs(self, rollout: Rollout) -> PolicyLogprobs | None:
        trainer = self._clean(Role.POLICY)
        found = self._logprobs(trainer.model, rollout, trainer.config, "value")
        return None if found is None else PolicyLogprobs(*found)

    def ref_logprobs(self, rollout: Rollout) -> ReferenceLogprobs | None:
        if self._reference is None:
            raise StateError("the reference is not placed on this gang")
        found = self._logprobs(self._reference, rollout, self._blueprint.model.policy, "none")
        return None if found is None else ReferenceLogprobs(found[0])

    def values(self, rollout: Rollout) -> Values | None:
        trainer = self._clean(Role.CRITIC)

        def read(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return state_values(head_values(hidden, batch, trainer.model.output_layer), batch.mask)

        batches = self._micro_batches(rollout, np.arange(rollout.num_rows), trainer.config)
        outputs = run_forward(trainer.model, self._trunk, batches, read)
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

    def version(self, role: Role) -> int:
        return self._trainer(role).version

    def dirty(self, role: Role) -> bool:
        return self._trainer(role).dirty

    def mark_clean(self, role: Role) -> None:
        self._trainer(role).dirty = False

    def digest(self, role: Role) -> str:
        return gather.digest_of(self._trainer(role).model, self._blueprint)

    def save(self, role: Role, directory: Path) -> Callable[[], dict[str, FileSum] | None]:
        taken = self._clean(role).snapshot()
        return partial(write_snapshot, taken, directory, self._writers, self._threads)

    def load(self, role: Role, directory: Path | None) -> None:
        trainer = self._trainer(role)
        if directory is None:
            reset_role(trainer.model, self._blueprint, read_weights(self._blueprint.model.path))
            trainer.restart()
        else:
            trainer.load(directory)

    def trained_weights(self) -> Mapping[str, np.ndarray] | None:
        tensors = gather.trained_tensors(self._clean(Role.POLICY).model, self._blueprint)
        return None if tensors is None else {name: gather.as_numpy(tensor) for name, tensor in tensors.items()}

    def export(self, directory: Path) -> Callable[[], None]:
        policy, model = self._clean(Role.POLICY).model, self._blueprint.model
        trained = gather.trained_tensors(policy, self._blueprint)
        adapters = gather.trained_tensors(policy, self._blueprint, merged=False) if model.lora.rank else {}
        if trained is None or adapters is None:
            return lambda: None
        taken, alone = (
            {name: t.to("cpu", copy=True) for name, t in tensors.items()} for tensors in (trained, adapters)
        )

        def write() -> None:
            write_model(directory, model.path, taken, model.dtype)
            if alone:
                write_adapters(directory / ADAPTERS, model, self._blueprint.spec, alone)

        return write

    def close(self) -> None:
        self._trainers.clear()
        self._reference = self._trunk = None
        parallel.leave()

    def _trainer(self, role: Role) -> Trainer:
        if role not in self._trainers:
            raise StateError(f"{role} is not placed on this gang")
        return self._trainers[role]

    def _clean(self, role: Role) -> Trainer:
        trainer = self._trainer(role)
        if trainer.dirty:
            raise StateError(f"{role} is dirty: an update to version {trainer.version} was not committed; load it")
        return trainer

    def _logprobs(
        self, model: GPTModel, rollout: Rollout, config: OptimizerConfig, entropy: Entropy
    ) -> tuple[np.ndarray, ...] | None:
        """(log-probs, entropies) [rows, seq] on rank 0."""

        def read(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            weight = output_weight(model, self._trunk)
            return response_logprobs(
                hidden, batch, weight, self._distribution, self.product_choice.products, self._kernels, entropy=entropy
            )

        batches = self._micro_batches(rollout, np.arange(rollout.num_rows), config)
        outputs = run_forward(model, self._trunk, batches, read)
        logprobs, entropies = np.zeros((2, *rollout.tokens.shape), np.float32)
        for batch, (of_tokens, of_distributions) in zip(batches if outputs else [], outputs, strict=True):
            _fill(logprobs, batch, of_tokens)
            _fill(entropies, batch, of_distributions)
        return gather.collect_rows(self._parallel_rank, logprobs, entropies)

    def _update(self, role: Role, step: int, batch: PolicyBatch | CriticBatch, loss: MinibatchLoss) -> dict[str, float]:
        """Trains version `step` on all rows of the batch; not the policy's while the critic warms up. Adds the largest
        peak of the ranks' processes, so far, to the metrics."""
        trainer = self._clean(role)
        if trainer.version != step:
            raise StateError(f"{role} is at version {trainer.version}; update {step} needs version {step}")
        held = self._ppo.critic_warmup_steps if role is Role.POLICY else 0
        if step < held:
            return _named(role, trainer.advance(step))
        cut = minibatches(batch.rollout.num_rows, self._ppo.minibatches, self._ppo.epochs, self._seed, step)
        work = [self._minibatch(batch, rows, trainer.config, loss) for epoch in cut for rows in epoch]
        lr = learning_rate(trainer.config, step - held, self._total_steps - held)
        limits = UpdateLimits(self._ppo.max_skipped_steps, self._ppo.target_kl if role is Role.POLICY else None)
        stats, metrics = trainer.train(step, lr, self._trunk, work, limits)
        metrics["peak_memory_bytes"] = float(max(gather.from_all_ranks(peak_bytes())))
        return gather.summarise_over_ranks(self._parallel_rank, stats) | _named(role, metrics)

    def _minibatch(
        self, batch: PolicyBatch | CriticBatch, rows: np.ndarray, config: OptimizerConfig, loss: MinibatchLoss
    ) -> Minibatch:
        rollout, empty = batch.rollout, not batch.advantages.loss_mask[rows].any()
        return Minibatch(
            rows,
            rollout.row,
            [] if empty else self._micro_batches(rollout, rows, config, never_empty=True),
            partial(loss, rows),
            empty,
        )

    def _micro_batches(
        self, rollout: Rollout, rows: np.ndarray, config: OptimizerConfig, *, never_empty: bool = False
    ) -> list[MicroBatch]:
        """This rank's share of some rows. With a trunk a row always goes to the same rank, which keeps its hidden
        states; without, every data-parallel rank gets nearly as many tokens. With `never_empty` a rank without a row
        gets one that nothing of the loss depends on, since every rank takes part in the reduction of gradients."""
        rank, mask = self._parallel_rank, rollout.response_mask
        if self._trunk is not None:
            share = rows[rollout.row[rows] % rank.data_size == rank.data_rank]
        else:
            share = rows[balanced(row_lengths(mask[rows]), rank.data_size)[rank.data_rank]]
        if never_empty and not len(share):
            share, mask = rows[:1], np.zeros_like(mask)
        if not len(share):
            return []
        return cut_micro_batches(
            rollout.tokens,
            mask,
            share,
            rank.device,
            max_tokens=config.micro_batch_tokens,
            max_rows=config.micro_batch_rows,
            multiple=rank.tensor_size if self._blueprint.layout.sequence_parallel else 1,
        )


def _named(role: Role, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{role}/{name}": value for name, value in metrics.items()}


def _fill(array: np.ndarray, batch: MicroBatch, found: Tensor) -> None:
    """Writes a micro-batch's rows into an array [rows, seq]."""
    width = min(array.shape[1], found.shape[1])
    array[batch.rows, :width] = found[:, :width].cpu().numpy()
