"""Versions of installed packages. They are read from the packages' metadata, so no package is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

SOFTWARE = ("numpy", "torch", "megatron-core", "triton")
"""Packages whose versions may change the last bits of results. Python's version may change them too."""


def software() -> dict[str, str]:
    """Return the installed versions of Python and of the packages in `SOFTWARE`."""
    return {"python": platform.python_version()} | installed_versions(SOFTWARE)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package, or `not installed`."""
    return {package: _installed(package) for package in packages}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
