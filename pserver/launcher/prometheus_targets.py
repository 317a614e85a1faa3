"""The file by which Prometheus finds the processes of this host."""

from __future__ import annotations

import json
from pathlib import Path

from pserver.launcher.cluster import Cluster
from transpiler.files.named_errors import naming

NAME = "prometheus.json"  # in the folder of logs


def write_targets(cluster: Cluster, folder: Path) -> None:
    """Writes it, where the cluster has metrics."""
    if cluster.metrics is not None:
        whole = folder / f"{NAME}.new"  # Prometheus looks at any time
        with naming(whole):
            whole.write_text(json.dumps(cluster.metrics_targets(), indent=1) + "\n")
        whole.replace(folder / NAME)
