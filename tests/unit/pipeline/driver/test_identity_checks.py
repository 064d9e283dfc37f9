"""A run records its identity when it starts. A continued run and its workers are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import pipeline.driver.preparation
from pipeline.config.identity import fingerprint, read_identity, write_identity
from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from pipeline.driver.preparation import NumericsWatch, check_identity, new_identity
from pipeline.errors import ConfigError
from pipeline.observe.journal import EventKind, Journal, read_events
from stages.models.hf_files import ByteTokenizer
from stages.prompts import PromptTable, tokenise
from storage.address import Address
from storage.commits import Commit, provenance_here
from storage.config import PromptsConfig
from storage.ledger import Ledger
from storage.prompts import PromptItem
from tests.support.paths import TINY

SOFTWARE = {"python": "3", "torch": "2.0"}


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of the installed software; a test may change them."""
    here = dict(SOFTWARE)
    monkeypatch.setattr(pipeline.driver.preparation, "software", lambda: dict(here))
    return here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model (only its files) and the directory of a run."""
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    return tmp_path


def load(folder: Path, *overrides: str) -> RunConfig:
    where = (f"runs_dir={folder}/runs", "name=tiny", f"model.path={folder}/model")
    return load_config([TINY], [*where, *overrides])


def prompts(text: str = "one") -> PromptTable:
    items = [PromptItem(text, None, {"answer": 1}), PromptItem("two", None, {})]
    return tokenise(items, ByteTokenizer(), PromptsConfig(url="x.jsonl", held_out=1), seed=0)


def ledger(folder: Path) -> Ledger:
    return Ledger(f"{folder}/runs/tiny/ledger")


def begin(folder: Path) -> None:
    config = load(folder)
    write_identity(config.run_dir, new_identity(config, prompts()).identity)


def test_what_has_not_changed_is_not_stated_again(folder: Path) -> None:
    begin(folder)
    again = check_identity(load(folder), prompts(), ledger(folder))
    assert again.identity == read_identity(folder / "runs" / "tiny")
    assert (again.changed, again.warnings) == ((), ())


def test_a_change_is_stated_and_said(folder: Path) -> None:
    begin(folder)
    again = check_identity(load(folder, "evaluate.every=4"), prompts(), ledger(folder))
    assert [s.changed for s in again.identity.statements] == [(), ("evaluate.every=4 (was 2)",)]
    assert len(again.identity.config_hashes) == 2
    assert again.changed == ("evaluate.every=4 (was 2)",)
    assert again.warnings == ()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", [None, b"other"])
def test_other_model_files_are_refused(folder: Path, file: str, change: bytes | None) -> None:
    begin(folder)
    (folder / "model" / "config.json").touch()
    if change is not None:
        (folder / "model" / file).write_bytes(change)
    else:
        (folder / "model" / "tokenizer.json").write_bytes(b"new")
        file = "tokenizer.json"
    with pytest.raises(ConfigError) as refused:
        check_identity(load(folder), prompts(), ledger(folder))
    assert refused.value.key == "model.path"
    assert f"not those that the run began with: {file}: " in str(refused.value)


def test_a_model_may_lie_elsewhere_if_it_is_the_same(folder: Path) -> None:
    begin(folder)
    elsewhere = f"model.reference_path={folder}/other"
    assert len(check_identity(load(folder, elsewhere), prompts(), ledger(folder)).changed) == 1
    (folder / "other" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ConfigError) as refused:
        check_identity(load(folder, elsewhere), prompts(), ledger(folder))
    assert refused.value.key == "model.reference_path"


def test_another_rubric_in_the_same_file_is_refused(folder: Path) -> None:
    """Half of the steps would be judged by another standard than the others."""
    rubric = folder / "rubric.txt"
    rubric.write_text("How kind is {response}?")
    args = f"{{url: 'http://h/v1', model: m, rubric_file: {rubric}, on_unparsed: 0}}"
    config = load(folder, f"evaluate.reward.parts={{judged: {{kind: judge, weight: 1.0, args: {args}}}}}")
    write_identity(config.run_dir, new_identity(config, prompts()).identity)
    assert check_identity(config, prompts(), ledger(folder)).changed == ()
    rubric.write_text("How short is {response}?")
    with pytest.raises(ConfigError, match="its files are not those that the run began with: rubric: ") as refused:
        check_identity(config, prompts(), ledger(folder))
    assert refused.value.key.endswith("judged.args.rubric_file")


def test_other_prompts_are_refused(folder: Path) -> None:
    begin(folder)
    with pytest.raises(ConfigError, match=r"^prompts.url: .*is not what .* began with"):
        check_identity(load(folder), prompts("three"), ledger(folder))


def test_other_software_is_refused_or_said_or_begun_anew_with(folder: Path, versions: dict[str, str]) -> None:
    begin(folder)
    versions["torch"] = "3.0"
    with pytest.raises(ConfigError) as refused:
        check_identity(load(folder), prompts(), ledger(folder))
    said = str(refused.value)
    assert said.startswith("cluster.same_numerics: given 'refuse'; ")
    assert "torch: 3.0 (was 2.0)" in said
    assert "python" not in said
    assert "cluster.same_numerics=warn" in said
    assert "--from-checkpoint" in said
    warned = check_identity(load(folder, "cluster.same_numerics=warn"), prompts(), ledger(folder))
    assert "torch: 3.0 (was 2.0)" in warned.warnings[-1]
    assert warned.identity.latest.software["torch"] == "3.0"
    anew = check_identity(load(folder), prompts(), ledger(folder), "resumed from checkpoint v2")
    assert (anew.identity.latest.anew, anew.identity.latest.why) == (True, "resumed from checkpoint v2")


def test_a_run_whose_identity_is_gone_must_at_least_be_of_this_config(folder: Path) -> None:
    config = load(folder)
    assert check_identity(config, prompts(), ledger(folder)).warnings == (), "nothing was committed: it starts now"
    digest = new_identity(config, prompts()).identity.latest.config_hash
    made = provenance_here(seed=0, config_hash=digest)
    ledger(folder).commit(Commit(Address("publish", 0), "a", None, 0, {}, made, 1.0))
    (warning,) = check_identity(config, prompts(), ledger(folder)).warnings
    assert "identity.json was missing" in warning
    with pytest.raises(ConfigError, match=f"is missing, and the commits are of another config .digest {digest}"):
        check_identity(load(folder, "seed=9"), prompts(), ledger(folder))


ITEMS = {"instructions": "avx2", **SOFTWARE}


class Workers:
    """Owns the watch over a run's workers, and its journal."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        config = load(folder, *overrides)
        self.run_dir = config.run_dir
        identity = read_identity(self.run_dir) or new_identity(config, prompts()).identity
        self.journal = Journal(self.run_dir / "events.jsonl")
        self.watch = NumericsWatch(config, identity, self.journal)

    def warnings(self) -> list[str | None]:
        return [e.detail for e in read_events(self.journal.path) if e.kind is EventKind.WARNED]


@pytest.fixture
def watch(folder: Path) -> Iterator[Callable[..., Workers]]:
    """Return what begins to watch with these overrides."""
    with ExitStack() as stack:

        def begin(*overrides: str) -> Workers:
            workers = Workers(folder, *overrides)
            stack.callback(workers.journal.close)
            return workers

        yield begin


def test_numerics_are_written_down_by_gang(watch: Callable[..., Workers]) -> None:
    """A gang that trains may have other processors than one that generates: no node of one runs on the other."""
    workers = watch()
    engine = ITEMS | {"instructions": "avx512f", "engine.kernels": "native"}
    workers.watch.on_worker_built(("train", 0), ITEMS)
    workers.watch.on_worker_built(("generate", 0), engine)
    workers.watch.on_worker_built(("generate", 1), engine)
    identity = read_identity(workers.run_dir)
    seen = [(n.gang, n.worker, n.fingerprint, n.items) for n in identity.numerics]
    assert seen == [
        ("train", "train-0", fingerprint(ITEMS), ITEMS),
        ("generate", "generate-0", fingerprint(engine), engine),
    ]
    assert workers.warnings() == []


def test_a_replica_with_other_numerics_is_refused(watch: Callable[..., Workers]) -> None:
    workers = watch()
    workers.watch.on_worker_built(("generate", 0), ITEMS)
    with pytest.raises(ConfigError) as refused:
        workers.watch.on_worker_built(("generate", 1), ITEMS | {"instructions": "avx512f"})
    said = str(refused.value)
    assert said.startswith("cluster.same_numerics: given 'refuse'; worker generate-1 computes with others")
    assert "instructions: avx512f (was avx2)" in said
    assert "torch" not in said


def test_or_said_once(watch: Callable[..., Workers]) -> None:
    workers = watch("cluster.same_numerics=warn")
    for index, instructions in enumerate(("avx2", "avx512f", "avx512f")):
        workers.watch.on_worker_built(("generate", index), ITEMS | {"instructions": instructions})
    (said,) = workers.warnings()
    assert said is not None
    assert "worker generate-1 computes with others than generate-0" in said
    identity = read_identity(workers.run_dir)
    assert len(identity.numerics) == 2


def test_a_resumed_run_on_another_machine_is_refused(watch: Callable[..., Workers]) -> None:
    watch().watch.on_worker_built(("train", 0), ITEMS)
    with pytest.raises(ConfigError, match=r"worker train-0 .*instructions: avx512f \(was avx2\)"):
        watch().watch.on_worker_built(("train", 0), ITEMS | {"instructions": "avx512f"})


def test_all_workers_have_the_drivers_software(watch: Callable[..., Workers]) -> None:
    with pytest.raises(ConfigError, match=r"than the driver has: torch: 9 \(was 2.0\)"):
        watch().watch.on_worker_built(("score", 0), ITEMS | {"torch": "9"})


def test_a_runtime_that_says_nothing_is_not_asked(watch: Callable[..., Workers]) -> None:
    workers = watch()
    workers.watch.on_worker_built(("train", 0), {})
    assert read_identity(workers.run_dir) is None
