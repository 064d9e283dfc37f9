"""Seconds of forward passes and of updates on the ranks of a gang, at the hardware's peaks (the roofline).

**One micro-batch.** A gang has t x d x p ranks (tensor, data, pipeline). It divides the rows of a node over its d
data-parallel ranks. Each data-parallel rank divides its rows into m micro-batches. The time S that a pipeline stage
needs for one micro-batch is limited by arithmetic or by memory:

    S = max(F / (t x d x p x m x rate),  bytes / bandwidth)

    F          number of operations for all rows. In training: 3 forward passes and the recomputation. Frozen blocks do
               not count. With LoRA, the gradients of frozen weights do not count either.
    bytes      weights and gradients that a rank reads and writes. A forward pass reads the weights. A backward pass
               reads them once for the gradients of its inputs, and reads and writes the gradients of the trained
               weights.
    rate       peak rate of a rank in FLOP/s
    bandwidth  peak memory bandwidth of a rank

**All micro-batches** together take (m + p - 1) x S. Of this time, (p - 1) x S is the pipeline bubble (1F1B). Four
other costs are added:

- Optimizer step: gradients are read for the norm and for the step, and set to zero. Masters and moments are read and
  written. The weights are written if they are not the masters themselves. Muon's orthogonalisation adds arithmetic.
- Tensor parallelism: each block all-reduces the hidden states of a micro-batch 2 times forward and 2 times backward.
  There is 1 more all-reduce if `mlp` is recomputed, and there are 2 more if everything is recomputed. With sequence
  parallelism, each all-reduce is a reduce-scatter and an all-gather. The backward pass then also gathers the inputs of
  two linear layers once more. The kernels for CPUs keep these inputs instead.
- Data parallelism: gradients are all-reduced once for each optimizer step. With ZeRO-1 they are reduce-scattered, and
  the weights are gathered.
- Calls: a fixed cost of every block that a micro-batch goes through.

**Frozen blocks** pad each row to one of a few widths. For example, rows of 65 to 128 tokens are padded to 72, 80, ...,
120 or 128 tokens. The frozen blocks are called once for each width that occurs in a micro-batch. There are `_WIDTHS`
widths from n to 2 n tokens, where n is a power of two. Each row is assumed to have one of these widths, all with the
same probability.

**On a CPU**, element-wise operations count too (norms, rotary embedding, SwiGLU, softmax, additions). On GPUs the
calibrated efficiency includes them. The operations of a forward pass write E numbers:

    E = tokens x L x (6 h + 2 i)  +  8 x L x heads x (sum of n^2)  +  10 x V x sampled tokens

    L  number of blocks      h  hidden size      i  intermediate size      n  length of a row      V  vocabulary size

The last term is 0 for the critic. A backward pass writes 1.5 E numbers. Each number takes the time of `_ELEMENT_FLOPS`
operations at the float32 rate (`ELEMENTS`). E was measured on one thread of a CPU with AVX-512, with torch 2.13 and
hidden sizes of 64 and 576. Element-wise operations have an efficiency of their own, because they do not profit from
16-bit products.

Small micro-batches are slower on a CPU. If the hidden states of a micro-batch have c numbers, the rate is at most
max(1, floor(c / `_GRAIN`)) times the float32 rate of one thread. The reasons: torch uses at most this number of
threads, and 16-bit products of this size are not faster.

**Collectives.** `check --trace` lists the collectives of a layout. The counts above were compared with this list for
sequence parallelism with `mlp` recomputed. Tensor-parallel collectives count in full, although Megatron overlaps some
collectives of the backward pass with a matrix product.

On GPUs and with `portable` kernels, data-parallel collectives overlap with passes, here and in a run
(`stages.models.gradient_buffers`):

- The gradients are reduced during the backward pass of the last micro-batch.
- The weights are gathered during the first forward pass of the next minibatch. After the last minibatch, nothing
  overlaps with this.

Such a collective costs only the seconds by which it is longer than the pass, but at least the seconds of one bucket.
Collective and pass are compared at the hardware's peaks. In a pipeline, the pass of the first stage is taken, because
this stage ends last.

Sources: Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473, sections 2 and 3), sequence parallelism (Korthikanti et
al. 2022, arXiv 2205.05198, section 4.2.2), ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), overlap (Li et al. 2020,
arXiv 2006.15704, section 3.2). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipeline.config.hardware import HardwareCluster
from pipeline.plan.calibration import ELEMENTS
from pipeline.plan.links import Numbers, all_reduce_s, gather_s, larger, link_of, send_s, smaller
from stages.models.config import OptimizerConfig
from stages.models.flops import forward_flops, matrix_numbers
from stages.models.layouts import adapter_parameters
from stages.models.memory import (
    GangModels,
    moments_bytes,
    orthogonalisation_flops,
    role_parameters,
    trained_parameters,
)
from stages.models.protocol import Role

ARITHMETIC, WEIGHTS, BUBBLE = "arithmetic", "weights read", "pipeline bubble"
OPTIMIZER, TENSOR, PIPELINE, DATA = "optimizer", "tensor-parallel", "pipeline sends", "data-parallel"
_GRAIN = 32_768
"""Minimum number of elements per thread. On a CPU, torch uses at most one thread for each 32,768 elements of an
operation (ATen/TensorIterator.h: GRAIN_SIZE)."""
_ELEMENT_FLOPS = 50
"""Cost of one number that an element-wise operation writes on a CPU. The unit is the time of one float32 operation in a
matrix product."""
_WIDTHS = 8
"""Number of different widths to which the frozen blocks (`Trunk`) pad rows with lengths from n to 2 n tokens, where n
is a power of two. For example, rows with 65 to 128 tokens are padded to 72, 80, ..., 120 or 128 tokens."""
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Minimum number of parameters in a bucket of gradients: in total, and for each data-parallel rank. The larger minimum
applies (megatron-core, distributed/distributed_data_parallel.py)."""


@dataclass(frozen=True)
class Work:
    """The work of one node: seconds of arithmetic and memory reads, seconds of collectives, and the number of calls,
    each of which costs a fixed time. For several shards, each number is an array with one entry per shard."""

    parts: dict[str, Numbers]
    """Resource or cause that limits the speed (`ARITHMETIC`, `WEIGHTS`, `BUBBLE`, ...) -> seconds that it takes at the
    hardware's peaks. The seconds add up."""
    links: dict[str, Numbers]
    """Kind of collective (`TENSOR`, ...) -> seconds at the links' full bandwidth."""
    calls: Numbers = 0.0
    """Number of fixed costs (`StageSpeed.call_s`), for launches and Python. Engines have one for each decoding pass.
    Scoring and advantage nodes have one for each row. Forward passes and updates have one for each transformer block
    and micro-batch."""

    @property
    def roofline(self) -> float:
        """Sum of `parts`: a lower bound of the seconds of this work, at the peaks of arithmetic and memory."""
        return math.fsum(self.parts.values())

    def times(self, factor: float) -> Work:
        """Return this work done `factor` times."""
        parts, links = ({name: factor * s for name, s in of.items()} for of in (self.parts, self.links))
        return Work(parts, links, factor * self.calls)

    def plus(self, other: Work) -> Work:
        """Return the sum of this work and another."""
        return Work(_sum(self.parts, other.parts), _sum(self.links, other.links), self.calls + other.calls)


NO_WORK = Work({}, {})


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in [*one, *(other.keys() - one.keys())]}


@dataclass(frozen=True)
class Rows:
    """Rows that go through a model together. For several shards, each with `count` rows, the other fields are arrays
    with one number per shard."""

    count: int
    tokens: Numbers
    """Tokens of prompts and responses."""
    squares: Numbers
    """Sum of the rows' squared lengths."""
    sampled: Numbers
    """Tokens of the responses."""

    def share(self, parts: int) -> Rows:
        """Return the largest part, if the rows are divided into `parts` nearly equal parts."""
        count = -(-self.count // parts)
        factor = count / self.count if self.count else 0.0
        return Rows(count, self.tokens * factor, self.squares * factor, self.sampled * factor)


def rows_of(prompt: float, lengths: Sequence[int]) -> Rows:
    """Return rows with prompts of `prompt` tokens and responses of these lengths."""
    sampled = sum(lengths)
    squares = sum((prompt + length) ** 2 for length in lengths)
    return Rows(len(lengths), len(lengths) * prompt + sampled, squares, sampled)


def rows_of_nodes(prompt: float, lengths: np.ndarray) -> Rows:
    """Return the rows of several nodes. `lengths`: tokens of the responses (nodes, rows)."""
    whole, sampled = prompt + lengths, lengths.sum(axis=1)
    count = lengths.shape[1]
    return Rows(count, count * prompt + sampled, (whole * whole).sum(axis=1), sampled)


@dataclass(frozen=True)
class GangSpeed:
    """The models of a gang, and the speed of its ranks."""

    models: GangModels
    cluster: HardwareCluster
    flops: float
    """Peak rate of one rank, in FLOP/s."""
    small_flops: float
    """Peak float32 rate of one CPU thread, in FLOP/s. It limits operations on small tensors, which torch divides among
    few threads. Infinite on GPUs."""
    element_flops: float
    """Peak float32 rate of all threads of a rank, in FLOP/s. It limits element-wise operations. Infinite on GPUs."""
    bytes_per_s: float
    """Peak memory bandwidth of one rank."""
    numbers: Mapping[Role, int]
    """Role -> number of its model's parameters in `model.dtype`, on the rank that has the most."""
    trained: Mapping[Role, int]
    """Role -> number of its model's trained parameters in `model.dtype`, on the rank that has the most."""


def gang_speed(
    models: GangModels,
    cluster: HardwareCluster,
    flops: float,
    small_flops: float,
    element_flops: float,
    bytes_per_s: float,
) -> GangSpeed:
    """Return the speed of a gang with these models, given the peaks of one rank."""
    stages = range(models.layout.pipeline)
    numbers = {role: max(role_parameters(models, role, s).of_dtype for s in stages) for role in models.roles}
    trained = {role: max(trained_parameters(models, role, s).of_dtype for s in stages) for role in models.trained}
    return GangSpeed(models, cluster, flops, small_flops, element_flops, bytes_per_s, numbers, trained)


@dataclass(frozen=True)
class _Pass:
    """A pass of rows through a role's model."""

    operations: Numbers
    """Operations of all rows on all ranks."""
    elements: Numbers
    """Number of elements that element-wise operations write, for all rows on all ranks."""
    moved: float
    """Bytes of weights and gradients that a rank reads and writes for a micro-batch."""
    halves: int
    """Number of all-gathers and reduce-scatters of hidden states over the tensor-parallel ranks in a block. An
    all-reduce counts as two."""
    sends: int = 1
    """Number of sends between pipeline stages, of hidden states or of their gradients."""
    blocks: Numbers = 1.0
    """Number of blocks that a pipeline stage computes. Each has a fixed cost."""

    def plus(self, other: _Pass) -> _Pass:
        """Return a pass with the sums of the costs of both passes. Only `blocks` is not a sum: it is copied from
        `self`."""
        return _Pass(
            self.operations + other.operations,
            self.elements + other.elements,
            self.moved + other.moved,
            self.halves + other.halves,
            self.sends + other.sends,
            self.blocks,
        )


def forward_work(gang: GangSpeed, role: Role, optimizer: OptimizerConfig, rows: Rows, *, trunk: bool) -> Work:
    """Return the work of a forward pass of a role's model over rows. `trunk`: True if the frozen blocks are computed
    too, False if their outputs are kept from an earlier pass."""
    forward = _forward_pass(gang, role, rows, trunk=trunk)
    if trunk and rows.count:  # a call of the frozen blocks for each width of a micro-batch's rows
        rank_rows, above = rows.share(gang.models.data_ranks), _num_blocks(gang, role, trunk=False)
        widths = _num_widths(rank_rows.count / micro_batches(rank_rows, optimizer))
        forward = replace(forward, blocks=above + widths * (_num_blocks(gang, role, trunk=True) - above))
    return _sweep(gang, role, optimizer, rows, forward)


def update_work(
    gang: GangSpeed, role: Role, optimizer: OptimizerConfig, rows: Rows, *, epochs: int, minibatches: int
) -> Work:
    """Return the work of an update of a role's model: `epochs` passes over the rows, each with `minibatches` optimizer
    steps. The frozen blocks' outputs are kept from earlier passes. If `model.reuse_forward` lists the role, each epoch
    has only one minibatch. The first epoch then needs no forward pass."""
    part, steps = rows.share(minibatches), epochs * minibatches
    forward, backward = _forward_pass(gang, role, part, trunk=False), _backward_pass(gang, role, part)
    kept = minibatches if role in gang.models.model.reuse_forward else 0
    swept = _sweep(gang, role, optimizer, part, forward.plus(backward)).times(steps - kept)
    swept = swept.plus(_sweep(gang, role, optimizer, part, backward).times(kept)) if kept else swept
    exchanged = _exchanges(
        gang,
        role,
        steps,
        _stage(gang, optimizer, part, forward).seconds,
        _stage(gang, optimizer, part, backward).seconds,
    )
    links = {DATA: exchanged} if gang.models.data_ranks > 1 else {}
    return swept.plus(_optimizer_step(gang, role).times(steps)).plus(Work({}, links))


def _forward_pass(gang: GangSpeed, role: Role, rows: Rows, *, trunk: bool) -> _Pass:
    operations, blocks = _forward(gang, role, rows, trunk=trunk), _num_blocks(gang, role, trunk=trunk)
    elements = _elements(gang, role, rows, trunk=trunk)
    return _Pass(operations, elements, gang.numbers[role] * gang.models.dtype_bytes, 4, blocks=blocks)


def _elements(gang: GangSpeed, role: Role, rows: Rows, *, trunk: bool) -> Numbers:
    """Return the number of elements that the element-wise operations of a forward pass write."""
    spec = gang.models.spec_of(role)
    blocks = gang.models.num_blocks(role) + (gang.models.model.frozen_blocks if trunk else 0)
    of_block = rows.tokens * (6 * spec.hidden_size + 2 * spec.intermediate_size) + 8 * spec.num_heads * rows.squares
    return blocks * of_block + (0.0 if role is Role.CRITIC else 10 * spec.vocab_size * rows.sampled)


def _num_blocks(gang: GangSpeed, role: Role, *, trunk: bool) -> float:
    """Return the number of blocks that a pipeline stage computes in a pass. Frozen blocks count if `trunk`, or if the
    model has no others."""
    own = gang.models.num_blocks(role)
    return (own + gang.models.model.frozen_blocks if trunk or not own else own) / gang.models.layout.pipeline


def _num_widths(rows: Numbers) -> Numbers:
    """Return the expected number of different widths, if each row has one of `_WIDTHS` widths at random."""
    return _WIDTHS * (1 - (1 - 1 / _WIDTHS) ** rows)


def _backward_pass(gang: GangSpeed, role: Role, rows: Rows) -> _Pass:
    """Return a backward pass, including its recomputation of activations."""
    models, layout = gang.models, gang.models.layout
    number, spec, forward = models.dtype_bytes, models.spec_of(role), _forward_pass(gang, role, rows, trunk=False)
    operations, moved = _backward(gang, role, rows), gang.numbers[role] * number
    moved += gang.trained[role] * 2 * models.gradient_bytes(role)
    halves = 6 if layout.sequence_parallel and models.portable else 4
    if layout.recompute == "full":
        again = (forward.operations, forward.elements, forward.moved, forward.halves)
    elif layout.recompute == "selective" and "mlp" in layout.recompute_modules:
        mlps = _mlp_numbers(gang, role) * models.num_blocks(role)
        elements = 2 * spec.intermediate_size * models.num_blocks(role) * rows.tokens
        again = (2.0 * mlps * rows.tokens, elements, mlps / (layout.tensor * layout.pipeline) * number, 2)
    else:
        again = (0.0, 0.0, 0.0, 0)
    backward = _Pass(operations, 1.5 * forward.elements, moved, halves, blocks=forward.blocks)
    return backward.plus(_Pass(*again, sends=0))


def _forward(gang: GangSpeed, role: Role, rows: Rows, *, trunk: bool) -> Numbers:
    """Return the operations of a forward pass over all rows on all ranks. `trunk`: with the frozen blocks."""
    spec, is_critic = gang.models.spec_of(role), role is Role.CRITIC
    blocks = gang.models.num_blocks(role) + (gang.models.model.frozen_blocks if trunk else 0)
    outputs, num_outputs = (1, rows.tokens) if is_critic else (spec.vocab_size, rows.sampled)
    return forward_flops(spec, blocks, rows.tokens, rows.squares, outputs=outputs, num_outputs=num_outputs)


def _backward(gang: GangSpeed, role: Role, rows: Rows) -> Numbers:
    """Return the operations of a backward pass. For each matrix product of the forward pass, the backward pass has two
    products (for the gradients of the input and of the weight), or one if the weight is frozen. With LoRA, the result
    also includes the adapters' products of the forward pass, because `_forward` does not count them."""
    operations, model = 2 * _forward(gang, role, rows, trunk=False), gang.models.model
    spec, blocks = gang.models.spec_of(role), gang.models.num_blocks(role)
    if model.lora.rank:
        adapters = adapter_parameters(spec, model.lora, tensor=1)
        operations += (6 * adapters - 2 * matrix_numbers(spec)) * blocks * rows.tokens
    if role is not Role.CRITIC and (model.lora.rank or (spec.tied_embeddings and model.frozen_blocks)):
        operations -= 2.0 * spec.hidden_size * spec.vocab_size * rows.sampled  # the output layer is frozen
    return operations


def _mlp_numbers(gang: GangSpeed, role: Role) -> int:
    spec = gang.models.spec_of(role)
    return 3 * spec.hidden_size * spec.intermediate_size


def _sweep(gang: GangSpeed, role: Role, optimizer: OptimizerConfig, rows: Rows, passes: _Pass) -> Work:
    """Return the work of sending rows through the pipeline of a gang, in micro-batches. The argument `passes` describes
    what is computed for the rows: a forward pass, a backward pass, or both."""
    models, layout = gang.models, gang.models.layout
    if not rows.count:
        return NO_WORK
    stages = layout.pipeline
    rank_rows = rows.share(models.data_ranks)
    count = micro_batches(rank_rows, optimizer)
    stage = _stage(gang, optimizer, rows, passes)
    links, turns = dict[str, Numbers](), count + stages - 1
    parts = {
        ARITHMETIC: count * stage.products_s,
        ELEMENTS: count * stage.elements_s,
        WEIGHTS: count * stage.memory_s,
    }
    hidden = rank_rows.tokens / count * models.spec_of(role).hidden_size * models.dtype_bytes
    if layout.tensor > 1:
        link, ranks = link_of(gang.cluster, layout.tensor), layout.tensor
        half = gather_s(link, ranks, hidden) if layout.sequence_parallel else all_reduce_s(link, ranks, hidden) / 2
        links[TENSOR] = turns * models.num_blocks(role) / stages * passes.halves * half
    if stages > 1:
        parts[BUBBLE] = (stages - 1) * stage.seconds
        link = link_of(gang.cluster, 2, layout.tensor * models.data_ranks)
        links[PIPELINE] = turns * passes.sends * send_s(link, hidden / layout.tensor)
    return Work(parts, links, turns * passes.blocks)


class _Stage(NamedTuple):
    """The seconds of one micro-batch in one pipeline stage. Either arithmetic limits them (matrix products, and
    element-wise operations on CPUs), or the bandwidth of the memory."""

    products_s: Numbers
    elements_s: Numbers
    memory_s: Numbers

    @property
    def seconds(self) -> Numbers:
        return self.products_s + self.elements_s + self.memory_s


def _stage(gang: GangSpeed, optimizer: OptimizerConfig, rows: Rows, passes: _Pass) -> _Stage:
    """Return the seconds of one micro-batch in one pipeline stage."""
    if not rows.count:
        return _Stage(0.0, 0.0, 0.0)
    layout, rank_rows = gang.models.layout, rows.share(gang.models.data_ranks)
    count = micro_batches(rank_rows, optimizer)
    # on a CPU, further threads and 16-bit products save no time if a micro-batch has few numbers
    parts = larger(1.0, rank_rows.tokens / count * gang.models.spec.hidden_size // _GRAIN)
    rate = smaller(gang.flops, parts * gang.small_flops)
    element_rate = smaller(gang.element_flops, parts * gang.small_flops) / _ELEMENT_FLOPS
    share = rank_rows.count / rows.count / (layout.tensor * layout.pipeline * count)
    products, elements = share * passes.operations / rate, share * passes.elements / element_rate
    moved = passes.moved / gang.bytes_per_s
    is_computed = 1 * (products + elements >= moved)
    return _Stage(products * is_computed, elements * is_computed, moved * (1 - is_computed))


def micro_batches(rows: Rows, optimizer: OptimizerConfig) -> Numbers:
    """Return the smallest number of micro-batches for one rank's rows with which each micro-batch stays within
    `micro_batch_tokens` and `micro_batch_rows`. All rows are assumed to have the mean length."""
    fit = larger(1, optimizer.micro_batch_tokens / (rows.tokens / rows.count) // 1)
    return -(-rows.count // smaller(fit, optimizer.micro_batch_rows or fit))


def _optimizer_step(gang: GangSpeed, role: Role) -> Work:
    """Return the work of one optimizer step on the rank with the most trained parameters."""
    models, layout = gang.models, gang.models.layout
    numbers, shards = gang.trained[role], models.data_ranks if layout.distributed_optimizer else 1
    # gradients are read for the norm and for the step, and zeroed; masters and moments are read and written; the
    # weights are written if they are not the masters themselves
    count = trained_parameters(models, role, 0)
    moments = moments_bytes(models, role, 0) / (count.of_dtype + count.float32)
    gradients, state = 3 * models.gradient_bytes(role), 8 + 2 * moments
    state += 0 if models.dtype_bytes == 4 else models.dtype_bytes
    moved_s = numbers * (gradients + state / shards) / gang.bytes_per_s
    return Work({OPTIMIZER: moved_s + orthogonalisation_flops(models, role) / gang.flops}, {})


def _exchanges(gang: GangSpeed, role: Role, steps: int, forward_s: Numbers, backward_s: Numbers) -> Numbers:
    """Return the seconds that the data-parallel collectives of `steps` optimizer steps add to the passes. `forward_s`,
    `backward_s`: seconds of a pass of one micro-batch in one stage."""
    models, layout = gang.models, gang.models.layout
    numbers, data = gang.trained[role], models.data_ranks
    if data == 1:
        return 0.0
    link, to_add = link_of(gang.cluster, data, layout.tensor), models.gradient_bytes(role) * numbers
    if layout.distributed_optimizer:
        gradients = gather_s(link, data, to_add)
        weights = gather_s(link, data, models.dtype_bytes * numbers)
    else:
        gradients, weights = all_reduce_s(link, data, to_add), 0.0
    if not models.portable:
        return steps * (gradients + weights)
    buckets = max(1, math.ceil(numbers / max(_BUCKET, _BUCKET_PER_RANK * data)))

    def exposed(seconds: float, beside: Numbers) -> Numbers:
        return larger(seconds / buckets, seconds - beside)

    return steps * exposed(gradients, backward_s) + (steps - 1) * exposed(weights, forward_s) + weights
