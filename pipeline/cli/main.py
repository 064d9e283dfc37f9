"""The command line: `stageline run | resume | check | inspect | replay | export`.

Exit codes: 0 done, 2 bad input, 3 a stage failed, 130 interrupted (and resumable). Each command's module is imported
when it is called: `stageline --help` must not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    commands = importlib.import_module("pipeline.cli.commands")
    command: Callable[[argparse.Namespace], int] = getattr(commands, options.command)
    return command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stageline",
        description="RLHF-PPO as a workflow DAG: every stage a node, staleness an edge, every output an open data set.",
        epilog="exit codes: 0 done, 2 bad input, 3 a stage failed, 130 interrupted (and resumable)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = _add(commands, "run", "run a config to its last step")
    _takes_config(run)

    resume = _add(commands, "resume", "continue an interrupted run from its directory")
    resume.add_argument("run_dir", metavar="RUN", help="the run's directory, for example runs/demo")

    check = _add(commands, "check", "say what a run would be refused for, or verify a run's directory")
    check.add_argument("target", metavar="CONFIG|RUN", help="a config file, or a run's directory")
    check.add_argument("more", nargs="*", metavar="CONFIG|key=value", help="further files and changes, as for `run`")

    inspect = _add(commands, "inspect", "show the rows of a step: prompt, response, score, KL, version, advantage")
    inspect.add_argument("run_dir", metavar="RUN")
    inspect.add_argument("--step", type=int, required=True)
    inspect.add_argument("--rows", type=int, default=10, help="how many rows to show (default 10)")

    replay = _add(commands, "replay", "run one node again from its stored inputs and show the difference")
    replay.add_argument("run_dir", metavar="RUN")
    replay.add_argument("--step", type=int, required=True)
    replay.add_argument("--stage", required=True)
    replay.add_argument("--shard", type=int, default=0)

    export = _add(commands, "export", "write a version of the policy in Hugging Face layout")
    export.add_argument("run_dir", metavar="RUN")
    export.add_argument("--version", type=int, help="default: the newest")
    export.add_argument("--to", metavar="DIR", help="default: weights/vNNNNNN in the run's directory")
    return parser


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    return parser


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="CONFIG|key=value",
        help="YAML files, merged in the order given, then key=value changes",
    )
