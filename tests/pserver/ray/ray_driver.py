"""A driver of jobs on Ray, in a process of its own, as a user has it.

::

    python ray_driver.py ADDRESS TARGET '{"servers": 2}'

TARGET is a script, or the name of a function below.  The last line is the result as JSON.  It goes
on to show what Ray's processes print until its input has a line.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

import pserver.ray
from pserver.ray import ProcessFailed


def trained(steps: int) -> list[float]:
    """Trains a line; returns its parameters."""
    import torch

    from trainer import fleet

    fleet.init()
    torch.manual_seed(0)
    inputs, half = torch.randn(8, 4), slice(fleet.worker_index(), None, 2)
    model = fleet.distributed_model(torch.nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        model(inputs[half]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    print("trainer", fleet.worker_index(), "threads", os.environ["OMP_NUM_THREADS"])
    fleet.finish()
    return list(found)


def breaks() -> None:
    """Fails by an exception."""
    raise ArithmeticError("it is over")


def exits() -> None:
    """Ends as a script does by ``sys.exit``."""
    sys.exit(9)


FUNCTIONS = {each.__name__: each for each in (trained, breaks, exits)}


def stored(address: str) -> int:
    """Bytes of all objects that the stores of all nodes have ever had."""
    reply = get_memory_info_reply(get_state_from_address(address))
    return int(reply.store_stats.cumulative_created_bytes)


def watch(address: str, over: threading.Event, seen: list[int]) -> None:
    """Looks at the stores again and again, as nodes may go."""
    while not over.wait(0.3):
        seen.append(stored(address))


def main() -> None:
    """Runs one job."""
    address, target, said = sys.argv[1:]
    ray.init(address=address)
    over, seen = threading.Event(), [stored(address)]
    watcher = threading.Thread(target=watch, args=(address, over, seen))
    watcher.start()
    try:
        done = pserver.ray.run(FUNCTIONS.get(target, target), **json.loads(said))
        result = {"values": done.values, "restarts": done.restarts, "status": 0}
    except (ProcessFailed, TimeoutError, ValueError, KeyboardInterrupt) as error:
        status = getattr(error, "exit_status", None)
        result = {"error": f"{type(error).__name__}: {error}", "status": status}
    finally:
        over.set()
        watcher.join()
    groups = [each["state"] for each in ray.util.placement_group_table().values()]
    result |= {"stored": max(seen) - seen[0], "groups": groups}
    print("result", json.dumps(result), flush=True)
    sys.stdin.readline()
    ray.shutdown()


if __name__ == "__main__":
    main()
