"""The fields of a strategy, for type checkers: a misspelled switch or key is an error before a
script runs.  ``DistributedStrategy`` checks the same, and ranges, at each assignment.

``make reference`` writes this file from the tables of settings: see strategy.py.

A dictionary has two types: "ASyncConfigs" is assigned, and may lack keys; "ReadASyncConfigs" is
read, has all, and refuses assignments to its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NotRequired, Protocol, TypedDict, TypeVar

if TYPE_CHECKING:
    from typing_extensions import ReadOnly

    Read = TypeVar("Read", covariant=True)
    Assigned = TypeVar("Assigned", contravariant=True)

    class Settings(Protocol[Read, Assigned]):
        """A field that is read as another type than it is assigned."""

        def __get__(self, strategy: object, kind: type[object] | None = None) -> Read: ...
        def __set__(self, strategy: object, values: Assigned) -> None: ...


class OuterOptimizer(TypedDict, total=False):
    """The keys of ``outer_optimizer``, as a script assigns them."""

    type: Literal["sgd", "nesterov", "adam"]
    """The update rule."""
    lr: float
    """The learning rate."""
    momentum: float
    """Of "sgd" and "nesterov"."""


Modes = Literal["sync", "async", "half_async", "geo", "diloco", "collective", "k_steps", "k_step"]


class ASyncConfigs(TypedDict, total=False):
    """The keys of ``a_sync_configs``, as a script assigns them."""

    k_steps: int
    """Steps that a trainer takes by itself between two exchanges; 0: no k-step mode."""
    max_merge_var_num: int
    """The most steps of a trainer that one message merges; in half_async mode the exact number."""
    send_queue_size: int
    """Steps (in geo mode messages) that may be on their way before a further one waits."""
    row_invalidation: bool
    """Servers tell a trainer which rows others have changed, and it asks for those alone;
    otherwise it asks for every row once in a window."""
    look_ahead: int
    """Batches whose rows of tables are looked up ahead, while the steps before them are taken;
    0: a forward looks up its own."""
    independent_recv_thread: bool
    """A thread of its own fetches parameters; otherwise they come with the answer to a step."""
    min_send_grad_num_before_recv: int
    """Messages after which parameters are fetched again."""
    thread_pool_size: int
    """The most servers that a message is on its way to at a time."""
    send_wait_times: int
    """How often, 10 ms each, the sending thread waits for a further step to merge."""
    soft_wait_ms: int
    """Milliseconds for which a step waits for the answer to the one before, even where the queue
    has room; 0: a trainer runs ahead as far as the queue allows."""
    runtime_split_send_recv: bool
    """The sending thread cuts gradients into slices; otherwise ``step()`` does."""
    launch_barrier: bool
    """Trainers wait for servers that are not up yet for the start timeout, not only for the
    heartbeat timeout."""
    merge: Literal["auto", "sum", "mean"]
    """How the steps of a message are merged; "auto": by the sum under sgd and momentum, by the
    mean under other rules and in half_async mode."""
    half_async: bool
    """Chooses half_async mode: a trainer merges its own steps and waits for their result."""
    staleness: int | None
    """The most steps that a trainer may be ahead of the slowest; None: any; 0: sync mode."""
    dc_asgd: float
    """The factor lambda of delay compensation; 0: none."""
    outer_optimizer: OuterOptimizer | None
    """With ``k_steps`` it chooses diloco mode: the servers' update rule for the mean change."""
    nonfinite: Literal["auto", "refuse", "apply", "stop"]
    """What servers do with a step that has a NaN or an infinity in it: refuse it, apply it, or
    stop the job.  auto: apply in sync mode, refuse in the others."""
    outlier_push: Literal["off", "refuse", "apply", "stop"]
    """What servers do with a step of which a norm is far beyond its trainer's own history:
    refuse it, apply it and say so, or stop the job.  off: norms are not looked at."""
    outlier_factor: float
    """How many times its history a norm must exceed to be an outlier."""
    lost_trainer: Literal["wait", "go_on", "stop"]
    """What becomes of a job whose trainer is lost: the others wait for another process in its
    place, up to the start timeout, and then go on without it; they go on at once; or the job
    stops."""
    buffers: Literal["trainer0", "mean", "own"]
    """Whose buffers (batch norm's running statistics) all trainers have: trainer 0's, which
    travel with its steps; the mean of the trainers'; each its own."""
    modes: Mapping[str, Modes]
    """The mode of each parameter, by the first pattern that its name matches."""
    overlap: bool
    """Gradients leave while backward runs.  Where a second backward, clipping or a GradScaler
    changes them before ``step()``, they are sent again; writes through ``.data`` are looked for
    in the first steps."""
    embeddings: list[str] | tuple[str, ...] | None
    """Patterns of names of embedding modules whose rows move to the servers."""
    k_step: int
    """Another spelling of ``k_steps``."""


if TYPE_CHECKING:

    class ReadASyncConfigs(TypedDict):
        """The keys of ``a_sync_configs``, as a script reads them."""

        k_steps: ReadOnly[int]
        max_merge_var_num: ReadOnly[int]
        send_queue_size: ReadOnly[int]
        row_invalidation: ReadOnly[bool]
        look_ahead: ReadOnly[int]
        independent_recv_thread: ReadOnly[bool]
        min_send_grad_num_before_recv: ReadOnly[int]
        thread_pool_size: ReadOnly[int]
        send_wait_times: ReadOnly[int]
        soft_wait_ms: ReadOnly[int]
        runtime_split_send_recv: ReadOnly[bool]
        launch_barrier: ReadOnly[bool]
        merge: ReadOnly[Literal["auto", "sum", "mean"]]
        half_async: ReadOnly[bool]
        staleness: ReadOnly[int | None]
        dc_asgd: ReadOnly[float]
        outer_optimizer: ReadOnly[OuterOptimizer | None]
        nonfinite: ReadOnly[Literal["auto", "refuse", "apply", "stop"]]
        outlier_push: ReadOnly[Literal["off", "refuse", "apply", "stop"]]
        outlier_factor: ReadOnly[float]
        lost_trainer: ReadOnly[Literal["wait", "go_on", "stop"]]
        buffers: ReadOnly[Literal["trainer0", "mean", "own"]]
        modes: ReadOnly[Mapping[str, Modes]]
        overlap: ReadOnly[bool]
        embeddings: ReadOnly[list[str]]
        k_step: NotRequired[ReadOnly[int]]


class GradientScaleConfigs(TypedDict, total=False):
    """The keys of ``gradient_scale_configs``, as a script assigns them."""

    scale_strategy: Literal["avg", "sum", "customized"]
    """How the gradients of trainers become one."""


if TYPE_CHECKING:

    class ReadGradientScaleConfigs(TypedDict):
        """The keys of ``gradient_scale_configs``, as a script reads them."""

        scale_strategy: ReadOnly[Literal["avg", "sum", "customized"]]


class TrainerDescConfigs(TypedDict, total=False):
    """The keys of ``trainer_desc_configs``, as a script assigns them."""

    dump_fields_path: str
    """The directory, or its URL, where trainers dump steps."""
    dump_fields: list[str] | tuple[str, ...] | None
    """Names of tensors whose samples are dumped."""
    dump_param: list[str] | tuple[str, ...] | None
    """Names of parameters to dump."""
    stat_var_names: list[str] | tuple[str, ...] | None
    """Names of tensors that are summarised."""


if TYPE_CHECKING:

    class ReadTrainerDescConfigs(TypedDict):
        """The keys of ``trainer_desc_configs``, as a script reads them."""

        dump_fields_path: ReadOnly[str]
        dump_fields: ReadOnly[list[str]]
        dump_param: ReadOnly[list[str]]
        stat_var_names: ReadOnly[list[str]]


class FsClientParam(TypedDict, total=False):
    """The keys of ``fs_client_param``, as a script assigns them."""

    uri: str
    """A URL; paths of ``fleet`` below it get the user and password."""
    user: str
    """The user's name there."""
    passwd: str
    """The user's password; it is never printed."""
    hadoop_bin: str
    """The hadoop command, by which pyarrow finds Hadoop."""


if TYPE_CHECKING:

    class ReadFsClientParam(TypedDict):
        """The keys of ``fs_client_param``, as a script reads them."""

        uri: ReadOnly[str]
        user: ReadOnly[str]
        passwd: ReadOnly[str]
        hadoop_bin: ReadOnly[str]


class AmpConfigs(TypedDict, total=False):
    """The keys of ``amp_configs``, as a script assigns them."""

    init_loss_scaling: float
    """The first loss scale."""
    use_dynamic_loss_scaling: bool
    """The loss scale adapts."""
    incr_every_n_steps: int
    """Finite steps in a row before it grows."""
    decr_every_n_nan_or_inf: int
    """Overflows in a row before it shrinks."""
    incr_ratio: float
    """By which the loss scale grows."""
    decr_ratio: float
    """By which the loss scale shrinks."""
    custom_white_list: list[str] | tuple[str, ...] | None
    """Ops that run in 16 bits."""
    custom_black_list: list[str] | tuple[str, ...] | None
    """Ops that run in 32 bits."""
    custom_black_varnames: list[str] | tuple[str, ...] | None
    """Variables kept in 32 bits."""
    use_pure_fp16: bool
    """Parameters are float16, too."""
    use_pure_bf16: bool
    """Parameters are bfloat16, too."""
    use_fp16_guard: bool
    """Only guarded ops run in float16."""


if TYPE_CHECKING:

    class ReadAmpConfigs(TypedDict):
        """The keys of ``amp_configs``, as a script reads them."""

        init_loss_scaling: ReadOnly[float]
        use_dynamic_loss_scaling: ReadOnly[bool]
        incr_every_n_steps: ReadOnly[int]
        decr_every_n_nan_or_inf: ReadOnly[int]
        incr_ratio: ReadOnly[float]
        decr_ratio: ReadOnly[float]
        custom_white_list: ReadOnly[list[str]]
        custom_black_list: ReadOnly[list[str]]
        custom_black_varnames: ReadOnly[list[str]]
        use_pure_fp16: ReadOnly[bool]
        use_pure_bf16: ReadOnly[bool]
        use_fp16_guard: ReadOnly[bool]


class QatConfigs(TypedDict, total=False):
    """The keys of ``qat_configs``, as a script assigns them."""

    channel_wise_abs_max: bool
    """One scale for each channel."""
    weight_bits: int
    """Bits of a weight."""
    activation_bits: int
    """Bits of an activation."""
    not_quant_pattern: list[str] | tuple[str, ...] | None
    """Names that stay as they are."""
    algo: str
    """The algorithm's name."""


if TYPE_CHECKING:

    class ReadQatConfigs(TypedDict):
        """The keys of ``qat_configs``, as a script reads them."""

        channel_wise_abs_max: ReadOnly[bool]
        weight_bits: ReadOnly[int]
        activation_bits: ReadOnly[int]
        not_quant_pattern: ReadOnly[list[str]]
        algo: ReadOnly[str]


class RecomputeConfigs(TypedDict, total=False):
    """The keys of ``recompute_configs``, as a script assigns them."""

    checkpoints: list[str] | tuple[str, ...] | None
    """Names of modules that are recomputed; in programs, of tensors that are kept."""
    enable_offload: bool
    """Kept activations move to main memory."""
    checkpoint_shape: list[int] | tuple[int, ...] | None
    """Of an offloaded activation."""


if TYPE_CHECKING:

    class ReadRecomputeConfigs(TypedDict):
        """The keys of ``recompute_configs``, as a script reads them."""

        checkpoints: ReadOnly[list[str]]
        enable_offload: ReadOnly[bool]
        checkpoint_shape: ReadOnly[list[int]]


class GradientMergeConfigs(TypedDict, total=False):
    """The keys of ``gradient_merge_configs``, as a script assigns them."""

    k_steps: int
    """Steps whose gradients make one update."""
    avg: bool | Literal["avg", "sum"]
    """The mean over these steps, not the sum."""


if TYPE_CHECKING:

    class ReadGradientMergeConfigs(TypedDict):
        """The keys of ``gradient_merge_configs``, as a script reads them."""

        k_steps: ReadOnly[int]
        avg: ReadOnly[bool]


class LarsConfigs(TypedDict, total=False):
    """The keys of ``lars_configs``, as a script assigns them."""

    lars_coeff: float
    """The trust coefficient."""
    lars_weight_decay: float
    """Weight decay."""
    epsilon: float
    """Added to the denominator."""
    exclude_from_weight_decay: list[str] | tuple[str, ...] | None
    """Parts of names of parameters, or of their modules' types, that have no decay."""


if TYPE_CHECKING:

    class ReadLarsConfigs(TypedDict):
        """The keys of ``lars_configs``, as a script reads them."""

        lars_coeff: ReadOnly[float]
        lars_weight_decay: ReadOnly[float]
        epsilon: ReadOnly[float]
        exclude_from_weight_decay: ReadOnly[list[str]]


class LambConfigs(TypedDict, total=False):
    """The keys of ``lamb_configs``, as a script assigns them."""

    lamb_weight_decay: float
    """Weight decay."""
    exclude_from_weight_decay: list[str] | tuple[str, ...] | None
    """Parts of names of parameters, or of their modules' types, that have no decay."""


if TYPE_CHECKING:

    class ReadLambConfigs(TypedDict):
        """The keys of ``lamb_configs``, as a script reads them."""

        lamb_weight_decay: ReadOnly[float]
        exclude_from_weight_decay: ReadOnly[list[str]]


class LocalsgdConfigs(TypedDict, total=False):
    """The keys of ``localsgd_configs``, as a script assigns them."""

    k_steps: int
    """Steps between two averages."""
    begin_step: int
    """Up to this one every step ends in an average."""


if TYPE_CHECKING:

    class ReadLocalsgdConfigs(TypedDict):
        """The keys of ``localsgd_configs``, as a script reads them."""

        k_steps: ReadOnly[int]
        begin_step: ReadOnly[int]


class AdaptiveLocalsgdConfigs(TypedDict, total=False):
    """The keys of ``adaptive_localsgd_configs``, as a script assigns them."""

    init_k_steps: int
    """Steps between two averages, at first."""
    begin_step: int
    """Up to this one every step ends in an average."""


if TYPE_CHECKING:

    class ReadAdaptiveLocalsgdConfigs(TypedDict):
        """The keys of ``adaptive_localsgd_configs``, as a script reads them."""

        init_k_steps: ReadOnly[int]
        begin_step: ReadOnly[int]


class DgcConfigs(TypedDict, total=False):
    """The keys of ``dgc_configs``, as a script assigns them."""

    rampup_begin_step: int
    """The first compressed step, counted from 0; before it gradients travel whole."""
    rampup_step: int
    """Steps from there until the last sparsity; each one holds for equally many."""
    sparsity: list[float] | tuple[float, ...]
    """The part of each large gradient that stays, stage by stage."""


if TYPE_CHECKING:

    class ReadDgcConfigs(TypedDict):
        """The keys of ``dgc_configs``, as a script reads them."""

        rampup_begin_step: ReadOnly[int]
        rampup_step: ReadOnly[int]
        sparsity: ReadOnly[list[float]]


class ShardingConfigs(TypedDict, total=False):
    """The keys of ``sharding_configs``, as a script assigns them."""

    sharding_segment_strategy: Literal["segment_broadcast_MB", "segment_anchors"]
    """How modules are divided into segments, whose parameters are gathered together."""
    segment_broadcast_MB: float
    """The size of a segment, in MB."""
    segment_anchors: list[str] | tuple[str, ...] | None
    """Names of modules, or of their parameters, that begin a segment."""
    sharding_degree: int
    """Shards; not assigned: as many as the other degrees leave trainers for."""
    gradient_merge_acc_step: int
    """Steps whose mean gradient is reduced and applied once."""
    optimize_offload: bool
    """The optimizer's states of a model on a GPU lie in main memory between updates."""
    dp_degree: int
    """Replicas of the sharded model."""
    mp_degree: int
    """Parts of each split layer."""
    pp_degree: int
    """Stages of the pipeline."""
    pp_allreduce_in_optimize: bool
    """Replicas reduce their gradients in the update, not in backward."""
    optimize_cast: bool
    """Casts move to the update."""


if TYPE_CHECKING:

    class ReadShardingConfigs(TypedDict):
        """The keys of ``sharding_configs``, as a script reads them."""

        sharding_segment_strategy: ReadOnly[Literal["segment_broadcast_MB", "segment_anchors"]]
        segment_broadcast_MB: ReadOnly[float]
        segment_anchors: ReadOnly[list[str]]
        sharding_degree: ReadOnly[int]
        gradient_merge_acc_step: ReadOnly[int]
        optimize_offload: ReadOnly[bool]
        dp_degree: ReadOnly[int]
        mp_degree: ReadOnly[int]
        pp_degree: ReadOnly[int]
        pp_allreduce_in_optimize: ReadOnly[bool]
        optimize_cast: ReadOnly[bool]


class PipelineConfigs(TypedDict, total=False):
    """The keys of ``pipeline_configs``, as a script assigns them."""

    micro_batch_size: int
    """Samples of a micro-batch; not assigned: as accumulate_steps makes them."""
    accumulate_steps: int
    """Micro-batches of a batch; not assigned: as many as micro_batch_size makes."""
    schedule_mode: Literal["1F1B", "F-then-B"]
    """A forward and a backward in turn, or all forwards, then all backwards."""
    micro_batch: int
    """Another spelling of ``accumulate_steps``."""


if TYPE_CHECKING:

    class ReadPipelineConfigs(TypedDict):
        """The keys of ``pipeline_configs``, as a script reads them."""

        micro_batch_size: ReadOnly[int]
        accumulate_steps: ReadOnly[int]
        schedule_mode: ReadOnly[Literal["1F1B", "F-then-B"]]
        micro_batch: NotRequired[ReadOnly[int]]


class TensorParallelConfigs(TypedDict, total=False):
    """The keys of ``tensor_parallel_configs``, as a script assigns them."""

    tensor_parallel_degree: int
    """Parts of each split layer."""
    tensor_init_seed: int
    """Of the initial values of split layers; -1: they are as the script made them."""


if TYPE_CHECKING:

    class ReadTensorParallelConfigs(TypedDict):
        """The keys of ``tensor_parallel_configs``, as a script reads them."""

        tensor_parallel_degree: ReadOnly[int]
        tensor_init_seed: ReadOnly[int]


Order = Literal["dp", "pp", "sharding", "sep", "mp"]


class HybridConfigs(TypedDict, total=False):
    """The keys of ``hybrid_configs``, as a script assigns them."""

    dp_degree: int
    """Replicas; -1: as many as the other degrees leave trainers for."""
    mp_degree: int
    """Parts of each split layer."""
    pp_degree: int
    """Pipeline stages."""
    sharding_degree: int
    """Shards of the states."""
    sep_degree: int
    """Parts of a sequence."""
    order: list[Order] | tuple[Order, ...]
    """The dimensions of the mesh of trainers, from outside to inside."""


if TYPE_CHECKING:

    class ReadHybridConfigs(TypedDict):
        """The keys of ``hybrid_configs``, as a script reads them."""

        dp_degree: ReadOnly[int]
        mp_degree: ReadOnly[int]
        pp_degree: ReadOnly[int]
        sharding_degree: ReadOnly[int]
        sep_degree: ReadOnly[int]
        order: ReadOnly[list[Order]]


class ExecutionStrategyConfigs(TypedDict, total=False):
    """The keys of ``execution_strategy``, as a script assigns them."""

    num_threads: int
    """Threads of torch within one op while the job runs; 0: as many as it had."""
    num_iteration_per_drop_scope: int
    """Runs after which memory kept for reuse is given back; 0: never."""
    num_iteration_per_run: int
    """Steps of one run, of a list of feeds."""


if TYPE_CHECKING:

    class ReadExecutionStrategyConfigs(TypedDict):
        """The keys of ``execution_strategy``, as a script reads them."""

        num_threads: ReadOnly[int]
        num_iteration_per_drop_scope: ReadOnly[int]
        num_iteration_per_run: ReadOnly[int]


class ExecutionStrategyFields:
    """The attributes of ``execution_strategy`` as an object."""

    if not TYPE_CHECKING:
        __slots__ = ()
    else:
        num_threads: int
        """Threads of torch within one op while the job runs; 0: as many as it had."""
        num_iteration_per_drop_scope: int
        """Runs after which memory kept for reuse is given back; 0: never."""
        num_iteration_per_run: int
        """Steps of one run, of a list of feeds."""


AnyExecutionStrategy = ExecutionStrategyConfigs | ExecutionStrategyFields


class BuildStrategyConfigs(TypedDict, total=False):
    """The keys of ``build_strategy``, as a script assigns them."""

    enable_sequential_execution: bool
    """Sums are waited for where they begin, compiled code keeps the program's order."""
    fuse_elewise_add_act_ops: bool
    """``torch.compile`` makes the code of a program's compute, and fuses what it can."""
    fuse_bn_act_ops: bool
    """``torch.compile`` makes the code of a program's compute, and fuses what it can."""
    enable_auto_fusion: bool
    """``torch.compile`` makes the code of a program's compute, and fuses what it can."""
    fuse_relu_depthwise_conv: bool
    """``torch.compile`` makes the code of a program's compute, and fuses what it can."""
    fuse_broadcast_ops: bool
    """Trainer 0's first values travel in one message a ring."""
    fuse_all_optimizer_ops: bool
    """Updates run as torch's fused, or else multi-tensor, kernels."""
    enable_inplace: bool
    """An element-wise op writes over an operand that nothing else reads."""


if TYPE_CHECKING:

    class ReadBuildStrategyConfigs(TypedDict):
        """The keys of ``build_strategy``, as a script reads them."""

        enable_sequential_execution: ReadOnly[bool]
        fuse_elewise_add_act_ops: ReadOnly[bool]
        fuse_bn_act_ops: ReadOnly[bool]
        enable_auto_fusion: ReadOnly[bool]
        fuse_relu_depthwise_conv: ReadOnly[bool]
        fuse_broadcast_ops: ReadOnly[bool]
        fuse_all_optimizer_ops: ReadOnly[bool]
        enable_inplace: ReadOnly[bool]


class BuildStrategyFields:
    """The attributes of ``build_strategy`` as an object."""

    if not TYPE_CHECKING:
        __slots__ = ()
    else:
        enable_sequential_execution: bool
        """Sums are waited for where they begin, compiled code keeps the program's order."""
        fuse_elewise_add_act_ops: bool
        """``torch.compile`` makes the code of a program's compute, and fuses what it can."""
        fuse_bn_act_ops: bool
        """``torch.compile`` makes the code of a program's compute, and fuses what it can."""
        enable_auto_fusion: bool
        """``torch.compile`` makes the code of a program's compute, and fuses what it can."""
        fuse_relu_depthwise_conv: bool
        """``torch.compile`` makes the code of a program's compute, and fuses what it can."""
        fuse_broadcast_ops: bool
        """Trainer 0's first values travel in one message a ring."""
        fuse_all_optimizer_ops: bool
        """Updates run as torch's fused, or else multi-tensor, kernels."""
        enable_inplace: bool
        """An element-wise op writes over an operand that nothing else reads."""


AnyBuildStrategy = BuildStrategyConfigs | BuildStrategyFields


class StrategyFields:
    """The switches and dictionaries of a ``DistributedStrategy``."""

    if not TYPE_CHECKING:
        __slots__ = ()
    else:
        a_sync: bool
        """Servers do not wait for all trainers; ``a_sync_configs`` says more.  Without servers
        trainers step together, whatever it says."""
        adam_d2sum: bool
        """Adam's rule of Paddle's servers in place of Adam."""
        amp: bool
        """Mixed precision: see ``amp_configs``."""
        asp: bool
        """Structured sparsity: 2 of 4 weights are zero."""
        qat: bool
        """Quantization-aware training: see ``qat_configs``."""
        recompute: bool
        """Activations are computed again in backward."""
        gradient_merge: bool
        """Several steps' gradients make one update."""
        lars: bool
        """LARS in place of SGD with momentum: ``lars_configs``."""
        lamb: bool
        """LAMB in place of Adam: see ``lamb_configs``."""
        sync_batch_norm: bool
        """Batch norm over the batches of all trainers."""
        sync_nccl_allreduce: bool
        """The host waits for each all-reduce right away."""
        use_hierarchical_allreduce: bool
        """Reduces within rows of ranks, then between their first ranks."""
        hierarchical_allreduce_inter_nranks: int
        """Ranks of a row; 0 and 1: those of each machine."""
        fuse_all_reduce_ops: bool
        """Gradients travel in buckets; otherwise each by itself."""
        fuse_grad_size_in_MB: int
        """The most MB of a bucket."""
        fuse_grad_size_in_num: int
        """The most gradients of a bucket; 0: any number."""
        last_comm_group_size_MB: float
        """The most MB of the bucket that leaves last."""
        find_unused_parameters: bool
        """A parameter may have no gradient in a step, and then counts as zero."""
        nccl_comm_num: int
        """Process groups, which buckets use in turn."""
        fp16_allreduce: bool
        """Gradients of more than 16 bits travel as float16."""
        dgc: bool
        """Of a large gradient each trainer sends the largest elements, and keeps the others for
        later steps: deep gradient compression."""
        localsgd: bool
        """Trainers step by themselves, and average their parameters."""
        adaptive_localsgd: bool
        """The same, with a number of steps that follows the loss."""
        heter_ccl_mode: bool
        """Trainers with different accelerators."""
        sharding: bool
        """Parameters, gradients and the optimizer's states are sharded; in programs the states."""
        pipeline: bool
        """Layers are stages on different trainers."""
        fuse_grad_merge: bool
        """Merged gradients share one buffer."""
        tensor_parallel: bool
        """Layers are split over trainers."""
        auto: bool
        """As ``auto_search``."""
        semi_auto: bool
        """The division is found from hints in the model."""
        auto_search: bool
        """The update mode is what ``pserver plan --search --write`` has chosen for the script."""
        split_data: bool
        """``fleet.shard`` gives each trainer its own part of the data, not all of it."""
        elastic: bool
        """Samples are dealt out by leases in every job, also where a lost trainer ends it."""
        without_graph_optimization: bool
        """A program's ops run as they were written; False: ``torch.compile`` optimizes them."""
        cudnn_exhaustive_search: bool
        """cuDNN measures all its algorithms for convolutions while the job runs."""
        conv_workspace_size_limit: int
        """The memory of a convolution of cuDNN while the job runs, in MB; 0: no limit."""
        cudnn_batchnorm_spatial_persistent: bool
        """cuDNN's fast batch norm."""
        a_sync_configs: Settings[ReadASyncConfigs, ASyncConfigs]
        gradient_scale_configs: Settings[ReadGradientScaleConfigs, GradientScaleConfigs]
        trainer_desc_configs: Settings[ReadTrainerDescConfigs, TrainerDescConfigs]
        fs_client_param: Settings[ReadFsClientParam, FsClientParam]
        amp_configs: Settings[ReadAmpConfigs, AmpConfigs]
        qat_configs: Settings[ReadQatConfigs, QatConfigs]
        recompute_configs: Settings[ReadRecomputeConfigs, RecomputeConfigs]
        gradient_merge_configs: Settings[ReadGradientMergeConfigs, GradientMergeConfigs]
        lars_configs: Settings[ReadLarsConfigs, LarsConfigs]
        lamb_configs: Settings[ReadLambConfigs, LambConfigs]
        localsgd_configs: Settings[ReadLocalsgdConfigs, LocalsgdConfigs]
        adaptive_localsgd_configs: Settings[ReadAdaptiveLocalsgdConfigs, AdaptiveLocalsgdConfigs]
        dgc_configs: Settings[ReadDgcConfigs, DgcConfigs]
        sharding_configs: Settings[ReadShardingConfigs, ShardingConfigs]
        pipeline_configs: Settings[ReadPipelineConfigs, PipelineConfigs]
        tensor_parallel_configs: Settings[ReadTensorParallelConfigs, TensorParallelConfigs]
        hybrid_configs: Settings[ReadHybridConfigs, HybridConfigs]
        execution_strategy: Settings[ReadExecutionStrategyConfigs, AnyExecutionStrategy]
        build_strategy: Settings[ReadBuildStrategyConfigs, AnyBuildStrategy]
