"""PPO as a person writes it first, and one idea after the other added to it: seconds of a step of the same work.

SmolLM2-135M, 16 prompts of 16 tokens a step, sentences of reviews: a response ends at its full stop or after 96 tokens,
so lengths are uneven with a long tail. The reward takes 30 ms a row, as a judge that is asked in turn. Policy and
critic are trained whole. Every arm has both cores; each has all that the arms before it have:

    naive        `benchmarks/naive_ppo.py`
    engine       the same loop, with the embedded engine
    trainer      a synchronous run of ours in one process: packed micro-batches, selective recomputation; weights
                 through a folder on a disk
    refit        weights through memory, into the engine's own
    streaming    gangs of their own, four shards: a shard is scored while others are generated
    overlap      staleness 1; the reference works beside the policy's log-probs
    drafts       looked-up and learned drafts, where they pay
    migration    two replicas with a core each; the last rows of a step move to one of them
    plan         gangs, threads and shards as `stageline plan` chooses them, calibrated on two of the arms before
    TRL          TRL's PPOTrainer in an environment of its own (`--peer DIR`, `--no-peer`)

Runs draw the same tokens in every arm. Naive, engine and TRL get the prompts of the first run; naive and engine end
their rows where the run's ended, TRL's end by the same rule. Arms are taken in turn in every repeat. An arm's step is
the mean of its steps after the warm-up (naive, engine, TRL: their median), its figure the median over repeats, and its
factor over naive the median over repeats of the ratio in the same repeat.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.harness import arguments, measured_load, report, write_json
from benchmarks.ppo_step import MODEL, ROOT, TRL, Measured, peer_python, run_job
from benchmarks.small_model import small_model
from pipeline.cli.main import main as stageline
from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.driver.run import run
from storage.address import Address

WORKLOAD = ROOT / "benchmarks/ablation.yaml"
CORES = os.cpu_count() or 1
WARM_UP = 2
DTYPES = ("float32", "bfloat16")
MICRO_BATCH_ROWS = 8
"""Rows of a padded micro-batch of naive, engine and TRL; about the tokens of a packed one of ours."""
ROLES = ("generate", "score", "reference", "policy", "critic")


def placed(gangs: str, **roles: str) -> str:
    """Return the setting of the gangs (in YAML) and of the gang of each role; of roles that are not named: train."""
    where = ", ".join(f"{role}: {roles.get(role, 'train')}" for role in ROLES)
    return f"placement={{gangs: {gangs}, roles: {{{where}}}}}"


APART = {"generate": "generate", "score": "score"}
FOUR = "generate: {{threads: 1, workers: {}, concurrent_shards: {}}}, score: {{}}, reference: {{}}, "
TRAINER = "train: {{threads: {}, layout: {{recompute: selective}}}}"


@dataclass(frozen=True)
class Arm:
    """One idea. `changes` are added to those of the runs before, `placement` replaces theirs; none: not a run."""

    name: str
    pays: str
    """Where the idea pays, for a reader who sees that it gains nothing here."""
    placement: str = ""
    changes: tuple[str, ...] = ()
    planned: bool = False


ARMS = (
    Arm("naive", ""),
    Arm("engine", "wherever responses are sampled"),
    Arm(
        "trainer",
        "with uneven lengths, and where activations fill the memory",
        placed("{" + TRAINER.format(CORES) + "}", generate="train", score="train"),
        ("cluster.weights_dir={disk}",),
    ),
    Arm(
        "refit",
        "where weights are large against a step, or their folder is on another host",
        changes=("cluster.weights_dir=null",),
    ),
    Arm(
        "streaming",
        "where scoring takes long against generation and does not need its cores",
        placed(
            f"{{generate: {{threads: {CORES}, concurrent_shards: 4}}, score: {{}}, {TRAINER.format(CORES)}}}", **APART
        ),
        ("rollout.shards=4",),
    ),
    Arm(
        "overlap",
        "where generation and training own their devices, or leave some of them idle",
        placed(f"{{{FOUR.format(1, 4)}{TRAINER.format(CORES)}}}", reference="reference", **APART),
        ("staleness=1",),
    ),
    Arm(
        "drafts",
        "with few rows in flight (1.3 times at one sampled row, 2.2 at one greedy one)",
        changes=("engine.embedded.speculation.drafter=both",),
    ),
    Arm(
        "migration",
        "where replicas own their devices and a free one can take other work",
        placed(f"{{{FOUR.format(2, 2)}{TRAINER.format(CORES)}}}", reference="reference", **APART),
        ("cluster.migrate_rows_below=8",),
    ),
    Arm("plan", "where there are more devices to divide than two cores", planned=True),
)  # fmt: skip
QUICK_ARMS = ("naive", "engine", "trainer", "overlap")
CALIBRATING = ("refit", "overlap")
"""Arms whose runs the plan is calibrated on: stages alone on all cores, and beside one another."""


@dataclass
class Bench:
    """The inputs of all arms, and what the runs of a dtype have in common."""

    scratch: Path
    steps: int
    base: list[str]
    """Settings of all runs."""
    stop_token: int
    job: dict[str, Any] = field(default_factory=dict)
    """Prompts and lengths of the first run."""
    plan: Path | None = None

    def config(self, arm: Arm, dtype: str, repeat: int) -> RunConfig:
        """Return the config of a run: the settings of all runs up to this one."""
        runs = [each for each in ARMS[: ARMS.index(arm) + 1] if each.placement or each.changes]
        if arm.planned:
            assert self.plan is not None
            sources, changes = [self.plan], list[str]()
        else:
            sources = [WORKLOAD]
            placements = [each.placement for each in runs if each.placement]
            changes = [*self.base, f"model.dtype={dtype}", f"engine.dtype={dtype}", placements[-1]]
            changes += [change.format(disk=self.scratch / "weights") for each in runs for change in each.changes]
        named = [f"name={dtype}-{arm.name}-{repeat}", f"runs_dir={self.scratch / 'runs'}"]
        return load_config(sources, [*changes, *named])

    def measure(self, arm: Arm, dtype: str, repeat: int) -> Measured:
        if arm.name in ("naive", "engine"):
            program = [sys.executable, "-m", "benchmarks.naive_ppo"]
            return run_job(program, self.job | {"engine": arm.name == "engine"}, self.scratch, str(ROOT))
        if arm.planned and self.plan is None:
            self.make_plan(dtype, repeat)
        config = self.config(arm, dtype, repeat)
        with measured_load() as load:
            result = run(config, Console(file=StringIO()))
        ledger = open_history(config).ledger
        first, last = ledger.get(Address("publish", WARM_UP)), ledger.get(Address("publish", config.steps))
        stages = {stage: seconds / config.steps for stage, seconds in result.summary.stage_s.items()}
        if not self.job:
            self.job = self.job_of(config)
        return Measured((last.finished - first.finished) / (config.steps - WARM_UP), stages, load().others)

    def job_of(self, config: RunConfig) -> dict[str, Any]:
        """Return the work of a run, for trainers that are no runs of ours."""
        store = open_history(config).store
        rows = []
        for step in range(config.steps):
            rollout = store.read_step("generate", step, config.rollout.shards)
            width = int(rollout.prompt_lengths[0])
            rows.append((rollout.tokens[:, :width].tolist(), rollout.response_lengths.tolist()))
        return {
            "model": str(Path(config.model.path).absolute()),
            "dtype": config.model.dtype,
            "threads": CORES,
            "rows": rows,
            "prompts": rows[0][0],
            "suppressed": config.sampling.suppress_token_ids,
            "new": config.sampling.max_new_tokens,
            "stop_token": self.stop_token,
            "epochs": config.ppo.epochs,
            "lora_rank": 0,
            "micro_batch_rows": min(MICRO_BATCH_ROWS, config.rollout.rows),
            **config.reward.args,
            "steps": self.steps,
            "warm_up": WARM_UP,
        }

    def make_plan(self, dtype: str, repeat: int) -> None:
        """Calibrate on runs of this repeat, and plan the placement of the arm before the planned one."""
        calibration, plan = (str(self.scratch / f"{dtype}-{name}.yaml") for name in ("calibration", "plan"))
        file = self.scratch / f"{dtype}-before.yaml"
        before = next(arm for arm in ARMS if arm.name == "migration")
        file.write_text((self.scratch / "runs" / f"{dtype}-{before.name}-{repeat}" / "config.yaml").read_text("utf8"))
        runs = [str(self.scratch / "runs" / f"{dtype}-{name}-{repeat}") for name in CALIBRATING]
        new = [n for _, lengths in self.job["rows"] for n in lengths]
        spread = statistics.stdev(map(math.log, new))
        lengths = f"lognormal:{statistics.fmean(new)},{spread}" if spread else f"fixed:{new[0]}"
        commands = (
            ["calibrate", *runs, "--hardware", "1xcpu", "--write", calibration],
            ["plan", str(file), "name=planned", "--devices", f"{CORES}xcpu", "--calibration", calibration,
             "--lengths", lengths, "--write", plan],
        )  # fmt: skip
        with redirect_stdout(StringIO()) as printed:
            done = all(stageline(command) == 0 for command in commands)
        if not done:
            raise RuntimeError(f"no plan was found:\n{printed.getvalue()}")
        self.plan = Path(plan)


def sentence_model(folder: Path, source: Path) -> int:
    """Make a directory with the source's model in which the full stop is the end of sequence. Return its token."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    stop: int = AutoTokenizer.from_pretrained(source).encode(".")[0]
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((source / name).read_text("utf8")) if (source / name).exists() else {}
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": stop}), "utf8")
    return stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [arm.name for arm in ARMS]
    parser.add_argument("--peer", type=Path, default=ROOT / ".peers/trl", help="folder of TRL's environment")
    parser.add_argument("--no-peer", action="store_true", help="without TRL")
    steps = "steps measured in each run, after 2 that warm up; plan needs 2 or more"
    parser.add_argument("--steps", type=int, default=3, help=steps)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--arms", nargs="+", choices=names, default=names, help="these arms; plan needs those before it"
    )


def measure_all(options: argparse.Namespace, dtype: str, scratch: Path) -> tuple[dict[str, list[Measured]], Bench]:
    """Return the measurements of each side by repeat, in the order of the table."""
    arms = [arm for arm in ARMS if arm.name in (QUICK_ARMS if options.quick else options.arms)]
    steps, repeats = (1, 1) if options.quick else (options.steps, options.repeats)
    source = small_model(scratch / "small", ROOT / MODEL, blocks=2) if options.quick else ROOT / MODEL
    stop = sentence_model(scratch / "model", source)
    base = [f"model.path={scratch / 'model'}", f"steps={steps + WARM_UP}"]
    if options.quick:
        base += ["rollout.rows=4", "sampling.max_new_tokens=8", "engine.kv_budget_mb=64"]
    bench = Bench(scratch, steps, base, stop)
    python = None if options.no_peer or options.quick else peer_python(options.peer.resolve())
    runs = [arm for arm in arms if arm.name not in ("naive", "engine")]
    found: dict[str, list[Measured]] = {arm.name: [] for arm in arms}
    for repeat in range(repeats):
        for arm in [*runs, *(arm for arm in arms if arm not in runs)]:  # a run says what the others' rows are
            found[arm.name].append(bench.measure(arm, dtype, repeat))
            print(f"{dtype} {arm.name}: {found[arm.name][-1].step_s:.2f} s a step", file=sys.stderr, flush=True)
        if python is not None:
            found.setdefault("TRL", []).append(run_job([str(python), str(TRL)], bench.job, scratch))
            print(f"{dtype} TRL: {found['TRL'][-1].step_s:.2f} s a step", file=sys.stderr, flush=True)
    return found, bench


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    figures: dict[str, float] = {}
    rows, notes = list[tuple[str, ...]](), list[str]()
    for dtype in ("bfloat16",) if options.quick else options.dtypes:
        with tempfile.TemporaryDirectory(prefix="stageline-ablation-") as folder:
            found, bench = measure_all(options, dtype, Path(folder))
            if bench.plan is not None:
                placement = load_config([bench.plan], []).placement
                gangs = ", ".join(f"{n} {g.workers} x {g.threads}" for n, g in placement.gangs.items())
                notes.append(f"{dtype}, plan: {gangs}")
        new = [n for _, lengths in bench.job["rows"][WARM_UP:] for n in lengths]
        num_rows = len(bench.job["prompts"])
        first, before = next(iter(found)), float("nan")
        for side, repeats in found.items():
            step_s = statistics.median(m.step_s for m in repeats)
            rate = num_rows / step_s / CORES
            ratios = [base.step_s / m.step_s for base, m in zip(found[first], repeats, strict=True)]
            factor, gain = statistics.median(ratios), before / step_s
            before = step_s
            spread = f"{factor:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            load = max(m.others for m in repeats)
            rows.append((dtype, side, f"{step_s:.2f}", f"{rate:.2f}", spread,
                         "" if side == first or side == "TRL" else f"{gain:.2f}", f"{load:.0%}"))  # fmt: skip
            figures |= {
                f"{dtype}/{side}/step_s": step_s,
                f"{dtype}/{side}/samples_per_core_second": rate,
                f"{dtype}/{side}/over_{first}": factor,
                f"{dtype}/{side}/over_{first}/least": min(ratios),
                f"{dtype}/{side}/over_{first}/most": max(ratios),
                f"{dtype}/{side}/others_load": load,
            }
            figures |= {
                f"{dtype}/{side}/{stage}_s": statistics.median(m.stages[stage] for m in repeats)
                for stage in repeats[0].stages
            }
            pays = next((arm.pays for arm in ARMS if arm.name == side), "")
            if gain < 1.02 and pays and side != first:
                notes.append(f"{dtype}, {side} gains nothing here ({gain:.2f}); it pays {pays}")
        notes.append(
            f"{dtype}: responses of {statistics.fmean(new):.0f} tokens, median {statistics.median(new):.0f}, "
            f"longest {max(new)}"
        )
    report(
        f"ablation: {num_rows} rows a step, {CORES} cores",
        ("weights", "arm", "s/step", "samples / core-second", "x naive (spread)", "x arm before", "others' load"),
        rows,
        notes,
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
