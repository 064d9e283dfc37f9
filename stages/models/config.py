"""Settings of the models, of their parallel layout and of the sampling of responses, and the checks for values that
cannot work. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from storage.problems import Constraint, Problem, above, at_least, setting, unread_problems

Offload = Literal["none", "gradients", "idle"]
"""The part of a gang's device memory that is freed whenever it is not needed: see `stages/models/offload.py`."""
RECOMPUTE_MODULES = ("core_attn", "mlp")
"""The modules of a dense model that Megatron can recompute. `core_attn` saves almost no memory, since the fused
attention keeps no scores; `mlp` saves the most. (Megatron 0.16 recomputes `layernorm` with Transformer Engine only.)"""
MOST_BETA = 1 - 2**-8
"""Maximum beta for a moment stored in bfloat16. With a larger beta the moment would not decay when gradients vanish:
see `stages/models/adamw.py`."""
Optimizer = Literal["adamw", "adafactor", "muon"]
LORA_TARGETS = ("qkv", "proj", "fc1", "fc2")
"""Linear layers of a block that can have adapters. In this order: queries, keys and values; attention's output; gate
and up; down."""


@dataclass
class LayoutConfig:
    """Megatron's parallel layout of one gang. The number of data-parallel ranks is ranks / (tensor * pipeline)."""

    tensor: int = setting(1, at_least(1))
    """Number of tensor-parallel ranks. Each holds a part of every block."""
    pipeline: int = setting(1, at_least(1))
    """Number of pipeline stages. Each holds some of the blocks."""
    sequence_parallel: bool = False
    """Also divide the activations outside the matrix products (norms, residual stream) among the tensor-parallel
    ranks."""
    distributed_optimizer: bool = False
    """Divide master weights and optimizer state among the data-parallel ranks (ZeRO-1)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again. selective: the activations of some modules of every block.
    full: all activations of every block, from the block's input."""
    recompute_modules: list[str] = setting([])
    """Modules to recompute under `selective` (`RECOMPUTE_MODULES`); empty: core_attn."""


@dataclass
class OptimizerConfig:
    """Settings of an optimizer with clipping of the global gradient norm."""

    optimizer: Optimizer = "adamw"
    """Algorithm. adamw: AdamW. adafactor: has no first moment, and one second moment for each row and each column of a
    matrix. It needs 8 bytes per parameter less than adamw. muon: makes orthogonalised steps with a single moment for
    the matrices of the blocks, and adamw's steps for all other tensors. It needs 4 bytes per parameter of these
    matrices less than adamw. adafactor and muon need whole matrices on each rank, so they run only under data and
    pipeline parallelism."""
    lr: float = setting(1e-5, at_least(0))
    """Learning rate. The steps of all optimizers are scaled to about the root mean square of adamw's steps. So a good
    rate for adamw is a first choice for the others. In a short run muon moves less at the same rate, since the first
    steps of adamw are larger than its later steps."""
    warmup_steps: int = setting(0, at_least(0, " (0: none)"))
    """Number of PPO steps in which the learning rate rises linearly to `lr`."""
    decay: Literal["linear", "cosine", "constant"] = "linear"
    """Change of the learning rate after the warm-up. constant: the rate stays at `lr`. linear, cosine: it falls from
    `lr` towards `min_lr`, and would reach `min_lr` one step after the run's last step."""
    min_lr: float = setting(0.0, at_least(0))
    """Rate (not a share of `lr`) at the end of the decay."""
    betas: list[float] = setting(
        [0.9, 0.95],
        Constraint(
            "two numbers, both from 0 to below 1 (0.9, 0.95 are usual)",
            lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        ),
    )
    """AdamW's two betas. (The momentum of muon is always 0.95.)"""
    eps: float = setting(1e-5, above(0, " (1e-5 is usual)"))
    """AdamW's epsilon."""
    weight_decay: float = setting(0.0, at_least(0, " (0: none)"))
    """Decoupled weight decay."""
    max_grad_norm: float = setting(1.0, at_least(0, " (0: none)"))
    """Global norm that gradients are clipped to."""
    micro_batch_tokens: int = setting(4096, at_least(1))
    """Maximum number of tokens per forward and backward pass, unless one row is longer. Gradients do not depend on this
    number."""
    micro_batch_rows: int | None = setting(None, at_least(1))
    """Maximum number of rows per forward and backward pass; null: as many as the tokens allow."""
    gradients_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the buffer in which gradients are added up, over micro-batches and over data-parallel ranks. bfloat16
    needs bfloat16 weights and saves 2 bytes a parameter. The sum is then rounded to 8 bits for each micro-batch and
    each rank, so few large micro-batches are best."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the moments of adamw and muon are stored. The arithmetic is always float32. bfloat16 saves 2 bytes
    for each number of a moment."""


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021). With adapters, only the adapters and the critic's head are trained."""

    rank: int = setting(0, at_least(0))
    """Rank of every adapter. 0: there are no adapters, and the models' own weights are trained. Otherwise the models'
    own weights are frozen, and policy, critic and reference share them."""
    alpha: float = setting(
        32.0, above(0, " (twice the rank is usual): with 0 an adapter adds nothing and learns nothing")
    )
    """An adapter's output is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))
    """Linear layers of every trained block that have adapters: queries, keys and values (qkv); attention's output
    (proj); gate and up (fc1); down (fc2)."""


@dataclass
class ModelConfig:
    """The initial policy, and settings for the computation of policy, reference and critic. Reference and critic start
    from the same model, unless they have paths of their own."""

    path: str = "???"
    """The model, in one of three forms. A directory in Hugging Face layout (Llama 2 and 3.x, Mistral, Qwen 2, 2.5 and
    3). The name (`org/model`) of a model in this account's Hugging Face cache; the cached model's directory is used.
    The name of a random model: `random:tiny` for a small one, `random:1b-shape`, `random:8b-shape` or
    `random:70b-shape` for the shapes of Llama-3.2-1B, Llama-3.1-8B or 70B. Nothing is downloaded."""
    reference_path: str | None = None
    """Reference model of the KL; null: the model at `path`. The reference model must have the policy's vocabulary, and
    with `frozen_blocks` also the policy's architecture and frozen blocks."""
    critic_path: str | None = None
    """Model that the critic starts from; null: the model at `path`. The critic gets a new scalar head, unless this
    model is a reward model. The critic's size may differ from the policy's, but its vocabulary must begin with the
    policy's. With `frozen_blocks` the critic must have the policy's architecture and frozen blocks."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the models' forward and backward passes. Master weights are float32. Gradients and moments are float32
    too, unless section `policy` or `critic` chooses another dtype. On a CPU float16 runs in plain torch, which is
    several times as slow as the other dtypes."""
    tf32: bool = False
    """CUDA only: round the operands of float32 products to TF32's 10 bits."""
    deterministic: bool = True
    """CUDA only: use only operations that give the same bits every time. Then an update that is computed again can be
    compared by its digest. (On a CPU updates always give the same bits.)"""
    products: Literal["auto", "torch", "onednn"] = "auto"
    """Library for float32 matrix products on a CPU. auto: oneDNN on AMD processors, torch's BLAS on others. The last
    bits of a run depend on the library."""
    kernels: Literal["auto", "native", "torch", "portable"] = "auto"
    """Implementation of the transformer blocks. native: on a CPU, C between the matrix products, compiled at the first
    start. torch: on a CPU, plain torch instead of C. portable: on any device, Megatron's own linears and embedding, and
    attention in `dtype`. auto: portable on CUDA, with a fused SwiGLU if `deterministic` is off; on a CPU native, or
    torch without a C compiler. The last bits of a run depend on the implementation."""
    frozen_blocks: int = setting(0, at_least(0))
    """Number of lowest transformer blocks that are not trained. Embeddings and a tied output layer are then frozen too.
    Policy, critic and reference share these blocks. The blocks are computed once per row, and their outputs are
    kept."""
    trunk_cache_mb: int = setting(1024, at_least(0))
    """MiB of memory on each rank for outputs of the frozen blocks. Outputs are kept for the most recently used rows;
    `trunk/hit_rate` shows if the memory suffices. A token takes hidden size x 4 bytes: 2.3 KB for SmolLM2-135M, 16 KB
    for an 8B model. 0: nothing is kept."""
    critic_blocks: int | None = None
    """Number of the critic's blocks above the frozen blocks; null: all that the critic's model has."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    eos_token_ids: list[int] = setting([])
    """Ids of the end-of-sequence tokens; empty: the ids that the model's files name."""
    pad_token: str | None = None
    """Token that fills short prompts in stored arrays; no result depends on it. null: the tokenizer's own pad token. If
    the tokenizer has none, or its pad token ends responses, null chooses a special token without another use."""
    peak_tflops: float | None = setting(None, above(0, ", or null: then it is measured"))
    """Peak TFLOPS of one rank in `dtype`. `update_policy/mfu` is the share of this peak that an update achieves. null:
    measured by a matrix product when the worker starts."""
    reuse_forward: list[str] = field(default_factory=list)
    """Roles (policy, critic) that keep the activations of the forward pass of `logprob` or `value` for the update. The
    first minibatch of the update then needs no forward pass, since the weights are still the same. The activations take
    memory until the update; no bit of the result changes."""
    policy: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""
    critic: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The critic's optimizer."""

    def path_of(self, role: str) -> str:
        """Return the path of the model that a role (`protocol.Role`) starts from."""
        return {"reference": self.reference_path, "critic": self.critic_path}.get(role) or self.path

    def optimizer_of(self, role: str) -> OptimizerConfig:
        """Return the settings of a trained role's optimizer."""
        return self.critic if role == "critic" else self.policy

    def own_blocks(self, num_layers: int, *, is_critic: bool) -> int:
        """Return the number of a role's blocks above the frozen blocks. `num_layers`: number of blocks of the model
        that the role starts from."""
        above = num_layers - self.frozen_blocks
        return self.critic_blocks or above if is_critic else above


def recompute_problems(key: str, layout: LayoutConfig) -> Iterator[Problem]:
    """Yield the problems of a layout's recomputation. `key`: the config key of the layout."""
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
    """Yield the problems of section `model` that do not depend on other sections."""
    if config.products == "onednn" and config.dtype != "float32":
        need = f"chooses float32 products: auto for model.dtype {config.dtype}"
        yield Problem("model.products", config.products, need)
    if config.kernels == "native" and config.dtype == "float16":
        yield Problem(
            "model.kernels", config.kernels, "has no float16: auto, torch or portable, or another model.dtype"
        )
    if config.frozen_blocks == 0:
        why = "no outputs are kept under model.frozen_blocks=0: freeze 1 block or more"
        yield from unread_problems("model", config, why, ("trunk_cache_mb",))
    if set(config.reuse_forward) - {"policy", "critic"} or len(set(config.reuse_forward)) < len(config.reuse_forward):
        yield Problem("model.reuse_forward", config.reuse_forward, "must name policy, critic, or both, each once")
    yield from _lora_problems(config.lora)
    for key, optimizer in (("model.policy", config.policy), ("model.critic", config.critic)):
        yield from _optimizer_problems(key, optimizer, config.dtype)
        if optimizer.optimizer == "muon" and config.lora.rank:
            need = (
                "makes the steps of whole weights orthogonal, not those of LoRA's factors: adamw or adafactor, or "
                f"model.lora.rank=0 (given {config.lora.rank})"
            )
            yield Problem(f"{key}.optimizer", optimizer.optimizer, need)


def _lora_problems(config: LoraConfig) -> Iterator[Problem]:
    unknown = [name for name in config.targets if name not in LORA_TARGETS]
    if unknown:
        need = f"{', '.join(unknown)} cannot have adapters; the targets are {', '.join(LORA_TARGETS)}"
        yield Problem("model.lora.targets", config.targets, need)
    elif not config.targets or len(set(config.targets)) < len(config.targets):
        need = f"must name one or more of {', '.join(LORA_TARGETS)}, each once (no adapters: model.lora.rank=0)"
        yield Problem("model.lora.targets", config.targets, need)
    if config.rank == 0:
        why = "there are no adapters under model.lora.rank=0: a rank above 0 (16 is usual)"
        yield from unread_problems("model.lora", config, why, ("alpha", "targets"))


def _optimizer_problems(key: str, config: OptimizerConfig, dtype: str) -> Iterator[Problem]:
    if 0 <= config.lr < config.min_lr:
        yield Problem(f"{key}.min_lr", config.min_lr, f"must be from 0 to {key}.lr = {config.lr}, since it is a rate")
    elif config.min_lr and config.decay == "constant":
        need = f"nothing decays under {key}.decay=constant: use 0, or decay=linear or cosine"
        yield Problem(f"{key}.min_lr", config.min_lr, need)
    if config.optimizer == "adafactor":
        why = "adafactor has no first moment, and betas and an epsilon of its own"
        yield from unread_problems(key, config, why, ("betas", "eps", "moments_dtype"))
    if config.gradients_dtype == "bfloat16" and dtype != "bfloat16":
        need = f"gradients are float32 or of the weights' dtype: needs model.dtype=bfloat16 (given {dtype})"
        yield Problem(f"{key}.gradients_dtype", config.gradients_dtype, need)
    if (
        config.optimizer != "adafactor"
        and config.moments_dtype == "bfloat16"
        and max(config.betas, default=0) > MOST_BETA
    ):
        need = (
            f"8 bits round each step of a moment back if its beta is above {MOST_BETA}, so that it never decays "
            f"(given {key}.betas={config.betas}): smaller betas, or float32"
        )
        yield Problem(f"{key}.moments_dtype", config.moments_dtype, need)


@dataclass
class SamplingConfig:
    """Settings of sampling. The trainer computes log-probs under the same distribution."""

    max_new_tokens: int = setting(64, at_least(1))
    """Maximum number of tokens in a response. A response that reaches this number without EOS counts as cut."""
    min_new_tokens: int = setting(0, at_least(0))
    """EOS cannot be sampled before this many tokens."""
    temperature: float = setting(1.0, at_least(0))
    """Divisor of the logits, in sampling and in every log-prob of the run. 0: greedy (evaluation only)."""
    suppress_token_ids: list[int] = setting([])
    """Tokens that are never sampled. The trainer's distributions exclude them too."""

    @property
    def has_fixed_length(self) -> bool:
        """True if every response has the same number of tokens."""
        return self.min_new_tokens == self.max_new_tokens


def sampling_problems(config: SamplingConfig) -> Iterator[Problem]:
    """Yield the problems of section `sampling` that do not depend on other sections."""
    if config.temperature == 0:
        need = "training needs a distribution: above 0 (evaluate.temperature=0 evaluates greedily)"
        yield Problem("sampling.temperature", config.temperature, need)
    if config.min_new_tokens > config.max_new_tokens:
        need = f"must be at most sampling.max_new_tokens = {config.max_new_tokens}"
        yield Problem("sampling.min_new_tokens", config.min_new_tokens, need)
