"""Work of forward passes and of updates on a gang's ranks: a node's roofline, in seconds at the hardware's peaks.

A gang of t x d x p ranks (tensor, data, pipeline) divides rows over its d data-parallel ranks, and their rows into m
micro-batches. With F operations of all rows:

    stage             max(F / (t d p m rate),  weights of a stage / bandwidth)     of one micro-batch
    sweep             (m + p - 1) stage                              1F1B: p - 1 stages are the bubble
    training          F is 3 forward passes, 4 with full recomputation; frozen blocks and, with LoRA, the gradients of
                      frozen weights are left out
    tensor parallel   2 all-reduces of a micro-batch's hidden states in each block forward, 2 backward; with sequence
                      parallelism an all-gather and a reduce-scatter each, of the same bytes
    data parallel     gradients in float32 are all-reduced once for each optimizer step; with ZeRO-1 they are
                      reduce-scattered, and the weights are gathered
    optimizer         bytes of gradients, masters and moments, each read and written once

Sources: Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473, sections 2 and 3), ZeRO (Rajbhandari et al. 2020, arXiv
1910.02054). Nothing overlaps: Stageline starts no collective before the backward pass has ended. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.hardware import HardwareCluster
from pipeline.plan.links import all_reduce_s, gather_s, link_of, send_s
from stages.models.config import OptimizerConfig
from stages.models.flops import forward_flops, matrix_numbers
from stages.models.layouts import adapter_parameters
from stages.models.memory import GangModels, role_parameters, trained_parameters
from stages.models.protocol import Role

ARITHMETIC, WEIGHTS, BUBBLE = "arithmetic", "weights read", "pipeline bubble"
OPTIMIZER, TENSOR, PIPELINE, DATA = "optimizer", "tensor-parallel", "pipeline sends", "data-parallel"


@dataclass(frozen=True)
class Work:
    """Work of one node."""

    parts: dict[str, float]
    """Seconds at the hardware's peaks, by what limits."""
    links: dict[str, float]
    """Seconds of collectives at the links' full bandwidth."""
    calls: float = 0.0
    """Number of passes, micro-batches or rows, each with a fixed cost."""

    @property
    def roofline(self) -> float:
        """Fewest seconds at the peaks of arithmetic and memory."""
        return math.fsum(self.parts.values())

    def times(self, factor: float) -> Work:
        """Return this work done `factor` times."""
        parts, links = ({name: factor * s for name, s in of.items()} for of in (self.parts, self.links))
        return Work(parts, links, factor * self.calls)

    def plus(self, other: Work) -> Work:
        """Return this work and another one after it."""
        return Work(_sum(self.parts, other.parts), _sum(self.links, other.links), self.calls + other.calls)


NO_WORK = Work({}, {})


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in [*one, *(other.keys() - one.keys())]}


@dataclass(frozen=True)
class Rows:
    """Rows that go through a model together."""

    count: int
    tokens: float
    """Tokens of prompts and responses."""
    squares: float
    """Sum of the rows' squared lengths."""
    sampled: float
    """Tokens of the responses."""

    def share(self, parts: int) -> Rows:
        """Return the largest of `parts` nearly equal parts."""
        count = -(-self.count // parts)
        factor = count / self.count if self.count else 0.0
        return Rows(count, self.tokens * factor, self.squares * factor, self.sampled * factor)


def rows_of(prompt: float, lengths: Sequence[int]) -> Rows:
    """Return rows with prompts of `prompt` tokens and responses of these lengths."""
    sampled = sum(lengths)
    squares = sum((prompt + length) ** 2 for length in lengths)
    return Rows(len(lengths), len(lengths) * prompt + sampled, squares, sampled)


@dataclass(frozen=True)
class GangSpeed:
    """The ranks of a gang, and what they hold."""

    models: GangModels
    cluster: HardwareCluster
    flops: float
    """Peak rate of one rank, in FLOP/s."""
    bytes_per_s: float
    """Peak memory bandwidth of one rank."""
    numbers: Mapping[Role, int]
    """Parameters of each role's model on the rank that holds the most of it, in `model.dtype`."""
    trained: Mapping[Role, int]
    """Those that are trained."""


def gang_speed(models: GangModels, cluster: HardwareCluster, flops: float, bytes_per_s: float) -> GangSpeed:
    """Return the ranks of a gang with these models; `flops`, `bytes_per_s`: peaks of one rank."""
    stages = range(models.layout.pipeline)
    numbers = {role: max(role_parameters(models, role, s).of_dtype for s in stages) for role in models.roles}
    trained = {role: max(trained_parameters(models, role, s).of_dtype for s in stages) for role in models.trained}
    return GangSpeed(models, cluster, flops, bytes_per_s, numbers, trained)


def forward_work(gang: GangSpeed, role: Role, optimizer: OptimizerConfig, rows: Rows, *, trunk: bool) -> Work:
    """Return the work of a forward pass of a role's model over rows. `trunk`: the frozen blocks are computed, too;
    otherwise their outputs are kept from an earlier pass."""
    return _sweep(gang, role, optimizer, rows, _forward(gang, role, rows, trunk=trunk), trains=False)


def update_work(
    gang: GangSpeed, role: Role, optimizer: OptimizerConfig, rows: Rows, *, epochs: int, minibatches: int
) -> Work:
    """Return the work of an update of a role's model: `epochs` passes over the rows, each with `minibatches` optimizer
    steps. The frozen blocks' outputs are kept from earlier passes."""
    part = rows.share(minibatches)
    forward = _forward(gang, role, part, trunk=False)
    backward = _backward(gang, role, part)
    recomputed = {"none": 0.0, "selective": 0.0, "full": forward}[gang.models.layout.recompute]
    if gang.models.layout.recompute == "selective" and "mlp" in gang.models.layout.recompute_modules:
        recomputed = 2.0 * _mlp_numbers(gang, role) * gang.models.num_blocks(role) * part.tokens
    whole = _sweep(gang, role, optimizer, part, forward + backward + recomputed, trains=True)
    without = _sweep(gang, role, optimizer, part, backward + recomputed, trains=True)
    first = without if optimizer.reuse_forward else whole
    step = _optimizer_step(gang, role)
    found = first.plus(step).times(minibatches)
    return found.plus(whole.plus(step).times(minibatches * (epochs - 1))) if epochs > 1 else found


def _forward(gang: GangSpeed, role: Role, rows: Rows, *, trunk: bool) -> float:
    """Return the operations of a forward pass."""
    spec, is_critic = gang.models.spec_of(role), role is Role.CRITIC
    blocks = gang.models.num_blocks(role) + (gang.models.model.frozen_blocks if trunk else 0)
    outputs, num_outputs = (1, rows.tokens) if is_critic else (spec.vocab_size, rows.sampled)
    return forward_flops(spec, blocks, rows.tokens, rows.squares, outputs=outputs, num_outputs=num_outputs)


def _backward(gang: GangSpeed, role: Role, rows: Rows) -> float:
    """Return the operations of a backward pass: two products for each of the forward pass, or one if its weight is
    frozen, and two of an adapter's."""
    twice, model = 2 * _forward(gang, role, rows, trunk=False), gang.models.model
    if not model.lora.rank:
        return twice
    spec, blocks = gang.models.spec_of(role), gang.models.num_blocks(role)
    adapters = adapter_parameters(spec, model.lora, tensor=1)
    return twice + (6 * adapters - 2 * matrix_numbers(spec)) * blocks * rows.tokens


def _mlp_numbers(gang: GangSpeed, role: Role) -> int:
    spec = gang.models.spec_of(role)
    return 3 * spec.hidden_size * spec.intermediate_size


def _sweep(
    gang: GangSpeed, role: Role, optimizer: OptimizerConfig, rows: Rows, operations: float, *, trains: bool
) -> Work:
    """Return the work of rows that go through the pipeline in micro-batches. `operations`: of all rows."""
    models, layout = gang.models, gang.models.layout
    if not rows.count:
        return NO_WORK
    stages = layout.pipeline
    mine = rows.share(models.data_ranks)
    count = micro_batches(mine, optimizer)
    computed = operations * mine.count / rows.count / (layout.tensor * stages * count) / gang.flops
    # a backward pass reads the weights twice, and adds to gradients in float32
    read = gang.numbers[role] * (3 * models.dtype_bytes + 8 if trains else models.dtype_bytes) / gang.bytes_per_s
    stage, limit = (computed, ARITHMETIC) if computed >= read else (read, WEIGHTS)
    parts, links, turns = {limit: count * stage}, dict[str, float](), count + stages - 1
    hidden = mine.tokens / count * models.spec_of(role).hidden_size * models.dtype_bytes
    if layout.tensor > 1:
        reduce = all_reduce_s(link_of(gang.cluster, layout.tensor), layout.tensor, hidden)
        links[TENSOR] = turns * models.num_blocks(role) / stages * (4 if trains else 2) * reduce
    if stages > 1:
        parts[BUBBLE] = (stages - 1) * stage
        link = link_of(gang.cluster, 2, layout.tensor * models.data_ranks)
        links[PIPELINE] = turns * (2 if trains else 1) * send_s(link, hidden / layout.tensor)
    return Work(parts, links, turns)


def micro_batches(rows: Rows, optimizer: OptimizerConfig) -> int:
    """Return the micro-batches of one rank's rows: the fewest that keep to `micro_batch_tokens` and `micro_batch_rows`,
    with rows of the mean length."""
    fit = max(1, int(optimizer.micro_batch_tokens / (rows.tokens / rows.count)))
    return -(-rows.count // min(fit, optimizer.micro_batch_rows or fit))


def _optimizer_step(gang: GangSpeed, role: Role) -> Work:
    """Return the work of one optimizer step on the rank with the most trained parameters."""
    models, layout = gang.models, gang.models.layout
    numbers, data = gang.trained[role], models.data_ranks
    shards = data if layout.distributed_optimizer else 1
    # gradients: read for the norm and the step, and zeroed; masters and both moments: read and written; the weights
    state = 3 * 8 if models.dtype_bytes == 4 else 3 * 8 + models.dtype_bytes
    parts = {OPTIMIZER: numbers * (12 + state / shards) / gang.bytes_per_s}
    links: dict[str, float] = {}
    if data > 1:
        link = link_of(gang.cluster, data, layout.tensor)
        if layout.distributed_optimizer:
            links[DATA] = gather_s(link, data, 4 * numbers) + gather_s(link, data, models.dtype_bytes * numbers)
        else:
            links[DATA] = all_reduce_s(link, data, 4 * numbers)
    return Work(parts, links)
