"""Libraries that Megatron uses where they can be imported: a trainer must compute the same with and without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from stages.models.config import ModelConfig
from stages.models.protocol import Role
from tests.support.models import opened, random_advantages, random_rollout, update_both
from tests.support.paths import ROOT

APEX = """
class FusedAdam:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("Apex's optimizer has no state by parameter named `step`")

FusedSGD = FusedAdam
"""


def digests_after_an_update(directory: Path) -> list[str]:
    """Return the digests of policy and critic after an update and a return to the checkpoint of it."""
    with opened(directory, ModelConfig(path="random:tiny")) as host:
        rng = np.random.default_rng(0)
        rollout = random_rollout(rng, 4, 13)
        answers = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
        update_both(host, 0, rollout, random_advantages(rng, rollout.response_mask), answers)
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
        "from tests.unit.stages.models.test_other_libraries import digests_after_an_update as digests;"
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
