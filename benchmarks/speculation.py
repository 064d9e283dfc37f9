"""Tokens per second with drafts against without: on text with the repetitions that real responses have.

Continued reviews, sums with worked steps, code; 1, 2, 4 and 16 rows in flight; greedy and sampled; drafters none,
ngram, learned, both, all on one model in one process. Sides are taken in turn in every repeat, on all cores; every
repeat has prompts of its own, so that no drafter has seen their responses. A figure is the median over repeats of the
ratio to no drafts. That tokens and log-probs are the same bits on every side is asserted, every time.

The learned head is trained first, on responses to other prompts, for --train seconds; the engines' estimates of costs
and acceptance are warmed up on other prompts too. Last, the same prompts once more with other noise, as in a second
epoch (same weights: the best case), where lookup finds the responses of the first.

`--run CONFIG` measures whole runs of a config instead, without drafts and with those of `--drafters`, in turn in every
repeat. Seconds are those of the steps after two that warm up; tokens per second are those of the engine while it
generates. Runs with and without drafts have the same commits, which is asserted. `--json` also has the share of right
guesses in every step: it shows whether the drafts follow the policy.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import arguments, measured_load, report, write_json
from benchmarks.overlap import WARM_UP_STEPS, Measured, measure
from pipeline.config.loading import load_config
from pipeline.driver.results import open_history
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.drafts.calibration import BRANCHES, make_student
from stages.engines.embedded.drafts.draft_head import KIND, LearnedDrafter
from stages.engines.embedded.drafts.drafters import Drafter, NgramDrafter
from stages.engines.embedded.drafts.speculation import Speculation
from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.runner import choose_kernels
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from stages.models.hf_files import Tokenizer, read_tokenizer
from stages.models.spec import RANDOM_TINY

CORES = os.cpu_count() or 1
CPU = torch.device("cpu")
MODEL, REVIEWS = Path("assets/smollm2-135m-instruct"), Path("assets/movie_reviews.tsv")
SIDES = ("none", "ngram", "learned", "both")
WORKLOADS = ("reviews", "sums", "code")
PARTS = 4
"""Parts of the training."""
FIRST_TEST = 1000
"""Prompts from this number on are measured, those before it are trained on."""
_TASKS = (
    "sort a list", "reverse a string", "count the vowels in a string", "compute the factorial of n",
    "find the largest number in a list", "check if a word is a palindrome", "merge two sorted lists",
    "remove duplicates from a list", "compute the fibonacci numbers", "sum the digits of a number",
    "count the words in a text", "find all primes below n", "transpose a matrix", "flatten a nested list",
    "search a sorted list", "convert celsius to fahrenheit", "rotate a list by k places", "compute a dot product",
    "find the median of a list", "check whether two words are anagrams",
)  # fmt: skip
_MANNERS = ("", " Add a docstring.", " Show an example.", " Do not use built-in functions.", " Explain each line.")


class Trained(LearnedDrafter):
    """Owns a head that several engines share, one at a time: it learns only when the benchmark says so."""

    def train(self) -> bool:
        return False

    def learn(self) -> bool:
        return super().train()


def make_prompt(workload: str, number: int, tokenizer: Tokenizer, reviews: Sequence[str]) -> tuple[int, ...]:
    """Return the `number`-th prompt of a workload."""
    rng = random.Random(number)
    if workload == "reviews":
        return tuple(tokenizer.encode(" ".join(reviews[number % len(reviews)].split()[:8])))
    if workload == "sums":
        a, b, c = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 9)
        text = f"Tom has {a} apples and buys {b} more each day for {c} days. How many has he then? Show each step."
    else:
        text = f"Write a Python function to {rng.choice(_TASKS)}. Name it task_{number}.{rng.choice(_MANNERS)}"
    return tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}]))


def run(engine: EmbeddedEngine, requests: Sequence[Request]) -> tuple[float, dict[int, tuple[bytes, bytes]]]:
    """Return the seconds, and every row's tokens and log-probs as bytes."""
    started = time.perf_counter()
    rows = {c.row: (c.tokens.astype(np.int32).tobytes(), c.logprobs.tobytes()) for c in engine.generate(requests)}
    return time.perf_counter() - started, rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 16], help="rows in flight")
    parser.add_argument("--modes", nargs="+", choices=("greedy", "sampled"), default=["greedy", "sampled"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--new", type=int, default=64, help="tokens of a response")
    parser.add_argument("--train", type=float, default=120.0, help="seconds of training the head")
    parser.add_argument("--train-rows", type=int, default=256, help="responses of each workload and mode to train on")
    parser.add_argument("--branches", type=int, default=BRANCHES, help="guesses of the head for each position")
    parser.add_argument("--run", type=Path, metavar="CONFIG", help="measure whole runs of this config")
    parser.add_argument("--drafters", nargs="+", choices=SIDES[1:], default=["ngram", "both"], help="those of --run")
    parser.add_argument("--change", nargs="+", default=[], metavar="KEY=VALUE", help="changes of --run's config")
    parser.set_defaults(repeats=5)


class Bench:
    """Owns one engine for each side."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = RANDOM_TINY if options.quick else str(MODEL)
        self.options, self.tokenizer = options, read_tokenizer(self.path)
        self.reviews = (
            [line.split("\t")[2] for line in REVIEWS.read_text("utf8").splitlines()] if REVIEWS.exists() else ["a"]
        )
        self.settings = EngineConfig(max_rows=max(options.rows), dtype=options.dtype)
        self.kernels = choose_kernels(self.settings, CPU)
        self.head = Trained(
            make_student(self.path, CPU),
            self.kernels,
            getattr(torch, options.dtype),
            options.branches,
        )
        self.engines: dict[str, EmbeddedEngine] = {}
        self._stack = ExitStack()
        for side in SIDES:
            drafters: list[Drafter] = []
            if side in ("ngram", "both"):
                drafters.append(NgramDrafter())
            if side in ("learned", "both"):
                drafters.append(self.head)
            engine = build_embedded(
                self.path, self.settings, max_seq=256, threads=CORES, device=CPU, drafters=drafters, eos_token_ids=[0]
            )
            assert isinstance(engine, EmbeddedEngine)
            self.engines[side] = self._stack.enter_context(closing(engine))

    def close(self) -> None:
        self._stack.close()

    def requests(self, workload: str, first: int, num: int, mode: str, step: int) -> list[Request]:
        sampling = SamplingConfig(self.options.new, self.options.new, temperature=float(mode == "sampled"))
        return [
            Request(i, 1, step, make_prompt(workload, first + i, self.tokenizer, self.reviews), 0, sampling)
            for i in range(num)
        ]

    def train(self) -> tuple[float, int]:
        """Generate responses to prompts of all workloads and train on them, part by part, as in the steps of a run: the
        head remembers only the last ones. Return the seconds and the steps of the training."""
        torch.set_num_threads(CORES)
        num, seconds, steps = -(-self.options.train_rows // PARTS), 0.0, 0
        for part in range(PARTS):
            for workload in WORKLOADS:
                for mode in self.options.modes:
                    run(self.engines["learned"], self.requests(workload, part * num, num, mode, 0))
            started, left = time.perf_counter(), self.options.train / PARTS
            while time.perf_counter() - started < left and self.head.learn():
                steps += 1
            seconds += time.perf_counter() - started
            self.kernels.end_threads()  # of this thread; idle ones would slow the engines'
        return seconds, steps

    def compare(self, num_rows: int, mode: str, epochs: int = 1) -> dict[str, dict[str, float]]:
        """Return, for each workload and in total, tokens per second without drafts and the ratios of the other
        sides. `epochs` 2: only the second pass over the same prompts counts."""
        for side in SIDES:  # settles the estimates for this many rows
            for workload in WORKLOADS:
                run(self.engines[side], self.requests(workload, 500, num_rows, mode, 1))
        rates: dict[str, dict[str, list[float]]] = {}
        for repeat in range(self.options.repeats):
            total = dict.fromkeys(SIDES, 0.0)
            for workload in WORKLOADS:
                first = FIRST_TEST + 50 * num_rows + repeat * num_rows + (500 if epochs > 1 else 0)
                seconds: dict[str, float] = {}
                for step in range(1, epochs + 1):
                    requests = self.requests(workload, first, num_rows, mode, step)
                    expected: dict[int, tuple[bytes, bytes]] | None = None
                    for side in SIDES[repeat % 4 :] + SIDES[: repeat % 4]:
                        seconds[side], rows = run(self.engines[side], requests)
                        expected = expected or rows
                        assert rows == expected, f"{side}: drafts changed the tokens of {workload}, {mode}"
                for side in SIDES:
                    total[side] += seconds[side]
                    rates.setdefault(workload, {}).setdefault(side, []).append(
                        num_rows * self.options.new / seconds[side]
                    )
            for side in SIDES:
                rates.setdefault("all", {}).setdefault(side, []).append(3 * num_rows * self.options.new / total[side])
        return {workload: summary(by_side) for workload, by_side in rates.items()}


def summary(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median speed without drafts, and the median ratio of every other side to it in the same repeat."""
    plain = rates["none"]
    ratios = {
        side: statistics.median(a / b for a, b in zip(rates[side], plain, strict=True))
        for side in SIDES
        if side != "none"
    }
    return {"none": statistics.median(plain), **ratios}


# ---- whole runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredRun:
    """One run's steps after the warm-up."""

    steps: Measured
    tokens: float
    busy_s: float
    """Tokens of a step that the engine sampled, and its seconds."""
    acceptance: list[float]
    """Right guesses / guesses of every step of the run; 0 without guesses."""
    gained: list[float]
    """Tokens per row and pass of every step of the run."""
    outputs: dict[str, str]
    """Address -> content of every commit."""


def measure_run(options: argparse.Namespace, drafter: str, name: str, runs: Path) -> MeasuredRun:
    changes = [*options.change, f"engine.embedded.speculation.drafter={drafter}", f"name={name}", f"runs_dir={runs}",
               "tracking={uri: null, report: false}", "cluster.dashboard=null"]  # fmt: skip
    config = load_config([options.run], changes)
    steps = measure(config)
    history = open_history(config)
    metrics = [history.read_step_metrics(step) for step in range(config.steps)]
    acceptance, gained = [], []
    for one in metrics:
        guesses = {kind: n for name, n in one.items() if (kind := name.removeprefix("generate/drafted/")) != name}
        right = sum(n * one[f"generate/acceptance/{kind}"] for kind, n in guesses.items())
        fed = sum(int(name.rpartition("/")[2]) * share for name, share in one.items() if "/draft_length/" in name)
        acceptance.append(right / sum(guesses.values()) if guesses else 0.0)
        gained.append(1 + fed * acceptance[-1])
    measured = metrics[WARM_UP_STEPS : config.steps - config.staleness]
    busy_s = [one["generate/busy_s"] for one in measured]
    tokens = [one["generate/busy_s"] * one["generate/tokens_per_busy_s"] for one in measured]
    outputs = {str(commit.address): commit.content for commit in history.ledger.list()}
    return MeasuredRun(steps, sum(tokens) / len(measured), sum(busy_s) / len(measured), acceptance, gained, outputs)


def compare_runs(options: argparse.Namespace) -> None:
    sides = ("none", *options.drafters)
    found: dict[str, list[MeasuredRun]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="stageline-speculation-") as folder:
        for repeat in range(options.repeats):
            first = repeat % len(sides)
            for side in sides[first:] + sides[:first]:
                one = measure_run(options, side, f"{side}-{repeat}", Path(folder))
                found[side].append(one)
                assert one.outputs == found[sides[first]][repeat].outputs, f"{side}: drafts changed the run"
                print(f"{side}: {one.steps.step_s:.3f} s a step", file=sys.stderr, flush=True)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for side, repeats in found.items():
        pairs = list(zip(repeats, found["none"], strict=True))
        of_side = {
            "step_s": statistics.median(one.steps.step_s for one in repeats),
            "cpu_s": statistics.median(one.steps.cpu_s for one in repeats),
            "generate_s": statistics.median(one.busy_s for one in repeats),
            "tokens_per_s": statistics.median(one.tokens / one.busy_s for one in repeats),
            "speedup_step": statistics.median(plain.steps.step_s / one.steps.step_s for one, plain in pairs),
            "speedup_cpu": statistics.median(plain.steps.cpu_s / one.steps.cpu_s for one, plain in pairs),
            "speedup_generate": statistics.median(plain.busy_s / one.busy_s for one, plain in pairs),
            "others": max(one.steps.others for one in repeats),
        }
        figures |= {f"{side}/{name}": value for name, value in of_side.items()}
        for step, (acceptance, gained) in enumerate(zip(repeats[0].acceptance, repeats[0].gained, strict=True)):
            figures |= {f"{side}/acceptance/{step}": acceptance, f"{side}/tokens_per_pass/{step}": gained}
        shown = ("step_s", "speedup_step", "cpu_s", "speedup_cpu", "generate_s", "speedup_generate", "tokens_per_s")
        rows.append((side, *(f"{of_side[name]:.3g}" for name in shown), f"{of_side['others']:.0%}"))
    columns = ("drafts", "s/step", "times", "CPU s/step", "times", "gen. s", "times", "tok/s", "others' load")
    report(f"runs of {options.run} with drafts", columns, rows, [f"{options.repeats} repeats, medians; {CORES} cores"])
    write_json(options.json, figures)


def main() -> None:
    options = arguments(__doc__ or "", add_options)
    if options.run is not None:
        compare_runs(options)
        return
    if options.quick:
        options.repeats, options.new, options.train, options.rows = 1, 16, 2.0, [1, 4]
        options.train_rows = 48
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    with closing(Bench(options)) as bench, measured_load() as load:
        figures["train_s"], figures["train_steps"] = bench.train()
        print(f"trained: {figures['train_s']:.0f} s, {figures['train_steps']:.0f} steps", file=sys.stderr, flush=True)
        cells = [(mode, num_rows, 1) for mode in options.modes for num_rows in options.rows]
        if "sampled" in options.modes:
            cells.append(("sampled", min(options.rows), 2))
        for mode, num_rows, epochs in cells:
            for workload, speeds in bench.compare(num_rows, mode, epochs).items():
                name = f"{mode}, {num_rows} rows" + (", second epoch" if epochs > 1 else "")
                rows.append((name, workload, f"{speeds['none']:.0f}", *(f"{speeds[side]:.2f}" for side in SIDES[1:])))
                print(*rows[-1], file=sys.stderr, flush=True)
                figures |= {f"{name}/{workload}/{side}": value for side, value in speeds.items()}
        notes = [f"{options.dtype}, {CORES} threads, {options.new} new tokens a row, median of {options.repeats}"]
        for side in SIDES[1:]:
            stats = bench.engines[side].stats()
            kinds = ", ".join(f"{k} {stats.accepted_tokens.get(k, 0)}/{n}" for k, n in stats.drafted_tokens.items())
            notes.append(f"{side}: accepted/drafted {kinds}; lengths {dict(sorted(stats.draft_lengths.items()))}")
        speculation = bench.engines["learned"].drafts
        assert isinstance(speculation, Speculation)
        acceptance, costs = speculation.acceptance(KIND), speculation.costs
        drafting = speculation.drafting[bench.head]
        notes.append(f"head: acceptance by position {[round(a, 2) for a in acceptance]}")
        notes.append(f"pass, ms by tokens: { {n: round(1000 * s, 1) for n, s in costs.curve.items()} }; "
                     f"each 1000 positions attended to {1e6 * costs.per_position:.2f} ms")  # fmt: skip
        notes.append(f"drafting a position, ms by rows: { {n: round(1000 * s, 2) for n, s in drafting.curve.items()} }")
    report(
        "drafts: tokens/s without, and times as fast with",
        ("rows in flight", "workload", "none, tok/s", *SIDES[1:]),
        rows,
        [*notes, f"others' load {load().others:.0%}; head trained {figures['train_s']:.0f} s beforehand"],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
