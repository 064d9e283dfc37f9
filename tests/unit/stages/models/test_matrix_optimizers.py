"""Adafactor and Muon by parts of a tensor, against torch's own on the parts and Adafactor's formula in float64.
(`test_model_update.py` compares whole updates, `test_memory.py` their memory.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.models.checkpoints import masters_of
from stages.models.config import LoraConfig, ModelConfig, OptimizerConfig
from stages.models.hf_conversion import named_by_block, to_hf
from stages.models.matrix_optimizers import MatrixOptimizer, Rows, parts_of
from stages.models.protocol import Role
from tests.support.families import random_model
from tests.support.models import opened

LR, DECAY, FACTOR = 0.01, 0.1, 0.25
PARTS: list[Rows] = [torch.tensor([0, 1, 4]), torch.tensor([2, 5]), slice(3, 4), slice(6, 9)]


def run(kind: Any, gradients: list[Tensor], moments: Any = "float32") -> tuple[MatrixOptimizer, Tensor, Tensor]:
    """Return (optimizer, tensor at the start, tensor after a step with each of the gradients)."""
    start = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    master = start.clone()
    replaced = torch.optim.AdamW([{"params": [master], "weight_decay": DECAY}], lr=LR)
    optimizer = MatrixOptimizer(replaced, OptimizerConfig(kind, moments_dtype=moments), {master: PARTS})
    optimizer.factor = FACTOR
    for gradient in gradients:
        master.grad_dtype = gradient.dtype
        master.grad = gradient
        optimizer.step()
    return optimizer, start, master


def drawn(dtype: torch.dtype) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(2)
    return [torch.randn(9, 4, generator=numbers).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_a_part_gets_torchs_step(kind: str, dtype: torch.dtype) -> None:
    gradients = drawn(dtype)
    optimizer, start, found = run(kind, gradients)
    for rows in PARTS:
        part = start[rows].clone()
        alone: torch.optim.Optimizer = (
            torch.optim.Adafactor([part], lr=LR, weight_decay=DECAY, eps=(1e-15, 1.0))
            if kind == "adafactor"
            else torch.optim.Muon([part], lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        )
        for gradient in gradients:
            part.grad = gradient[rows].float() * FACTOR
            alone.step()
        assert torch.equal(found[rows], part)
    (state,) = optimizer.state.values()
    assert state["step"] == 3
    assert not optimizer._of_part.state


def test_adafactor_equals_the_formula() -> None:
    gradients = drawn(torch.float32)
    _, start, found = run("adafactor", gradients)
    for rows in PARTS:
        theta = start[rows].double()
        r = c = torch.zeros(())
        for step, gradient in enumerate(gradients, 1):
            g, beta = FACTOR * gradient[rows].double(), 1 - step**-0.8
            r = beta * r + (1 - beta) * g.square().mean(1, keepdim=True)
            c = beta * c + (1 - beta) * g.square().mean(0, keepdim=True)
            u = g / (r @ c / r.mean()).sqrt()
            size = max(1.0, float(theta.square().mean().sqrt()))
            theta = (1 - LR * DECAY) * theta - LR * size * u / max(1.0, float(u.square().mean().sqrt()))
        torch.testing.assert_close(found[rows].double(), theta, rtol=1e-5, atol=1e-6)


def test_muons_moment_may_be_bfloat16() -> None:
    """The step goes nearly the same way, and the moment is within the rounding of two sums."""
    gradients = drawn(torch.float32)
    (exact, start, whole), (short, _, found) = run("muon", gradients), run("muon", gradients, "bfloat16")
    (moment,), (rounded,) = ([state["momentum_buffer"] for state in o.state.values()] for o in (exact, short))
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.float(), moment, rtol=0, atol=3 * 2**-8 * float(moment.abs().max()))
    assert 0 < (found - whole).norm() < 0.1 * (whole - start).norm()


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=3)], ids=["all", "lora"])
def test_parts_are_hugging_faces_tensors(tmp_path: Path, lora: LoraConfig) -> None:
    """Biases, and queries of two groups, whose rows alternate with those of keys and values."""
    random_model("Qwen 2.5").save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"), lora=lora)
    with opened(tmp_path, model) as host:
        for role in (Role.POLICY, Role.CRITIC):
            trainer = host._trainers[role]
            (inner,) = trainer._optimizer.chained_optimizers
            masters, blueprint = [*masters_of(inner)], host._blueprints[role]
            parts = parts_of(masters, trainer.model, blueprint, "adafactor")
            trained = [one for one in named_by_block(trainer.model, 0) if one[2].requires_grad]
            assert len(parts) == len(trained)
            for name, block, parameter in trained:
                theirs = [tensor for _, tensor in to_hf(name, block, parameter, blueprint.spec, lambda own: [own])]
                own = [parameter[rows] for rows in parts[parameter]]
                assert [tuple(part.shape) for part in own] == [tuple(tensor.shape) for tensor in theirs], name
                assert all(torch.equal(part, tensor) for part, tensor in zip(own, theirs, strict=True)), name
            matrices = parts_of(masters, trainer.model, blueprint, "muon")
            assert matrices.keys() == {p for _, block, p in trained if block is not None and p.dim() == 2}
