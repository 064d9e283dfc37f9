"""The models of one rank of a gang behind the `ModelHost` protocol.

May import numpy, torch, safetensors, storage, stages.ppo, stages.models.hf_files and this folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from torch import Tensor

from stages.engines.config import SamplingConfig
from stages.models import minibatch_losses, parallel
from stages.models.build import Blueprint, build_role, build_trunk, named_hf_tensors, output_weight, reset_role
from stages.models.config import LayoutConfig, ModelConfig
from stages.models.errors import StateError
from stages.models.forward import (
    Distribution,
    MicroBatch,
    cut_micro_batches,
    head_values,
    row_lengths,
    run_forward,
    token_logprobs,
)
from stages.models.hf_files import RANDOM_TINY, read_config, read_eos_ids, read_weights
from stages.models.hf_weights import OUTPUT, llama_shape
from stages.models.protocol import CriticBatch, PolicyBatch, Rank, Role
from stages.models.trainer import Loss, Trainer
from stages.models.trunk import Trunk
from stages.ppo.config import PPOConfig
from stages.ppo.masks import state_values
from stages.ppo.micro_batches import minibatches
from stages.ppo.stats import LossStats, merge_stats, summarise_stats
from storage.records import PolicyLogprobs, ReferenceLogprobs, Rollout, Values

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model")  # fmt: skip
"""Beside config.json, what an exported model takes over from the one it started as, where it is there."""


class MegatronHost:
    """Owns this rank's models, their optimizers and its place in the gang's process group. Implements ModelHost: see
    stages/models/protocol.py for what each method promises."""

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
        config = read_config(model.path)
        shape = llama_shape(config)
        parallel.check_layout(model, shape, layout, rank.size)
        self._ppo = ppo
        self._seed = seed
        self._total_steps = total_steps
        self._distribution = Distribution(
            temperature=sampling.temperature,
            suppressed=tuple(sampling.suppress_token_ids),
            eos=tuple(model.eos_token_ids) or read_eos_ids(model.path),
            min_new_tokens=sampling.min_new_tokens,
        )
        self._place = parallel.join(rank, layout, seed)
        self._blueprint = Blueprint(model, shape, layout, self._place)
        weights = read_weights(model.path)
        self._trunk = Trunk(build_trunk(self._blueprint, weights)) if model.frozen_blocks else None
        self._reference = build_role(self._blueprint, Role.REFERENCE, weights) if Role.REFERENCE in roles else None
        self._trainers = {
            role: Trainer(role, build_role(self._blueprint, role, weights), optimizer, self._blueprint)
            for role, optimizer in ((Role.POLICY, model.policy), (Role.CRITIC, model.critic))
            if role in roles
        }

    def policy_logprobs(self, rollout: Rollout) -> PolicyLogprobs | None:
        trainer = self._clean(Role.POLICY)
        found = self._logprobs(trainer.model, rollout, trainer.config.micro_batch_rows)
        return None if found is None else PolicyLogprobs(*found)

    def ref_logprobs(self, rollout: Rollout) -> ReferenceLogprobs | None:
        if self._reference is None:
            raise StateError("the reference is not placed on this gang")
        found = self._logprobs(self._reference, rollout, self._blueprint.model.policy.micro_batch_rows)
        return None if found is None else ReferenceLogprobs(found[0])

    def values(self, rollout: Rollout) -> Values | None:
        trainer = self._clean(Role.CRITIC)

        def read(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return state_values(head_values(hidden, trainer.model.output_layer), batch.mask)

        batches = self._micro_batches(rollout, np.arange(rollout.num_rows), trainer.config.micro_batch_rows)
        outputs = run_forward(trainer.model, self._trunk, batches, read)
        values, bootstrap = np.zeros(rollout.tokens.shape, np.float32), np.zeros(rollout.num_rows, np.float32)
        for batch, (of_tokens, of_end) in zip(batches if outputs else [], outputs, strict=True):
            _fill(values, batch, of_tokens)
            bootstrap[batch.rows] = of_end.cpu().numpy()
        answer = self._collect(values, bootstrap)
        return None if answer is None else Values(*answer)

    def update_policy(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        model = self._clean(Role.POLICY).model
        loss = minibatch_losses.policy_loss_of(
            batch,
            self._ppo,
            step=step,
            device=self._place.device,
            logprobs=lambda rows, hidden: token_logprobs(
                hidden,
                rows,
                output_weight(model, self._trunk),
                self._distribution,
                entropy_gradient=self._ppo.entropy_coef != 0,
            ),
        )
        return self._update(Role.POLICY, step, batch.rollout, loss)

    def update_critic(self, step: int, batch: CriticBatch) -> dict[str, float]:
        model = self._clean(Role.CRITIC).model
        loss = minibatch_losses.value_loss_of(
            batch,
            self._ppo,
            device=self._place.device,
            head=lambda hidden: head_values(hidden, model.output_layer),
        )
        return self._update(Role.CRITIC, step, batch.rollout, loss)

    def version(self, role: Role) -> int:
        return self._trainer(role).version

    def dirty(self, role: Role) -> bool:
        return self._trainer(role).dirty

    def mark_clean(self, role: Role) -> None:
        self._trainer(role).dirty = False

    def digest(self, role: Role) -> str:
        model = self._trainer(role).model
        own = {name: _digest(tensor) for name, tensor in self._whole_tensors(model)}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        named = {name: digest for part in parts for name, digest in part.items()}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()

    def save(self, role: Role, directory: Path) -> None:
        self._clean(role).save(directory)

    def load(self, role: Role, directory: Path | None) -> None:
        trainer = self._trainer(role)
        if directory is None:
            reset_role(trainer.model, self._blueprint, read_weights(self._blueprint.model.path))
            trainer.restart()
        else:
            trainer.load(directory)

    def trained_weights(self) -> Mapping[str, np.ndarray] | None:
        tensors = self._gathered(self._clean(Role.POLICY).model)
        return None if tensors is None else {name: _as_numpy(tensor) for name, tensor in tensors.items()}

    def export(self, directory: Path) -> None:
        trained = self._gathered(self._clean(Role.POLICY).model)
        if trained is None:
            return
        source = self._blueprint.model.path
        dtype = self._blueprint.dtype
        whole = {name: tensor.to(dtype) for name, tensor in read_weights(source).items()} | dict(trained)
        if self._blueprint.shape.tied:
            whole.pop(OUTPUT, None)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in whole.items()},
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )
        config = read_config(source) | {"dtype": self._blueprint.model.dtype}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in COPIED_FILES if source != RANDOM_TINY else ():
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, directory / name)

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

    def _logprobs(self, model: GPTModel, rollout: Rollout, size: int) -> tuple[np.ndarray, ...] | None:
        """(log-probs, entropies) [rows, seq] on rank 0."""

        def read(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            weight = output_weight(model, self._trunk)
            return token_logprobs(hidden, batch, weight, self._distribution, entropy_gradient=False)

        batches = self._micro_batches(rollout, np.arange(rollout.num_rows), size)
        outputs = run_forward(model, self._trunk, batches, read)
        logprobs, entropy = np.zeros((2, *rollout.tokens.shape), np.float32)
        for batch, (of_tokens, of_distributions) in zip(batches if outputs else [], outputs, strict=True):
            _fill(logprobs, batch, of_tokens)
            _fill(entropy, batch, of_distributions)
        return self._collect(logprobs, entropy)

    def _update(
        self, role: Role, step: int, rollout: Rollout, loss: Callable[[np.ndarray, int], Loss]
    ) -> dict[str, float]:
        """Trains version `step` on all rows; `loss` makes a minibatch's loss from its rows and the number of optimizer
        steps taken before it."""
        trainer = self._clean(role)
        if trainer.version != step:
            raise StateError(f"{role} is at version {trainer.version}; update {step} needs version {step}")
        size = trainer.config.micro_batch_rows
        cut = minibatches(rollout.num_rows, self._ppo.minibatches, self._ppo.epochs, self._seed, step)
        work = [
            (self._micro_batches(rollout, rows, size, never_empty=True), loss(rows, number))
            for number, rows in enumerate(rows for epoch in cut for rows in epoch)
        ]
        stats, metrics = trainer.train(step, self._total_steps, self._trunk, work)
        return self._summary(stats) | {f"{_PREFIX[role]}/{name}": value for name, value in metrics.items()}

    def _micro_batches(
        self, rollout: Rollout, rows: np.ndarray, size: int, *, never_empty: bool = False
    ) -> list[MicroBatch]:
        """This rank's share of some rows. With a trunk a row always goes to the same rank, which keeps its hidden
        states; without, rows of like length are dealt out in turn. With `never_empty` a rank without a row gets one
        that nothing of the loss depends on, since every rank takes part in the reduction of gradients."""
        place = self._place
        if self._trunk is not None:
            share = rows[rollout.row[rows] % place.data_size == place.data_rank]
        else:
            by_length = rows[np.argsort(-row_lengths(rollout.response_mask[rows]), kind="stable")]
            share = by_length[place.data_rank :: place.data_size]
        mask = rollout.response_mask
        if never_empty and not len(share):
            share, mask = rows[:1], np.zeros_like(mask)
        multiple = place.tensor_size if self._blueprint.layout.sequence_parallel else 1
        return cut_micro_batches(rollout.tokens, mask, share, size, place, multiple) if len(share) else []

    def _collect(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...] | None:
        """The ranks' rows put together on rank 0: each row is zero everywhere but on the rank that computed it."""
        if dist.get_world_size() == 1:
            return arrays
        summed = []
        for array in arrays:
            tensor = torch.from_numpy(array if self._place.speaks else np.zeros_like(array)).to(self._place.device)
            dist.all_reduce(tensor)
            summed.append(tensor.cpu().numpy())
        return tuple(summed) if dist.get_rank() == 0 else None

    def _summary(self, stats: list[list[LossStats]]) -> dict[str, float]:
        """The update's metrics from the micro-batches of all ranks, by minibatch; on every rank."""
        own = [[(_floats(s.sums), _floats(s.maxima)) for s in minibatch] for minibatch in stats]
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own if self._place.speaks else [])
        parts = [part for part in parts if part]
        merged = [
            merge_stats(
                [LossStats(_tensors(sums), _tensors(maxima)) for part in parts for sums, maxima in part[number]]
            )
            for number in range(len(parts[0]))
        ]
        return summarise_stats(merged)

    def _whole_tensors(self, model: GPTModel) -> Iterator[tuple[str, Tensor]]:
        """This pipeline stage's trained tensors by Hugging Face name."""
        group = parallel_state.get_tensor_model_parallel_group()

        def gather(tensor: Tensor) -> list[Tensor]:
            if group.size() == 1:
                return [tensor]
            parts = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            return parts

        first_block = self._blueprint.model.frozen_blocks
        return named_hf_tensors(model, self._blueprint, first_block=first_block, gather=gather)

    def _gathered(self, model: GPTModel) -> dict[str, Tensor] | None:
        """The model's trained tensors from all pipeline stages, on rank 0."""
        tensors = dict(self._whole_tensors(model))
        if self._place.pipeline_size > 1:
            speaks = self._place.tensor_rank == 0 and self._place.data_rank == 0
            parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object({n: t.cpu() for n, t in tensors.items()} if speaks else {}, parts)
            tensors = {name: tensor for part in parts or [] for name, tensor in part.items()}
        return tensors if dist.get_rank() == 0 else None


_PREFIX = {Role.POLICY: "policy", Role.CRITIC: "critic"}


def _fill(array: np.ndarray, batch: MicroBatch, found: Tensor) -> None:
    """Writes a micro-batch's rows into an array [rows, seq]."""
    width = min(array.shape[1], found.shape[1])
    array[batch.rows, :width] = found[:, :width].cpu().numpy()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(_as_numpy(tensor).tobytes()).hexdigest()


def _as_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor's numbers; bfloat16, which numpy lacks, as its bit pattern in uint16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.cpu().numpy()


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(tensor) for name, tensor in tensors.items()}


def _tensors(numbers: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
