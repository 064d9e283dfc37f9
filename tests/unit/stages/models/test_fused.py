"""The choice among Megatron's fused kernels, and Apex's product in an update. (`test_block_kernels` compares the fused
SwiGLU's numbers.)"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from stages.models import build
from stages.models.config import ModelConfig, OptimizerConfig
from stages.models.hf_conversion import named_by_block
from stages.models.kernels import fused
from stages.models.kernels.blocks import PortableKernels
from stages.models.protocol import Role
from stages.ppo.config import PPOConfig
from tests.support.models import opened, update_on_random_rows

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "deterministic", "triton", "name"),
    [
        ("auto", False, True, "fused"),
        ("auto", True, True, "portable"),
        ("auto", False, False, "portable"),
        ("portable", False, True, "portable"),
    ],
)
def test_kernels_on_cuda(
    monkeypatch: pytest.MonkeyPatch, asked: Any, deterministic: bool, triton: bool, name: str
) -> None:
    monkeypatch.setattr(fused, "has_triton", lambda: triton)
    model, given = ModelConfig("random:tiny", kernels=asked, deterministic=deterministic), PortableKernels()
    assert fused.with_fusions(given, model, CUDA).name == name
    assert fused.with_fusions(given, model, CPU) is given


@pytest.mark.parametrize("installed", [False, True])
def test_apexs_product_is_for_devices_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", installed)
    assert fused.adds_gradients(CUDA) == installed
    assert not fused.adds_gradients(CPU)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_an_update_whose_products_add_to_the_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, tolerance: float
) -> None:
    """A stand-in for Apex's extension, which Megatron calls with (inputs, gradient of the outputs, sum)."""
    totals: set[int] = set()

    def add(inputs_NK: Tensor, grad_NM: Tensor, total_MK: Tensor) -> None:
        totals.add(total_MK.data_ptr())
        total_MK.addmm_(grad_NM.float().T, inputs_NK.float())

    def updated(directory: Path, *, by_apex: bool) -> dict[str, Tensor]:
        directory.mkdir()
        totals.clear()
        monkeypatch.setattr(build, "adds_gradients", lambda device: by_apex)
        monkeypatch.setattr(layers, "_grad_accum_fusion_available", by_apex)
        extension = SimpleNamespace(wgrad_gemm_accum_fp32=add)
        monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", extension, raising=False)
        optimizer = OptimizerConfig(lr=1e-3, micro_batch_rows=3)
        settings = ModelConfig("random:tiny", dtype=dtype, kernels="portable", policy=optimizer, critic=optimizer)
        with opened(directory, settings, PPOConfig(epochs=1, minibatches=1)) as host:
            update_on_random_rows(host, np.random.default_rng(0), 8, 13)
            linears = {
                parameter.main_grad.data_ptr()
                for role in (Role.POLICY, Role.CRITIC)
                for name, _, parameter in named_by_block(host._trainers[role].model, 0)
                if ".linear_" in name
            }
            assert totals == (linears if by_apex else set())
            model = host._trainers[Role.POLICY].model
            return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}

    torchs, apexs = (updated(tmp_path / str(by_apex), by_apex=by_apex) for by_apex in (False, True))
    for name, gradient in torchs.items():
        torch.testing.assert_close(apexs[name], gradient, rtol=0, atol=tolerance * float(gradient.abs().max()))
