"""The cost of a score in a sandbox: rows of reasoning-gym's `countdown`, scored in this process and in the sandbox.

    numbers   answers that cannot run code when they are evaluated: they share one fork
    calls     answers that could (a name with a call): each has a fork of its own

The physical limit of `calls` is a fork that ends at once, of a process that has loaded the same scorer only.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.harness import arguments, measured_load, report, write_json
from stages.rewards.protocol import Sample
from stages.rewards.reasoning import ReasoningReward, load_problems
from stages.rewards.reasoning_tasks import TaskScorer
from storage.config import PromptsConfig

TASK = "reasoning-gym:countdown?size=64&seed=1&instruction=tags"
FORKS = """
import os, statistics, time
from stages.rewards.reasoning_tasks import TaskScorer
TaskScorer("tags")
found = []
for _ in range(41):
    start = time.perf_counter()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    found.append(time.perf_counter() - start)
print(1e3 * statistics.median(found))
"""
ANSWERS = {"numbers": "<answer>3*(4+5)-2</answer>", "calls": "<answer>max(3, 4)+abs(5)</answer>"}


def per_row_ms(work: Callable[[], object], rows: int, repeats: int) -> float:
    """Return the median of some repeats, in milliseconds a row."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append((time.perf_counter() - start) / rows * 1e3)
    return statistics.median(found)


def fork_ms() -> float:
    """Return the median milliseconds from a fork of a process with the scorer to the child's end."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    options = arguments(__doc__ or "")
    rows, repeats = (8, 3) if options.quick else (64, max(options.repeats, 9))
    items = load_problems(PromptsConfig(url=TASK))[:rows]
    figures: dict[str, float] = {}
    table: list[tuple[str, ...]] = []
    direct, confined = TaskScorer("tags"), ReasoningReward()
    try:
        with measured_load() as load:
            figures["fork_ms"] = fork_ms()
            for name, answer in ANSWERS.items():
                samples = [Sample(item.text or "", answer, extra=item.extra, row=row) for row, item in enumerate(items)]

                def here(samples: list[Sample] = samples) -> None:
                    for sample in samples:
                        direct.prepare({"response": sample.response, "problem": sample.extra})()

                def there(samples: list[Sample] = samples) -> None:
                    confined(samples)

                there()
                found = {"here": per_row_ms(here, rows, repeats), "sandbox": per_row_ms(there, rows, repeats)}
                figures |= {f"{name}/{side}_ms": value for side, value in found.items()}
                table.append((name, *(f"{value:.2f}" for value in found.values())))
    finally:
        confined.close()
    notes = [f"a fork that ends at once takes {figures['fork_ms']:.2f} ms; others' load {load().others:.0%}"]
    report("Milliseconds a row of countdown", ("answers", "in this process", "in the sandbox"), table, notes)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
