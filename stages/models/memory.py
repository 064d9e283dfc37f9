r"""Predict the memory that the models of one rank take, in bytes, from the architecture and the layout alone.

    parameters     this rank's parts of all models that are placed on the gang
    gradients      for every trained parameter, in `gradients_dtype`; whole on each data-parallel
                   rank
    masters        float32 copies of 16-bit parameters; divided over the data-parallel ranks with
                   the distributed optimizer
    moments        the optimizer's numbers in `moments_dtype`, with AdamW two for every trained
                   parameter (`moments_bytes`); divided in the same way as masters
    activations    kept for the backward pass: per block (`block_activations`) x blocks x
                   micro-batches in flight; and one block whose activations are recomputed
    logits         kept logits, temporary blocks of the vocabulary, and the output layer's gradient
    trunk cache    hidden states of the frozen blocks

Three rules apply to the sum:

- On one gang policy and critic train in turn. So only the larger of their activations counts, plus the activations that
  the other role keeps of all rows for its own update (`reuse_forward`).
- The recomputed block is needed only after the output layer's backward pass. So it can use the memory of the logits:
  the bytes of the block are subtracted from the bytes of the logits.
- With LoRA only adapters and the critic's head are trained, and all roles share the frozen weights.

Not counted are fragmentation and the temporaries of the optimizer's step (a tensor or two).

The last part of the file counts the other memory of a rank: the blocks of a publication, the whole tensors of an
export, the copies of a checkpoint, and on a GPU the memory of CUDA and NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from stages.models.config import LayoutConfig, ModelConfig, Offload
from stages.models.layouts import SPLIT_BY_ROWS, TARGET_PARTS, adapter_parameters, adapter_shapes, target_parts
from stages.models.protocol import Role
from stages.models.spec import (
    EMBEDDING,
    K_BIAS,
    K_PROJ,
    Q_BIAS,
    Q_PROJ,
    V_BIAS,
    V_PROJ,
    ModelSpec,
    layer_and_part,
    layer_shapes,
    padded,
    tensor_shapes,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

GRADIENTS = "gradients"

LOGITS_BLOCK_BYTES = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Device -> bytes of a block of logits: on a CPU small enough for its cache, on a GPU large enough to keep it busy."""
LOGITS_MIN_BLOCK = 512
"""Minimum number of vocabulary tokens in a block of logits. With fewer tokens the matrix product is slow. If the
micro-batch has many sampled tokens, a block of this minimum size may be larger than LOGITS_BLOCK_BYTES."""
LOGITS_KEPT_BYTES = 1 << 27
"""Maximum number of bytes of a micro-batch's logits that are kept from the forward to the backward pass: enough for 680
tokens at a vocabulary of 49k. Computing the logits again costs a third of the output layer's time in float32."""

_SPLIT = tuple(part for parts in TARGET_PARTS.values() for part in parts)
"""Projections of a layer. Tensor parallelism splits them, while the norms are whole on each rank."""


@dataclass(frozen=True)
class MicroBatchSize:
    """Upper bounds of a micro-batch's size."""

    tokens: int
    """Maximum number of tokens of all rows together."""
    sampled: int
    """Maximum number of tokens that go through the output layer."""
    width: int
    """Maximum number of tokens of a row."""


@dataclass(frozen=True)
class RowsSize:
    """Length of the rows, and their number per step and in the whole run. The memory for kept hidden states and
    activations depends on these sizes."""

    width: int
    """Maximum number of tokens of a row."""
    of_step: int
    """Number of rows in a step."""
    of_run: int
    """Number of rows in the whole run. The trunk cache keeps the frozen blocks' outputs for these rows."""


@dataclass(frozen=True)
class GangModels:
    """The models that the ranks of a gang hold, and their layout."""

    spec: ModelSpec
    model: ModelConfig
    layout: LayoutConfig
    roles: frozenset[Role]
    """Roles among policy, critic and reference that are placed on the gang."""
    data_ranks: int
    offload: Offload = "none"
    own: Mapping[Role, ModelSpec] = field(default_factory=dict)
    """Role with a model of its own (`model.reference_path`, `model.critic_path`) -> the architecture of this model."""
    portable: bool = False
    """True if the transformer blocks use Megatron's own linears. On CUDA they always do. On a CPU they do only if
    `model.kernels` is "portable"."""
    on_gpu: bool = False

    def computes_scores(self, role: Role) -> bool:
        """Return True if attention computes a matrix of scores [heads, tokens, tokens] for each row. It does so on CUDA
        for float32 heads that share keys, since torch has no fused kernel for them."""
        spec, ranks = padded(self.spec_of(role), self.layout.tensor), self.layout.tensor
        return self.on_gpu and self.dtype_bytes == 4 and spec.num_heads // ranks > max(1, spec.num_kv_heads // ranks)

    def spec_of(self, role: Role) -> ModelSpec:
        return self.own.get(role, self.spec)

    def num_blocks(self, role: Role) -> int:
        """Return the number of a role's blocks above the frozen blocks, on all pipeline stages together."""
        return self.model.own_blocks(self.spec_of(role).num_layers, is_critic=role is Role.CRITIC)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.model.dtype]

    def gradient_bytes(self, role: Role) -> int:
        """Return the bytes of one number in a role's gradients. (The critic's head is an exception: its gradients are
        float32.)"""
        return DTYPE_BYTES[self.model.optimizer_of(role).gradients_dtype]

    def moment_bytes(self, role: Role) -> int:
        """Return the size in bytes of one number in the moments of a role's optimizer."""
        return DTYPE_BYTES[self.model.optimizer_of(role).moments_dtype]

    @property
    def trained(self) -> Collection[Role]:
        return self.roles & {Role.POLICY, Role.CRITIC}


@dataclass(frozen=True)
class ParameterCount:
    """Parameter counts of one rank's part of a model, or of its trained part."""

    of_dtype: int
    """Number of parameters in `model.dtype`."""
    float32: int = 0
    """Number of parameters that are always float32: the critic's head."""


def block_parameters(spec: ModelSpec, tensor: int) -> int:
    """Return the number of parameters of one transformer block on one of `tensor` ranks, including padding."""
    total = 0
    for part, shape in layer_shapes(padded(spec, tensor)).items():
        number = 1
        for size in shape:
            number *= size
        total += number // tensor if part.startswith(_SPLIT) else number
    return total


def role_parameters(gang: GangModels, role: Role, stage: int) -> ParameterCount:
    """Return the parameter counts of a role's model above the frozen blocks, on one tensor-parallel rank of a stage."""
    spec, layout = gang.spec_of(role), gang.layout
    blocks = gang.num_blocks(role)
    vocabulary = padded(spec, layout.tensor).vocab_size // layout.tensor * spec.hidden_size
    number = blocks // layout.pipeline * block_parameters(spec, layout.tensor)
    number += _vocabulary_matrices(gang, role, stage) * vocabulary
    last = stage == layout.pipeline - 1
    if last:
        number += spec.hidden_size  # the final norm
    return ParameterCount(number, spec.hidden_size + 1 if last and role is Role.CRITIC else 0)


def _vocabulary_matrices(gang: GangModels, role: Role, stage: int) -> int:
    """Return the number of matrices [vocabulary, hidden] of a role's model on a stage, from 0 to 2: the embedding, and
    the output layer if it has memory of its own."""
    frozen, pipeline = gang.model.frozen_blocks, gang.layout.pipeline
    number = int(stage == 0 and not frozen)
    if stage == pipeline - 1 and role is not Role.CRITIC:
        # a tied output layer is the embedding: the first stage's, the trunk's, or a copy on the last stage
        number += not gang.spec_of(role).tied_embeddings or (pipeline > 1 and not frozen)
    return number


def trained_parameters(gang: GangModels, role: Role, stage: int) -> ParameterCount:
    """Return the counts of a role's trained parameters, on one tensor-parallel rank of a stage. These are all
    parameters above the frozen blocks, or with LoRA the adapters and a critic's head."""
    whole = role_parameters(gang, role, stage)
    if not gang.model.lora.rank:
        return whole
    spec = gang.spec_of(role)
    blocks = gang.num_blocks(role) // gang.layout.pipeline
    wide = padded(spec, gang.layout.tensor)
    return ParameterCount(blocks * adapter_parameters(wide, gang.model.lora, gang.layout.tensor), whole.float32)


def moments_bytes(gang: GangModels, role: Role, stage: int) -> int:
    """Return the bytes of the moments of a role's trained parameters, on one tensor-parallel rank of a stage.

    adamw       two numbers for every parameter
    muon        one number for every weight in the blocks' matrices, two for every other parameter
    adafactor   one number for each row and each column of a Hugging Face matrix, one for each element of a vector
    """
    count = trained_parameters(gang, role, stage)
    spec, lora, last = gang.spec_of(role), gang.model.lora, stage == gang.layout.pipeline - 1
    optimizer, blocks = gang.model.optimizer_of(role).optimizer, gang.num_blocks(role) // gang.layout.pipeline
    shapes = [*(adapter_shapes(spec, lora, 0) if lora.rank else layer_shapes(spec)).values()]
    numbers = 2 * (count.of_dtype + count.float32)
    if optimizer == "muon":
        numbers -= blocks * sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    elif optimizer == "adafactor":
        numbers = blocks * sum(map(sum, shapes)) + (count.float32 + 1 if count.float32 else 0)
        if not lora.rank:
            numbers += _vocabulary_matrices(gang, role, stage) * (spec.vocab_size + spec.hidden_size)
            numbers += spec.hidden_size if last else 0
    return gang.moment_bytes(role) * numbers


def orthogonalisation_flops(gang: GangModels, role: Role) -> int:
    """Return the operations of Muon's five iterations on all matrices of a stage's blocks, in one optimizer step. For a
    matrix with sides m <= n, an iteration has two products of m x m x n and one product of m x m x m. Return 0 for
    other optimizers."""
    if gang.model.optimizer_of(role).optimizer != "muon":
        return 0
    sides = [sorted(shape) for shape in layer_shapes(gang.spec_of(role)).values() if len(shape) == 2]
    return gang.num_blocks(role) // gang.layout.pipeline * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sides)


def _held_parameters(gang: GangModels, stage: int) -> int:
    """Return the parameters in `model.dtype` that a rank holds for all roles, without frozen blocks. With LoRA, roles
    built from `model.path` share theirs, which count once. With fewer blocks in the critic, a pipeline stage may hold
    some blocks for the critic and others for the policy: all count."""
    shared = gang.roles - gang.own.keys() if gang.model.lora.rank else frozenset()
    alone = sum(role_parameters(gang, role, stage).of_dtype for role in gang.roles - shared)
    adapters = sum(trained_parameters(gang, role, stage).of_dtype for role in gang.trained if gang.model.lora.rank)
    beside, per_block = 0, block_parameters(gang.spec, gang.layout.tensor)
    blocks: set[int] = set()
    for role in shared:
        here = gang.num_blocks(role) // gang.layout.pipeline
        blocks |= {*range(stage * here, (stage + 1) * here)}
        # policy or reference has the most parameters outside the blocks; a critic's are among them
        beside = max(beside, role_parameters(gang, role, stage).of_dtype - here * per_block)
    return alone + beside + len(blocks) * per_block + adapters


def trunk_parameters(gang: GangModels) -> int:
    """Return the number of parameters of the trunk (frozen blocks and embedding) on one rank. All roles share the
    trunk. Return 0 without frozen blocks."""
    spec, frozen = gang.spec, gang.model.frozen_blocks
    if not frozen:
        return 0
    vocabulary = padded(spec, gang.layout.tensor).vocab_size // gang.layout.tensor * spec.hidden_size
    return frozen * block_parameters(spec, gang.layout.tensor) + vocabulary


def state_bytes(gang: GangModels, stage: int) -> dict[str, int]:
    """Return the bytes of parameters, gradients, masters and moments on a rank's device, at the time when they take the
    most memory. The result depends on `offload`."""
    whole, alone = (
        _state_bytes(gang, stage),
        [_state_bytes(replace(gang, roles=frozenset({role})), stage) for role in gang.roles],
    )
    if gang.offload == "idle":
        return max(alone, key=lambda parts: sum(parts.values()), default=whole)
    if gang.offload == "gradients":
        return whole | {GRADIENTS: max((parts[GRADIENTS] for parts in alone), default=0)}
    return whole


def offloaded_bytes(gang: GangModels, stage: int) -> int:
    """Return the bytes in the host's memory that the copies of offloaded tensors take. These are the masters, moments
    and parameters of all roles, without the parameters of the trunk. The result is 0 if the setting `offload` is not
    "idle". All roles count, since a role's copies keep their memory while the role is on the device."""
    if gang.offload != "idle":
        return 0
    kept = (_state_bytes(replace(gang, roles=frozenset({role})), stage) for role in gang.roles)
    trunk = gang.dtype_bytes * trunk_parameters(gang)
    return sum(sum(parts.values()) - parts[GRADIENTS] - trunk for parts in kept)


def _state_bytes(gang: GangModels, stage: int) -> dict[str, int]:
    """Return the bytes of the state of all roles together, if nothing is offloaded. With the distributed optimizer
    Megatron pads its buffers to multiples of the data-parallel size. The padding is not counted."""
    wide = gang.dtype_bytes == 4
    shards = gang.data_ranks if gang.layout.distributed_optimizer else 1
    in_dtype = float32 = gradients = moments = 0
    for role in gang.trained:
        count = trained_parameters(gang, role, stage)
        in_dtype, float32 = in_dtype + count.of_dtype, float32 + count.float32
        gradients += gang.gradient_bytes(role) * count.of_dtype + 4 * count.float32
        moments += moments_bytes(gang, role, stage)
    held = trunk_parameters(gang) + _held_parameters(gang, stage)
    return {
        "parameters": gang.dtype_bytes * held + 4 * float32,
        GRADIENTS: gradients,
        "float32 masters": 0 if wide else 4 * -(-in_dtype // shards),
        "moments": -(-moments // shards),
    }


def block_activations(
    spec: ModelSpec, layout: LayoutConfig, dtype_bytes: int, *, portable: bool = False, scores: int = 0
) -> float:
    """Return the bytes per token that a transformer block keeps for the backward pass.

    Args:
        portable: True: the block has Megatron's own linears, as on CUDA. False: it has the kernels for a CPU.
        scores: number of scores that a head computes for each token, if attention computes a matrix of scores
            (`GangModels.computes_scores`); 0 otherwise.

    The table lists the tensors that are kept without recomputation. h is the hidden size, f the MLP's width, q and k
    are the widths of queries and of keys, and d is `dtype_bytes`. With several tensor-parallel ranks, f, q and k are
    this rank's part of the padded model. Sequence parallelism divides the norms' tensors among these ranks too. Under
    `recompute: full` only the block's input is kept.

        on a CPU
        norms (2)      4 h for the residual stream, 4 for a scale, d h for the input of the linears
        attention      4 (q + 2 k) for the split heads, 4 q for its output and 4 per head; in 16 bits d q for the
                       rounded output
        MLP            2 d f for gate and up, d f for their product

        portable
        norms (2)      as on a CPU, and 4 h more for the normalised stream
        attention      instead of the line for a CPU: d (q + 2 k) as they come from the linear, d (q + k) after
                       rotation, d q for its output, 4 per head
        MLP            as on a CPU, and d f more for the activated gate
        angles         8 per dimension of a head, which every rank has

        portable, with a matrix of scores
        attention      instead of the portable line: 4 q each for scaled queries, scaled keys, values and the output
                       (keys and values are repeated for every query head), and 4 per head and score
    """
    spec, sequence = padded(spec, layout.tensor), layout.tensor if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return 4 * spec.hidden_size / sequence  # the block's input
    recomputed = (layout.recompute_modules or ["core_attn"]) if layout.recompute == "selective" else []
    norms = 2 * (spec.hidden_size * (4 + dtype_bytes) + 4) / sequence
    keys = max(spec.kv_size, spec.head_dim * layout.tensor)  # a key head is never split: ranks may hold the same one
    mlp = 3 * spec.intermediate_size * dtype_bytes
    if portable:
        norms += 2 * 4 * spec.hidden_size / sequence + 8 * spec.head_dim
        attended = 4 * spec.num_heads
        attention = dtype_bytes * (3 * spec.q_size + 3 * keys)
        if scores and "core_attn" not in recomputed:
            attention, attended = 4 * 4 * spec.q_size, 4 * spec.num_heads * scores
        mlp += spec.intermediate_size * dtype_bytes
    else:
        attended = 4 * spec.num_heads + (4 * spec.q_size if dtype_bytes < 4 else 0)
        attention = 4 * (spec.q_size + 2 * keys) + dtype_bytes * spec.q_size
    split = attention + (0 if "core_attn" in recomputed else attended) + (0 if "mlp" in recomputed else mlp)
    return norms + split / layout.tensor


def adapter_activations(gang: GangModels, role: Role) -> float:
    """Return the difference, in bytes per token, between the activations of a block with adapters and of a block whose
    weights are all trained. Each adapter keeps x A^T. A linear without an adapter no longer keeps its input, since its
    frozen weight needs no gradient. So the result may be negative."""
    layout, lora = gang.layout, gang.model.lora
    spec = padded(gang.spec_of(role), layout.tensor)
    if not lora.rank or layout.recompute == "full":
        return 0
    sequence = layout.tensor if layout.sequence_parallel else 1
    inputs = {
        "qkv": spec.hidden_size / sequence,
        "proj": spec.q_size / layout.tensor if gang.dtype_bytes < 4 else 0,  # in float32 attention keeps it anyway
        "fc1": spec.hidden_size / sequence,
        "fc2": spec.intermediate_size / layout.tensor,
    }
    if layout.recompute == "selective" and "mlp" in layout.recompute_modules:
        del inputs["fc1"], inputs["fc2"]
    inner = {target: lora.rank * len(TARGET_PARTS[target]) for target in lora.targets}
    return gang.dtype_bytes * sum(inner[name] if name in inner else -inputs[name] for name in inputs)


def activation_bytes(gang: GangModels, role: Role, batch: MicroBatchSize, stage: int) -> int:
    """Return the bytes of a stage's activations: the kept activations of all micro-batches in flight, and the
    recomputed activations of one block. Stage s of p stages has p - s micro-batches in flight (1F1B)."""
    again = _recomputed(gang, role, batch) * batch.tokens
    return round(kept_bytes(gang, role, batch, stage) * (gang.layout.pipeline - stage) + again)


def kept_bytes(gang: GangModels, role: Role, batch: MicroBatchSize, stage: int) -> float:
    """Return the bytes that a stage keeps of one micro-batch for the backward pass, without logits."""
    spec, layout = gang.spec_of(role), gang.layout
    blocks = gang.num_blocks(role)
    sequence = layout.tensor if layout.sequence_parallel else 1
    scores = batch.width if gang.computes_scores(role) else 0
    kept = block_activations(spec, layout, gang.dtype_bytes, portable=gang.portable, scores=scores)
    per_block = kept + adapter_activations(gang, role)
    per_token = blocks // layout.pipeline * per_block
    if stage == layout.pipeline - 1:
        per_token += (8 if gang.portable else 4) * spec.hidden_size / sequence + 4  # the final norm's input and scale
    if not stage and not (gang.model.frozen_blocks or gang.model.lora.rank):
        per_token += 9  # the token's id, and a flag for an id in this rank's part of the vocabulary
    return per_token * batch.tokens


def _recomputed(gang: GangModels, role: Role, batch: MicroBatchSize) -> float:
    """Return the bytes per token of the activations that the backward pass recomputes in one block."""
    scores = batch.width if gang.computes_scores(role) else 0
    spec, layout = gang.spec_of(role), gang.layout
    whole = LayoutConfig(layout.tensor, layout.pipeline, layout.sequence_parallel)
    kept, all_of_it = (
        block_activations(spec, one, gang.dtype_bytes, portable=gang.portable, scores=scores) for one in (layout, whole)
    )
    return all_of_it - kept


def logits_bytes(gang: GangModels, batch: MicroBatchSize, device: str) -> int:
    """Return the bytes of the output layer and its softmax in a training pass of the policy. The logits are computed in
    blocks: all sampled tokens x a part of the vocabulary. The forward pass keeps the blocks that fit into
    LOGITS_KEPT_BYTES. The backward pass computes the others again.

    The result is the sum of

    - the kept logits,
    - one further block of logits, unless all logits are kept,
    - the larger of the temporaries of the two passes:

        forward     three blocks: the logits minus their maximum, the exponential, and the product of
                    both (for the entropy); the selected hidden states and their rounded copy
        backward    the block's rounded gradient; the block's part of the layer's gradient, before it
                    is added to the gradient buffer; hidden states and their gradient
    """
    spec = gang.spec
    vocabulary = padded(spec, gang.layout.tensor).vocab_size // gang.layout.tensor
    whole = 4 * batch.sampled * vocabulary
    block = min(whole, max(LOGITS_BLOCK_BYTES[device], 4 * batch.sampled * LOGITS_MIN_BLOCK))
    frozen = gang.model.lora.rank or (gang.spec.tied_embeddings and gang.model.frozen_blocks)
    gradient = 0 if frozen else block // max(1, 4 * batch.sampled) * spec.hidden_size * 4
    kept = whole if whole <= LOGITS_KEPT_BYTES else LOGITS_KEPT_BYTES // block * block
    again = 0 if kept == whole else block
    hidden = 4 * batch.sampled * spec.hidden_size
    forward, backward = 3 * block + 2 * hidden, block + gradient + 3 * hidden
    return kept + again + max(forward, backward)


def trunk_cache_bytes(gang: GangModels, rows: int, width: int) -> int:
    """Return the bytes of a rank's trunk cache after `rows` rows of `width` tokens, at most the cache's limit. Each
    data-parallel rank keeps its share of the rows."""
    if not gang.model.frozen_blocks:
        return 0
    return min(gang.model.trunk_cache_mb << 20, -(-rows // gang.data_ranks) * width * 4 * gang.spec.hidden_size)


def held_bytes(gang: GangModels, role: Role, rows: RowsSize, stage: int) -> float:
    """Return the bytes of the activations that a role keeps from its forward pass to its update, for all rows of a
    step. Return 0 for a role that is not in `reuse_forward`."""
    tokens = -(-rows.of_step // gang.data_ranks) * rows.width
    return (
        kept_bytes(gang, role, MicroBatchSize(tokens, sampled=0, width=rows.width), stage)
        if role in gang.model.reuse_forward
        else 0
    )


def rank_bytes(
    gang: GangModels, batches: Mapping[Role, MicroBatchSize], stage: int, *, rows: RowsSize, device: str
) -> dict[str, int]:
    """Return purpose -> bytes for the memory on the device that the models of a rank need. The rank belongs to pipeline
    stage `stage`. `batches`: trained role -> size of its micro-batches."""
    last = stage == gang.layout.pipeline - 1
    held = {role: held_bytes(gang, role, rows, stage) for role in gang.trained}
    working: dict[Role, tuple[int, int]] = {}
    for role in gang.trained:
        beside = sum(number for other, number in held.items() if other is not role)
        alone = activation_bytes(gang, role, batches[role], stage)
        logits = logits_bytes(gang, batches[role], device) if last and role is Role.POLICY else 0
        logits = max(0, logits - round(_recomputed(gang, role, batches[role]) * batches[role].tokens))
        working[role] = round(max(alone, held[role]) + beside), logits
    activations, logits = max(working.values(), key=sum, default=(0, 0))
    return {
        **state_bytes(gang, stage),
        "activations": activations,
        "logits": logits,
        "trunk cache": trunk_cache_bytes(gang, rows.of_run, rows.width),
    }


# ---- publication, checkpoints, and what CUDA takes ------------------------------------------------------

CUDA_CONTEXT_BYTES = 616 << 20
"""Size of a process's CUDA context with the kernels that torch loads on first use: 616 MiB in LMCache/LMCache#4019,
about 400 MiB in pytorch/pytorch#109888. Not measured here."""
BLOCK_BYTES = 32 << 20
"""Maximum number of bytes of a tensor that are copied or written at a time by a publication, or gathered at a time for
a digest."""
NCCL_CHANNELS = 32
_NCCL_SIMPLE, _NCCL_LL, _NCCL_LL128 = 1 << 22, 8 * 512 * 8 * 16, 120 * 640 * 8 * 8
"""Bytes of a channel's buffer by protocol, from NCCL's src/init.cc and src/include/device.h. Simple: DEFAULT_BUFFSIZE.
LL: LINES x THREADS x STEPS x bytes of a line. LL128: ELEMS_PER_THREAD x THREADS x STEPS x 8."""
NCCL_BYTES = NCCL_CHANNELS * (_NCCL_SIMPLE + _NCCL_LL + _NCCL_LL128)
"""Buffers of a communicator on a GPU: 294 MiB, if all channels have one neighbour each (a ring)."""
_FUSED = ((Q_PROJ, K_PROJ, V_PROJ), (Q_BIAS, K_BIAS, V_BIAS))


def published_tensors(spec: ModelSpec, model: ModelConfig, pipeline: int = 1, stage: int = 0) -> dict[str, int]:
    """Return name -> number of elements for each tensor that a pipeline stage publishes: the policy's trained tensors,
    or with LoRA the tensors that adapters are merged into."""
    frozen, adapted = model.frozen_blocks, {*target_parts(model.lora)}
    per_stage = model.own_blocks(spec.num_layers, is_critic=False) // pipeline
    numbers = {}
    for name, shape in tensor_shapes(spec).items():
        where = layer_and_part(name)
        if where is None:
            of_stage, trained = 0 if name == EMBEDDING else pipeline - 1, not (frozen and name == EMBEDDING)
        else:
            of_stage, trained = (where[0] - frozen) // per_stage, where[0] >= frozen
        if adapted:
            trained = trained and where is not None and where[1] in adapted
        if trained and of_stage == stage:
            numbers[name] = math.prod(shape)
    return numbers


def publication_bytes(gang: GangModels, stage: int, *, on_gpu: bool) -> tuple[int, int]:
    """Return the bytes (on the device, in the host's memory) that a publication takes beside the model's state. A
    publication copies tensors in blocks of at most `BLOCK_BYTES`. It takes two blocks: one on the GPU and one on the
    host, or without a GPU two on the host. With LoRA it also takes the memory to gather and merge one whole tensor."""
    number, lora = gang.dtype_bytes, gang.model.lora.rank
    largest = max(published_tensors(gang.spec, gang.model, gang.layout.pipeline, stage).values(), default=0)
    block = min(BLOCK_BYTES, number * largest)
    merged = _gathered_bytes(gang, largest) if lora else 0
    return (merged + block, block) if on_gpu else (0, merged + 2 * block)


def _gathered_bytes(gang: GangModels, largest: int) -> int:
    """Return the bytes that a whole tensor of `largest` elements takes while it is gathered and, with LoRA, merged."""
    number, lora = gang.dtype_bytes, gang.model.lora.rank
    return (3 if gang.layout.tensor > 1 else 1) * number * largest + (2 * 4 * largest if lora else 0)


def adapter_bytes(gang: GangModels) -> int:
    """Return the bytes of all adapters of the policy, which an export copies to the host's memory."""
    blocks = gang.spec.num_layers - gang.model.frozen_blocks
    return gang.dtype_bytes * blocks * adapter_parameters(gang.spec, gang.model.lora, 1)


def checkpoint_bytes(gang: GangModels, stage: int, *, is_pinned: bool) -> int:
    """Return the bytes of a rank's copies for a checkpoint of all trained roles. The rank keeps this memory for the
    next checkpoint. The copies are weights, masters and moments, and each data-parallel rank copies a share. With AdamW
    they have 14 bytes per parameter of a 16-bit model and 12 of a float32 model; bfloat16 moments save 4 bytes."""
    whole = 0
    for role in gang.trained:
        of_adamw = gang.model.optimizer_of(role).optimizer == "adamw"
        moments = (gang.moment_bytes(role),) * 2 if of_adamw else ()
        kinds = (4, *moments) if gang.dtype_bytes == 4 else (gang.dtype_bytes, 4, *moments)
        sizes = [*_trained_sizes(gang, role, stage)]
        for elements in sizes:
            whole += sum(pinned(number * elements) if is_pinned else number * elements for number in kinds)
        whole += (4 + sum(moments)) * trained_parameters(gang, role, stage).float32
        if not of_adamw:  # rounded as much as the weights
            rounding = sum(pinned(4 * size) for size in sizes) / sum(4 * size for size in sizes) if is_pinned else 1.0
            whole += round(rounding * moments_bytes(gang, role, stage))
    return -(-whole // gang.data_ranks)


def pinned(num_bytes: int) -> int:
    """Return the size of an allocation of pinned memory. torch rounds it up to a power of two, so that the memory can
    be reused (CachingHostAllocator)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def communicators(layout: LayoutConfig, ranks: int) -> int:
    """Return the number of NCCL communicators that a rank uses: one for each of its groups with more than one rank. The
    groups are all ranks; the rank's tensor-parallel, pipeline and data-parallel groups; and the ranks that hold one
    copy of the model together (for the norm of the gradients)."""
    group = layout.tensor * layout.pipeline
    used = (layout.tensor > 1, layout.pipeline > 1, ranks > group, group > 1)
    return 1 + sum(used) if ranks > 1 else 0


def _trained_sizes(gang: GangModels, role: Role, stage: int) -> Iterator[int]:
    """Yield the number of elements of each trained tensor in `model.dtype` that a rank holds."""
    spec, layout = padded(gang.spec_of(role), gang.layout.tensor), gang.layout
    blocks, lora = gang.num_blocks(role) // layout.pipeline, gang.model.lora
    if lora.rank:
        shapes = layer_shapes(spec)
        for target in lora.targets:
            by_rows = target in SPLIT_BY_ROWS
            for part in TARGET_PARTS[target]:
                outputs, inputs = shapes[part]
                whole, cut = (inputs, outputs) if by_rows else (outputs, inputs)
                yield from [lora.rank * whole, lora.rank * cut // layout.tensor] * blocks
        return
    parts = {part: math.prod(shape) for part, shape in layer_shapes(spec).items()}
    fused = [sum(parts.pop(part, 0) for part in group) for group in _FUSED]
    sizes = {"qkv": fused[0], "qkv.bias": fused[1]} | parts
    for part, elements in sizes.items():
        split = part.startswith(("qkv", *_SPLIT))
        yield from [elements // layout.tensor if split else elements] * blocks
    beside = role_parameters(gang, role, stage).of_dtype - blocks * block_parameters(gang.spec_of(role), layout.tensor)
    vocabulary = spec.vocab_size // layout.tensor * spec.hidden_size
    yield from [vocabulary] * (beside // vocabulary)
    yield beside % vocabulary
