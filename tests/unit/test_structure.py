"""Rules of structure that import-linter does not check."""

from __future__ import annotations

import ast
from collections import Counter

import grimp

from tests.support.paths import ROOT

FILES = sorted(path for package in ("pipeline", "stages", "storage") for path in (ROOT / package).rglob("*.py"))


def test_imports_go_round_in_no_circle() -> None:
    """The contracts of pyproject.toml order folders; this holds for every file."""
    graph = grimp.build_graph("pipeline", "stages", "storage", cache_dir=None)
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


def test_no_two_classes_share_a_name() -> None:
    """One name per thing: a reader who searches for a class finds one. Private ones are their file's own affair."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text("utf8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their file names alone: of two that are alike, one is not collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []
