"""Settings of a rank's process before it multiplies on CUDA. Most hosts have no GPU, so torch is told of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stages.models.config import ModelConfig
from stages.models.numerics import ENVIRONMENT, repeats_bits, set_numerics


@pytest.fixture
def said_to_have_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch report CUDA, and restore everything afterwards."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    settings: Any = torch.utils.deterministic
    filled, tf32 = settings.fill_uninitialized_memory, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.use_deterministic_algorithms(False)
    settings.fill_uninitialized_memory = filled
    torch.backends.cuda.matmul.allow_tf32 = tf32


@pytest.mark.usefixtures("said_to_have_cuda")
def test_deterministic_by_default() -> None:
    model = ModelConfig()
    set_numerics(model)
    assert torch.are_deterministic_algorithms_enabled()
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert repeats_bits(model)


@pytest.mark.usefixtures("said_to_have_cuda")
def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(tf32=True, deterministic=False)
    set_numerics(model)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not ENVIRONMENT.keys() & os.environ.keys()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert not repeats_bits(model)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    set_numerics(ModelConfig())
    assert os.environ["NCCL_ALGO"] == "Tree", "what a user has set stays"


@pytest.mark.usefixtures("said_to_have_cuda")
@pytest.mark.parametrize("tf32", [False, True])
def test_the_choice_of_tf32_can_be_read_through_both_of_torchs_apis(tf32: bool) -> None:
    """Other libraries of the process read it, some by the older names. torch refuses that if only the newer is set."""
    set_numerics(ModelConfig(tf32=tf32))
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if tf32 else "ieee")


def test_a_cpu_has_no_tf32_and_repeats_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"model\.tf32 = True: float32 products of NVIDIA GPUs"):
        set_numerics(ModelConfig(tf32=True))
    set_numerics(ModelConfig())
    assert not torch.are_deterministic_algorithms_enabled()
    assert repeats_bits(ModelConfig(deterministic=False))
