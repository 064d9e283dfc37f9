"""Versions of installed packages, read from their metadata: no package is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

SOFTWARE = ("numpy", "torch", "megatron-core", "triton")
"""Packages that the bits depend on, beside Python itself."""


def software() -> dict[str, str]:
    """Return the installed versions of the software that the bits depend on."""
    return {"python": platform.python_version()} | installed_versions(SOFTWARE)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages; `not installed` for one that is not."""
    return {package: _installed(package) for package in packages}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
