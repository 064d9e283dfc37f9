"""Build policy, reference and critic of one rank as Megatron GPTModels, and fill them with Hugging Face weights.

    frozen_blocks = 0                         frozen_blocks = k

    policy     reference    critic            policy     reference    critic
    norm, out  norm, out    norm, head        norm, out  norm, out    norm, head
    blocks     blocks       blocks            blocks k.. blocks k..   blocks k..
    embedding  embedding    embedding              \\         |         /
                                                  trunk: blocks 0..k-1
                                                         embedding

The trunk has the embedding and no output layer. The parts above the trunk have an output layer each and no embedding.
An output layer that is tied to the embedding is the trunk's embedding itself, so it is frozen with the trunk. Without
frozen blocks each role is an ordinary model of its own.

With `model.lora` only adapters and the critic's head are trained. Then the parts above the trunk share their frozen
parameters too, and policy and critic have adapters of their own (`lora`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from stages.models import hf_conversion, lora
from stages.models.config import LayoutConfig, ModelConfig
from stages.models.forward import Trunk
from stages.models.kernels.blocks import BlockKernels
from stages.models.kernels.fused import adds_gradients
from stages.models.layers import CpuEmbedding, HiddenOutput, block_spec, rotary_frequencies
from stages.models.numerics import Products
from stages.models.parallel import ParallelRank
from stages.models.protocol import Role
from stages.models.spec import SCORE_BIAS, SCORE_WEIGHT, ModelSpec, padded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Blueprint:
    """Everything that decides how this rank's models are built. The blueprints of two roles differ only in `spec`."""

    model: ModelConfig
    spec: ModelSpec
    layout: LayoutConfig
    parallel_rank: ParallelRank
    kernels: BlockKernels
    products: Products = Products.TORCH
    seed: int = 0
    """The run's seed, from which adapters are initialised."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.model.dtype]

    def num_blocks(self, role: Role) -> int:
        """Return the number of a role's blocks without the frozen blocks."""
        return self.model.own_blocks(self.spec.num_layers, is_critic=role is Role.CRITIC)


def build_trunk(blueprint: Blueprint, weights: Mapping[str, Tensor]) -> GPTModel:
    """Return the trunk (the embedding and the frozen lowest blocks) with its weights."""
    trunk = _stage(blueprint, blueprint.model.frozen_blocks, embedding=True, output=False, tied=False)
    load_weights(blueprint, weights, hf_conversion.named_by_block(trunk, 0))
    return trunk.requires_grad_(False).eval()


def build_role(
    blueprint: Blueprint, role: Role, weights: Mapping[str, Tensor], shared: lora.FrozenWeights | None = None
) -> GPTModel:
    """Return policy, reference or critic with its weights of version 0.

    A critic that starts from a reward model gets the head of the reward model. Otherwise its head is zero, so that its
    first values are 0 everywhere and depend on no seed. `shared`: with LoRA, the frozen weights of the roles built
    before. This role's frozen weights are added to `shared`.
    """
    frozen = blueprint.model.frozen_blocks
    rank, tied = blueprint.parallel_rank, blueprint.spec.tied_embeddings and role is not Role.CRITIC
    model = _stage(
        blueprint,
        blueprint.num_blocks(role),
        embedding=rank.first_stage and not frozen,
        output=rank.last_stage,
        # Megatron ties the weights within a model; above a trunk `output_weight` returns the trunk's embedding
        tied=tied and not frozen,
    )
    if rank.last_stage:
        model.output_layer = _output(blueprint, role, None if tied and frozen else model.output_layer.weight)
    known = set()
    if blueprint.model.lora.rank:
        shared = {} if shared is None else shared
        known = set(shared.values())
        _add_lora(model, blueprint, role, shared)
    if role is Role.REFERENCE:
        model.requires_grad_(False).eval()
    named = hf_conversion.named_by_block(model, frozen)
    load_weights(blueprint, weights, (entry for entry in named if entry[2] not in known))
    return model


def reset_role(model: GPTModel, blueprint: Blueprint, weights: Mapping[str, Tensor]) -> None:
    """Go back to version 0: give the trained parameters of `model` their first values again. `model`: a model that
    `build_role` returned. `weights`: the Hugging Face tensors that it was built from."""
    named = hf_conversion.named_by_block(model, blueprint.model.frozen_blocks)
    load_weights(blueprint, weights, (entry for entry in named if entry[2].requires_grad))


def output_weight(model: GPTModel, trunk: Trunk | None) -> Tensor:
    """Return the weight [padded vocab / TP, hidden] that turns hidden states of a policy or reference into logits. Call
    it on the last pipeline stage only."""
    own = model.output_layer.weight
    if own is not None:
        return own
    return model.embedding.word_embeddings.weight if trunk is None else trunk.output_weight


@torch.no_grad()
def load_weights(
    blueprint: Blueprint, weights: Mapping[str, Tensor], named: Iterable[tuple[str, int | None, Parameter]]
) -> None:
    """Fill this rank's parameters with the rank's parts of the whole Hugging Face tensors in `weights`. `named`: the
    parameters, as `hf_conversion.named_by_block` yields them.

    A critic's head gets the reward model's head if `weights` has one, and zeros otherwise. Adapters get their initial
    values. Raises ValueError, naming the tensor, if a shape differs.
    """
    rank, spec = blueprint.parallel_rank, blueprint.spec
    adapters: dict[int, dict[str, Tensor]] = {}
    for name, block, parameter in named:
        if name.startswith("output_layer.") and parameter.shape[0] == 1:
            _load_head(parameter, SCORE_WEIGHT if name.endswith(".weight") else SCORE_BIAS, weights)
            continue
        source = weights
        if ".lora." in name and block is not None:
            if block not in adapters:
                adapters[block] = lora.initial_adapters(spec, blueprint.model.lora, block, blueprint.seed)
            source = adapters[block]
        part = hf_conversion.from_hf(name, block, source, spec, rank.tensor_rank, rank.tensor_size)
        if part.shape != parameter.shape:
            raise ValueError(
                f"{name} of block {block} is {tuple(part.shape)} in the model's files, {tuple(parameter.shape)} by its"
                " config.json"
            )
        parameter.copy_(part)


def _load_head(parameter: Parameter, name: str, weights: Mapping[str, Tensor]) -> None:
    if name not in weights:
        parameter.data.zero_()
        return
    if weights[name].shape != parameter.shape:
        raise ValueError(f"{name} is {tuple(weights[name].shape)} in the model's files, not {tuple(parameter.shape)}")
    parameter.data.copy_(weights[name])


def _add_lora(model: GPTModel, blueprint: Blueprint, role: Role, shared: lora.FrozenWeights) -> None:
    """Add adapters to a role's model, freeze all but adapters and head, and share the frozen weights with the other
    roles."""
    if role is not Role.REFERENCE:
        lora.add_adapters(
            model,
            blueprint.model.lora,
            blueprint.spec,
            blueprint.parallel_rank,
            products=blueprint.products,
            kernels=blueprint.kernels,
        )
    lora.freeze(model, role)
    lora.share_frozen(model, blueprint.model.frozen_blocks, shared)
    if blueprint.layout.recompute != "none":
        lora.let_gradients_pass(model)


def _stage(blueprint: Blueprint, num_blocks: int, *, embedding: bool, output: bool, tied: bool) -> GPTModel:
    """Return this rank's stage of a GPTModel, with uninitialised weights. `num_blocks`: blocks of all pipeline stages
    together."""
    layout, device = blueprint.layout, blueprint.parallel_rank.device
    spec = padded(blueprint.spec, layout.tensor)
    config = TransformerConfig(
        **hf_conversion.transformer_kwargs(spec),
        num_layers=num_blocks,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=blueprint.dtype,
        pipeline_dtype=torch.float32,  # stages pass on the residual stream
        fp32_residual_connection=True,
        bf16=blueprint.dtype is torch.bfloat16,
        fp16=blueprint.dtype is torch.float16,
        deterministic_mode=blueprint.model.deterministic,
        gradient_accumulation_fusion=blueprint.kernels.portable and adds_gradients(device),
        variable_seq_lengths=layout.pipeline > 1,  # micro-batches have no padding, so their shapes differ
        moe_token_dispatcher_type="alltoall",  # unused here; the default refuses variable_seq_lengths
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # every weight is copied in
        # the losses already weight their tokens: Megatron must add gradients up and not divide them
        calculate_per_token_loss=True,
        recompute_granularity=None if layout.recompute == "none" else layout.recompute,
        recompute_modules=list(layout.recompute_modules) or None,  # a copy: Megatron may add to it
        recompute_method="uniform" if layout.recompute == "full" else None,
        recompute_num_layers=1 if layout.recompute == "full" else None,
    )
    with device:  # Megatron would leave torch's norms on the CPU
        stage = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(
                num_blocks // layout.pipeline, blueprint.products, blueprint.kernels, qk_norm=spec.qk_norm
            ),
            vocab_size=spec.vocab_size,
            max_sequence_length=spec.max_positions,
            pre_process=embedding,
            post_process=output,
            parallel_output=True,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
        )
    if embedding and not blueprint.kernels.portable:
        # Megatron chooses the class itself; ours differs only in its forward
        stage.embedding.word_embeddings.__class__ = CpuEmbedding
    stage.rotary_pos_emb.inv_freq = rotary_frequencies(spec).to(device)  # Megatron has only one of Llama's scalings
    for name, _, parameter in hf_conversion.named_by_block(stage, 0):
        # Megatron marks split weights when it initialises them; the gradient norm counts unmarked ones on one rank only
        if name in hf_conversion.SPLIT_AXES and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, hf_conversion.SPLIT_AXES[name], 1)
    return stage


def _output(blueprint: Blueprint, role: Role, weight: Parameter | None) -> HiddenOutput:
    """Return the module that replaces the output layer. It returns the hidden states unchanged. For the critic it holds
    a head of zeros. For other roles it holds `weight`, the role's own output weight (None: the role uses the
    embedding)."""
    bias = None
    if role is Role.CRITIC:
        # float32 under every dtype: values and their errors are small differences of large numbers
        device = blueprint.parallel_rank.device
        weight = Parameter(torch.zeros(1, blueprint.spec.hidden_size, device=device))
        bias = Parameter(torch.zeros(1, device=device))
    return HiddenOutput(sequence_parallel=blueprint.layout.sequence_parallel, weight=weight, bias=bias)
