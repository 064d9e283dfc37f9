"""Settings of the models that are trained or evaluated, and of their parallel layout; what of them cannot work.

May import the standard library and storage.problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

from storage.problems import Problem, above, at_least

Offload = Literal["none", "gradients", "idle"]
"""What of a gang's models leaves its devices while it is not needed: see `stages/models/offload.py`."""
RECOMPUTE_MODULES = ("core_attn", "mlp")
"""Of Megatron's modules to recompute those that a dense model has. `core_attn` saves next to nothing, since the fused
attention keeps no scores; `mlp` saves the most. (Megatron 0.16 recomputes `layernorm` with Transformer Engine only.)"""


LORA_TARGETS = ("qkv", "proj", "fc1", "fc2")
"""Linears of a block that can have adapters: queries, keys and values; attention's output; gate and up; down."""


@dataclass
class LayoutConfig:
    """Megatron's parallel layout of one gang; data parallelism is ranks / (tensor * pipeline)."""

    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    """What of the activations is computed again in the backward pass: nothing, some modules of every block, or all of
    every block from its input."""
    recompute_modules: list[str] = field(default_factory=list)
    """Under `selective`: which (`RECOMPUTE_MODULES`); empty: core_attn."""


@dataclass
class OptimizerConfig:
    """AdamW with global grad-norm clip."""

    lr: float = 1e-5
    warmup_steps: int = 0
    """PPO steps of linear warm-up."""
    decay: Literal["linear", "cosine", "constant"] = "linear"
    """After the warm-up; linear and cosine end at `min_lr` one step past the run's last."""
    min_lr: float = 0.0
    """Rate (not a share of `lr`) that the decay ends at."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Two."""
    eps: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096
    """Tokens per forward and backward, at most (but for a longer row); gradients do not depend on it."""
    micro_batch_rows: int | None = None
    """Rows per forward and backward, at most; null: as many as the tokens allow."""
    reuse_forward: bool = False
    """Keep what the forward pass of `logprob`, or of `value`, computed until the update, whose first epoch then needs
    none of its own: the same weights on the same rows. Holds their activations until then; no bit changes."""


@dataclass
class LossScaleConfig:
    """Under `model.dtype: float16`: what the loss is multiplied by before the backward pass, and the gradients divided
    by after it."""

    initial: float = 65536.0
    minimum: float = 1.0
    """At which a gradient that is not finite counts for `ppo.max_skipped_steps`."""
    growth_interval: int = 1000
    """Optimizer steps in a row with finite gradients after which the scale is doubled; one without halves it."""


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) as all that is trained, beside the critic's head."""

    rank: int = 0
    """Of every adapter; 0: none, the models' own weights are trained. Otherwise these are frozen, and policy, critic
    and reference share them."""
    alpha: float = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))
    """Linears of every trained block that have adapters."""


@dataclass
class ModelConfig:
    """The start policy, which is also the reference, and what the critic starts from, unless they have paths of their
    own."""

    path: str = "???"
    """A directory in Hugging Face layout (a family of `stages.models.spec`), or `random:tiny` for a small random
    model."""
    reference_path: str | None = None
    """The model that the KL is taken to; null: `path`'s. Of the same vocabulary; with `frozen_blocks` of the same
    architecture and the same frozen blocks."""
    critic_path: str | None = None
    """The model that the critic starts from, with a new scalar head; null: `path`'s. Of any size, and of a vocabulary
    that begins with the policy's; with `frozen_blocks` of the same architecture and the same frozen blocks."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the trained models' forward and backward; master weights and optimizer state are float32. float16 takes plain
    torch on a CPU, several times as slow as the others."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    tf32: bool = False
    """CUDA only: float32 products round their operands to TF32's 10 bits."""
    deterministic: bool = True
    """On CUDA: an update that runs again has the same bits, and its digest is compared. (On a CPU always.)"""
    products: Literal["auto", "torch", "onednn"] = "auto"
    """What multiplies float32 matrices on a CPU; auto: oneDNN on AMD processors, torch's BLAS on others. The last bits
    of a run depend on it."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """What computes the trained models' blocks between their products; auto: C on a CPU, compiled at the first start,
    plain torch elsewhere or where there is no C compiler. The last bits of a run depend on it."""
    frozen_blocks: int = 0
    """Lowest transformer blocks (and the embeddings, and the output layer tied to them) that are not trained. Policy,
    critic and reference share them: they are computed once per row and kept."""
    trunk_cache_mb: int = 1024
    """Of the frozen blocks' outputs kept on a rank, the rows used last; `trunk/hit_rate` says whether that is enough.
    hidden size x 4 bytes a token: 2.3 KB for SmolLM2-135M, 16 KB for an 8B model. 0: nothing is kept."""
    critic_blocks: int | None = None
    """Blocks of the critic above the frozen ones; null: as many as the policy."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    eos_token_ids: list[int] = field(default_factory=list)
    """Empty: the model's own."""
    peak_tflops: float | None = None
    """What one rank can compute per second in `dtype`, which `update_policy/mfu` is a share of; null: measured by a
    product of matrices when the worker starts."""
    policy: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: OptimizerConfig = field(default_factory=OptimizerConfig)

    def path_of(self, role: str) -> str:
        """Of the model that a role (`protocol.Role`) starts from."""
        return {"reference": self.reference_path, "critic": self.critic_path}.get(role) or self.path

    def own_blocks(self, num_layers: int, *, is_critic: bool) -> int:
        """Blocks of a role above the frozen ones, where its model has `num_layers`."""
        above = num_layers - self.frozen_blocks
        return self.critic_blocks or above if is_critic else above


def recompute_problems(key: str, layout: LayoutConfig) -> Iterator[Problem]:
    """What of a layout's recomputation cannot work; `key`: the layout's."""
    unknown = [name for name in layout.recompute_modules if name not in RECOMPUTE_MODULES]
    if unknown:
        need = f"{', '.join(unknown)} cannot be recomputed alone; the modules are {', '.join(RECOMPUTE_MODULES)}"
        yield Problem(f"{key}.recompute_modules", layout.recompute_modules, need)
    elif len(set(layout.recompute_modules)) < len(layout.recompute_modules):
        yield Problem(f"{key}.recompute_modules", layout.recompute_modules, "must name each module once")
    elif layout.recompute_modules and layout.recompute != "selective":
        need = f"needs {key}.recompute=selective (given {layout.recompute})"
        yield Problem(f"{key}.recompute_modules", layout.recompute_modules, need)


def model_problems(config: ModelConfig) -> Iterator[Problem]:
    """What of the section `model` cannot work by itself."""
    not_negative = {"model.frozen_blocks": config.frozen_blocks, "model.trunk_cache_mb": config.trunk_cache_mb}
    yield from at_least(0, not_negative)
    yield from above(0, {"model.peak_tflops": config.peak_tflops}, ", or null: then it is measured")
    if config.products == "onednn" and config.dtype != "float32":
        need = f"chooses float32 products: auto for model.dtype {config.dtype}"
        yield Problem("model.products", config.products, need)
    if config.kernels == "native" and config.dtype == "float16":
        yield Problem("model.kernels", config.kernels, "has no float16: auto or torch, or another model.dtype")
    yield from _loss_scale_problems(config)
    yield from _lora_problems(config.lora)
    yield from _optimizer_problems("model.policy", config.policy)
    yield from _optimizer_problems("model.critic", config.critic)


def _loss_scale_problems(config: ModelConfig) -> Iterator[Problem]:
    scale = config.loss_scale
    for name, default in asdict(LossScaleConfig()).items() if config.dtype != "float16" else ():
        if getattr(scale, name) != default:
            need = f"scales the loss under model.dtype=float16 alone (given {config.dtype}): leave it at {default:g}"
            yield Problem(f"model.loss_scale.{name}", getattr(scale, name), need)
    yield from above(0, {"model.loss_scale.minimum": scale.minimum}, " (1 is usual)")
    if not scale.minimum <= scale.initial < math.inf:
        need = f"must be finite and no less than model.loss_scale.minimum = {scale.minimum}"
        yield Problem("model.loss_scale.initial", scale.initial, need)
    yield from at_least(1, {"model.loss_scale.growth_interval": scale.growth_interval})


def _lora_problems(config: LoraConfig) -> Iterator[Problem]:
    yield from at_least(0, {"model.lora.rank": config.rank})
    why = " (twice the rank is usual): with 0 an adapter adds nothing and learns nothing"
    yield from above(0, {"model.lora.alpha": config.alpha}, why)
    unknown = [name for name in config.targets if name not in LORA_TARGETS]
    if unknown:
        need = f"{', '.join(unknown)} cannot have adapters; the targets are {', '.join(LORA_TARGETS)}"
        yield Problem("model.lora.targets", config.targets, need)
    elif not config.targets or len(set(config.targets)) < len(config.targets):
        need = f"must name one or more of {', '.join(LORA_TARGETS)}, each once (no adapters: model.lora.rank=0)"
        yield Problem("model.lora.targets", config.targets, need)
    for name in ("alpha", "targets") if config.rank == 0 else ():
        default = getattr(LoraConfig(), name)
        if getattr(config, name) != default:
            need = f"says nothing without adapters: give model.lora.rank (16, say), or leave it at {default}"
            yield Problem(f"model.lora.{name}", getattr(config, name), need)


def _optimizer_problems(key: str, config: OptimizerConfig) -> Iterator[Problem]:
    yield from at_least(1, {f"{key}.micro_batch_tokens": config.micro_batch_tokens})
    if config.micro_batch_rows is not None:
        yield from at_least(1, {f"{key}.micro_batch_rows": config.micro_batch_rows})
    yield from at_least(0, {f"{key}.lr": config.lr})
    if not config.min_lr >= 0 or 0 <= config.lr < config.min_lr:
        yield Problem(f"{key}.min_lr", config.min_lr, f"must be from 0 to {key}.lr = {config.lr}: it is a rate itself")
    elif config.min_lr and config.decay == "constant":
        need = f"nothing decays under {key}.decay=constant: use 0, or decay=linear or cosine"
        yield Problem(f"{key}.min_lr", config.min_lr, need)
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        need = "must be two numbers, both from 0 to below 1 (0.9, 0.95 are usual)"
        yield Problem(f"{key}.betas", config.betas, need)
    yield from above(0, {f"{key}.eps": config.eps}, " (1e-5 is usual)")
    not_negative = {
        f"{key}.warmup_steps": config.warmup_steps,
        f"{key}.weight_decay": config.weight_decay,
        f"{key}.max_grad_norm": config.max_grad_norm,
    }
    yield from at_least(0, not_negative, " (0: none)")
