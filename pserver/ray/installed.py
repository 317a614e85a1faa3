"""Ray, if it is installed."""

from __future__ import annotations

from typing import Any


def ray_library() -> Any:
    """The package ``ray``.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        import ray
        import ray.cloudpickle
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ModuleNotFoundError(
            "pserver.ray.run needs Ray, which is not installed: pip install '.[ray]' "
            "in a checkout of pserver",
            name="ray",
        ) from None
    return ray
