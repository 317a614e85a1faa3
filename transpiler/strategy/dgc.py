"""The settings that exclude deep gradient compression, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from transpiler.strategy.parallel_settings import DGC_MODES
from transpiler.strategy.strategy import DistributedStrategy

# Settings that dgc excludes, with the reason.
EXCLUDED: Mapping[str, str] = MappingProxyType(
    {
        "fp16_allreduce": "the few elements that it sends are exact",
        "localsgd": "it sends gradients, and local SGD sends none",
        "adaptive_localsgd": "it sends gradients, and local SGD sends none",
        "lars": "it applies the momentum of torch.optim.SGD",
        "lamb": "it applies the momentum of torch.optim.SGD",
        "a_sync_configs.dc_asgd": "the square of many steps' gradients is no curvature",
        "a_sync_configs.overlap": "it chooses what to send in step(), and overlap sends before",
    }
)
# The same in jobs without servers, where step() exchanges all gradients.
EXCLUDED_AMONG_TRAINERS: Mapping[str, str] = MappingProxyType(
    {
        "gradient_merge": "both exchange gradients in step()",
        "gradient_scale_configs.scale_strategy": "it sends parts of a mean",
    }
    | dict.fromkeys(
        (
            "sync_nccl_allreduce",
            "use_hierarchical_allreduce",
            "fuse_all_reduce_ops",
            "fuse_grad_size_in_MB",
            "fuse_grad_size_in_num",
            "last_comm_group_size_MB",
            "find_unused_parameters",
            "nccl_comm_num",
        ),
        "gradients leave in step(), not in the buckets of a backward",
    )
)


def dgc_refusals(strategy: DistributedStrategy, modes: Sequence[str]) -> Iterator[str]:
    """The reasons why dgc has no effect in a job that reads it, or why other settings of the
    strategy have none beside it.

    Args:
        modes: the update modes of a job with servers; none for other jobs.

    Returns:
        Sentences, each of which begins with a setting's full name.
    """
    given = strategy.unsupported(())
    if not strategy.dgc:
        for name in given:
            if name.startswith("dgc_configs."):
                yield f"strategy.{name}: has no effect without dgc=True"
        return
    excluded = EXCLUDED if modes else {**EXCLUDED, **EXCLUDED_AMONG_TRAINERS}
    for name in given:
        if name in excluded:
            yield f"strategy.{name}: excludes strategy.dgc, because {excluded[name]}"
    odd = [mode for mode in modes if mode not in DGC_MODES]
    if odd and len(odd) < len(modes):
        yield (
            f"strategy.dgc: expected the modes {', '.join(DGC_MODES)} for all parameters, in which "
            f"trainers send gradients to servers, got {', '.join(modes)}"
        )
