"""A Ray cluster of several nodes on this machine, in a process of its own.

::

    python ray_nodes.py 2 127.0.0.2:2 127.0.0.3:2

A head with so many CPUs, and a node for each address; then a line "at ADDRESS" for ``ray.init``.
A line of input that is an address kills that node; after "end" all end.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20  # the least that Ray takes


def main() -> None:
    """Runs the cluster until it is told to end."""
    head = {
        "num_cpus": int(sys.argv[1]),
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    session = cluster.head_node.get_session_dir_path()
    nodes = {}
    try:
        for argument in sys.argv[2:]:
            address, _, cpus = argument.rpartition(":")
            nodes[address] = cluster.add_node(
                num_cpus=int(cpus), node_ip_address=address, object_store_memory=STORE_BYTES
            )
        print("at", cluster.address, flush=True)
        for line in sys.stdin:
            if line.strip() == "end":
                break
            cluster.remove_node(nodes.pop(line.strip()), allow_graceful=False)
            print("killed", line.strip(), flush=True)
    finally:
        with suppress(Exception):  # a node that was killed, once more
            cluster.shutdown()
        shutil.rmtree(session, ignore_errors=True)
        print("down", flush=True)


if __name__ == "__main__":
    main()
