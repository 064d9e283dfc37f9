"""A whole run whose reference and critic are models of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.driver.results import open_history
from stages.models.spec import read_config
from tests.support.runs import ONE_GANG, QUIET, configure, finish

pytestmark = pytest.mark.processes


def test_a_run_with_three_models(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference is as wide as the policy, the critic smaller; what they did can be replayed."""
    torch.manual_seed(0)
    paths = {"critic": tmp_path / "critic", "reference": tmp_path / "reference"}
    LlamaForCausalLM(LlamaConfig(**read_config("random:tiny") | {"hidden_size": 32})).save_pretrained(paths["critic"])
    LlamaForCausalLM(LlamaConfig(**read_config("random:tiny"))).save_pretrained(paths["reference"])
    models = [f"model.{role}_path={path}" for role, path in paths.items()]
    changes = ("steps=2", "evaluate.every=0", "checkpoint.every=1", *models, ONE_GANG, *QUIET)
    config = finish(configure(folder, "three-models", *changes))
    assert verify_run(config).faults == []
    first = open_history(config).read_step_metrics(0)
    assert abs(first["kl/ref"]) > 1.0, "the policy starts elsewhere than the reference"
    assert first["critic/grad_norm"] > 0
    assert first["update_critic/mfu"] > 0
    for stage in ("reference", "value", "update_critic"):
        assert main(["replay", str(config.run_dir), "--step", "1", "--stage", stage]) == 0
        assert "identical: difference must be 0" in capsys.readouterr().out
