"""The documentation has every config key, and names no file that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config.reference import page
from tests.support.paths import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "slurm/README.md"])
PATHS = re.compile(
    r"`((?:pipeline|stages|storage|conf|tests|benchmarks|requirements)/[\w./-]*\w)`"  # a file or folder in code quotes
    r"|\]\(([\w./-]+\.md)[#)]"  # a link to another page
)


def test_the_page_of_all_config_keys_is_the_generated_one() -> None:
    """Otherwise: python -m pipeline.config.reference > docs/configuration.md"""
    assert (ROOT / "docs/configuration.md").read_text("utf8") == page()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_names_only_files_that_exist(path: Path) -> None:
    text = path.read_text("utf8")
    made = {ROOT / path for path in re.findall(r"^New file `([\w./]+)`", text, re.MULTILINE)}  # by a recipe
    named = [(ROOT / code if code else path.parent / link) for code, link in PATHS.findall(text)]
    assert [path for path in named if not path.exists() and path not in made] == []


def test_the_keys_beside_those_of_other_systems_exist() -> None:
    text = (ROOT / "docs/coming-from.md").read_text("utf8")
    ours = "".join(re.findall(r"^\|[^|]*\|([^|]*)\|$", text, re.MULTILINE))
    keys = re.findall(r"^\| `([\w.*]+)` \|", page(), re.MULTILINE)
    known = {name for key in keys for name in (key, key.rpartition(".")[0])}
    named = re.findall(r"`([a-z_]+\.[\w.]+)", ours)
    assert len(named) > 50
    assert {name.replace("model.critic.", "model.policy.") for name in named} - known == set()
