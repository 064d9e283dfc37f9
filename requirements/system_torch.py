"""Check the torch that this interpreter has already (`make install TORCH=system`): it must be of a version that
pyproject.toml allows. Usage: `python system_torch.py pyproject.toml`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import torch


def main(pyproject: Path) -> str | None:
    """Return the reason why this torch cannot be used, or None."""
    dependencies = tomllib.loads(pyproject.read_text("utf8"))["project"]["dependencies"]
    (needed,) = (one for one in dependencies if re.match(r"torch\b", one))
    least, limit = (_release(bound) for bound in re.findall(r"[\d.]+", needed))
    if least <= _release(torch.__version__) < limit:
        return None
    need = f"Stageline needs {needed}: install such a one, or leave TORCH out"
    return f"{sys.executable} has torch {torch.__version__}, {need}"


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor version: (2, 13) of "2.13.0+cu130"."""
    return tuple(int(part) for part in version.split(".")[:2])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
