"""`stageline check CONFIG [key=value...] [--as 16x8xH100-80]`: find all reasons why a run of a config would be refused,
on this host or on the cluster of `--as`.

The command also tries the reward on a few made-up responses, unless `--no-reward` is given. It prints the memory that
the run would need. With `--trace` it also prints the memory and the collectives of the run's ranks
(`pipeline/cli/trace.py`).

`stageline check RUN`: verify a run's directory (`pipeline/cli/verification.py`).

Neither command starts a worker or writes a file.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from pipeline.cli.answers import BAD_INPUT, SUCCESS, config_from_sources, output_console, print_line, read_saved_config
from pipeline.config.devices import Worker, place_all_here
from pipeline.config.fitting import devices_memory, layout_text
from pipeline.config.hardware import AS, read_cluster
from pipeline.config.memory import (
    HostMemory,
    MemoryLimits,
    PlannedRun,
    WorkerMemory,
    gpus_here,
    hosts_memory,
    memory_limits,
    planned_run,
    workers_memory,
)
from pipeline.config.preflight import (
    check_run,
    device_notes,
    guarantee_lines,
    unproven_guarantees,
    will_be_replaced,
)
from pipeline.config.reward_trial import trial_errors, try_rewards
from pipeline.config.role_models import role_models
from pipeline.config.rules import length_notes
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError, join_errors, refuse
from pipeline.launch.target_cluster import TargetCheck, check_target
from pipeline.observe.tables import MemoryColumn, memory_table, placement_table
from stages.engines.capabilities import Device
from stages.models.protocol import Role
from stages.models.spec import read_spec


def command(options: argparse.Namespace) -> int:
    if Path(options.target).is_dir():
        if options.cluster is not None:
            raise ConfigError(AS, f"given {options.cluster!r}; {options.target} is a run's directory: give its config")
        verify_run = import_module("pipeline.cli.verification").verify_run  # loads torch and Zarr
        report = verify_run(read_saved_config(options.target))
        output_console().print(report.render(), crop=False)  # a problem is one line, however long
        return SUCCESS if report.is_sound else BAD_INPUT
    here = options.cluster is None
    tries = options.try_reward and here
    config = config_from_sources([options.target, *options.more], runs_here=here, tries_rewards=tries)
    if options.trace:
        with warnings.catch_warnings(action="ignore"):  # Megatron warns about missing packages
            show_trace = import_module("pipeline.cli.trace").show_trace  # loads torch
        show_trace(config)
    if options.cluster is not None:
        return _check_on_target(config, options.target, options.cluster)
    replaces = will_be_replaced(config)
    try:
        checked = check_run(config, resume=False, replaces=replaces)
    except ConfigError as error:
        raise join_errors([error, *(trial_errors(config, error.keys) if tries else [])]) from error
    tried = try_rewards(config, checked) if tries else []
    prompts = checked.prompts
    _show_memory(config)
    _show_guarantees(config, "cuda" if gpus_here() else "cpu")
    _show_network(config)
    for key, protections in checked.sandboxes.items():
        print_line(_sandbox_line(key, protections))
    for result in tried:
        print_line(f"note: {result}" if result.lowest == result.highest else str(result))
    if not tries:
        print_line("note: the reward was not tried (--no-reward)")
    if replaces:
        print_line(f"note: {config.run_dir} holds a run that committed no update; `stageline run` moves it aside")
    train, held_out = len(prompts.train), len(prompts.held_out)
    per_step = config.rollout.rows // config.rollout.responses_per_prompt
    if per_step > train:
        print_line(
            f"note: a step has {per_step} prompts (rollout.rows={config.rollout.rows}), but there are {train} to train "
            "on: every step repeats some"
        )
    of_devices = device_notes(config, gpus_here(), os.cpu_count() or 1)
    for note in [*of_devices, *config.judge_notes(), *length_notes(config)]:
        print_line(f"note: {note}")
    evaluated = "held out" if config.evaluation_source is None else "to evaluate on"
    print_line(f"{options.target}: would run ({train} prompts to train on, {held_out} {evaluated})")
    return SUCCESS


def _show_guarantees(config: RunConfig, device: Device) -> None:
    """Print the guarantees that a run lacks with its engine on this kind of device. If it lacks none, print nothing."""
    if unproven_guarantees(config, device):
        for line in guarantee_lines(config, device):
            print_line(line)


def _show_network(config: RunConfig) -> None:
    """Print a warning if ranks of the run may connect to one another between hosts, since these connections have no
    TLS."""
    spread = [gang.name for gang in config.gangs() if gang.is_ordered and gang.workers > 1]
    if config.cluster.kind == "attached" and spread:
        where = config.cluster.interface or "the interface by which each host reaches the driver"
        print_line(
            f"exposed: ranks of {', '.join(spread)} connect to one another over {where} (cluster.interface) without "
            "TLS, and run what they are sent: nobody but this run's hosts may reach it"
        )


def _sandbox_line(key: str, protections: Mapping[str, str | None]) -> str:
    """Return a line about a reward's sandbox. `protections`: what is out of reach -> how, or None if it is not."""
    kept = "; ".join(f"{what} ({how})" for what, how in protections.items() if how is not None)
    open_to_it = ", ".join(what for what, how in protections.items() if how is None)
    return f"sandbox of {key}: keeps it from {kept or 'nothing'}" + (f"; not from {open_to_it}" if open_to_it else "")


def _show_memory(config: RunConfig) -> None:
    """Print the predicted memory of a run on this host."""
    limits = memory_limits(config)
    models = role_models(config, read_spec(config.model.path))
    run = planned_run(config, models, on_gpus=limits.num_devices > 0)
    _show_prediction(run, limits, place_all_here(config.gangs()))


def _show_prediction(run: PlannedRun, limits: MemoryLimits, hosts: Mapping[Worker, str]) -> None:
    """Print the predicted memory of each gang's workers, of each gang's fullest GPU, and of the hosts. The memory of
    workers and hosts is listed by item."""
    workers = workers_memory(run)
    columns: list[MemoryColumn] = []
    for gang in run.config.gangs():
        columns += _worker_columns([worker for worker in workers if worker.worker[0] == gang.name])
    output_console().print(memory_table("predicted memory of a worker", columns), crop=False)
    if limits.num_devices:
        for device in fullest_gpu_lines(run, workers, hosts, limits):
            print_line(device)
    of_hosts = [
        MemoryColumn(name, host.items, host.total)
        for name, host in _group_equal_hosts(hosts_memory(run, workers, hosts))
    ]
    output_console().print(memory_table("predicted memory of a host", of_hosts, limits.host), crop=False)


def _worker_columns(workers: Sequence[WorkerMemory]) -> Iterator[MemoryColumn]:
    """Yield the columns of the memory table for one gang: its first worker, and among its remaining workers the one
    that needs the most memory. If all workers need the same memory, yield a single column for all of them."""
    first, *others = workers
    largest = max(others, key=lambda worker: worker.total, default=first)
    name = first.worker[0]
    if all(worker.items == first.items for worker in others):
        yield MemoryColumn(f"{name} (x {len(workers)})", first.items, first.total)
        return
    yield MemoryColumn(f"{name} 0", first.items, first.total)
    yield MemoryColumn(f"{name} {largest.worker[1]}, largest of {len(others)} others", largest.items, largest.total)


def fullest_gpu_lines(
    run: PlannedRun, workers: Sequence[WorkerMemory], hosts: Mapping[Worker, str], limits: MemoryLimits
) -> Iterator[str]:
    """Yield a line about the fullest GPU of each gang. A GPU that gangs share counts for the gang of its largest
    worker."""
    devices = devices_memory(run, workers, hosts, limits.num_devices)
    for gang in dict.fromkeys(device.largest.worker[0] for device in devices):
        most = max((d for d in devices if d.largest.worker[0] == gang), key=lambda device: device.num_bytes)
        of_gib = f" of {limits.device / 2**30:.1f}" if math.isfinite(limits.device) else ""
        yield f"the fullest GPU of {gang}: {most.num_bytes / 2**30:.1f}{of_gib} GiB (GPU {most.number} of {most.host})"


def _reserve_text(target: TargetCheck) -> str:
    """Return a sentence about the memory that the prediction leaves free."""
    run, limits, workers = target.run, target.limits, workers_memory(target.run)
    rooms = [("host", limits.host, max(host.total for host in hosts_memory(run, workers, target.hosts)))]
    if limits.num_devices:
        devices = devices_memory(run, workers, target.hosts, limits.num_devices)
        rooms.append(("GPU", limits.device, max(device.num_bytes for device in devices)))
    left = (
        f"{(size - used) / 2**30:.1f} GiB ({1 - used / size:.0%}) of the fullest {what}" for what, size, used in rooms
    )
    return (
        f"{' and '.join(left)} would be free. Fragmentation and libraries' workspaces, which nobody predicts, must fit "
        "there"
    )


def _group_equal_hosts(hosts: Sequence[HostMemory]) -> Iterator[tuple[str, HostMemory]]:
    """Yield (name, memory of a host) once for each group of hosts with equal memory. The name contains the name of the
    first host and the number of the others."""
    groups: list[list[HostMemory]] = []
    for host in hosts:
        same = next((group for group in groups if group[0].items == host.items), None)
        groups.append([host]) if same is None else same.append(host)
    for first, *others in groups:
        yield first.host + (f" and {len(others)} more" if others else ""), first


def _check_on_target(config: RunConfig, target: str, text: str) -> int:
    """Check a config (`target`: its name for the user) against the cluster of `--as`, such as `16x8xH100-80`, which
    need not exist. Print placement and predicted memory. Raises ConfigError if the run does not fit."""
    cluster = read_cluster(text)
    checked = check_target(config, cluster, text)
    whole = f"{cluster.nodes} nodes" if cluster.nodes > 1 else "a node"
    gpus = f" with {cluster.gpus_per_node} GPUs" if cluster.gpus_per_node else ""
    print_line(f"{text}: {whole}{gpus} ({cluster.hardware.description})")
    output_console().print(placement_table([*_placement_rows(config, checked)]))
    _show_prediction(checked.run, checked.limits, checked.hosts)
    refuse(checked.problems)
    _show_guarantees(config, "cuda" if checked.run.on_gpus else "cpu")
    for note in [*checked.notes, *length_notes(config)]:
        print_line(f"note: {note}")
    print_line(f"note: {_reserve_text(checked)}")
    print_line(f"{target}: would fit")
    return SUCCESS


def _placement_rows(config: RunConfig, target: TargetCheck) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row of the placement's table for each gang."""
    for gang in config.gangs():
        layout = config.placement.gangs[gang.name].layout
        by_node: dict[str, list[int]] = {}
        for index in range(gang.workers):
            worker = gang.name, index
            by_node.setdefault(target.hosts[worker], []).extend(target.devices[worker])
        where = [f"{node}: {_gpu_numbers_text(gpus)}" if gpus else node for node, gpus in by_node.items()]
        shown = "; ".join(where[:4]) + (f"; … {where[-1]}" if len(where) > 4 else "")
        engines = f"tensor: {config.engine.tensor_parallel}, pipeline: {config.engine.pipeline_parallel} a replica"
        laid_out = layout_text(layout) if gang.is_ordered else engines if Role.GENERATE in gang.roles else ""
        yield gang.name, str(gang.workers), laid_out, shown


def _gpu_numbers_text(gpus: Sequence[int]) -> str:
    """Return GPU numbers as text: `0-7` for three or more numbers without a gap, otherwise a list such as `0, 2`."""
    known = sorted(set(gpus))
    whole = len(known) > 2 and known == [*range(known[0], known[-1] + 1)]
    return f"{known[0]}-{known[-1]}" if whole else ", ".join(map(str, known))
