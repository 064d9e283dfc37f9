"""The command line: `stageline run | resume | submit | …` (see `COMMANDS`).

Exit codes: 0 done, 2 bad input (or `check` or `doctor` found faults), 3 a stage or the storage failed, 4 a worker's
driver disappeared, 75 a job ended early, 130 interrupted (3, 75, 130: resumable).

Each command is a function of `options` that returns the exit code. Its module is imported when the command is called,
so that `stageline --help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

_EXIT_CODES = (
    "exit codes: 0 done, 2 bad input (nothing was started) or `check` found faults in a run, 3 a stage or the storage "
    "failed, 4 a worker's driver disappeared, 75 a job ended early, 130 interrupted (3, 75, 130: resumable)"
)


@dataclass(frozen=True)
class Command:
    """The function, the help text and the arguments of a command."""

    function: str
    """`module:function`. If only a module is given, its function `command` is called."""
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # When Megatron is imported, it warns that Transformer Engine and Apex are missing. Only its warnings are hidden.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    options = _parse(arguments)
    module, _, function = COMMANDS[options.command].function.partition(":")
    command = getattr(importlib.import_module(module), function or "command")
    run_command = importlib.import_module("pipeline.cli.answers").run_command
    code: int = run_command(command, options)
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments. Changes (key=value) may stand on both sides of an option. argparse alone would refuse them
    there."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    taken = next((getattr(options, name) for name in ("changes", "sources", "more") if hasattr(options, name)), None)
    if rest and (taken is None or any(text.startswith("-") for text in rest)):
        hint = "" if taken is None else " (settings of a config have no dashes: key=value)"
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if taken is not None:
        taken += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stageline",
        description="RLHF-PPO as a workflow DAG: every stage a node, staleness an edge, every output an open data set.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('stageline')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, description=command.help))
    return parser


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="CONFIG|key=value",
        help="YAML files, merged in the order given, then key=value changes",
    )


def _run_here(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="move an earlier run of the same name aside, also one with committed updates; asks first",
    )
    parser.add_argument("--yes", action="store_true", help="with --overwrite: do not ask")
    _json_lines(parser)


def _json_lines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json-lines",
        action="store_true",
        help="print one JSON object per line for programs (docs/running.md), no tables",
    )


def _resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="the run's directory, for example runs/demo")
    parser.add_argument(
        "changes",
        nargs="*",
        default=[],  # without it, argparse says that key=value is required too
        metavar="key=value",
        help="settings to change; docs/running.md lists those that may change",
    )
    parser.add_argument(
        "--from-checkpoint",
        action="store_true",
        help="archive the outputs committed after the newest usable checkpoint, and compute them again on this machine",
    )
    _json_lines(parser)


def _worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="?", metavar="RUN", help="the run's directory, as this host sees it")
    parser.add_argument("--scheduler-file", metavar="FILE", help="instead of RUN: the file that the driver wrote")
    parser.add_argument("--gang", required=True, metavar="NAME", help="a gang of `placement.gangs`")
    parser.add_argument("--index", required=True, type=int, help="its rank or replica, from 0")
    parser.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface (default: that of the config, or of the route to the driver)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for the driver (default 300)",
    )


def _submit(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the script without submitting it")


def _sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="CONFIG|key=value,value",
        help="as for `run`; settings with several values make one run per combination",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the runs without starting them")
    parser.add_argument(
        "--here", action="store_true", help="run them one after the other on this host, even if there is Slurm"
    )
    parser.add_argument("--at-once", type=int, metavar="N", help="with Slurm: most runs that are active at once")


def _may_requeue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN")
    parser.add_argument("--job", required=True, metavar="ID", help="Slurm's number of the job")
    parser.add_argument(
        "--restart", required=True, type=int, metavar="N", help="number of requeues before this start of the job"
    )
    parser.add_argument("--because", required=True, metavar="TEXT", help="why it ended, if no reason is recorded yet")
    parser.add_argument("--lost", action="store_true", help="its driver, workers or batch node were lost")
    parser.add_argument(
        "--restarts", required=True, type=int, metavar="N", help="maximum number of starts of the job that may be lost"
    )
    parser.add_argument(
        "--without-progress", required=True, type=int, metavar="N", help="most requeues in a row without a commit"
    )


def _status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="?", metavar="RUN", help="default: every run in --runs-dir")
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="default: runs")


def _cancel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN")


def _logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN")
    parser.add_argument("--gang", metavar="NAME", help="show the output of this gang's workers; default: the job's")
    parser.add_argument("--index", type=int, help="show one worker only: its rank, or number of the replica")
    parser.add_argument("--lines", type=int, default=20, help="number of lines from the end of each file (default 20)")
    parser.add_argument("--follow", action="store_true", help="keep printing new lines until Ctrl-C")


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="CONFIG|RUN", help="a config file, or a run's directory")
    text = "more files and changes, as for `run`"
    parser.add_argument("more", nargs="*", default=[], metavar="CONFIG|key=value", help=text)
    parser.add_argument(
        "--as",
        dest="cluster",
        metavar="NODESxGPUSxHARDWARE",
        help="check the config against a cluster that is not here, as 16x8xH100-80 (kinds: conf/hardware)",
    )
    parser.add_argument(
        "--no-reward",
        dest="try_reward",
        action="store_false",
        help="do not try the reward on a few made-up responses (reward models and judges are never tried)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also run a rank of each pipeline stage without GPUs and numbers; print its memory and its collectives",
    )


def _simulate(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument(
        "--hardware",
        required=True,
        metavar="NODESxGPUSxHARDWARE",
        help="the cluster, as for `check --as`: 16x8xH100-80",
    )
    _prediction(parser)
    parser.add_argument("--stragglers", metavar="SHARE:FACTOR", help="0.05:3: one node in 20 takes 3 times as long")
    parser.add_argument("--failures-per-hour", type=float, metavar="N", help="lose a random worker N times an hour")
    parser.add_argument("--rebuild-s", type=float, metavar="SECONDS", help="until a lost worker is back (default 300)")
    parser.add_argument("--timeline", metavar="FILE.png", help="draw the nodes of every worker over time")
    parser.add_argument("--trace-file", metavar="FILE.json", help="write them as a trace for ui.perfetto.dev")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="*", metavar="CONFIG|key=value", help="as for `run`; with --from: changes of the run's config"
    )
    parser.add_argument(
        "--from",
        dest="from_run",
        metavar="RUN",
        help="plan with a run's config, lengths and measured speeds (on the hardware that it ran on)",
    )
    parser.add_argument(
        "--devices",
        required=True,
        metavar="DEVICESxHARDWARE",
        help="devices to place the run on: 64xH100-80, or the cores of one node: 2xcpu",
    )
    parser.add_argument("--nodes-of", type=int, metavar="N", help="devices to use of each node (default: all)")
    _prediction(parser)
    parser.add_argument(
        "--objective",
        choices=("step_time", "samples_per_device_hour", "time_to_samples"),
        default="step_time",
        help="shortest step (default), most samples per device and hour, or shortest time to --samples",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="samples that the run needs at a staleness of 0, for time_to_samples"
    )
    parser.add_argument(
        "--staleness-price",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="0.05: each version of staleness needs 5 %% more samples (default 0)",
    )
    parser.add_argument("--write", metavar="FILE.yaml", help="write the best plan as a config for run and submit")


def _prediction(parser: argparse.ArgumentParser) -> None:
    """Add the options on which predicted times depend."""
    parser.add_argument(
        "--calibration", metavar="FILE", help="measured speeds, from `stageline calibrate` (default: assumed ones)"
    )
    parser.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help="responses' tokens, fixed:256 or lognormal:MEAN,SIGMA (default: the longest, sampling.max_new_tokens)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is random (default 0)")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="where runs would be stored (default: runs)")
    parser.add_argument("--out", default=".", metavar="DIR", help="where the two reports go (default: here)")
    parser.add_argument("--model", default="random:tiny", help="model of the tests that compute (default: random:tiny)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of a process (default: half)")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="KIND=PYTHON",
        help="also test vllm or tensorrt_llm in this environment (default: those that `make engine-...` made here)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest time of a test's processes (default: 600)",
    )
    parser.add_argument("--until", metavar="TEST", help="the last test (default: all)")
    parser.add_argument("--submit", metavar="CONFIG", help="test every node that this config asks Slurm for")
    parser.add_argument("more", nargs="*", metavar="key=value", help="with --submit: changes of the config")
    parser.add_argument("--dry-run", action="store_true", help="with --submit: print the script, and submit nothing")


def _calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="RUN",
        help="runs on the machine: more kinds of runs tell more; with --step-seconds a CONFIG, as for `run`",
    )
    parser.add_argument(
        "--hardware",
        required=True,
        metavar="NODESxGPUSxHARDWARE",
        help="what they ran on, as 1x8xH100-80 or 1xcpu (kinds: conf/hardware, or the path of a YAML file)",
    )
    parser.add_argument(
        "--step-seconds", type=float, metavar="S", help="a published step time of the config, where there is no run"
    )
    parser.add_argument("--lengths", metavar="KIND:NUMBERS", help="with --step-seconds: lengths, as for `simulate`")
    parser.add_argument("--write", metavar="FILE.yaml", help="write the calibration, for `simulate` and `plan`")


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN")
    parser.add_argument("--step", type=int, help="default: the last step that has rows")
    parser.add_argument("--rows", type=int, default=10, help="how many rows to show (default 10)")


def _dashboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN")
    parser.add_argument("--port", type=int, help="default: 8788, or another port if it is taken")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dirs", nargs="+", metavar="RUN", help="one or several runs; each is compared with the first"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="default: report.html in the run's directory, or in this directory for several runs",
    )


def _replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN")
    parser.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar="key=value",
        help="with --updates: train a variant on the recorded rollouts, as a separate run (name=...)",
    )
    parser.add_argument(
        "--updates", metavar="A:B", help="repeat updates A to B - 1 of all trained models, from the stored rollouts"
    )
    parser.add_argument("--step", type=int, help="with --stage: repeat one node")
    parser.add_argument("--stage")
    parser.add_argument("--shard", type=int, default=0)


def _version(text: str) -> int | str:
    if text == "best":
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"given {text!r}; must be a number, or best")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN")
    parser.add_argument("--version", type=_version, help="a number, or `best` by the evaluations; default: the newest")
    parser.add_argument("--to", metavar="DIR", help="default: weights/vNNNNNN in the run's directory")
    parser.add_argument(
        "--rollouts",
        metavar="FILE.parquet",
        help="instead of weights, write every row of the run with its text and numbers",
    )


def _evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory in Hugging Face layout, or org/model in its cache")
    parser.add_argument(
        "sources",
        nargs="*",
        default=[],  # without it, argparse says that CONFIG is required too
        metavar="CONFIG|key=value",
        help="a config, as for `run`, whose evaluation is repeated: RUN/config.yaml, for example",
    )
    parser.add_argument("--prompts", metavar="FILE", help="evaluate on all prompts of this file (evaluate.prompts.url)")
    parser.add_argument("--reward", metavar="KIND", help="score by this reward (evaluate.reward.kind)")


def _sync(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN")
    parser.add_argument(
        "--to", metavar="URI", help="another MLflow store, which gets the whole run (default: tracking.uri)"
    )


def _reward(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "learn a reward model from judgements, or from the scores of a larger one"
    ships = "Example configs: conf/reward/. Every key: docs/reward_models.md. Writes RUN/model, for `kind: model`."
    _run(actions.add_parser("train", help=text, description=text, epilog=ships))
    text = "let a judge make a preference set: pairs of responses, with the better one named"
    ships = (
        "Example config: conf/label/. Every key: docs/judges.md. Writes RUN/pairs.jsonl, for `stageline reward train`."
    )
    label = actions.add_parser("label", help=text, description=text, epilog=ships)
    _run(label)
    label.add_argument("--from", dest="source", metavar="RUN", help="label the responses of a run's rollouts")


COMMANDS = {
    "run": Command("pipeline.cli.run", "run a config to its last step", _run_here),
    "resume": Command("pipeline.cli.run:resume", "continue an interrupted run from its directory", _resume),
    "worker": Command(
        "pipeline.cli.worker", "run one worker on this host, for a run with cluster.kind=attached", _worker
    ),
    "submit": Command(
        "pipeline.cli.slurm_jobs:submit", "submit a run as a Slurm job, which continues it after every requeue", _submit
    ),
    "job": Command("pipeline.cli.run:job", "start or continue a run: the command of a cluster's job", _run),
    "may-requeue": Command(
        "pipeline.cli.slurm_jobs:may_requeue",
        "tell the script of a cluster's job if the job may be requeued",
        _may_requeue,
    ),
    "status": Command("pipeline.cli.status", "show the progress of runs and the state of their jobs", _status),
    "logs": Command("pipeline.cli.slurm_jobs:logs", "show the output of a run's job, or of a gang's workers", _logs),
    "cancel": Command("pipeline.cli.slurm_jobs:cancel", "end a run's job", _cancel),
    "sweep": Command("pipeline.cli.sweep", "start one run per combination of some settings", _sweep),
    "check": Command(
        "pipeline.cli.check", "find all problems of a config before a run, or verify a run's directory", _check
    ),
    "simulate": Command(
        "pipeline.cli.simulate", "play a config on a virtual clock: step time, idle gangs, critical path", _simulate
    ),
    "plan": Command("pipeline.cli.plan", "search for the fastest placement of a config on some devices", _plan),
    "doctor": Command(
        "pipeline.cli.doctor", "test this machine, from its packages to a PPO update; write a report", _doctor
    ),
    "calibrate": Command(
        "pipeline.cli.calibrate", "measure a machine's speeds in runs that it executed, for plans", _calibrate
    ),
    "inspect": Command(
        "pipeline.cli.inspect_step",
        "show the rows of a step: prompt, response, score, KL, version, advantage",
        _inspect,
    ),
    "dashboard": Command(
        "pipeline.cli.dashboard", "serve the page of a run's graph for a browser, also after the run", _dashboard
    ),
    "report": Command("pipeline.cli.report", "write one HTML file about a run, or several runs side by side", _report),
    "replay": Command(
        "pipeline.cli.replay",
        "repeat a node or a range of updates from stored inputs, or train a variant",
        _replay,
    ),
    "export": Command(
        "pipeline.cli.export", "write a version of the policy in Hugging Face layout, or all rows as Parquet", _export
    ),
    "evaluate": Command(
        "pipeline.cli.evaluate",
        "sample and score evaluated prompts with any Hugging Face model, by transformers alone",
        _evaluate,
    ),
    "sync": Command("pipeline.cli.sync", "deliver the rest of a run's tracking data to MLflow", _sync),
    "reward": Command("pipeline.cli.reward", "train a reward model, or let a judge label responses", _reward),
}
"""Name of a command of `stageline` -> its function, its help text, and the function that adds its arguments to the
parser."""
