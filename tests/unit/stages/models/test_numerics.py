"""float32 products by torch and by oneDNN, and that the choice between them is stable and the same everywhere."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.models import numerics, parallel
from stages.models.config import LayoutConfig, ModelConfig, SamplingConfig, model_problems
from stages.models.host import MegatronHost
from stages.models.layers import CpuColumnLinear, CpuRowLinear
from stages.models.numerics import (
    ENVIRONMENT,
    Products,
    choose_by_vendor,
    choose_products,
    input_gradient,
    multiply,
    repeats_bits,
    set_numerics,
    weight_gradient,
)
from stages.models.protocol import Rank, Role
from stages.ppo.config import PPOConfig
from tests.support.collectives import run_ranks
from tests.support.models import opened, published, update_on_random_rows
from tests.support.paths import ROOT
from tests.unit.stages.models.test_model_update import batches, model_config, weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("products", Products)
@pytest.mark.parametrize("rows", [(), (0,), (1,), (7, 3)])
def test_products_equal_those_in_float64(products: Products, rows: tuple[int, ...]) -> None:
    x, grad, weight = torch.randn(5, *rows, 24), torch.randn(5, *rows, 40), torch.randn(40, 24)
    wide, wide_grad = x.double(), grad.double()
    expected = (
        (multiply(x, weight, products), wide @ weight.double().T),
        (input_gradient(grad, weight, products), wide_grad @ weight.double()),
        (weight_gradient(grad, x, products), wide_grad.reshape(-1, 40).T @ wide.reshape(-1, 24)),
    )
    for found, wanted in expected:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_processor_without_16_bit_products_rounds_those_of_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "cpu_multiplies", lambda given: given == torch.float32)
    x, grad, weight = (torch.randn(*shape).to(dtype) for shape in ((5, 7, 24), (5, 7, 40), (40, 24)))
    wide, wide_grad = x.double(), grad.double()
    expected = (
        (multiply(x, weight, Products.TORCH), wide @ weight.double().T),
        (input_gradient(grad, weight, Products.TORCH), wide_grad @ weight.double()),
        (weight_gradient(grad, x, Products.TORCH), wide_grad.reshape(-1, 40).T @ wide.reshape(-1, 24)),
    )
    for found, wanted in expected:
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=1e-5)


def test_the_rule_is_the_processors_vendor_and_no_stopwatch() -> None:
    assert choose_by_vendor("AuthenticAMD") == (Products.ONEDNN, "processor AuthenticAMD")
    assert choose_by_vendor("GenuineIntel") == (Products.TORCH, "processor GenuineIntel")
    assert choose_by_vendor("") == (Products.TORCH, "processor unknown")


def test_a_choice_is_recorded_with_what_was_measured(tmp_path: Path) -> None:
    parallel.join(Rank(0, 1, f"file://{tmp_path}/rendezvous", 1), LayoutConfig(), 0)
    try:
        before = torch.get_rng_state()
        found = choose_products("onednn", torch.float32, CPU)
        assert torch.equal(before, torch.get_rng_state())
        without = choose_products("auto", torch.bfloat16, CPU)
        with pytest.raises(ValueError, match=r"model\.products = onednn needs float32"):
            choose_products("onednn", torch.bfloat16, CPU)
    finally:
        parallel.leave()
    assert (found.products, found.reason) == (Products.ONEDNN, "model.products")
    names = {f"{p} {kind}" for p in Products for kind in ("forward", "input_gradient", "weight_gradient")}
    assert set(found.milliseconds) == names
    assert all(ms > 0 for ms in found.milliseconds.values())
    assert (without.products, dict(without.milliseconds)) == (Products.TORCH, {})


def test_a_model_trained_with_onednn_is_the_one_trained_with_torch_but_for_rounding(tmp_path: Path) -> None:
    found = {}
    for name in ("torch", "onednn", "again"):
        (tmp_path / name).mkdir()
        config = dataclasses.replace(model_config(), products="torch" if name == "torch" else "onednn")
        with opened(tmp_path / name, config) as host:
            layer = host._trainers[Role.POLICY].model.decoder.layers[0]
            wanted = Products.TORCH if name == "torch" else Products.ONEDNN
            for linear in (layer.mlp.linear_fc1, layer.mlp.linear_fc2, layer.self_attention.linear_qkv):
                assert isinstance(linear, CpuColumnLinear | CpuRowLinear)
                assert linear.products is wanted
            policy, _ = batches(host)
            host.update_policy(0, policy)
            host.mark_clean(Role.POLICY)
            found[name] = weights(host), host.digest(Role.POLICY)
    assert found["onednn"][1] == found["again"][1]
    for name, array in found["torch"][0].items():
        torch.testing.assert_close(
            torch.from_numpy(found["onednn"][0][name]), torch.from_numpy(array), rtol=0, atol=1e-5
        )


def update_on_a_rank(rank: int, directory: Path, products: str, sequence_parallel: bool) -> None:
    """One of two tensor-parallel ranks; saves the policy's weights after an update."""
    config = dataclasses.replace(model_config(), products=products)
    host = MegatronHost(
        config,
        SamplingConfig(),
        PPOConfig(),
        LayoutConfig(tensor=2, sequence_parallel=sequence_parallel),
        frozenset({Role.POLICY}),
        Rank(rank, 2, f"file://{directory}/rendezvous-{products}", 1),
        seed=0,
        total_steps=10,
    )
    assert host.product_choice.products == products
    try:
        policy = torch.load(directory / "batch.pt", weights_only=False)
        host.update_policy(0, policy)
        host.mark_clean(Role.POLICY)
        found = published(host)
        if found is not None:
            torch.save({name: torch.from_numpy(a.copy()) for name, a in found.items()}, directory / f"{products}.pt")
    finally:
        host.close()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_agree_whoever_multiplies(tmp_path: Path, sequence_parallel: bool) -> None:
    (tmp_path / "one").mkdir()
    with opened(tmp_path / "one", model_config()) as host:
        torch.save(batches(host)[0], tmp_path / "batch.pt")
    for products in Products:
        run_ranks(update_on_a_rank, 2, tmp_path, products.value, sequence_parallel)
    one, other = (torch.load(tmp_path / f"{products}.pt") for products in Products)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-5)


def test_onednn_for_bfloat16_is_refused() -> None:
    (problem,) = model_problems(ModelConfig(path="random:tiny", dtype="bfloat16", products="onednn"))
    assert problem.key == "model.products"


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


APEX = """
class FusedAdam:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("Apex's optimizer has no state by parameter named `step`")

FusedSGD = FusedAdam
"""


def digests_after_an_update(directory: Path) -> list[str]:
    """Return the digests of policy and critic after an update and a return to the checkpoint of it."""
    with opened(directory, ModelConfig(path="random:tiny")) as host:
        update_on_random_rows(host, np.random.default_rng(0), 4, 13)
        for role in (Role.POLICY, Role.CRITIC):
            (directory / role.value).mkdir()
            host.save(role, directory / role.value)()
            host.load(role, directory / role.value)
        return [host.digest(role) for role in (Role.POLICY, Role.CRITIC)]


def test_where_apex_is_installed_torchs_adamw_updates_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "site/apex").mkdir(parents=True)
    (tmp_path / "site/apex/__init__.py").touch()
    (tmp_path / "site/apex/optimizers.py").write_text(APEX)
    (tmp_path / "here").mkdir()
    program = (
        "import sys; from pathlib import Path; from apex.optimizers import FusedAdam;"
        "from megatron.core import optimizer;"
        "assert optimizer.Adam is FusedAdam, 'Megatron would take it';"
        "from tests.unit.stages.models.test_numerics import digests_after_an_update as digests;"
        "print(*digests(Path(sys.argv[1])))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == digests_after_an_update(tmp_path / "here")
