"""The recipes of docs/extending.md, done word for word on a copy of the sources, and then run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.processes

RECIPES = {
    "A reward", "A prompt source", "A metric", "An estimator of the KL penalty",
    "A stage", "A model family", "An engine",
}  # fmt: skip
PLACEMENT = "placement={gangs: {all: {}}, roles: {generate: all, score: all, reference: all, policy: all, critic: all}}"


@dataclass(frozen=True)
class Edit:
    """One block of the page: a new file, or lines at a line of an old one."""

    file: str
    line: str | None
    where: str
    """after, before, in place of"""
    code: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        if self.line is None:
            assert not path.exists(), f"{self.file} is there already"
            path.write_text(self.code, "utf8")
            return
        text = path.read_text("utf8")
        line = self.line + "\n"
        assert text.count(line) == 1, f"{self.file} has {text.count(line)} lines {self.line!r}"
        new = {"after": line + self.code, "before": self.code + line, "in place of": self.code}[self.where]
        path.write_text(text.replace(line, new), "utf8")


def recipes() -> dict[str, list[Edit]]:
    """The page's edits by the heading they stand under."""
    found: dict[str, list[Edit]] = {}
    for section in re.split(r"^## ", (ROOT / "docs/extending.md").read_text("utf8"), flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        edits = []
        pattern = (
            r"^(?:New file|In) `([^`]+)`(?:, (after|before|in place of)\s`([^`]+)`)?:"
            r"\n\n```(?:python|toml)\n(.*?)^```$"
        )
        for file, where, line, code in re.findall(pattern, body, re.MULTILINE | re.DOTALL):
            edits.append(Edit(file, line or None, where, code))
        found[heading] = edits
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with every recipe followed, in the page's order."""
    root = tmp_path_factory.mktemp("extended")
    for folder in ("pipeline", "stages", "storage", "conf", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for edits in recipes().values():
        for edit in edits:
            edit.apply(root)
    return root


def python(root: Path, *arguments: str) -> str:
    """Return the output of an interpreter that sees only the copy."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(copy: Path) -> Path:
    """The directory of a run of one step that uses all of them but the model family."""
    rows = [{"question": f"what is {i} and {i}?", "answer": str(2 * i)} for i in range(24)]
    (copy / "questions.json").write_text(json.dumps(rows), "utf8")
    changes = (
        "steps=1", "evaluate.every=0", PLACEMENT, "tracking.uri=null",
        "cluster.dashboard=null",
        "reward={kind: brevity, args: {limit: 40}}",
        "prompts.url=questions.json", "prompts.field=question", "prompts.max_tokens=24", "engine.kind=uniform",
        "ppo.kl.estimator=abs",
    )  # fmt: skip
    text = (copy / "conf/run/tiny.yaml").read_text("utf8")
    text = text.replace("reward: {kind: characters, args: {characters: aeiou}}\n", "")
    (copy / "conf/run/extended.yaml").write_text(text, "utf8")
    printed = python(copy, "-m", "pipeline.cli", "run", "conf/run/extended.yaml", "name=extended", *changes)
    (copy / "runs/extended/printed.txt").write_text(printed, "utf8")
    return copy / "runs/extended"


def commit(run: Path, stage: str) -> dict[str, object]:
    (first, *_) = sorted((run / "ledger" / stage).rglob("*.json"))
    found: dict[str, object] = json.loads(first.read_text("utf8"))
    return found


def test_the_page_has_every_recipe() -> None:
    assert {heading for heading, edits in recipes().items() if edits} == RECIPES


def test_a_reward_is_added(run: Path) -> None:
    """Responses of 8 tokens are at most 8 bytes: scores near 1 - 8 / 40."""
    metrics = commit(run, "score")["metrics"]
    assert isinstance(metrics, dict)
    assert 0.7 < metrics["score/mean"] <= 1.0


def test_a_prompt_source_is_added(run: Path) -> None:
    extras = [json.loads(line) for line in (run / "prompts.jsonl").read_text("utf8").splitlines()]
    assert {"answer": "14"} in extras
    assert len(extras) == 24


def test_a_metric_is_added(run: Path) -> None:
    metrics = commit(run, "advantage")["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["reward/range"] >= 0
    assert "Range of the scores" in (run / "report.html").read_text("utf8")
    assert re.search(r"^step 1/1 .*  range [\d.e-]+ ", (run / "printed.txt").read_text("utf8"), re.MULTILINE)


def test_a_kl_estimator_is_added(copy: Path) -> None:
    code = "import torch; from stages.ppo.kl import token_kl as kl; print(kl(*torch.tensor([[[-3.]], [[-1.]]]), 'abs'))"
    assert python(copy, "-c", code).strip() == "tensor([[2.]])"


def test_a_stage_is_added(run: Path, copy: Path) -> None:
    """Committed, in the store under its field's name, and sound in the eyes of `check`."""
    metrics = commit(run, "repetition")["metrics"]
    assert isinstance(metrics, dict)
    assert 0 <= metrics["response/repeated_share"] < 0.5
    assert (run / "rollouts.zarr/step_000000/repeated_share").is_dir()
    assert "repetition" in python(copy, "-m", "pipeline.cli", "check", str(run))


def test_an_engine_is_added(run: Path, copy: Path) -> None:
    """The engine's log-probs are those of a uniform draw from 253 tokens."""
    code = f"import zarr; print(zarr.open({str(run / 'rollouts.zarr')!r})['step_000000/sampler_logprobs'][:].min())"
    assert float(python(copy, "-c", code)) == pytest.approx(-5.5334, abs=1e-3)


@pytest.mark.full
def test_what_the_recipes_make_passes_the_projects_own_checks(copy: Path) -> None:
    """Style, import contracts, sizes and names: whoever follows the page can commit what comes of it."""
    python(copy, "-m", "ruff", "check", "--no-cache", "pipeline", "stages", "storage")
    python(copy, "-m", "ruff", "format", "--check", "--no-cache", "pipeline", "stages", "storage")
    python(copy, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache", "--no-logo")
    python(copy, "-m", "pytest", "-q", "tests/unit/test_structure.py", "tests/unit/test_imports.py")


FAMILY = """
import sys, torch, tempfile
from transformers import SeedOssConfig, SeedOssForCausalLM
from stages.engines.build import build_engine
from stages.engines.config import EngineConfig
from stages.models.config import SamplingConfig
from stages.engines.protocol import Request

torch.manual_seed(0)
config = SeedOssConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, eos_token_id=63)
theirs = SeedOssForCausalLM(config).eval()
for name, parameter in theirs.named_parameters():
    if name.endswith("bias"):
        torch.nn.init.normal_(parameter)
with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(folder)
    engine = build_engine(folder, EngineConfig(max_rows=2, kv_budget_mb=8), max_seq=32, threads=1)
    prompt = (5, 6, 7, 8, 9)
    (row,) = engine.generate([Request(0, 0, 0, prompt, 0, SamplingConfig(8, temperature=0.0))])
    engine.close()
tokens = torch.tensor([[*prompt, *row.tokens.tolist()]])
with torch.no_grad():
    logprobs = theirs(tokens).logits.log_softmax(-1)[0, 4:-1].gather(1, tokens[0, 5:, None])[:, 0]
assert (logprobs - torch.from_numpy(row.logprobs)).abs().max() < 1e-4, (logprobs, row.logprobs)
"""


@pytest.mark.full
def test_a_model_family_is_added(copy: Path) -> None:
    """The engine's log-probs of its own tokens are transformers'."""
    python(copy, "-c", FAMILY)
