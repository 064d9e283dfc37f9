"""`stageline check CONFIG [key=value...] | RUN`: find everything for which a run would be refused, or check a run's
directory.

Starts nothing and writes nothing. For a config it also prints the memory that the run would need.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from pipeline.cli.answers import BAD_INPUT, DONE, config_of, output, print_line, saved_config
from pipeline.config.memory import (
    DRIVER_BYTES,
    gpus_here,
    host_bytes,
    memory_limits,
    planned_run,
    published_bytes,
    workers_memory,
)
from pipeline.config.preflight import check_run, device_notes, engine_line, unproven
from pipeline.config.role_models import role_models
from pipeline.config.run import RunConfig
from pipeline.observe.tables import MemoryColumn, memory_table
from stages.engines.capabilities import Device
from stages.models.spec import read_spec


def command(options: argparse.Namespace) -> int:
    if Path(options.target).is_dir():
        verify_run = import_module("pipeline.cli.verification").verify_run  # loads torch and Zarr
        report = verify_run(saved_config(options.target))
        output().print(report.render(), crop=False)  # a problem is one line, however long
        return DONE if report.sound else BAD_INPUT
    config = config_of([options.target, *options.more])
    checked = check_run(config, resume=False)
    prompts = checked.prompts
    _show_memory(config)
    _show_engine(config)
    _show_network(config)
    for key, protections in checked.sandboxes.items():
        print_line(_sandbox_line(key, protections))
    train, held_out = len(prompts.train), len(prompts.held_out)
    per_step = config.rollout.rows // config.rollout.responses_per_prompt
    if per_step > train:
        print_line(
            f"note: a step has {per_step} prompts (rollout.rows={config.rollout.rows}), but there are {train} to train "
            "on: every step repeats some"
        )
    for note in [*device_notes(config), *config.judge_notes()]:
        print_line(f"note: {note}")
    print_line(f"{options.target}: would run ({train} prompts to train on, {held_out} held out)")
    return DONE


def _show_engine(config: RunConfig) -> None:
    """Print what the engine can do on this host, and what the run therefore cannot prove."""
    device: Device = "cuda" if gpus_here() else "cpu"
    print_line(engine_line(config, device))
    for missing in unproven(config, device):
        print_line(f"not proven: {missing}")


def _show_network(config: RunConfig) -> None:
    """Print which connections of a run on several hosts are open without a certificate."""
    spread = [gang.name for gang in config.gangs() if gang.ordered and gang.workers > 1]
    if config.cluster.kind == "attached" and spread:
        where = config.cluster.interface or "the interface by which each host reaches the driver"
        print_line(
            f"exposed: ranks of {', '.join(spread)} connect to one another over {where} (cluster.interface) without "
            "TLS, and run what they are sent: nobody but this run's hosts may reach it"
        )


def _sandbox_line(key: str, protections: Mapping[str, str | None]) -> str:
    """Return a line about the protections around a reward part's code on this host."""
    kept = "; ".join(f"{what} ({how})" for what, how in protections.items() if how is not None)
    open_to_it = ", ".join(what for what, how in protections.items() if how is None)
    return f"sandbox of {key}: keeps it from {kept or 'nothing'}" + (f"; not from {open_to_it}" if open_to_it else "")


def _show_memory(config: RunConfig) -> None:
    """Print the predicted memory of each gang's largest worker, by purpose."""
    limits = memory_limits(config)
    run = planned_run(config, role_models(config, read_spec(config.model.path)), limits)
    workers = workers_memory(run)
    columns = []
    for gang in config.gangs():
        of_gang = [worker for worker in workers if worker.worker[0] == gang.name]
        largest = max(of_gang, key=lambda worker: worker.total)
        columns.append(MemoryColumn(gang.name, len(of_gang), largest.items, largest.total))
    shared = {"published weights": published_bytes(run), "driver": DRIVER_BYTES}
    output().print(memory_table(columns, shared, host_bytes(run, workers), limits.host))
