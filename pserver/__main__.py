"""The command line: ``pserver``, or ``python -m pserver``.

Environment variables are read here and in ``trainer/environment``, nowhere else.  A mistake in what
was typed ends the process with exit status 2, any other error with 1, Ctrl-C with 130, all with one
line on stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pserver.cli.flags import USAGE, Parser, add_planning, parser
from pserver.cli.settings import UsageError, access_of, checked, server_config
from pserver.config import (
    check_protected,
    check_seconds,
    check_store,
    is_loopback,
    refuse_url,
    split_endpoint,
)
from pserver.errors import PServerError
from pserver.launcher import cluster
from pserver.launcher.cluster import variables_of
from pserver.launcher.planning import cost, plan
from pserver.security.access import Access
from pserver.telemetry.memory import frozen_imports, share_heap

FAILURE = 1
INTERRUPTED = 130  # by SIGINT, as shells say it
WIDE = 160  # columns of a table that goes to a file
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def run_serve(arguments: argparse.Namespace) -> int:
    """``pserver serve``; returns the exit status."""
    config = server_config(arguments, os.environ)
    # gRPC writes a line for each handshake of a stranger that fails, as fast as they come
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    share_heap()
    with frozen_imports():
        # here, because torch takes a second to import, and --help does not need it
        from pserver.service import server
        from pserver.service.eager_only import without_compiler
        from pserver.telemetry import logs

        without_compiler()
        server.warm_up()

    if arguments.log_json or os.environ.get("PSERVER_LOG_JSON") == "1":
        logs.write_json(logging.INFO)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    return server.serve(config)


def run_launch(arguments: argparse.Namespace) -> int:
    """``pserver launch``; returns the exit status."""
    if arguments.nccl2 and arguments.servers is not None:
        raise UsageError("--servers: expected none with --nccl2, where trainers have no servers")
    if not arguments.nccl2 and (arguments.servers is None or arguments.trainers is None):
        raise UsageError(
            "expected both --servers and --trainers, as numbers or as lists of HOST:PORT; or "
            "--nccl2 with --trainers" + _behind_script(arguments)
        )
    found = checked(lambda: _cluster(arguments))
    if found.devices is not None:
        found = checked(lambda: _on_gpus(found, found.devices or ()))
    # here, because it imports rich, and a probe, which has little time, does not need it
    from pserver.launcher import launch

    return launch.launch(found, _protected(found, arguments), panel=not arguments.no_panel)


def _behind_script(arguments: argparse.Namespace) -> str:
    """A hint about flags of ``launch`` that follow SCRIPT, where they belong to the script."""
    given = {word.partition("=")[0] for word in arguments.arguments}
    flags = [flag for flag in ("--nccl2", "--servers", "--trainers") if flag in given]
    if not flags:
        return ""
    return (
        f"; {' and '.join(flags)} behind {arguments.script} went to the script: write SCRIPT last"
    )


def _protected(found: cluster.Cluster, arguments: argparse.Namespace) -> dict[str, str]:
    """The environment of ``launch``'s processes, with the settings that its flags give to all of
    them.
    """
    environ = dict(os.environ)
    if arguments.keys:
        environ["PSERVER_KEYS"] = os.path.abspath(arguments.keys)
    if arguments.insecure:
        environ["PSERVER_INSECURE"] = "1"
    if arguments.log_json:
        environ["PSERVER_LOG_JSON"] = "1"
    if arguments.tensorboard:
        checked(lambda: refuse_url("--tensorboard", arguments.tensorboard))
        environ["PSERVER_TENSORBOARD"] = os.path.abspath(arguments.tensorboard)
    if arguments.insecure_collective:
        environ["PSERVER_INSECURE_COLLECTIVE"] = "1"
    path = _whole_path(arguments.checkpoint) if arguments.checkpoint else None
    environ |= checked(lambda: variables_of(path, arguments.every, arguments.keep))
    environ |= checked(lambda: _traced(arguments.trace, arguments.trace_steps))
    keys, insecure = environ.get("PSERVER_KEYS"), environ.get("PSERVER_INSECURE") == "1"
    checked(lambda: check_protected("--servers", found.servers, keys, insecure))
    return environ


def _traced(path: str | None, steps: int | None) -> dict[str, str]:
    """The environment variables that tell trainers to trace."""
    if path is None and steps is not None:
        raise ValueError("--trace-steps: has no effect without --trace")
    if steps is not None and steps < 1:
        raise ValueError(f"--trace-steps: expected 1 or more, got {steps}")
    if path is None:
        return {}
    if not path:
        raise ValueError("--trace: expected the name of a file, got none")
    counted = {"PSERVER_TRACE_STEPS": str(steps)} if steps else {}
    return {"PSERVER_TRACE": _whole_path(path), **counted}


def _whole_path(path: str) -> str:
    """A path that every process finds, wherever it runs; a URL stays as it is."""
    return path if "://" in path else os.path.abspath(path)


def _on_gpus(found: cluster.Cluster, devices: Sequence[str]) -> cluster.Cluster:
    # here, because torch takes a second to import
    from torch.cuda import device_count

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = cluster.visible_devices(devices, device_count(), visible)
    return dataclasses.replace(found, devices=named)


def _cluster(arguments: argparse.Namespace) -> cluster.Cluster:
    servers: tuple[str, ...] = ()
    least, asked = 0, arguments.trainers
    if asked is not None:
        least, asked = cluster.least_and_most(asked)
    if arguments.nccl2:
        trainers, devices = cluster.collective_endpoints(asked, arguments.devices, arguments.host)
    else:
        named = cluster.elastic_endpoints if least and arguments.host else cluster.cluster_endpoints
        servers, trainers = named(arguments.servers, asked, arguments.host)
        devices = None if arguments.devices is None else tuple(arguments.devices.split(","))
    return cluster.Cluster(
        arguments.script,
        tuple(arguments.arguments),
        servers,
        trainers,
        arguments.host,
        arguments.transport,
        arguments.heartbeat_timeout,
        arguments.data_dir,
        arguments.log_dir,
        devices,
        arguments.start_timeout,
        _store(arguments),
        arguments.metrics,
        arguments.job or "",
        arguments.web,
        arguments.max_restarts,
        least,
        arguments.grace,
        straggler_factor=arguments.straggler_factor,
        record_log=arguments.record_log,
    )


def _store(arguments: argparse.Namespace) -> str | None:
    """The place of servers' files: that of the job's own saves, unless another one is named."""
    if arguments.store is not None or arguments.nccl2 or not arguments.checkpoint:
        return None if arguments.store is None else str(arguments.store)
    path = _whole_path(arguments.checkpoint)
    try:
        check_store("--checkpoint", path)
    except ValueError:
        return None  # trainer 0 can write there, and no server
    return path


def run_plan(arguments: argparse.Namespace) -> int:
    """``pserver plan``; returns the exit status."""
    # flags may stand behind the script's arguments
    after = Parser(prog="pserver plan", add_help=False, allow_abbrev=False)
    add_planning(after)
    numbers, rest = after.parse_known_args(arguments.arguments)
    given = {
        name: getattr(arguments, name) if value is None or value is False else value
        for name, value in vars(numbers).items()
    }
    settings = checked(lambda: _planned(given))
    return plan.show(arguments.script, rest, settings, os.environ)


def _planned(given: Mapping[str, Any]) -> plan.PlanSettings:
    servers, trainers = given["servers"], given["trainers"]
    for flag, count in (("servers", servers), ("trainers", trainers)):
        if count is None or count < 1:
            raise UsageError(
                "expected both --servers and --trainers, as numbers of 1 or more, got "
                + (f"no --{flag}" if count is None else f"--{flag} {count}")
            )
    if servers > plan.MOST_PLANNED:
        raise UsageError(f"--servers: expected {plan.MOST_PLANNED} or fewer, got {servers}")
    for flag in ("link", "latency", "hosts", "search", "window", "figures"):
        if given["no_probe"] and given[flag] not in (None, False):
            raise ValueError(f"--{flag}: has no effect with --no-probe")
    for flag in ("memory", "write"):
        if given[flag] and not given["search"]:
            raise ValueError(f"--{flag}: has no effect without --search")
    memory = cost.memory("--memory", given["memory"]) if given["memory"] else None
    link = cost.bandwidth("--link", given["link"]) if given["link"] else None
    latency = cost.latency("--latency", given["latency"]) if given["latency"] else 0.0
    apart = given["hosts"] == "each" or (given["hosts"] is None and link is not None)
    window = plan.WINDOW_SECONDS if given["window"] is None else given["window"]
    check_seconds("--window", window)
    return plan.PlanSettings(
        servers,
        trainers,
        not given["no_probe"],
        link,
        latency,
        apart,
        bool(given["search"]),
        memory,
        bool(given["write"]),
        window,
        given["figures"] or "",
    )


def run_check(arguments: argparse.Namespace) -> int:
    """``pserver check``; returns the exit status."""
    # here, because it reads the index of names, and the rest does not need it
    from pserver.cli import check

    try:
        return check.show(arguments.scripts, sys.stdout, arguments.json)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def run_manifest(arguments: argparse.Namespace) -> int:
    """``pserver manifest``; returns the exit status."""
    # here, because they import yaml, and --help does not need it
    from pserver.launcher.manifests.description import ClusterDescription
    from pserver.launcher.manifests.writing import write

    settings = {**vars(arguments), "arguments": tuple(arguments.arguments)}
    names = {field.name for field in dataclasses.fields(ClusterDescription)}
    described = {name: value for name, value in settings.items() if name in names}
    cluster = checked(lambda: ClusterDescription(**described))
    checked(lambda: write(cluster, arguments.output, sys.stdout))
    return 0


def run_status(arguments: argparse.Namespace) -> int:
    """``pserver status``; returns the exit status."""
    endpoints = _endpoints(arguments)
    for flag in ("variables", "json", "watch"):
        if arguments.ready and getattr(arguments, flag):
            raise UsageError(f"--{flag}: has no effect with --ready")
    if arguments.ready:
        # here, because it imports gRPC, and --help does not need it
        from pserver.launcher import readiness

        keys = arguments.keys or os.environ.get("PSERVER_KEYS")
        return checked(lambda: readiness.show(endpoints, keys=keys))
    # here, because they import gRPC, torch and rich, and the rest does not need them
    from rich.console import Console

    from pserver.launcher import status
    from pserver.telemetry.job_view import JobView

    console = Console()
    console = console if console.is_terminal else Console(width=WIDE)
    show = status.show_json if arguments.json else partial(status.show, view=JobView(endpoints))
    asked = partial(status.ask_each, endpoints, arguments.variables, _access_of(arguments))
    if arguments.watch is None:
        return show(asked(), console)
    seconds = checked(lambda: check_seconds("--watch", arguments.watch))
    return status.watch(seconds, asked, show, console)


def run_web(arguments: argparse.Namespace) -> int:
    """``pserver web``; returns the exit status."""
    endpoints, access_of = _endpoints(arguments), _access_of(arguments)
    keys = arguments.keys or os.environ.get("PSERVER_KEYS")
    insecure = bool(arguments.insecure) or os.environ.get("PSERVER_INSECURE") == "1"
    page = [f"{arguments.host}:{arguments.port}"]
    beyond = not is_loopback(arguments.host)
    checked(lambda: check_protected("--host", page, keys, insecure))
    # here, because they import gRPC, torch and rich, and --help does not need them
    from pserver.operations.page_actions import actions
    from pserver.web import server as web

    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    settings = web.PageSettings(
        endpoints,
        arguments.host,
        arguments.port,
        Path(arguments.log_dir) if arguments.log_dir else None,
        keys if beyond else None,
        access_of,
        actions(endpoints, arguments.save_dir, access_of),
        arguments.read_only,
    )
    return checked(lambda: web.serve(settings))


def run_save(arguments: argparse.Namespace) -> int:
    """``pserver save``; returns the exit status."""
    # here, because they import gRPC, torch and rich, and --help does not need them
    from rich.console import Console

    from pserver.operations.save import save, save_programs

    write = save_programs if arguments.programs else save
    write(_endpoints(arguments), arguments.path, Console(), _access_of(arguments))
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """``pserver replay``; returns the exit status."""
    checked(lambda: refuse_url("LOG", arguments.log))
    if arguments.until is not None and arguments.until < 0:
        raise UsageError(f"--until: expected the number of a record, got {arguments.until}")
    if arguments.overwrite and arguments.to is None:
        raise UsageError("--overwrite: has no effect without --to")
    # here, because they import torch and rich, and --help does not need them
    from rich.console import Console

    from pserver.operations.replay import Target, replay

    target = None if arguments.to is None else Target(arguments.to, arguments.overwrite)
    replay(Path(arguments.log), Console(), arguments.start, target, arguments.until)
    return 0


def run_reset(arguments: argparse.Namespace) -> int:
    """``pserver reset``; returns the exit status."""
    # here, because they import gRPC and rich, and --help does not need them
    from rich.console import Console

    from pserver.operations.save import reset

    return reset(_endpoints(arguments), Console(), _access_of(arguments))


def run_drain(arguments: argparse.Namespace) -> int:
    """``pserver drain``; returns the exit status."""
    # here, because they import gRPC and rich, and --help does not need them
    from rich.console import Console

    from pserver.operations.save import drain

    return drain(_endpoints(arguments), Console(), _access_of(arguments))


def _access_of(arguments: argparse.Namespace) -> Callable[[str], Access]:
    return lambda endpoint: access_of(endpoint, os.environ, arguments.keys)


def run_keys(arguments: argparse.Namespace) -> int:
    """``pserver keys``; returns the exit status."""
    # here, because they import cryptography and rich, and --help does not need them
    from rich.console import Console

    from pserver.operations import keys

    return checked(lambda: keys.run(arguments, Console()))


def _endpoints(arguments: argparse.Namespace) -> list[str]:
    endpoints = [endpoint.strip() for endpoint in arguments.endpoints.split(",")]
    checked(lambda: [split_endpoint(endpoint) for endpoint in endpoints])
    if len(set(endpoints)) < len(endpoints):
        raise UsageError(f"expected each endpoint once, got {arguments.endpoints}")
    return endpoints


COMMANDS = {
    "serve": run_serve,
    "launch": run_launch,
    "plan": run_plan,
    "check": run_check,
    "manifest": run_manifest,
    "status": run_status,
    "web": run_web,
    "save": run_save,
    "replay": run_replay,
    "reset": run_reset,
    "drain": run_drain,
    "keys": run_keys,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point.

    Args:
        argv: the arguments behind the program's name; None: those of the process.

    Returns:
        The exit status.
    """
    arguments = parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except UsageError as error:
        status, message = USAGE, str(error)
    except (PServerError, OSError, ValueError) as error:
        status, message = FAILURE, f"{error}" or type(error).__name__
    except KeyboardInterrupt:
        status, message = INTERRUPTED, "interrupted"
    print(f"pserver {arguments.command}: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
