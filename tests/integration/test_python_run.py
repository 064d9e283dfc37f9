"""Runs that Python starts: docs/python.md as a script, and callbacks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import stageline
from pipeline.config.run import RunConfig
from tests.support.paths import ROOT
from tests.support.run_results import outputs
from tests.support.runs import ONE_GANG, QUIET, arguments

pytestmark = pytest.mark.processes


@pytest.mark.full
def test_the_page_is_a_script_without_a_guard_and_its_run_has_the_bits_of_the_command_line(
    tmp_path: Path, overlapped: RunConfig
) -> None:
    """Workers would import the script, and start the run again."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/python.md").read_text("utf8"), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "page.py").write_text(f"{code}\nassert len(curve) == config.steps")
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out reward") == 3
    of_page = stageline.open_run(tmp_path / "runs/from-python").config
    assert outputs(of_page) == outputs(overlapped)


@pytest.mark.full
def test_a_callback_that_raises_ends_the_run_and_resume_goes_on(tmp_path: Path) -> None:
    changes = (ONE_GANG, *QUIET, "steps=3", "staleness=0", "evaluate.every=0")
    config = stageline.load_config(*arguments(tmp_path, "stopped", *changes))
    seen: list[int] = []

    def stop(step: int, metrics: Mapping[str, float]) -> None:
        seen.append(step)
        if step == 1 and len(seen) == 2:
            raise ArithmeticError("far enough")

    with pytest.raises(ArithmeticError):
        stageline.run(config, callbacks=[stop], quiet=True)
    with pytest.raises(stageline.ConfigError):
        stageline.run(config, quiet=True)
    run = stageline.run(config, callbacks=[stop], resume=True, quiet=True)
    assert seen == [0, 1, 2]
    assert list(run.metrics().index) == [0, 1, 2]


def test_a_config_that_was_changed_is_checked_again(tmp_path: Path) -> None:
    config = stageline.load_config(*arguments(tmp_path, "unused"))
    config.rollout.shards = 3
    with pytest.raises(stageline.ConfigError) as refused:
        stageline.run(config, quiet=True)
    assert refused.value.key == "rollout.shards"
    config = stageline.load_config(*arguments(tmp_path, "unused"))
    config.sampling.max_tokens = config.model.policy.learning_rate = config.step = 1  # type: ignore[attr-defined]
    config.steps, config.ppo.kl, config.seed = "abc", None, -1  # type: ignore[assignment]
    config.model.policy.lr = np.float64(1e-3)
    with pytest.raises(stageline.ConfigError) as refused:
        stageline.run(config, quiet=True)
    assert {error.key: error.message.partition(" (in the given config); ")[::2] for error in refused.value.errors} == {
        "sampling.max_tokens": ("no such key", "did you mean sampling.max_new_tokens?"),
        "model.policy.learning_rate": ("no such key", "did you mean model.policy.lr?"),
        "step": ("no such key", "did you mean steps?"),
        "steps": ("given 'abc'", "must be a whole number"),
        "model.policy.lr": ("given np.float64(0.001)", "must be a number"),
        "ppo.kl": ("given null", "it holds the settings where, estimator, coef, target, horizon"),
        "seed": ("given -1; must be from 0 to 2^63 - 1", ""),
    }
    config = stageline.load_config(*arguments(tmp_path, "unused"))
    config.reward.args["scorer"] = len
    with pytest.raises(stageline.ConfigError, match=r"^reward.args.scorer: .* not a supported primitive type"):
        stageline.run(config, quiet=True)
    with pytest.raises(TypeError, match=r'run\(load_config\("run.yaml", "steps=4"\)\), not \{}'):
        stageline.run({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callbacks: give a list of functions"):
        stageline.run(config, callbacks=print)  # type: ignore[arg-type]


def test_another_thread_than_the_main_one_is_refused(tmp_path: Path) -> None:
    config = stageline.load_config(*arguments(tmp_path, "unused"))
    with ThreadPoolExecutor() as threads, pytest.raises(stageline.ConfigError, match="call it in the main thread"):
        threads.submit(stageline.run, config).result()
