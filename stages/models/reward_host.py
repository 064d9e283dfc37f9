"""A reward model of one rank: a causal language model with a scalar head at a row's last token, which scores rows and
can be trained. In Megatron it is what a critic is, and is built by the same code in the same layouts; it differs in
where its head is read, and starts from a random one.

    RewardModel(model, layout, rank, seed=0).scores(rows)     a trained one: `model.path` holds its head too

May import numpy, torch, megatron.core and this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stages.models import gather, parallel
from stages.models.build import DTYPES, Blueprint, build_role, build_trunk
from stages.models.config import LayoutConfig, ModelConfig
from stages.models.forward import MicroBatch, run_forward
from stages.models.hf_files import read_weights
from stages.models.kernels.choice import choose_kernels
from stages.models.layouts import check_layout
from stages.models.numerics import set_numerics
from stages.models.products import choose_products
from stages.models.protocol import Rank, Role
from stages.models.reward_files import new_head, write_reward_model
from stages.models.reward_rows import TokenRows, group_micro_batches, is_share, last_scores, score_micro_batches
from stages.models.spec import SCORE_WEIGHT, read_spec
from stages.models.trainer import Minibatch, Trainer, UpdateLimits, learning_rate
from stages.models.trunk import Trunk
from stages.ppo.stats import LossStats

ScoreLoss = Callable[[Tensor, np.ndarray], tuple[Tensor, LossStats]]
"""(share of the minibatch's loss, its stats) from the scores [B] of some rows and their numbers [B], where
`NO_ROW` is a row that the loss must not depend on."""

NO_ROW = -1
"""Number of a row that stands in for none."""
_ROLE = Role.CRITIC


@dataclass(frozen=True)
class GroupedRows:
    """What one optimizer step trains on: groups of rows (their numbers in `rows`) that are compared within a group."""

    rows: TokenRows
    groups: Sequence[np.ndarray]
    loss: ScoreLoss


class RewardModel:
    """Owns this rank's reward model, with an optimizer where it is trained, and its membership of the gang's process
    group. Every rank of the gang makes the same calls in the same order, and gets the whole answer."""

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        rank: Rank,
        *,
        seed: int,
        total_steps: int | None = None,
        joined: parallel.ParallelRank | None = None,
    ) -> None:
        """Joins the gang and builds the model of `model.path`, whose head is drawn with the seed where its files hold
        none. `total_steps`: optimizer steps that it is to be trained for with `model.critic`, which the learning rate
        depends on; None: it is not trained. `joined`: a membership with this layout that the caller has, and ends
        itself, so that a process can hold several models; None: this one joins. Raises ValueError, naming the key, for
        a layout that cannot hold it."""
        spec = read_spec(model.path)
        check_layout(model, {_ROLE: spec}, layout, rank.size)
        set_numerics(model)
        self._total_steps = total_steps
        self._path = model.path
        self._config = model.critic
        self._joined_here = joined is None
        self._parallel_rank = parallel.join(rank, layout, seed) if joined is None else joined
        device, dtype = self._parallel_rank.device, DTYPES[model.dtype]
        products = choose_products(model.products, dtype, device).products
        kernels = choose_kernels(model.kernels, dtype, device)
        self._blueprint = Blueprint(model, spec, layout, self._parallel_rank, kernels, products, seed)
        weights = read_weights(model.path)
        if SCORE_WEIGHT not in weights:
            weights |= new_head(spec.hidden_size, seed)
        frozen = model.frozen_blocks
        self._trunk = Trunk(build_trunk(self._blueprint, weights), model.trunk_cache_mb << 20) if frozen else None
        self._model = build_role(self._blueprint, _ROLE, weights)
        self._trainer: Trainer | None = None
        self._kept: list[Tensor] | None = None
        if total_steps is not None:
            self._trainer = Trainer(_ROLE, self._model, self._config, self._blueprint)
        else:
            self._model.requires_grad_(False).eval()

    def collectives_of(self, where: str) -> AbstractContextManager[None]:
        """As a `ModelHost`'s: around calls that all ranks make."""
        return self._parallel_rank.roll_call.collectives_of(where)

    def scores(self, rows: TokenRows) -> np.ndarray:
        """The score of each row, float32 [rows]: what it depends on is the row and the weights."""
        batches = score_micro_batches(rows, self._blueprint, self._config.micro_batch_tokens)
        found = run_forward(self._model, self._trunk, batches, self._read)
        scores = np.zeros(len(rows.lengths), np.float32)
        for batch, of_batch in zip(batches if found else [], found, strict=True):
            scores[batch.rows] = of_batch.float().cpu().numpy()
        if dist.get_world_size() == 1:
            return scores
        whole = torch.from_numpy(scores if self._parallel_rank.is_output_rank else np.zeros_like(scores))
        whole = whole.to(self._parallel_rank.device)
        dist.all_reduce(whole)
        return whole.cpu().numpy()

    def train(self, step: int, batch: GroupedRows) -> dict[str, float]:
        """Optimizer step `step`, from 0. Returns the stats of the loss over all ranks, `lr`, `grad_norm`, and
        `skipped_steps`: 1 where the gradient was not finite, and nothing has changed."""
        trainer = self._trained()
        assert self._total_steps is not None
        micro_batches = group_micro_batches(batch.rows, batch.groups, self._blueprint, self._config.micro_batch_tokens)
        counts = is_share(batch.groups, self._blueprint)

        def loss(micro: MicroBatch, hidden_NH: Tensor) -> tuple[Tensor, LossStats]:
            scores = self._read(micro, hidden_NH)
            return batch.loss(scores, micro.rows if counts else np.full_like(micro.rows, NO_ROW))

        minibatch = Minibatch(
            rows=np.concatenate(batch.groups),
            row_numbers=np.arange(len(batch.rows.lengths)),
            micro_batches=micro_batches,
            loss=lambda _: loss,
            empty=False,
        )
        lr = learning_rate(self._config, step, self._total_steps)
        stats, metrics = trainer.train(step, lr, self._trunk, [minibatch], UpdateLimits(None))
        trainer.dirty = False  # what is kept of a training is its end
        named = gather.summarise_over_ranks(self._parallel_rank, stats)
        return named | {name: metrics[name] for name in ("lr", "grad_norm", "skipped_steps")}

    @torch.no_grad()
    def keep(self) -> None:
        """Keeps a copy of the weights as they are, in place of any before."""
        self._kept = [parameter.detach().clone() for parameter in self._trained_parameters()]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the weights that were kept back; the model is not trained any more."""
        assert self._kept is not None, "nothing was kept"
        for parameter, kept in zip(self._trained_parameters(), self._kept, strict=True):
            parameter.copy_(kept)
        self._kept, self._trainer = None, None
        self._model.eval()

    @torch.no_grad()
    def shift(self, by: float) -> None:
        """Adds a number to all scores."""
        for name, parameter in self._model.named_parameters():
            if name == "output_layer.bias":
                parameter += by

    def export(self, directory: Path) -> None:
        """Writes the model, on rank 0: see `reward_files.write_reward_model`."""
        tensors = gather.trained_tensors(self._model, self._blueprint)
        if tensors is not None:
            write_reward_model(directory, self._path, tensors)

    def close(self) -> None:
        self._trainer = self._trunk = self._kept = None
        if self._joined_here:
            parallel.leave()

    def _read(self, batch: MicroBatch, hidden_NH: Tensor) -> Tensor:
        return last_scores(hidden_NH, batch, self._model.output_layer)

    def _trained(self) -> Trainer:
        assert self._trainer is not None, "this reward model was not built to be trained"
        return self._trainer

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]
