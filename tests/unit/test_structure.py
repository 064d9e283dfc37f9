"""The house stays tidy: no file, class or function outgrows a reading, and names are the field's.

A file that would be worse for being cut says so in its docstring, with the words "Longer than usual because".
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from tests.support.paths import ROOT

FILES = sorted(path for package in ("pipeline", "stages", "storage") for path in (ROOT / package).rglob("*.py"))
KERNELS = sorted((ROOT / "stages").rglob("*.[ch]"))
MOST_LINES = {"file": 400, "class": 300, "function": 60}
EXCUSE = "Longer than usual because"

RETIRED = {
    "lot": "restart unit",
    "late": "abandoned",
    "told": "reported",
    "guests": "incoming rows",
    "crew": "rank processes",
    "vacate": "release_slot",
    "bury": "reap",
    "pupil": "student",
    "room": "workspace, buffers, capacity",
    "flying": "running",
    "apart": "independent, separate",
    "speaks": "is_output_rank",
}
"""Words that were names here -> what the field calls it. Whole words of an identifier; `lines` of text are fine."""


def lengths(path: Path) -> Iterator[tuple[str, int, str]]:
    """(kind, lines, name) of a file and of every class and function in it."""
    text = path.read_text("utf8")
    name = path.relative_to(ROOT).as_posix()
    yield "file", text.count("\n"), name
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            assert node.end_lineno is not None
            yield kind, node.end_lineno - node.lineno + 1, f"{name}: {node.name}"


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name that a file gives or uses as one of its own: definitions, arguments, variables, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def words(identifier: str) -> set[str]:
    """`_StaticBuffers` -> {static, buffers, buffer}: a plural counts as both."""
    found = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}
    return found | {word.removesuffix("s") for word in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_outgrows_a_reading(path: Path) -> None:
    if EXCUSE in " ".join((ast.get_docstring(ast.parse(path.read_text("utf8"))) or "").split()):
        return
    assert [(kind, num, name) for kind, num, name in lengths(path) if num > MOST_LINES[kind]] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_are_the_fields(path: Path) -> None:
    used = set(identifiers(ast.parse(path.read_text("utf8"))))
    assert {name: RETIRED.keys() & words(name) for name in used if RETIRED.keys() & words(name)} == {}
    assert "Place" not in used  # a place in a parallel layout is a `ParallelRank`; other places are fine


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_names_of_kernels_are_the_fields(path: Path) -> None:
    """C has no syntax tree here: every word outside comments and strings."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"", " ", path.read_text("utf8"), flags=re.DOTALL)
    used = set(re.findall(r"[A-Za-z_]\w*", code))
    assert {name: RETIRED.keys() & words(name) for name in used if RETIRED.keys() & words(name)} == {}


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
