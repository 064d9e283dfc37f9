"""Models that score responses in a worker: reward models and local judges.

    RewardModel(model, layout, rank, seed=0).scores(rows)      the score of each row. `rank` is this process's rank in
                                                               its gang
    NextTokens(model, layout, joined, max_tokens).likeliest(rows, number)
                                                               the `number` likeliest next tokens of each row, for a
                                                               local judge

A reward model is a causal language model with a scalar head that is read at a row's last token. The head comes from
`model.path` if that model has one; otherwise it is new and random. A reward model can be trained. The code that builds
critics also builds reward models, in the same layouts. (A critic's head is read at every token, and a new critic's head
is zero.) `export` writes a directory in Hugging Face layout, which `AutoModelForSequenceClassification` loads. That
class has no bias in its head, so its logit is the score minus `reward_bias` of config.json.

Shape suffixes: B rows of a micro-batch, N tokens of these rows together, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from beartype import beartype
from jaxtyping import Int, jaxtyped
from megatron.core import parallel_state
from torch import Tensor

from stages.models import parallel
from stages.models import weights as gather
from stages.models.build import DTYPES, Blueprint, build_role, build_trunk, output_weight
from stages.models.config import LayoutConfig, ModelConfig
from stages.models.forward import MicroBatch, Trunk, cut_micro_batches, run_forward
from stages.models.hf_files import read_tokenizer
from stages.models.hf_weights import read_weights, write_config_and_tokenizer, write_tensors
from stages.models.kernels.blocks import choose_kernels
from stages.models.kernels.fused import with_fusions
from stages.models.layers import HiddenOutput
from stages.models.layouts import check_layout
from stages.models.numerics import choose_products, rows_multiple, set_numerics
from stages.models.offload import OffloadableTensors, has_own_memory
from stages.models.protocol import Rank, Role
from stages.models.spec import (
    LM_HEAD,
    REWARD_BIAS,
    SCORE_BIAS,
    SCORE_WEIGHT,
    VALUE_HEAD_BIAS,
    VALUE_HEAD_WEIGHT,
    read_config,
    read_spec,
)
from stages.models.trainer import Minibatch, Trainer, learning_rate
from stages.ppo.losses import LossStats
from stages.ppo.micro_batches import micro_batches, split_balanced
from storage.exports import write_sums

ScoreLoss = Callable[[Tensor, np.ndarray], tuple[Tensor, LossStats]]
"""A function that gets the scores [B] of a micro-batch's rows, and the index [B] of each of these rows among all
training rows. It returns (the micro-batch's share of the minibatch's loss, stats of the loss). The loss must not depend
on rows whose index is `NO_ROW`."""

NO_ROW = -1
"""Index that stands for a row that does not count in the loss. A rank that has no share of the rows computes copies of
other rows, which do not count."""
_ROLE = Role.CRITIC


@dataclass(frozen=True)
class GroupedRows:
    """The groups of one optimizer step. A group is an array of indices into `rows`, and its rows are compared with one
    another. `rows` holds all training rows, also the rows of other steps."""

    rows: TokenRows
    groups: Sequence[np.ndarray]
    loss: ScoreLoss


class RewardModel:
    """Owns this rank's part of a reward model, and its optimizer if the model is trained. Every rank of the gang makes
    the same calls in the same order and gets the whole result. If the constructor joined the gang itself (its argument
    `joined` is None), the method `close` also leaves the gang."""

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
        """Join the gang and build the model of `model.path`. If the model's files have no head, draw a new head with
        `seed`.

        Args:
            total_steps: number of optimizer steps of the training, which the learning rate's schedule needs
                (`model.critic` has the optimizer's settings); None: the model is not trained.
            joined: the caller's membership of a gang with this layout. With it a process can hold several models. None:
                join a gang here, and leave it in `close`.

        Raises ValueError, naming the key, for a layout that cannot hold the model.
        """
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
        kernels = with_fusions(choose_kernels(model.kernels, dtype, device), model, device)
        self._blueprint = Blueprint(model, spec, layout, self._parallel_rank, kernels, products, seed)
        weights = read_weights(model.path)
        if SCORE_WEIGHT not in weights:
            weights |= new_head(spec.hidden_size, seed)
        frozen = model.frozen_blocks
        self._trunk = Trunk(build_trunk(self._blueprint, weights), model.trunk_cache_mb << 20) if frozen else None
        self._model = build_role(self._blueprint, _ROLE, weights)
        models = [self._model] if self._trunk is None else [self._trunk.model, self._model]
        self._weights = OffloadableTensors(lambda: (parameter for model in models for parameter in model.parameters()))
        self._trainer: Trainer | None = None
        self._kept: list[Tensor] | None = None
        if total_steps is not None:
            self._trainer = Trainer(_ROLE, self._model, self._config, self._blueprint)
        else:
            self._model.requires_grad_(False).eval()

    def collectives_of(self, where: str) -> AbstractContextManager[None]:
        """Return a context for calls that every rank of the gang must make. Inside, RanksMissing is raised if some
        ranks do not join a collective. `where`: name of these calls in the error message."""
        return self._parallel_rank.missing_ranks.collectives_of(where)

    def scores(self, rows: TokenRows) -> np.ndarray:
        """Return the score of each row, float32 [rows]. A row's score depends only on the row and the weights."""
        self._weights.wake()
        batches = score_micro_batches(rows, self._blueprint, self._config.micro_batch_tokens)
        outputs = run_forward(self._model, self._trunk, batches, self._read)
        scores = np.zeros(len(rows.lengths), np.float32)
        for batch, of_batch in zip(batches if outputs else [], outputs, strict=True):
            scores[batch.rows] = of_batch.float().cpu().numpy()
        return from_all_ranks(scores, self._parallel_rank)

    def sleep(self) -> None:
        """Free the device until the next call of `scores`: move the weights to the host's memory, and drop the cached
        outputs of the frozen blocks. If the device has no memory of its own (a CPU), do nothing."""
        if has_own_memory():
            self._weights.sleep()
            if self._trunk is not None:
                self._trunk.forget()

    def train(self, step: int, batch: GroupedRows) -> dict[str, float]:
        """Make optimizer step `step` (from 0). Return the stats of the loss over all ranks, and three metrics: `lr`,
        `grad_norm` and `skipped_steps`. `skipped_steps` is 1 if the gradient was not finite; then the weights did not
        change."""
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
        stats, metrics = trainer.train(step, lr, self._trunk, [minibatch])
        trainer.dirty = False  # single steps are not committed, only the trained model is kept
        named = gather.summarise_over_ranks(self._parallel_rank, stats)
        return named | {name: metrics[name] for name in ("lr", "grad_norm", "skipped_steps")}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current trained weights for `restore`, replacing an earlier copy."""
        self._kept = [parameter.detach().clone() for parameter in self._trained_parameters()]

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the weights that the last call of `keep` copied, and end the training for good."""
        assert self._kept is not None, "nothing was kept"
        for parameter, kept in zip(self._trained_parameters(), self._kept, strict=True):
            parameter.copy_(kept)
        self._end_training()
        self._model.eval()

    @torch.no_grad()
    def shift(self, by: float) -> None:
        """Add `by` to the head's bias, and so to all scores."""
        for name, parameter in self._model.named_parameters():
            if name == "output_layer.bias":
                parameter += by

    def export(self, directory: Path) -> None:
        """Write the model on rank 0: see `write_reward_model`."""
        tensors = gather.trained_tensors(self._model, self._blueprint, merged=True)
        if tensors is not None:
            write_reward_model(directory, self._path, tensors)

    def close(self) -> None:
        self._end_training()
        self._trunk = None
        if self._joined_here:
            parallel.leave()

    def _end_training(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = self._kept = None

    def _read(self, batch: MicroBatch, hidden_NH: Tensor) -> Tensor:
        return last_scores(hidden_NH, batch, self._model.output_layer)

    def _trained(self) -> Trainer:
        assert self._trainer is not None, "this reward model was not built to be trained"
        return self._trainer

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]


# ---- rows ------------------------------------------------------------------------------------------------


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class TokenRows:
    """Rows of two tokens or more. Entries after a row's end are not read."""

    tokens: Int[np.ndarray, "rows seq"]
    lengths: Int[np.ndarray, " rows"]

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> TokenRows:
        """Return rows, which may differ in length, as one padded array with the lengths."""
        lengths = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((len(rows), int(lengths.max(initial=0))), np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = row
        return TokenRows(tokens, lengths)

    def last_tokens(self) -> np.ndarray:
        """Return a mask, bool [rows, seq], of each row's last token."""
        return np.arange(self.tokens.shape[1]) == self.lengths[:, None] - 1


def from_all_ranks(of_rows: np.ndarray, rank: parallel.ParallelRank) -> np.ndarray:
    """Return the results of all rows, on every rank. `of_rows`: this rank's results, with 0 for rows of other ranks.
    Only the results of output ranks are read (`ParallelRank.is_output_rank`)."""
    if dist.get_world_size() == 1:
        return of_rows
    whole = torch.from_numpy(of_rows if rank.is_output_rank else np.zeros_like(of_rows)).to(rank.device)
    dist.all_reduce(whole)
    return whole.cpu().numpy()


def ended(tokens: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """Return a row (prompt and response) as reward models read it: with an EOS at the end. If the row does not end with
    one, because the response was cut, the first of `eos_ids` is added."""
    return [*tokens] if tokens and tokens[-1] in eos_ids else [*tokens, eos_ids[0]]


def score_micro_batches(rows: TokenRows, blueprint: Blueprint, max_tokens: int) -> list[MicroBatch]:
    """Return the micro-batches of this rank's share of the rows to score. All shares have nearly the same number of
    tokens."""
    rank = blueprint.parallel_rank
    share = split_balanced(rows.lengths, rank.data_size)[rank.data_rank]
    if not len(share):
        return []
    return cut_micro_batches(
        rows.tokens, rows.last_tokens(), share, rank.device, max_tokens=max_tokens, multiple=_multiple(blueprint)
    )


def group_micro_batches(
    rows: TokenRows, groups: Sequence[np.ndarray], blueprint: Blueprint, max_tokens: int
) -> list[MicroBatch]:
    """Return the micro-batches of this rank's share of the groups.

    A group is never cut, so that its pairs are in one micro-batch. A micro-batch of one large group may have more than
    `max_tokens`. There is at least one micro-batch, since every rank takes part in the reduction of gradients. A rank
    without a share gets a copy of the first group, which does not count (see `is_share`).
    """
    rank = blueprint.parallel_rank
    sizes = np.array([int(rows.lengths[group].sum()) for group in groups])
    share = split_balanced(sizes, rank.data_size)[rank.data_rank]
    if not len(share):
        share = np.zeros(1, np.int64)
    made = []
    for part in micro_batches(share, sizes[share], max_tokens=max_tokens):
        together = np.concatenate([groups[number] for number in part])
        made += cut_micro_batches(
            rows.tokens,
            rows.last_tokens(),
            together,
            rank.device,
            max_tokens=int(sizes[part].sum()),
            multiple=_multiple(blueprint),
        )
    return made


def is_share(groups: Sequence[np.ndarray], blueprint: Blueprint) -> bool:
    """Return True if this rank has groups of its own, so that its micro-batches count in the loss. If there are fewer
    groups than data-parallel ranks, the last ranks have no groups of their own. They compute a copy of the first group,
    because every rank takes part in the reduction of gradients. The loss must not depend on such a copy (see
    `group_micro_batches`)."""
    return blueprint.parallel_rank.data_rank < len(groups)


def last_scores(hidden_NH: Tensor, batch: MicroBatch, head: HiddenOutput) -> Tensor:
    """Return the head's output at each row's last token, float32 [B], in the micro-batch's order."""
    assert head.weight is not None  # a critic's HiddenOutput always has one
    last = torch.from_numpy(np.cumsum(batch.lengths) - 1).to(hidden_NH.device)
    return F.linear(hidden_NH[last].float(), head.weight, head.bias)[:, 0]


def _multiple(blueprint: Blueprint) -> int:
    rank = blueprint.parallel_rank
    sequence = rank.tensor_size if blueprint.layout.sequence_parallel else 1
    return math.lcm(sequence, rows_multiple(blueprint.dtype, rank.device))


# ---- files -----------------------------------------------------------------------------------------------

_HEAD = 2
"""Second part of the seed with which a new head is drawn; the first part is the run's seed. So the head's random
numbers differ from all others that are drawn with the run's seed."""


def new_head(hidden_size: int, seed: int) -> dict[str, Tensor]:
    """Return name -> tensor of a new head. The bias is zero. The weight is random and normal, with standard deviation 1
    / sqrt(hidden_size + 1). The first scores are then of the order of 1 (Stiennon et al. 2020; Huang et al. 2024)."""
    drawn = np.random.default_rng([seed, _HEAD]).standard_normal((1, hidden_size), np.float32)
    return {
        SCORE_WEIGHT: torch.from_numpy(drawn) / math.sqrt(hidden_size + 1),
        SCORE_BIAS: torch.zeros(1),
    }


def write_reward_model(directory: Path, source: str, trained: Mapping[str, Tensor]) -> None:
    """Create the directory and write the model of `source` into it, with the tensors in `trained` in place of the old
    ones. The files are the config, the weights, the tokenizer, and their checksums.

    `trained` has the head under a critic's names. Trained tensors are written in float32, so that nothing is rounded.
    The other tensors keep their bits and dtype.
    """
    tensors = dict(trained)
    head = {SCORE_WEIGHT: tensors.pop(VALUE_HEAD_WEIGHT), SCORE_BIAS: tensors.pop(VALUE_HEAD_BIAS)}
    weights = {name: t for name, t in read_weights(source).items() if name not in (LM_HEAD, SCORE_BIAS)}
    weights |= {name: tensor.float() for name, tensor in tensors.items()} | {SCORE_WEIGHT: head[SCORE_WEIGHT]}
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", weights)
    write_config_and_tokenizer(directory, source, _config(source, float(head[SCORE_BIAS])))
    write_sums(directory)


def _config(source: str, bias: float) -> dict[str, object]:
    config = read_config(source)
    (architecture,) = config.get("architectures") or [f"{config['model_type'].capitalize()}ForCausalLM"]
    family = architecture.partition("For")[0]
    if config.get("pad_token_id") is None:
        config["pad_token_id"] = read_tokenizer(source).pad_id  # transformers finds a row's last token by it
    return config | {
        "architectures": [f"{family}ForSequenceClassification"],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "dtype": "float32",
        REWARD_BIAS: bias,
    }


# ---- local judges ---------------------------------------------------------------------------------------


class NextTokens:
    """Finds the likeliest next tokens of rows. Owns this rank's part of the language model, which is built by the same
    code as a reference model. Every rank of the gang makes the same calls in the same order and gets the whole
    result."""

    def __init__(
        self, model: ModelConfig, layout: LayoutConfig, joined: parallel.ParallelRank, max_tokens: int
    ) -> None:
        """Build the model of `model.path` in a layout, for a gang that the caller has joined and will leave.
        `max_tokens`: maximum number of tokens of a forward pass, unless one row is longer.

        Raises ValueError, naming the key, for a layout that cannot hold the model."""
        spec = read_spec(model.path)
        check_layout(model, {Role.REFERENCE: spec}, layout, dist.get_world_size())
        set_numerics(model)
        device, dtype = joined.device, DTYPES[model.dtype]
        products = choose_products(model.products, dtype, device).products
        kernels = with_fusions(choose_kernels(model.kernels, dtype, device), model, device)
        self._blueprint = Blueprint(model, spec, layout, joined, kernels, products)
        self._max_tokens = max_tokens
        self._model = build_role(self._blueprint, Role.REFERENCE, read_weights(model.path))
        self._weights = OffloadableTensors(lambda: self._model.parameters())

    def sleep(self) -> None:
        """Free the device until the next call of `likeliest`: move the weights to the host's memory. If the device has
        no memory of its own (a CPU), do nothing."""
        if has_own_memory():
            self._weights.sleep()

    def likeliest(self, rows: TokenRows, number: int) -> list[list[tuple[int, float]]]:
        """Return each row's `number` likeliest next tokens as (token, log-prob), the likeliest first."""
        self._weights.wake()
        rank, vocab_size = self._blueprint.parallel_rank, self._blueprint.spec.vocab_size
        batches = score_micro_batches(rows, self._blueprint, self._max_tokens)
        number = min(number, vocab_size)
        weight_VH = output_weight(self._model, None) if rank.last_stage else None
        if weight_VH is not None and rank.tensor_size == 1:
            weight_VH = weight_VH[:vocab_size]  # without padding; under tensor parallelism `read` cuts the padding off

        def read(batch: MicroBatch, hidden_NH: Tensor) -> tuple[np.ndarray, np.ndarray]:
            assert weight_VH is not None  # only the last stage reads
            last = torch.from_numpy(np.cumsum(batch.lengths) - 1).to(hidden_NH.device)
            logits_BV = F.linear(hidden_NH[last].to(weight_VH.dtype), weight_VH).float()
            if rank.tensor_size > 1:
                parts = [torch.empty_like(logits_BV) for _ in range(rank.tensor_size)]
                dist.all_gather(parts, logits_BV.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
                logits_BV = torch.cat(parts, dim=-1)[:, :vocab_size]
            top = torch.log_softmax(logits_BV, dim=-1).topk(number)
            return top.indices.cpu().numpy(), top.values.cpu().numpy()

        outputs = run_forward(self._model, None, batches, read)
        tokens = np.zeros((len(rows.lengths), number), np.int64)
        log_probs = np.zeros((len(rows.lengths), number), np.float32)
        for batch, (of_batch, values) in zip(batches if outputs else [], outputs, strict=True):
            tokens[batch.rows], log_probs[batch.rows] = of_batch, values
        tokens, log_probs = from_all_ranks(tokens, rank), from_all_ranks(log_probs, rank)
        return [
            list(zip(of_row, values, strict=True))
            for of_row, values in zip(tokens.tolist(), log_probs.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Free the model. The caller's membership of the gang stays."""
        del self._model
