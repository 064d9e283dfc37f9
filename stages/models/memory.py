"""Bytes that the models of one rank take, from the architecture and the layout alone: nothing is built.

    parameters       all of this rank's parts of the models that are placed on the gang
    gradients        float32, of every trained parameter; whole on each data-parallel rank
    masters          float32 copies of 16-bit parameters                \\  over the data-parallel ranks
    Adam moments     two float32 numbers of every trained parameter     /   with the distributed optimizer
    activations      what a block keeps for the backward pass (`block_activations`), x blocks x micro-batches in flight
    logits           blocks of the vocabulary kept and worked on, and the output layer's gradient
    trunk cache      hidden states of the frozen blocks

Of policy and critic on one gang only one trains at a time: the larger of their activations counts, beside what the
other keeps of all rows for its own update (`reuse_forward`). With LoRA adapters and the critic's head alone are
trained, and what is frozen is there once for all roles. Not counted: fragmentation, temporaries of the optimizer's step
(a tensor or two), weights merged with adapters while a version is published, when there are no activations, what the
communication library holds.

May import stages.models.{adapter_shapes, config, padding, protocol, spec} and the standard library: the checks before
a run read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from stages.models.adapter_shapes import TARGET_PARTS, adapter_parameters
from stages.models.config import LayoutConfig, ModelConfig, Offload
from stages.models.padding import padded
from stages.models.protocol import Role
from stages.models.spec import ModelSpec, layer_shapes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

GRADIENTS = "gradients"

LOGITS_BLOCK_BYTES = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Of logits worked on at a time: on a CPU few enough to stay in its cache, on a GPU enough to fill it."""
LOGITS_MIN_BLOCK = 512
"""Tokens of a block at least, however many rows it has: narrower products are slow."""
LOGITS_KEPT_BYTES = 1 << 27
"""Of a micro-batch's logits kept from the forward to the backward pass: those of 680 tokens at a vocabulary of 49k.
Making them again costs a third of the output layer's time in float32."""

_SPLIT = tuple(part for parts in TARGET_PARTS.values() for part in parts)
"""Parts of a layer that tensor-parallel ranks share, its projections; the norms are whole on each."""


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch: the most that one can have of either."""

    tokens: int
    """Of all rows."""
    sampled: int
    """Those that go through the output layer."""


@dataclass(frozen=True)
class RowsSize:
    """Rows that are kept."""

    width: int
    """Tokens of a row, at most."""
    of_step: int
    """Rows of a step."""
    of_run: int
    """Of the whole run, whose hidden states the trunk's cache fills up with."""


@dataclass(frozen=True)
class GangModels:
    """Models that the ranks of a gang hold, and how."""

    spec: ModelSpec
    model: ModelConfig
    layout: LayoutConfig
    roles: frozenset[Role]
    """Those of policy, critic and reference that are placed on the gang."""
    data_ranks: int
    offload: Offload = "none"
    own: Mapping[Role, ModelSpec] = field(default_factory=dict)
    """Architecture of the roles whose model is not the policy's (`model.reference_path`, `model.critic_path`)."""

    def spec_of(self, role: Role) -> ModelSpec:
        return self.own.get(role, self.spec)

    def num_blocks(self, role: Role) -> int:
        """Of a role above the frozen ones, on all pipeline stages."""
        return self.model.own_blocks(self.spec_of(role).num_layers, is_critic=role is Role.CRITIC)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.model.dtype]

    @property
    def trained(self) -> Collection[Role]:
        return self.roles & {Role.POLICY, Role.CRITIC}


@dataclass(frozen=True)
class ParameterCount:
    """Of one rank's part of a model, or of what is trained of it."""

    of_dtype: int
    """In `model.dtype`."""
    float32: int = 0
    """Always float32: the critic's head."""


def block_parameters(spec: ModelSpec, tensor: int) -> int:
    """Of one transformer block on one of `tensor` ranks, with the zeros that make it divide."""
    total = 0
    for part, shape in layer_shapes(padded(spec, tensor)).items():
        number = 1
        for size in shape:
            number *= size
        total += number // tensor if part.startswith(_SPLIT) else number
    return total


def role_parameters(gang: GangModels, role: Role, stage: int) -> ParameterCount:
    """Of a role's model above the frozen blocks, on one tensor-parallel rank of a pipeline stage."""
    spec, layout, frozen = gang.spec_of(role), gang.layout, gang.model.frozen_blocks
    blocks = gang.num_blocks(role)
    first, last = stage == 0, stage == layout.pipeline - 1
    vocabulary = padded(spec, layout.tensor).vocab_size // layout.tensor * spec.hidden_size
    number = blocks // layout.pipeline * block_parameters(spec, layout.tensor)
    number += vocabulary if first and not frozen else 0
    if last:
        number += spec.hidden_size  # the final norm
    if last and role is not Role.CRITIC:
        # a tied output layer is the embedding: on the first stage, in the trunk, or a copy on the last stage
        own = not spec.tied_embeddings or (layout.pipeline > 1 and not frozen)
        number += vocabulary if own else 0
    return ParameterCount(number, spec.hidden_size + 1 if last and role is Role.CRITIC else 0)


def trained_parameters(gang: GangModels, role: Role, stage: int) -> ParameterCount:
    """What is trained of them: all, or with LoRA the adapters and a critic's head."""
    whole = role_parameters(gang, role, stage)
    if not gang.model.lora.rank:
        return whole
    spec = gang.spec_of(role)
    blocks = gang.num_blocks(role) // gang.layout.pipeline
    wide = padded(spec, gang.layout.tensor)
    return ParameterCount(blocks * adapter_parameters(wide, gang.model.lora, gang.layout.tensor), whole.float32)


def _held_parameters(gang: GangModels, stage: int) -> int:
    """In `model.dtype`, of all roles above the frozen blocks. With LoRA a block, the embedding and the norm that
    several roles of one model have are there once; under pipeline parallelism a shorter critic has other blocks on a
    stage."""
    shared = gang.roles - gang.own.keys() if gang.model.lora.rank else frozenset()
    alone = sum(role_parameters(gang, role, stage).of_dtype for role in gang.roles - shared)
    adapters = sum(trained_parameters(gang, role, stage).of_dtype for role in gang.trained if gang.model.lora.rank)
    beside, per_block = 0, block_parameters(gang.spec, gang.layout.tensor)
    blocks: set[int] = set()
    for role in shared:
        here = gang.num_blocks(role) // gang.layout.pipeline
        blocks |= {*range(stage * here, (stage + 1) * here)}
        # the most that a role has beside its blocks is the policy's or the reference's, of which a critic's is a part
        beside = max(beside, role_parameters(gang, role, stage).of_dtype - here * per_block)
    return alone + beside + len(blocks) * per_block + adapters


def trunk_parameters(gang: GangModels) -> int:
    """Of the frozen blocks, which all roles share."""
    spec, frozen = gang.spec, gang.model.frozen_blocks
    if not frozen:
        return 0
    vocabulary = padded(spec, gang.layout.tensor).vocab_size // gang.layout.tensor * spec.hidden_size
    return frozen * block_parameters(spec, gang.layout.tensor) + vocabulary


def state_bytes(gang: GangModels, stage: int) -> dict[str, int]:
    """Parameters, gradients, masters and moments of a rank of a pipeline stage, where it computes: the most at a time,
    if some of them leave it in between (`offload`)."""
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
    """In the host's memory: copies of all roles' parameters, masters and moments, kept when they have been needed."""
    if gang.offload != "idle":
        return 0
    kept = (_state_bytes(replace(gang, roles=frozenset({role})), stage) for role in gang.roles)
    trunk = gang.dtype_bytes * trunk_parameters(gang)
    return sum(sum(parts.values()) - parts[GRADIENTS] - trunk for parts in kept)


def _state_bytes(gang: GangModels, stage: int) -> dict[str, int]:
    """Of all roles, with nothing offloaded. With the distributed optimizer Megatron pads its buffers to multiples of
    the data-parallel size, which is not counted."""
    wide = gang.dtype_bytes == 4
    shards = gang.data_ranks if gang.layout.distributed_optimizer else 1
    trained = [trained_parameters(gang, role, stage) for role in gang.trained]
    in_dtype, float32 = sum(c.of_dtype for c in trained), sum(c.float32 for c in trained)
    held = trunk_parameters(gang) + _held_parameters(gang, stage)
    return {
        "parameters": gang.dtype_bytes * held + 4 * float32,
        GRADIENTS: 4 * (in_dtype + float32),
        "float32 masters": 0 if wide else 4 * -(-in_dtype // shards),
        "Adam moments": 8 * -(-(in_dtype + float32) // shards),
    }


def block_activations(spec: ModelSpec, layout: LayoutConfig, dtype_bytes: int) -> float:
    """Bytes that a transformer block keeps of a token for the backward pass, on a CPU (plain torch, which CUDA takes,
    keeps up to half more). By tensor, with h the hidden size, f the MLP's, q and k the widths of queries and of keys,
    d = `dtype_bytes`; on a rank of several its part of the padded model:

        norms (2)      4 h of the residual stream, 4 of a scale, d h handed to the linears
        attention      4 (q + 2 k) of the heads taken apart, 4 q of its output and 4 a head; d q of it rounded, if it is
        MLP            2 d f of gate and up, d f of their product
    """
    spec, sequence = padded(spec, layout.tensor), layout.tensor if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return 4 * spec.hidden_size / sequence  # its input
    recomputed = (layout.recompute_modules or ["core_attn"]) if layout.recompute == "selective" else []
    norms = 2 * (spec.hidden_size * (4 + dtype_bytes) + 4) / sequence
    output = 4 * spec.q_size
    attended = 4 * spec.num_heads + (output if dtype_bytes < 4 else 0)
    keys = max(spec.kv_size, spec.head_dim * layout.tensor)  # a head is never split: ranks may have the same
    attention = 4 * (spec.q_size + 2 * keys) + dtype_bytes * spec.q_size
    mlp = 3 * spec.intermediate_size * dtype_bytes
    split = attention + (0 if "core_attn" in recomputed else attended) + (0 if "mlp" in recomputed else mlp)
    return norms + split / layout.tensor


def adapter_activations(gang: GangModels, role: Role) -> float:
    """Bytes that a block keeps of a token with adapters beyond those without: each adapter's x A^T, but not the input
    of a linear that has none, whose frozen weight needs no gradient."""
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
    """What a stage keeps of all micro-batches in flight for the backward pass, of which stage s of p of a pipeline has
    p - s (1F1B), and what it makes again of one block at a time."""
    again = _recomputed(gang.spec_of(role), gang.layout, gang.dtype_bytes) * batch.tokens
    return round(kept_bytes(gang, role, batch, stage) * (gang.layout.pipeline - stage) + again)


def kept_bytes(gang: GangModels, role: Role, batch: MicroBatchSize, stage: int) -> float:
    """What a stage keeps of a micro-batch for the backward pass, the logits aside."""
    spec, layout = gang.spec_of(role), gang.layout
    blocks = gang.num_blocks(role)
    sequence = layout.tensor if layout.sequence_parallel else 1
    per_block = block_activations(spec, layout, gang.dtype_bytes) + adapter_activations(gang, role)
    per_token = blocks // layout.pipeline * per_block
    if stage == layout.pipeline - 1:
        per_token += 4 * spec.hidden_size / sequence + 4  # what the final norm reads, and its scale
    if not stage and not (gang.model.frozen_blocks or gang.model.lora.rank):
        per_token += 9  # token ids, and whether they are this rank's
    return per_token * batch.tokens


def _recomputed(spec: ModelSpec, layout: LayoutConfig, dtype_bytes: int) -> float:
    """Of a token, what the backward pass makes again of the block that it is at."""
    whole = LayoutConfig(layout.tensor, layout.pipeline, layout.sequence_parallel)
    return block_activations(spec, whole, dtype_bytes) - block_activations(spec, layout, dtype_bytes)


def logits_bytes(gang: GangModels, batch: MicroBatchSize, device: str) -> int:
    """Of the output layer and its softmax, in the policy's backward pass: logits kept, two blocks at work, the hidden
    states and their gradient, and a block's of the layer's before it is added to the others."""
    spec = gang.spec
    vocabulary = padded(spec, gang.layout.tensor).vocab_size // gang.layout.tensor
    whole = 4 * batch.sampled * vocabulary
    block = min(whole, max(LOGITS_BLOCK_BYTES[device], 4 * batch.sampled * LOGITS_MIN_BLOCK))
    frozen = gang.model.lora.rank or (gang.spec.tied_embeddings and gang.model.frozen_blocks)
    gradient = 0 if frozen else block // max(1, 4 * batch.sampled) * spec.hidden_size * 4
    return min(whole, LOGITS_KEPT_BYTES) + 2 * block + 3 * 4 * batch.sampled * spec.hidden_size + gradient


def trunk_cache_bytes(gang: GangModels, rows: int, width: int) -> int:
    """Of the hidden states of so many rows, of which each data-parallel rank keeps its own."""
    if not gang.model.frozen_blocks:
        return 0
    return min(gang.model.trunk_cache_mb << 20, -(-rows // gang.data_ranks) * width * 4 * gang.spec.hidden_size)


def held_bytes(gang: GangModels, role: Role, rows: RowsSize, stage: int) -> float:
    """What a role keeps of all rows of a step from its forward to its update (`reuse_forward`)."""
    config = gang.model.critic if role is Role.CRITIC else gang.model.policy
    tokens = -(-rows.of_step // gang.data_ranks) * rows.width
    return kept_bytes(gang, role, MicroBatchSize(tokens, sampled=0), stage) if config.reuse_forward else 0


def rank_bytes(
    gang: GangModels, batches: Mapping[Role, MicroBatchSize], stage: int, *, rows: RowsSize, device: str
) -> dict[str, int]:
    """All of it for a rank of a pipeline stage, by what it is for. `batches`: each trained role's."""
    last = stage == gang.layout.pipeline - 1
    held = {role: held_bytes(gang, role, rows, stage) for role in gang.trained}
    working: dict[Role, tuple[int, int]] = {}
    for role in gang.trained:
        beside = sum(number for other, number in held.items() if other is not role)
        alone = activation_bytes(gang, role, batches[role], stage)
        logits = logits_bytes(gang, batches[role], device) if last and role is Role.POLICY else 0
        working[role] = round(max(alone, held[role]) + beside), logits
    activations, logits = max(working.values(), key=sum, default=(0, 0))
    return {
        **state_bytes(gang, stage),
        "activations": activations,
        "logits": logits,
        "trunk cache": trunk_cache_bytes(gang, rows.of_run, rows.width),
    }
