"""The images' recipes, which no test builds: their versions are the project's, and what they copy and call exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from stages.engines.remote.process import ENVIRONMENTS
from tests.support.paths import ROOT

FILES = sorted((ROOT / "slurm/container").glob("*.Dockerfile"))
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "WORKDIR"}
MAKEFILE = (ROOT / "Makefile").read_text("utf8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return (instruction, arguments), with continued lines joined."""
    lines = [line for line in file.read_text("utf8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined if line.strip())]


def of_kind(kind: str) -> list[str]:
    return [rest for file in FILES for word, rest in instructions(file) if word == kind]


def make_calls() -> list[list[str]]:
    """Return the arguments of each call of make."""
    commands = [command.strip() for run in of_kind("RUN") for command in run.split("&&")]
    return [shlex.split(command)[1:] for command in commands if command.startswith("make ")]


def pinned(variable: str) -> str:
    """Return the version that the Makefile pins."""
    (found,) = re.findall(rf"^{variable} [?:]= [\w-]+==([\w.]+)$", MAKEFILE, re.MULTILINE)
    return str(found)


def test_the_makefile_says_which_versions_are_installed() -> None:
    given = dict(argument.split("=", 1) for call in make_calls() for argument in call if "=" in argument)
    assert given == {
        "PYTHON": "python3.12",
        "TORCH": f"torch=={pinned('DEFAULT_TORCH')}",
        "VLLM": f"vllm=={pinned('VLLM')}",
        "TRTLLM": f"tensorrt-llm=={pinned('TRTLLM')}",
    }
    for kind, variable in (("vllm", "VLLM"), ("tensorrt_llm", "TRTLLM")):
        assert any(pinned(variable).startswith(f"{known}.") for known in ENVIRONMENTS[kind].versions)
    (python,) = re.findall(r">=(\d+\.\d+)", PROJECT["requires-python"])
    assert tuple(map(int, python.split("."))) <= (3, 12)


def test_every_base_has_a_version() -> None:
    stages = {name for base in of_kind("FROM") for name in re.findall(r" AS (\w+)$", base)}
    assert stages == {"vllm", "tensorrt_llm"}
    assert of_kind("ARG") == [f"STAGELINE=stageline:{PROJECT['version']}"]
    own, public = "${STAGELINE}", r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu24\.04"  # whose Python is 3.12
    for base in of_kind("FROM"):
        assert base.startswith(own) or re.fullmatch(public, base)
    readme = (ROOT / "slurm/README.md").read_text("utf8")
    assert set(re.findall(r"--tag [\w-]+:([\d.]+)", readme)) == {PROJECT["version"]}


def test_what_is_copied_and_called_exists() -> None:
    for rest in of_kind("COPY"):
        *sources, _ = rest.split()
        assert [source for source in sources if not (ROOT / source).exists()] == []
    targets = {call[0] for call in make_calls()}
    assert targets == {".venv/.installed/lock", "install", "engine-vllm", "engine-trtllm"}
    for target in targets:
        written = target.replace(".venv", "$(VENV)")
        assert re.search(rf"^{re.escape(written)}:", MAKEFILE, re.MULTILINE), target


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_layers_are_lean_and_the_recipe_says_what_was_tried(file: Path) -> None:
    assert "Never built." in file.read_text("utf8").partition("FROM")[0]
    for word, rest in instructions(file):
        assert word in KNOWN
        if "apt-get install" in rest:
            assert "--yes --no-install-recommends" in rest
            assert rest.startswith("apt-get update")
            assert rest.endswith("rm -rf /var/lib/apt/lists/*")


def test_neither_secrets_nor_results_get_into_an_image() -> None:
    ignored = set((ROOT / ".dockerignore").read_text("utf8").splitlines())
    assert {".git", ".venv", ".engines", "assets", "runs"} <= ignored
