"""`stageline report`: what it takes, and what it refuses in the run's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.config.loading import load_config, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.observe.evaluations import VariantSummary
from pipeline.observe.journal import EventKind, Journal
from tests.support.configs import arguments, write_config


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs that began, and came to nothing."""
    write_config(tmp_path)
    file, *changes = arguments(tmp_path)
    found = []
    for name in ("a", "b"):
        config = load_config([file], [*changes, f"name={name}"])
        paths = RunPaths(config.run_dir)
        paths.root.mkdir(parents=True)
        paths.config.write_text(to_yaml(config), "utf8")
        with Journal(paths.events) as journal:
            journal.append_now(EventKind.RUN_STARTED, command="stageline run c.yaml")
        found.append(str(paths.root))
    return found


def test_of_one_run_it_goes_into_its_directory(runs: list[str]) -> None:
    assert main(["report", runs[0]]) == 0
    text = (Path(runs[0]) / "report.html").read_text("utf8")
    assert "stageline run c.yaml" in text
    assert "no step was finished" in text


def test_of_several_it_goes_where_it_is_told(runs: list[str], tmp_path: Path) -> None:
    assert main(["report", *runs, "--out", str(tmp_path / "pair.html")]) == 0
    assert re.search(r"<title>a · b - Stageline</title>", (tmp_path / "pair.html").read_text("utf8"))


def test_a_variant_beside_its_parent(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory with a config and, once it has finished, a summary."""
    parent, variant = map(Path, runs)
    (variant / "events.jsonl").unlink()
    (variant / "variant.json").write_text("{}")
    assert "has not finished" in refused(capsys, *runs)
    summary = VariantSummary(str(parent), (0, 1), ["ppo.clip=0.1 (was 0.2)"], [], "w", None, {})
    (variant / "summary.json").write_text(summary.to_json())
    assert main(["report", *runs, "--out", str(tmp_path / "pair.html")]) == 0
    assert "ppo.clip=0.1 (was 0.2)" in (tmp_path / "pair.html").read_text("utf8")


def test_of_several_it_goes_here(runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *runs]) == 0
    assert (tmp_path / "report.html").is_file()
    assert not (Path(runs[0]) / "report.html").exists()


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert main(["report", *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, str(tmp_path))
    assert f"refused {tmp_path}: holds no run (no config.yaml in it); give a run's directory" in said


def test_a_run_that_never_began_is_refused(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (Path(runs[0]) / "events.jsonl").unlink()
    assert "holds no journal (events.jsonl): this run never began" in refused(capsys, runs[0])


def test_a_run_given_twice_is_refused(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "is the same run as" in refused(capsys, runs[0], f"{runs[0]}/../a")


def test_more_runs_than_colours_are_refused(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "given 9 runs; a report has 1 to 8" in refused(capsys, *runs[:1] * 9)


def test_a_file_not_writable_is_refused(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a directory; give a file" in refused(capsys, runs[0], "--out", str(tmp_path))
    assert "there is no directory" in refused(capsys, runs[0], "--out", str(tmp_path / "no/where.html"))
    assert "cannot write /proc/report.html" in refused(capsys, runs[0], "--out", "/proc/report.html")


def test_only_a_report_is_written_over(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Path(runs[0]) / "config.yaml"
    before = config.read_bytes()
    assert "must end in .html, for example" in refused(capsys, runs[0], "--out", str(config))
    page = tmp_path / "report.html"
    page.write_text("<!doctype html>\n<html lang='en'>mine</html>", "utf8")
    assert "no report of this version of Stageline" in refused(capsys, runs[0], "--out", str(page))
    monkeypatch.chdir(tmp_path)
    assert "not given; report.html is there, and is no report" in refused(capsys, *runs)
    assert config.read_bytes() == before
    assert "mine" in page.read_text("utf8")
    page.unlink()
    assert main(["report", *runs]) == 0
    assert main(["report", runs[0], "--out", str(page)]) == 0, "a report takes the place of a report"
    assert re.search(r"<title>a - Stageline</title>", page.read_text("utf8"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".report")] == []


def test_a_failed_report_leaves_the_old_one(runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "pair.html"
    assert main(["report", *runs, "--out", str(page)]) == 0
    before = page.read_bytes()

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["report", runs[0], "--out", str(page)]) == 2
    assert page.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".pair")] == []


def test_runs_of_one_name_are_told_apart(runs: list[str], tmp_path: Path) -> None:
    twin = tmp_path / "elsewhere" / "a"
    twin.parent.mkdir()
    Path(runs[1]).rename(twin)
    assert main(["report", runs[0], str(twin), "--out", str(tmp_path / "pair.html")]) == 0
    assert f"a ({twin})" in (tmp_path / "pair.html").read_text("utf8")
