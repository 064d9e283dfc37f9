"""The documentation names every config key, and no file that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config.placement import GangConfig
from pipeline.config.run import RunConfig
from pipeline.config.slurm import SlurmGangConfig
from stages.rewards.config import PartConfig
from tests.support.configs import keys
from tests.support.paths import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "slurm/README.md"])
PATHS = re.compile(
    r"`((?:pipeline|stages|storage|conf|tests|benchmarks|requirements)/[\w./-]*\w)`"  # a file or folder in code quotes
    r"|\]\(([\w./-]+\.md)[#)]"  # a link to another page
)


def test_running_has_exactly_the_keys_of_the_config() -> None:
    text = (ROOT / "docs/running.md").read_text("utf8")
    documented = re.findall(r"^\| `([\w.]+)` \|.*\|.*\|.*\|$", text, re.MULTILINE)
    named = keys(GangConfig(), "placement.gangs.NAME.") + keys(SlurmGangConfig(), "slurm.gangs.NAME.")
    named += keys(PartConfig(), "reward.parts.NAME.")
    assert sorted(documented) == sorted(keys(RunConfig(), "") + named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_only_files_that_exist(page: Path) -> None:
    text = page.read_text("utf8")
    made = {ROOT / path for path in re.findall(r"^New file `([\w./]+)`", text, re.MULTILINE)}  # by a recipe
    named = [(ROOT / code if code else page.parent / link) for code, link in PATHS.findall(text)]
    assert [path for path in named if not path.exists() and path not in made] == []
