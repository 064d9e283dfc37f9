"""The doctor's first test: the installed packages. The test does not import the packages, so it can report a missing
package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from pipeline.doctor.runner import DoctorSettings, Fault, Finding

OPTIONAL = (
    "transformer_engine",
    "apex",
    "flash-attn",
    "triton",
    "torchao",
    "vllm",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)
"""Packages that other libraries use if they are installed. The report lists their versions."""


def packages(settings: DoctorSettings) -> Finding:
    """Test that the required packages are installed, in the versions that Stageline needs."""
    wrong, installed = [], {}
    for text in requires("stageline") or []:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            installed[wanted.name] = version(wanted.name)
        except PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(installed[wanted.name], prereleases=True):
            wrong.append(f"{wanted.name} is {installed[wanted.name]}, needs {wanted.specifier}")
    if wrong:
        raise Fault("; ".join(wrong), "run `make install` in the clone, or install these versions", versions=installed)
    optional = {name: _version_or_none(name) for name in OPTIONAL}
    return Finding(
        f"{len(installed)} packages, torch {installed['torch']}", {"versions": installed, "optional": optional}
    )


def _version_or_none(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
