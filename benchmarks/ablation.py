"""PPO as a person writes it first, and one idea after the other added to it: seconds of a step of the same work.

SmolLM2-135M, 16 prompts of 16 tokens a step, sentences of reviews: a response ends at its full stop or after 96 tokens,
so lengths are uneven with a long tail. The reward takes 30 ms a row, as a judge that is asked in turn. Policy and
critic are trained whole. Every arm has both cores. Each is one idea added to another arm, which the table names:

    naive        `benchmarks/naive_ppo.py`
    engine       the same loop, with the embedded engine
    trainer      a synchronous run of ours in one process: packed micro-batches, selective recomputation; weights
                 through a folder on a disk
    refit        weights through memory, into the engine's own
    reuse        the update starts from the forward passes of the log-probs and the values
    streaming    gangs of their own, four shards: a shard is scored while others are generated (not with reuse)
    overlap      staleness 1; generation, scores and the reference in gangs of their own, beside the training
    drafts       looked-up and learned drafts, where they pay
    replicas     two replicas of the engine with a core each, two shards (not with reuse)
    migration    the same, and rows move between them where the measured cost of a pass says that it pays
    plan         gangs, threads and staleness as `stageline plan` chooses them, calibrated on two other arms
    TRL          TRL's PPOTrainer in an environment of its own (`--peer DIR`, `--no-peer`)

Runs draw the same tokens in every arm. Naive, engine and TRL get the prompts of the first run; naive and engine end
their rows where the run's ended, TRL's end by the same rule. Arms are taken in turn in every repeat. An arm's step is
the mean of its steps after the warm-up (naive, engine, TRL: their median), its figure the median over repeats, and its
factors the medians over repeats of the ratio in the same repeat. The limit: the matrix products of a step at the rate
of a large one in the same run.
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
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.harness import arguments, gemm_gflops, measured_load, report, this_hardware, write_json
from benchmarks.ppo_step import MODEL, ROOT, TRL, Measured, peer_python, run_job
from benchmarks.small_model import small_model
from pipeline.cli.main import main as stageline
from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.driver.run import run
from stages.models.flops import forward_flops
from stages.models.spec import read_spec
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


TRAINER = f"train: {{threads: {CORES}, layout: {{recompute: selective}}}}"
GANGS = "{{generate: {{threads: {}, workers: {}, concurrent_shards: {}}}, score: {{}}, reference: {{}}, {}}}"
OWN = {"generate": "generate", "score": "score"}
APART = OWN | {"reference": "reference"}


@dataclass(frozen=True)
class Arm:
    """One idea, added to the arm `to`. Its `changes` are added to that arm's, and its `placement` replaces that arm's.
    An arm without either is not a run."""

    name: str
    to: str
    pays: str
    """Where the idea pays, for a reader who sees that it gains nothing here."""
    placement: str = ""
    changes: tuple[str, ...] = ()
    planned: bool = False


ARMS = (
    Arm("naive", "", ""),
    Arm("engine", "naive", "wherever responses are sampled"),
    Arm(
        "trainer",
        "engine",
        "with uneven lengths, and where activations fill the memory",
        placed(f"{{{TRAINER}}}"),
        ("cluster.weights_dir={disk}",),
    ),
    Arm(
        "refit",
        "trainer",
        "where weights are large against a step, or their folder is on another host",
        changes=("cluster.weights_dir=null",),
    ),
    Arm(
        "reuse",
        "refit",
        "where an update has one minibatch, and memory for its activations",
        changes=("model.reuse_forward=[policy, critic]",),
    ),
    Arm(
        "streaming",
        "refit",
        "where scoring takes long against generation and does not need its cores",
        placed(f"{{generate: {{threads: {CORES}, concurrent_shards: 4}}, score: {{}}, {TRAINER}}}", **OWN),
        ("rollout.shards=4",),
    ),
    Arm(
        "overlap",
        "reuse",
        "where generation and training own their devices, or leave some of them idle",
        placed(GANGS.format(1, 1, 1, TRAINER), **APART),
        ("staleness=1",),
    ),
    Arm(
        "drafts",
        "overlap",
        "with few rows in flight (1.3 times at one sampled row, 2.2 at one greedy one)",
        changes=("engine.embedded.speculation.drafter=both",),
    ),
    Arm(
        "replicas",
        "overlap",
        "where replicas own their devices: two on one memory read all weights twice",
        placed(GANGS.format(1, 2, 1, TRAINER), **APART),
        ("rollout.shards=2", "model.reuse_forward=[]"),
    ),
    Arm(
        "migration",
        "replicas",
        "where replicas own their devices, and rows end at very different lengths",
        changes=("cluster.migrate_rows=true",),
    ),
    Arm("plan", "overlap", "where there are more devices to divide than two cores", planned=True),
)
QUICK_ARMS = ("naive", "engine", "trainer", "overlap")
CALIBRATING = ("refit", "overlap")
"""Arms whose runs the plan is calibrated on: stages alone on all cores, and beside one another."""


def lineage(arm: Arm) -> list[Arm]:
    """Return the arms that an arm builds on, the first one first, and the arm itself."""
    before = [each for each in ARMS if each.name == arm.to]
    return [*lineage(before[0]), arm] if before else [arm]


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
    gflops: list[float] = field(default_factory=list)
    """Rate of a large matrix product on all cores, before each repeat."""

    def config(self, arm: Arm, dtype: str, repeat: int) -> RunConfig:
        """Return the config of a run: the settings of this arm and of all runs that it builds on."""
        runs = [each for each in lineage(arm) if each.placement or each.changes]
        if arm.planned:
            assert self.plan is not None
            sources, changes = [self.plan], list[str]()
        else:
            sources = [WORKLOAD]
            placements = [each.placement for each in runs if each.placement]
            changes = [*self.base, f"model.dtype={dtype}", f"engine.dtype={dtype}", placements[-1]]
            changes += [change.format(disk=self.scratch / "weights") for each in runs for change in each.changes]
        named = [f"name={dtype}-{arm.name}-{repeat}", f"runs_dir={self.scratch / 'runs'}"]
        config = load_config(sources, [*changes, *named])
        # Beside the last steps of an asynchronous run no later step is generated, so they are not measured.
        return replace(config, steps=WARM_UP + self.steps + config.staleness)

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
        first, last = (ledger.get(Address("publish", version)) for version in (WARM_UP, WARM_UP + self.steps))
        stages = {stage: seconds / config.steps for stage, seconds in result.summary.stage_s.items()}
        if not self.job:
            self.job = self.job_of(config)
        return Measured((last.finished - first.finished) / self.steps, stages, load().others)

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
        """Calibrate on runs of this repeat, and plan the placement of the arm that the planned one builds on."""
        calibration, plan = (str(self.scratch / f"{dtype}-{name}.yaml") for name in ("calibration", "plan"))
        file = self.scratch / f"{dtype}-before.yaml"
        before = next(arm.to for arm in ARMS if arm.planned)
        file.write_text((self.scratch / "runs" / f"{dtype}-{before}-{repeat}" / "config.yaml").read_text("utf8"))
        runs = [str(self.scratch / "runs" / f"{dtype}-{name}-{repeat}") for name in CALIBRATING]
        new = [n for _, lengths in self.job["rows"] for n in lengths]
        spread = statistics.stdev(map(math.log, new))
        lengths = f"lognormal:{statistics.fmean(new)},{spread}" if spread else f"fixed:{new[0]}"
        commands = (
            ["calibrate", *runs, "--hardware", f"1x{CORES}x{this_hardware()}", "--write", calibration],
            ["plan", str(file), "name=planned", "--devices", f"{CORES}x{this_hardware()}", "--calibration", calibration,
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


def least_seconds(job: dict[str, Any], gflops: float) -> float:
    """Return the seconds of a step's matrix products at the rate of a large one: a forward pass each of generation and
    the reference, and forward and backward passes of policy and critic, whose first ones give log-probs and values."""
    spec, measured = read_spec(job["model"]), [lengths for _, lengths in job["rows"][WARM_UP:]]
    prompts = [len(prompt) for prompt in job["prompts"]]
    flops = 0.0
    for lengths in measured:
        rows = [prompt + new for prompt, new in zip(prompts, lengths, strict=True)]
        for passes, outputs in ((5, spec.vocab_size), (3, 1)):
            squares = sum(n**2 for n in rows)
            flops += passes * forward_flops(
                spec, spec.num_layers, sum(rows), squares, outputs=outputs, num_outputs=sum(lengths)
            )
    return flops / len(measured) / gflops / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [arm.name for arm in ARMS]
    parser.add_argument("--peer", type=Path, default=ROOT / ".peers/trl", help="folder of TRL's environment")
    parser.add_argument("--no-peer", action="store_true", help="without TRL")
    parser.add_argument("--draw", type=Path, help="draw the figures of --json FILE as this picture; measure nothing")
    steps = "steps measured in each run, after 2 that warm up; plan needs 2 or more"
    parser.add_argument("--steps", type=int, default=3, help=steps)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--arms", nargs="+", choices=names, default=names, help="these arms; naive is one; plan needs refit and overlap"
    )


def measure_all(options: argparse.Namespace, dtype: str, scratch: Path) -> tuple[dict[str, list[Measured]], Bench]:
    """Return the measurements of each side by repeat, in the order of the table."""
    arms = [arm for arm in ARMS if arm.name in (QUICK_ARMS if options.quick else options.arms)]
    steps, repeats = (1, 1) if options.quick else (options.steps, options.repeats)
    source = small_model(scratch / "small", ROOT / MODEL, blocks=2) if options.quick else ROOT / MODEL
    stop = sentence_model(scratch / "model", source)
    base = [f"model.path={scratch / 'model'}"]
    if options.quick:
        base += ["rollout.rows=4", "sampling.max_new_tokens=8", "engine.kv_budget_mb=64"]
    bench = Bench(scratch, steps, base, stop)
    python = None if options.no_peer or options.quick else peer_python(options.peer.resolve())
    runs = [arm for arm in arms if arm.name not in ("naive", "engine")]
    for arm in runs:
        if not arm.planned:
            bench.config(arm, dtype, 0)  # refused before anything is measured
    found: dict[str, list[Measured]] = {arm.name: [] for arm in arms}
    for repeat in range(repeats):
        bench.gflops.append(gemm_gflops(CORES, getattr(torch, dtype)))
        for arm in [*runs, *(arm for arm in arms if arm not in runs)]:  # a run says what the others' rows are
            found[arm.name].append(bench.measure(arm, dtype, repeat))
            print(f"{dtype} {arm.name}: {found[arm.name][-1].step_s:.2f} s a step", file=sys.stderr, flush=True)
        if python is not None:
            found.setdefault("TRL", []).append(run_job([str(python), str(TRL)], bench.job, scratch))
            print(f"{dtype} TRL: {found['TRL'][-1].step_s:.2f} s a step", file=sys.stderr, flush=True)
    return found, bench


def ratios_of(slow: list[Measured], fast: list[Measured]) -> list[float]:
    """Return how many times as fast one side was as the other in each repeat."""
    return [base.step_s / m.step_s for base, m in zip(slow, fast, strict=True)]


def draw(figures: dict[str, float], dtype: str, path: Path) -> None:
    """Draw a bar of the step's seconds for every arm, with its factor over the first one, and the limit (if it was
    measured) as a line."""
    picture = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    seconds = {
        key.split("/")[1]: value
        for key, value in figures.items()
        if key.startswith(dtype + "/") and key.endswith("/step_s")
    }
    first = next(iter(ARMS)).name
    colours = ["tab:gray" if arm == "TRL" else "tab:blue" for arm in seconds]
    bars = axes.barh(list(seconds), list(seconds.values()), color=colours)
    factors = [figures.get(f"{dtype}/{arm}/over_{first}", 1.0) for arm in seconds]
    axes.bar_label(
        bars, [f"{s:.1f} s, {factor:.1f}x" for s, factor in zip(seconds.values(), factors, strict=True)], padding=3
    )
    if (least := figures.get(f"{dtype}/least_s")) is not None:
        axes.axvline(least, color="black", linestyle=":", label="matrix products at the rate of a large one")
        axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel="seconds of a step (factor over naive)", xlim=(0, 1.2 * max(seconds.values())))
    axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    picture.savefig(path, dpi=110)


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    if options.draw is not None:
        draw(json.loads(options.json.read_text("utf8"))["figures"], options.dtypes[-1], options.draw)
        return
    if "naive" not in options.arms or {"naive", "engine"}.issuperset(options.arms):
        raise SystemExit(
            "--arms: needs naive, which the factors refer to, and a run, which gives the prompts (refit, say)"
        )
    figures: dict[str, float] = {}
    rows, notes = list[tuple[str, ...]](), list[str]()
    for dtype in ("bfloat16",) if options.quick else options.dtypes:
        with tempfile.TemporaryDirectory(prefix="stageline-ablation-") as folder:
            found, bench = measure_all(options, dtype, Path(folder))
            least = least_seconds(bench.job, statistics.median(bench.gflops))
            if bench.plan is not None:
                placement = load_config([bench.plan], []).placement
                gangs = ", ".join(f"{n} {g.workers} x {g.threads}" for n, g in placement.gangs.items())
                notes.append(f"{dtype}, plan: {gangs}")
        new = [n for _, lengths in bench.job["rows"][WARM_UP:] for n in lengths]
        num_rows = len(bench.job["prompts"])
        first, base = next(iter(found)), {arm.name: arm.to for arm in ARMS}
        figures |= {f"{dtype}/gemm_gflops": statistics.median(bench.gflops), f"{dtype}/least_s": least}
        notes.append(
            f"{dtype}: {figures[f'{dtype}/gemm_gflops']:.0f} GFLOP/s of a large product; a step's take {least:.2f} s"
        )
        for side, repeats in found.items():
            step_s = statistics.median(m.step_s for m in repeats)
            rate = num_rows / step_s / CORES
            ratios = ratios_of(found[first], repeats)
            factor, to = statistics.median(ratios), base.get(side, "")
            gain = statistics.median(ratios_of(found[to], repeats)) if to in found else math.nan
            spread = f"{factor:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            load = max(m.others for m in repeats)
            over = f"{gain:.2f} x {to}" if to in found else ""
            rows.append(
                (dtype, side, f"{step_s:.2f}", f"{rate:.2f}", spread, over, f"{least / step_s:.0%}", f"{load:.0%}")
            )
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
            if gain < 1.02:
                notes.append(f"{dtype}, {side} gains nothing here ({gain:.2f} x {to}); it pays {pays}")
        notes.append(
            f"{dtype}: responses of {statistics.fmean(new):.0f} tokens, median {statistics.median(new):.0f}, "
            f"longest {max(new)}"
        )
    report(
        f"ablation: {num_rows} rows a step, {CORES} cores",
        (
            "weights",
            "arm",
            "s/step",
            "samples / core-second",
            "x naive (spread)",
            "x the arm that it adds to",
            "of the limit",
            "others' load",
        ),
        rows,
        notes,
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
