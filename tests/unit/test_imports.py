"""Heavy libraries have one place each, and `stageline --help` waits for none of them.

That imports run one way is for the contracts in pyproject.toml, which `make lint` checks; here, that they miss nothing.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from tests.support.paths import ROOT, SMOLLM2

PACKAGES = ("pipeline", "stages", "storage")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

ONLY_IN = {
    "megatron": "stages/models",
    "mlflow": "pipeline/observe/mlflow_writer.py",
    "matplotlib": "pipeline/observe/plots.py",
    "tensorboard": "pipeline/observe/sinks.py",
    "wandb": "pipeline/observe/sinks.py",
    "gguf": "stages/models/assets.py",
    "triton": "stages/engines/embedded/kernels/cuda/triton_kernels.py",
    "vaderSentiment": "stages/rewards",
    "reasoning_gym": "stages/rewards/reasoning_tasks.py",
    "bokeh": "pipeline/driver/dashboard.py",
    "tornado": "pipeline/driver",
}
"""Library -> the one file or folder that imports it."""

HEAVY = (
    "torch",
    "triton",
    "megatron",
    "mlflow",
    "matplotlib",
    "dask",
    "distributed",
    "transformers",
    "zarr",
    "pyarrow",
)


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of everything imported in a file, at whatever depth, by statement or by `import_module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.partition(".")[0]


@functools.cache
def imported_by(path: Path) -> frozenset[str]:
    return frozenset(imported(ast.parse(path.read_text("utf8"))))


def importers(library: str) -> set[str]:
    """Files of the three packages, relative to the root, that import a library."""
    return {path.relative_to(ROOT).as_posix() for path in FILES if library in imported_by(path)}


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_a_heavy_library_is_imported_in_its_one_place(library: str) -> None:
    place = ONLY_IN[library]
    found = importers(library)
    assert found, f"nothing imports {library}: is this test looking in the right place?"
    assert {path for path in found if path != place and not path.startswith(place + "/")} == set()


def test_import_contracts_see_every_file() -> None:
    """A folder without __init__.py would be invisible to them, and could import whatever it likes."""
    seen = grimp.build_graph(*PACKAGES, cache_dir=None).modules
    expected = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in FILES}
    assert {name.removesuffix(".__init__") for name in expected} == seen


def test_every_stage_file_is_in_the_independence_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["tool"]["importlinter"]["contracts"]
    (independent,) = (contract["modules"] for contract in contracts if contract["type"] == "independence")
    helpers = {"stages.__init__"}
    files = {f"stages.{path.stem}" for path in (ROOT / "stages").glob("*.py")}
    assert set(independent) == files - helpers


def test_help_waits_for_no_heavy_library() -> None:
    imports = "import contextlib\nfrom pipeline.cli.main import main"
    code = f"{imports}\nwith contextlib.suppress(SystemExit):\n    main(['--help'])"
    assert modules_after(code) & set(HEAVY) == set()


def test_check_and_inspect_answer_without_loading_what_only_runs_need() -> None:
    check = "from pipeline.cli.main import main\nassert main(['check', 'conf/run/tiny.yaml']) == 0"
    slow = {"torch", "transformers", "megatron", "dask", "distributed", "mlflow", "matplotlib"}
    assert modules_after(check) & (slow | {"pandas", "xarray", "zarr"}) == set()
    read = {"pandas", "xarray", "pyarrow"}
    assert modules_after("import pipeline.cli.inspect_step, pipeline.cli.report") & (slow | read) == set()
    assert modules_after("import pipeline.cli.status") & (slow | read | {"zarr"}) == set()


@pytest.mark.smollm2
def test_a_prompt_is_tokenised_without_torch() -> None:
    read = f"from stages.models.hf_files import read_tokenizer\nread_tokenizer({str(SMOLLM2)!r}).encode('a')"
    assert modules_after(read) & {"torch", "transformers"} == set()


def test_storage_loads_without_torch_and_dask() -> None:
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in FILES]
    storage = [name.removesuffix(".__init__") for name in names if name.startswith("storage")]
    assert modules_after(f"import {', '.join(storage)}") & {"torch", "dask", "distributed"} == set()


def test_who_reads_a_run_waits_for_no_torch() -> None:
    assert modules_after("import stageline") & {"torch", "transformers", "megatron", "dask", "distributed"} == set()


def test_the_scheduler_side_loads_without_torch() -> None:
    """Dask's scheduler process unpickles tasks, so it imports these."""
    assert (
        modules_after("import pipeline.workers.entry, pipeline.workers.messages, pipeline.graph.graph")
        & {"torch", "megatron"}
        == set()
    )


def test_a_driver_starts_without_the_trainers_libraries() -> None:
    """Its workers' forkserver imports them, at the same time; MLflow is for a process of its own."""
    found = modules_after("import pipeline.driver.run, pipeline.observe.plots, pipeline.observe.tracking")
    assert {"torch", "megatron", "transformers", "mlflow"} & found == set()
