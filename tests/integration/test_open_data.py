"""A finished run as tables, xarray and Parquet; and docs/open_data.md, block by block."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import xarray as xr
import zarr

import stageline
from pipeline.cli.main import main
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from stages.models.hf_files import ByteTokenizer
from storage.address import Address
from storage.commits import provenance_here
from storage.ledger import Ledger
from tests.support.paths import ROOT
from tests.support.run_results import steps_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def run(overlapped: RunConfig) -> stageline.OpenedRun:
    return stageline.open_run(overlapped.run_dir)


@pytest.fixture
def copied(overlapped: RunConfig, tmp_path: Path) -> Path:
    """The run in a place of its own, where it may be damaged."""
    return Path(shutil.copytree(overlapped.run_dir, tmp_path / "copy"))


def test_a_run_and_its_config_have_a_short_text(run: stageline.OpenedRun, overlapped: RunConfig) -> None:
    steps = overlapped.steps
    assert repr(run) == f"<run {overlapped.run_dir}: {steps} of {steps} steps done>"
    assert repr(overlapped).startswith(f"<config of run {overlapped.name}: random:tiny, {steps} steps of ")


def test_rows_are_what_the_stages_made(run: stageline.OpenedRun, overlapped: RunConfig) -> None:
    rows = run.rows()
    decode = ByteTokenizer().decode
    assert len(rows) == overlapped.steps * overlapped.rollout.rows
    rollouts, scores = steps_of(overlapped, "generate"), steps_of(overlapped, "score")
    policies, references = steps_of(overlapped, "logprob"), steps_of(overlapped, "reference")
    advantages = [open_history(overlapped).store.read(Address("advantage", s)) for s in range(overlapped.steps)]
    for step, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
        of_step = rows[rows.step == step]
        mask = rollout.response_mask
        assert of_step.row.tolist() == rollout.row.tolist() == list(range(16))
        assert of_step.score.tolist() == score.scores.tolist()
        assert of_step.response.tolist() == [decode(t[m]) for t, m in zip(rollout.tokens, mask, strict=True)]
        assert set(of_step.version_first) == set(of_step.version_last) == {max(0, step - 1)}
        log_ratio = policies[step].policy_logprobs.astype(np.float64) - references[step].ref_logprobs
        np.testing.assert_allclose(of_step.kl, np.where(mask, log_ratio, 0).sum(1), atol=1e-5)
        mean = [a[m].mean() for a, m in zip(advantages[step].advantages, mask, strict=True)]
        np.testing.assert_allclose(of_step.advantage_mean, mean, atol=1e-6)
    assert rows.trained_on.all()
    assert list(run.rows([2]).step.unique()) == [2]
    with pytest.raises(ValueError, match=r"has no rows of steps \[9\]: it has 0 to 3"):
        run.rows([9])


def test_tokens_are_those_that_were_sampled(run: stageline.OpenedRun, overlapped: RunConfig) -> None:
    tokens, rows, (_, rollout, *_) = run.tokens([1]), run.rows([1]), steps_of(overlapped, "generate")
    assert tokens.groupby("row").size().tolist() == rows.response_length.tolist()
    assert tokens.token.tolist() == rollout.tokens[rollout.response_mask].tolist()
    assert tokens.groupby("row").position.min().tolist() == [0] * 16
    np.testing.assert_allclose(tokens.groupby("row").log_ratio.sum(), rows.kl, atol=1e-5)
    assert not tokens.drop(columns="text").isna().any(axis=None)


def test_evaluations_and_metrics_are_those_of_the_summary(run: stageline.OpenedRun) -> None:
    summary = json.loads((run.path / "summary.json").read_text())
    means = run.evaluations().groupby("version")[["score", "kl"]].mean()
    for found in summary["evaluations"]:
        assert means.score[found["version"]] == pytest.approx(found["reward"], abs=1e-6)
        assert means.kl[found["version"]] == pytest.approx(found["kl"], abs=1e-6)
    assert run.metrics()["reward/mean"].tolist() == pytest.approx(run.rows().groupby("step").score.mean().tolist())


def test_where_nothing_is_committed_tables_have_their_columns(run: stageline.OpenedRun, tmp_path: Path) -> None:
    """A run without evaluations, say."""
    begun = replace(run, history=replace(run.history, ledger=Ledger(str(tmp_path))))
    for empty, full in ((begun.rows(), run.rows()), (begun.evaluations(), run.evaluations())):
        of_parts = [name for name in full.columns if name.startswith("score.")]
        assert list(empty.columns) == [name for name in full.columns if name not in of_parts]
        assert len(empty) == 0
    assert list(begun.tokens().columns) == list(run.tokens().columns)
    assert begun.evaluations().pivot(index="prompt_index", columns="version", values="score").empty


def test_arrays_are_those_of_the_store(run: stageline.OpenedRun) -> None:
    found = run.arrays([1, 3])
    assert dict(found.sizes) == {"step": 2, "row": 16, "token": 24}
    plain = zarr.open_group(run.path / "rollouts.zarr", mode="r")
    for name in ("tokens", "scores", "values", "advantages", "response_mask"):
        assert np.array_equal(found[name].sel(step=3), plain[f"step_000003/{name}"][:])
    assert found.prompt.sel(step=3).values.tolist() == run.rows([3]).prompt.tolist()


@pytest.mark.filterwarnings("error")
def test_xarray_opens_the_store_in_one_call(run: stageline.OpenedRun, overlapped: RunConfig) -> None:
    tree = xr.open_datatree(run.path / "rollouts.zarr", engine="zarr", consolidated=False)
    assert sorted(tree.children) == [*(f"evaluate_00000{v}" for v in (0, 2, 4)), *(f"step_00000{s}" for s in range(4))]
    assert tree.attrs["run"] == overlapped.name
    assert tree.attrs["model"] == "random:tiny"
    step = tree["step_000001"].to_dataset()
    assert step.sampler_logprobs.dims == ("row", "token")
    assert step.sampler_logprobs.attrs["units"] == "nat"
    assert step.tokens.dtype == np.int32, "whole numbers stay whole"
    assert all(array.attrs["long_name"] for array in step.data_vars.values())


def test_the_vocabulary_is_enough_without_the_tokenizer(run: stageline.OpenedRun, monkeypatch: Any) -> None:
    monkeypatch.setattr("stages.models.hf_files.read_tokenizer", lambda path: pytest.fail("asked for"))
    assert stageline.open_run(run.path).rows([0]).response.tolist() == run.rows([0]).response.tolist()


def test_no_torch_is_loaded(run: stageline.OpenedRun) -> None:
    """A notebook that reads a run waits for neither torch nor the tokenizer's libraries."""
    code = (
        "import sys, stageline\n"
        f"run = stageline.open_run({str(run.path)!r})\n"
        "tables = run.rows(), run.tokens([0]), run.evaluations(), run.metrics(), run.arrays([0])\n"
        "print({'torch', 'transformers'} & sys.modules.keys() or 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"


def test_what_is_not_committed_is_not_seen(copied: Path) -> None:
    """A step without its advantage, a shard without its commit, and a dead attempt that has files and no commit, or
    lost: the tables hold what the ledger names, and NaN."""
    whole = stageline.open_run(copied)
    expected = whole.rows()
    for address in (Address("advantage", 3), Address("score", 3, 1), Address("generate", 2, 1)):
        (copied / f"ledger/{address}.json").unlink()
    store, record = whole.history.store, whole.history.store.read(Address("generate", 2, 0))
    late = record.rows(np.arange(record.num_rows)[::-1])
    for shard in (0, 1):
        store.prepare(Address("generate", 2, shard), late, provenance_here(seed=0, config_hash=""), attempt="a0-dead")
    rows = stageline.open_run(copied).rows()
    last = rows[rows.step == 3]
    assert last.advantage_mean.isna().all()
    assert not last.trained_on.any()
    assert last.score.isna().tolist() == [False] * 8 + [True] * 8
    pd.testing.assert_frame_equal(
        rows[rows.step == 2].reset_index(drop=True),
        expected[(expected.step == 2) & (expected.shard == 0)].reset_index(drop=True),
    )
    assert np.isnan(stageline.open_run(copied).arrays([3]).scores.values[0, 8:]).all()
    assert main(["export", str(copied), "--rollouts", str(copied / "rows.parquet")]) == 0
    written = pd.read_parquet(copied / "rows.parquet")
    assert len(written) == len(rows)
    assert written[written.step == 3].advantages.isna().all()


def test_parquet_has_the_rows_and_their_tokens(
    run: stageline.OpenedRun, overlapped: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "rows.parquet"
    assert main(["export", str(run.path), "--rollouts", str(target)]) == 0
    assert f"wrote {target}: 64 rows" in capsys.readouterr().out
    table, rows = pd.read_parquet(target), run.rows()
    pd.testing.assert_frame_equal(table[[*rows]], rows, check_dtype=False, rtol=1e-6)
    assert pyarrow.parquet.ParquetFile(target).num_row_groups == overlapped.steps
    tokens = run.tokens([2])
    of_step = table[table.step == 2]
    assert np.concatenate(of_step.response_ids.tolist()).tolist() == tokens.token.tolist()
    np.testing.assert_array_equal(np.concatenate(of_step.ref_logprobs.tolist()), tokens.ref_logprob)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rollouts", "rows.csv"], "a name that ends in .parquet"),
        (["--rollouts", "nowhere/rows.parquet"], "there is no directory nowhere"),
        (["--rollouts", "there.parquet"], "it exists already"),
        (["--rollouts", "rows.parquet", "--version", "1"], "leave --version and --to out"),
    ],
)
def test_refusals(
    run: stageline.OpenedRun, arguments: list[str], said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.parquet").touch()
    assert main(["export", str(run.path.resolve()), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_inspect_takes_the_last_step(run: stageline.OpenedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run.path), "--rows", "1"]) == 0
    assert "step 3 of overlapped" in capsys.readouterr().out


def test_a_resumed_run_writes_its_root_once(run: stageline.OpenedRun) -> None:
    root = run.path / "rollouts.zarr"
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    assert main(["resume", str(run.path)]) == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before
    assert main(["check", str(run.path)]) == 0


def test_an_export_may_be_read_by_others_and_says_what_it_is(run: stageline.OpenedRun) -> None:
    exported = run.path / "weights/v000004"
    modes = {path.stat().st_mode & 0o777 for path in exported.iterdir()}
    assert len(modes) == 1
    assert modes != {0o600}
    card = (exported / "README.md").read_text("utf8")
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# overlapped, version 4" in card
    assert "| reward | 1 · `characters` (`characters`) |" in card


def test_the_page_runs_from_top_to_bottom(
    run: stageline.OpenedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/demo").symlink_to(run.path.resolve())
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/open_data.md").read_text("utf8")
    blocks = re.findall(r"^```(python|)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 10
    names: dict[str, Any] = {}
    for kind, code in blocks:
        if kind == "python":
            exec(compile(code, "docs/open_data.md", "exec"), names)
        else:
            assert main(code.split()[1:]) == 0
    assert 1 <= len(names["suspects"]) <= 10
    out = capsys.readouterr().out
    assert "gain " in out
    assert f"{run.rows([0]).response[0]}\n" in out, "the text that plain Zarr gives is the response"
