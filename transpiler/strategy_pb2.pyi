from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OriginalMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSAID: _ClassVar[OriginalMode]
    COLLECTIVE: _ClassVar[OriginalMode]
    PS: _ClassVar[OriginalMode]
    PIPELINE: _ClassVar[OriginalMode]
    HETER: _ClassVar[OriginalMode]

class TableType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PS_SPARSE_TABLE: _ClassVar[TableType]
    PS_DENSE_TABLE: _ClassVar[TableType]
UNSAID: OriginalMode
COLLECTIVE: OriginalMode
PS: OriginalMode
PIPELINE: OriginalMode
HETER: OriginalMode
PS_SPARSE_TABLE: TableType
PS_DENSE_TABLE: TableType

class DistributedStrategy(_message.Message):
    __slots__ = ("a_sync", "adam_d2sum", "amp", "asp", "qat", "recompute", "gradient_merge", "lars", "lamb", "sync_batch_norm", "sync_nccl_allreduce", "use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks", "fuse_all_reduce_ops", "fuse_grad_size_in_MB", "fuse_grad_size_in_num", "last_comm_group_size_MB", "find_unused_parameters", "nccl_comm_num", "fp16_allreduce", "dgc", "localsgd", "adaptive_localsgd", "heter_ccl_mode", "sharding", "pipeline", "fuse_grad_merge", "tensor_parallel", "auto", "semi_auto", "auto_search", "split_data", "elastic", "without_graph_optimization", "cudnn_exhaustive_search", "conv_workspace_size_limit", "cudnn_batchnorm_spatial_persistent", "a_sync_configs", "gradient_scale_configs", "trainer_desc_configs", "fs_client_param", "amp_configs", "qat_configs", "recompute_configs", "gradient_merge_configs", "lars_configs", "lamb_configs", "localsgd_configs", "adaptive_localsgd_configs", "dgc_configs", "sharding_configs", "pipeline_configs", "tensor_parallel_configs", "hybrid_configs", "execution_strategy", "build_strategy", "emptied", "mode", "fuse_grad_size_in_TFLOPS", "calc_comm_same_stream", "is_fl_ps_mode", "with_coordinator", "downpour_table_param")
    A_SYNC_FIELD_NUMBER: _ClassVar[int]
    ADAM_D2SUM_FIELD_NUMBER: _ClassVar[int]
    AMP_FIELD_NUMBER: _ClassVar[int]
    ASP_FIELD_NUMBER: _ClassVar[int]
    QAT_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_MERGE_FIELD_NUMBER: _ClassVar[int]
    LARS_FIELD_NUMBER: _ClassVar[int]
    LAMB_FIELD_NUMBER: _ClassVar[int]
    SYNC_BATCH_NORM_FIELD_NUMBER: _ClassVar[int]
    SYNC_NCCL_ALLREDUCE_FIELD_NUMBER: _ClassVar[int]
    USE_HIERARCHICAL_ALLREDUCE_FIELD_NUMBER: _ClassVar[int]
    HIERARCHICAL_ALLREDUCE_INTER_NRANKS_FIELD_NUMBER: _ClassVar[int]
    FUSE_ALL_REDUCE_OPS_FIELD_NUMBER: _ClassVar[int]
    FUSE_GRAD_SIZE_IN_MB_FIELD_NUMBER: _ClassVar[int]
    FUSE_GRAD_SIZE_IN_NUM_FIELD_NUMBER: _ClassVar[int]
    LAST_COMM_GROUP_SIZE_MB_FIELD_NUMBER: _ClassVar[int]
    FIND_UNUSED_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NCCL_COMM_NUM_FIELD_NUMBER: _ClassVar[int]
    FP16_ALLREDUCE_FIELD_NUMBER: _ClassVar[int]
    DGC_FIELD_NUMBER: _ClassVar[int]
    LOCALSGD_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_LOCALSGD_FIELD_NUMBER: _ClassVar[int]
    HETER_CCL_MODE_FIELD_NUMBER: _ClassVar[int]
    SHARDING_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    FUSE_GRAD_MERGE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    SEMI_AUTO_FIELD_NUMBER: _ClassVar[int]
    AUTO_SEARCH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_DATA_FIELD_NUMBER: _ClassVar[int]
    ELASTIC_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_GRAPH_OPTIMIZATION_FIELD_NUMBER: _ClassVar[int]
    CUDNN_EXHAUSTIVE_SEARCH_FIELD_NUMBER: _ClassVar[int]
    CONV_WORKSPACE_SIZE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CUDNN_BATCHNORM_SPATIAL_PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    A_SYNC_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_SCALE_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_DESC_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    FS_CLIENT_PARAM_FIELD_NUMBER: _ClassVar[int]
    AMP_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    QAT_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_MERGE_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    LARS_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    LAMB_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    LOCALSGD_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_LOCALSGD_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    DGC_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    SHARDING_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    HYBRID_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    BUILD_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    EMPTIED_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    FUSE_GRAD_SIZE_IN_TFLOPS_FIELD_NUMBER: _ClassVar[int]
    CALC_COMM_SAME_STREAM_FIELD_NUMBER: _ClassVar[int]
    IS_FL_PS_MODE_FIELD_NUMBER: _ClassVar[int]
    WITH_COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    DOWNPOUR_TABLE_PARAM_FIELD_NUMBER: _ClassVar[int]
    a_sync: bool
    adam_d2sum: bool
    amp: bool
    asp: bool
    qat: bool
    recompute: bool
    gradient_merge: bool
    lars: bool
    lamb: bool
    sync_batch_norm: bool
    sync_nccl_allreduce: bool
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int
    fuse_all_reduce_ops: bool
    fuse_grad_size_in_MB: int
    fuse_grad_size_in_num: int
    last_comm_group_size_MB: float
    find_unused_parameters: bool
    nccl_comm_num: int
    fp16_allreduce: bool
    dgc: bool
    localsgd: bool
    adaptive_localsgd: bool
    heter_ccl_mode: bool
    sharding: bool
    pipeline: bool
    fuse_grad_merge: bool
    tensor_parallel: bool
    auto: bool
    semi_auto: bool
    auto_search: bool
    split_data: bool
    elastic: bool
    without_graph_optimization: bool
    cudnn_exhaustive_search: bool
    conv_workspace_size_limit: int
    cudnn_batchnorm_spatial_persistent: bool
    a_sync_configs: ASyncConfigs
    gradient_scale_configs: GradientScaleConfigs
    trainer_desc_configs: TrainerDescConfigs
    fs_client_param: FsClientParam
    amp_configs: AmpConfigs
    qat_configs: QatConfigs
    recompute_configs: RecomputeConfigs
    gradient_merge_configs: GradientMergeConfigs
    lars_configs: LarsConfigs
    lamb_configs: LambConfigs
    localsgd_configs: LocalsgdConfigs
    adaptive_localsgd_configs: AdaptiveLocalsgdConfigs
    dgc_configs: DgcConfigs
    sharding_configs: ShardingConfigs
    pipeline_configs: PipelineConfigs
    tensor_parallel_configs: TensorParallelConfigs
    hybrid_configs: HybridConfigs
    execution_strategy: ExecutionStrategy
    build_strategy: BuildStrategy
    emptied: _containers.RepeatedScalarFieldContainer[str]
    mode: OriginalMode
    fuse_grad_size_in_TFLOPS: float
    calc_comm_same_stream: bool
    is_fl_ps_mode: bool
    with_coordinator: bool
    downpour_table_param: _containers.RepeatedCompositeFieldContainer[TableParameter]
    def __init__(self, a_sync: _Optional[bool] = ..., adam_d2sum: _Optional[bool] = ..., amp: _Optional[bool] = ..., asp: _Optional[bool] = ..., qat: _Optional[bool] = ..., recompute: _Optional[bool] = ..., gradient_merge: _Optional[bool] = ..., lars: _Optional[bool] = ..., lamb: _Optional[bool] = ..., sync_batch_norm: _Optional[bool] = ..., sync_nccl_allreduce: _Optional[bool] = ..., use_hierarchical_allreduce: _Optional[bool] = ..., hierarchical_allreduce_inter_nranks: _Optional[int] = ..., fuse_all_reduce_ops: _Optional[bool] = ..., fuse_grad_size_in_MB: _Optional[int] = ..., fuse_grad_size_in_num: _Optional[int] = ..., last_comm_group_size_MB: _Optional[float] = ..., find_unused_parameters: _Optional[bool] = ..., nccl_comm_num: _Optional[int] = ..., fp16_allreduce: _Optional[bool] = ..., dgc: _Optional[bool] = ..., localsgd: _Optional[bool] = ..., adaptive_localsgd: _Optional[bool] = ..., heter_ccl_mode: _Optional[bool] = ..., sharding: _Optional[bool] = ..., pipeline: _Optional[bool] = ..., fuse_grad_merge: _Optional[bool] = ..., tensor_parallel: _Optional[bool] = ..., auto: _Optional[bool] = ..., semi_auto: _Optional[bool] = ..., auto_search: _Optional[bool] = ..., split_data: _Optional[bool] = ..., elastic: _Optional[bool] = ..., without_graph_optimization: _Optional[bool] = ..., cudnn_exhaustive_search: _Optional[bool] = ..., conv_workspace_size_limit: _Optional[int] = ..., cudnn_batchnorm_spatial_persistent: _Optional[bool] = ..., a_sync_configs: _Optional[_Union[ASyncConfigs, _Mapping]] = ..., gradient_scale_configs: _Optional[_Union[GradientScaleConfigs, _Mapping]] = ..., trainer_desc_configs: _Optional[_Union[TrainerDescConfigs, _Mapping]] = ..., fs_client_param: _Optional[_Union[FsClientParam, _Mapping]] = ..., amp_configs: _Optional[_Union[AmpConfigs, _Mapping]] = ..., qat_configs: _Optional[_Union[QatConfigs, _Mapping]] = ..., recompute_configs: _Optional[_Union[RecomputeConfigs, _Mapping]] = ..., gradient_merge_configs: _Optional[_Union[GradientMergeConfigs, _Mapping]] = ..., lars_configs: _Optional[_Union[LarsConfigs, _Mapping]] = ..., lamb_configs: _Optional[_Union[LambConfigs, _Mapping]] = ..., localsgd_configs: _Optional[_Union[LocalsgdConfigs, _Mapping]] = ..., adaptive_localsgd_configs: _Optional[_Union[AdaptiveLocalsgdConfigs, _Mapping]] = ..., dgc_configs: _Optional[_Union[DgcConfigs, _Mapping]] = ..., sharding_configs: _Optional[_Union[ShardingConfigs, _Mapping]] = ..., pipeline_configs: _Optional[_Union[PipelineConfigs, _Mapping]] = ..., tensor_parallel_configs: _Optional[_Union[TensorParallelConfigs, _Mapping]] = ..., hybrid_configs: _Optional[_Union[HybridConfigs, _Mapping]] = ..., execution_strategy: _Optional[_Union[ExecutionStrategy, _Mapping]] = ..., build_strategy: _Optional[_Union[BuildStrategy, _Mapping]] = ..., emptied: _Optional[_Iterable[str]] = ..., mode: _Optional[_Union[OriginalMode, str]] = ..., fuse_grad_size_in_TFLOPS: _Optional[float] = ..., calc_comm_same_stream: _Optional[bool] = ..., is_fl_ps_mode: _Optional[bool] = ..., with_coordinator: _Optional[bool] = ..., downpour_table_param: _Optional[_Iterable[_Union[TableParameter, _Mapping]]] = ...) -> None: ...

class ASyncConfigs(_message.Message):
    __slots__ = ("k_steps", "max_merge_var_num", "send_queue_size", "independent_recv_thread", "thread_pool_size", "send_wait_times", "runtime_split_send_recv", "merge", "half_async", "staleness", "dc_asgd", "outer_optimizer", "modes", "overlap", "min_send_grad_num_before_recv", "launch_barrier", "embeddings", "soft_wait_ms", "nonfinite", "buffers", "outlier_push", "outlier_factor", "lost_trainer", "row_invalidation", "look_ahead", "heter_worker_device_guard", "lr_decay_steps", "use_ps_gpu", "use_gpu_graph")
    K_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_MERGE_VAR_NUM_FIELD_NUMBER: _ClassVar[int]
    SEND_QUEUE_SIZE_FIELD_NUMBER: _ClassVar[int]
    INDEPENDENT_RECV_THREAD_FIELD_NUMBER: _ClassVar[int]
    THREAD_POOL_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEND_WAIT_TIMES_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_SPLIT_SEND_RECV_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    HALF_ASYNC_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    DC_ASGD_FIELD_NUMBER: _ClassVar[int]
    OUTER_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    MIN_SEND_GRAD_NUM_BEFORE_RECV_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_BARRIER_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SOFT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    OUTLIER_PUSH_FIELD_NUMBER: _ClassVar[int]
    OUTLIER_FACTOR_FIELD_NUMBER: _ClassVar[int]
    LOST_TRAINER_FIELD_NUMBER: _ClassVar[int]
    ROW_INVALIDATION_FIELD_NUMBER: _ClassVar[int]
    LOOK_AHEAD_FIELD_NUMBER: _ClassVar[int]
    HETER_WORKER_DEVICE_GUARD_FIELD_NUMBER: _ClassVar[int]
    LR_DECAY_STEPS_FIELD_NUMBER: _ClassVar[int]
    USE_PS_GPU_FIELD_NUMBER: _ClassVar[int]
    USE_GPU_GRAPH_FIELD_NUMBER: _ClassVar[int]
    k_steps: int
    max_merge_var_num: int
    send_queue_size: int
    independent_recv_thread: bool
    thread_pool_size: int
    send_wait_times: int
    runtime_split_send_recv: bool
    merge: str
    half_async: bool
    staleness: int
    dc_asgd: float
    outer_optimizer: OuterOptimizer
    modes: _containers.RepeatedCompositeFieldContainer[Mode]
    overlap: bool
    min_send_grad_num_before_recv: int
    launch_barrier: bool
    embeddings: _containers.RepeatedScalarFieldContainer[str]
    soft_wait_ms: int
    nonfinite: str
    buffers: str
    outlier_push: str
    outlier_factor: float
    lost_trainer: str
    row_invalidation: bool
    look_ahead: int
    heter_worker_device_guard: str
    lr_decay_steps: int
    use_ps_gpu: int
    use_gpu_graph: int
    def __init__(self, k_steps: _Optional[int] = ..., max_merge_var_num: _Optional[int] = ..., send_queue_size: _Optional[int] = ..., independent_recv_thread: _Optional[bool] = ..., thread_pool_size: _Optional[int] = ..., send_wait_times: _Optional[int] = ..., runtime_split_send_recv: _Optional[bool] = ..., merge: _Optional[str] = ..., half_async: _Optional[bool] = ..., staleness: _Optional[int] = ..., dc_asgd: _Optional[float] = ..., outer_optimizer: _Optional[_Union[OuterOptimizer, _Mapping]] = ..., modes: _Optional[_Iterable[_Union[Mode, _Mapping]]] = ..., overlap: _Optional[bool] = ..., min_send_grad_num_before_recv: _Optional[int] = ..., launch_barrier: _Optional[bool] = ..., embeddings: _Optional[_Iterable[str]] = ..., soft_wait_ms: _Optional[int] = ..., nonfinite: _Optional[str] = ..., buffers: _Optional[str] = ..., outlier_push: _Optional[str] = ..., outlier_factor: _Optional[float] = ..., lost_trainer: _Optional[str] = ..., row_invalidation: _Optional[bool] = ..., look_ahead: _Optional[int] = ..., heter_worker_device_guard: _Optional[str] = ..., lr_decay_steps: _Optional[int] = ..., use_ps_gpu: _Optional[int] = ..., use_gpu_graph: _Optional[int] = ...) -> None: ...

class OuterOptimizer(_message.Message):
    __slots__ = ("type", "lr", "momentum")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    type: str
    lr: float
    momentum: float
    def __init__(self, type: _Optional[str] = ..., lr: _Optional[float] = ..., momentum: _Optional[float] = ...) -> None: ...

class Mode(_message.Message):
    __slots__ = ("pattern", "mode")
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    mode: str
    def __init__(self, pattern: _Optional[str] = ..., mode: _Optional[str] = ...) -> None: ...

class GradientScaleConfigs(_message.Message):
    __slots__ = ("scale_strategy", "scale_gradient")
    SCALE_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SCALE_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    scale_strategy: str
    scale_gradient: bool
    def __init__(self, scale_strategy: _Optional[str] = ..., scale_gradient: _Optional[bool] = ...) -> None: ...

class TrainerDescConfigs(_message.Message):
    __slots__ = ("dump_fields_path", "dump_fields", "dump_param", "stat_var_names", "trainer", "device_worker", "local_sparse", "remote_sparse")
    DUMP_FIELDS_PATH_FIELD_NUMBER: _ClassVar[int]
    DUMP_FIELDS_FIELD_NUMBER: _ClassVar[int]
    DUMP_PARAM_FIELD_NUMBER: _ClassVar[int]
    STAT_VAR_NAMES_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_WORKER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SPARSE_FIELD_NUMBER: _ClassVar[int]
    REMOTE_SPARSE_FIELD_NUMBER: _ClassVar[int]
    dump_fields_path: str
    dump_fields: _containers.RepeatedScalarFieldContainer[str]
    dump_param: _containers.RepeatedScalarFieldContainer[str]
    stat_var_names: _containers.RepeatedScalarFieldContainer[str]
    trainer: str
    device_worker: str
    local_sparse: _containers.RepeatedScalarFieldContainer[str]
    remote_sparse: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dump_fields_path: _Optional[str] = ..., dump_fields: _Optional[_Iterable[str]] = ..., dump_param: _Optional[_Iterable[str]] = ..., stat_var_names: _Optional[_Iterable[str]] = ..., trainer: _Optional[str] = ..., device_worker: _Optional[str] = ..., local_sparse: _Optional[_Iterable[str]] = ..., remote_sparse: _Optional[_Iterable[str]] = ...) -> None: ...

class FsClientParam(_message.Message):
    __slots__ = ("uri", "user", "passwd", "hadoop_bin")
    URI_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PASSWD_FIELD_NUMBER: _ClassVar[int]
    HADOOP_BIN_FIELD_NUMBER: _ClassVar[int]
    uri: str
    user: str
    passwd: str
    hadoop_bin: str
    def __init__(self, uri: _Optional[str] = ..., user: _Optional[str] = ..., passwd: _Optional[str] = ..., hadoop_bin: _Optional[str] = ...) -> None: ...

class AmpConfigs(_message.Message):
    __slots__ = ("init_loss_scaling", "use_dynamic_loss_scaling", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio", "custom_white_list", "custom_black_list", "custom_black_varnames", "use_pure_fp16", "use_pure_bf16", "use_fp16_guard", "use_optimizer_fp16")
    INIT_LOSS_SCALING_FIELD_NUMBER: _ClassVar[int]
    USE_DYNAMIC_LOSS_SCALING_FIELD_NUMBER: _ClassVar[int]
    INCR_EVERY_N_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECR_EVERY_N_NAN_OR_INF_FIELD_NUMBER: _ClassVar[int]
    INCR_RATIO_FIELD_NUMBER: _ClassVar[int]
    DECR_RATIO_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_WHITE_LIST_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_BLACK_LIST_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_BLACK_VARNAMES_FIELD_NUMBER: _ClassVar[int]
    USE_PURE_FP16_FIELD_NUMBER: _ClassVar[int]
    USE_PURE_BF16_FIELD_NUMBER: _ClassVar[int]
    USE_FP16_GUARD_FIELD_NUMBER: _ClassVar[int]
    USE_OPTIMIZER_FP16_FIELD_NUMBER: _ClassVar[int]
    init_loss_scaling: float
    use_dynamic_loss_scaling: bool
    incr_every_n_steps: int
    decr_every_n_nan_or_inf: int
    incr_ratio: float
    decr_ratio: float
    custom_white_list: _containers.RepeatedScalarFieldContainer[str]
    custom_black_list: _containers.RepeatedScalarFieldContainer[str]
    custom_black_varnames: _containers.RepeatedScalarFieldContainer[str]
    use_pure_fp16: bool
    use_pure_bf16: bool
    use_fp16_guard: bool
    use_optimizer_fp16: bool
    def __init__(self, init_loss_scaling: _Optional[float] = ..., use_dynamic_loss_scaling: _Optional[bool] = ..., incr_every_n_steps: _Optional[int] = ..., decr_every_n_nan_or_inf: _Optional[int] = ..., incr_ratio: _Optional[float] = ..., decr_ratio: _Optional[float] = ..., custom_white_list: _Optional[_Iterable[str]] = ..., custom_black_list: _Optional[_Iterable[str]] = ..., custom_black_varnames: _Optional[_Iterable[str]] = ..., use_pure_fp16: _Optional[bool] = ..., use_pure_bf16: _Optional[bool] = ..., use_fp16_guard: _Optional[bool] = ..., use_optimizer_fp16: _Optional[bool] = ...) -> None: ...

class QatConfigs(_message.Message):
    __slots__ = ("channel_wise_abs_max", "weight_bits", "activation_bits", "not_quant_pattern", "algo")
    CHANNEL_WISE_ABS_MAX_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BITS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BITS_FIELD_NUMBER: _ClassVar[int]
    NOT_QUANT_PATTERN_FIELD_NUMBER: _ClassVar[int]
    ALGO_FIELD_NUMBER: _ClassVar[int]
    channel_wise_abs_max: bool
    weight_bits: int
    activation_bits: int
    not_quant_pattern: _containers.RepeatedScalarFieldContainer[str]
    algo: str
    def __init__(self, channel_wise_abs_max: _Optional[bool] = ..., weight_bits: _Optional[int] = ..., activation_bits: _Optional[int] = ..., not_quant_pattern: _Optional[_Iterable[str]] = ..., algo: _Optional[str] = ...) -> None: ...

class RecomputeConfigs(_message.Message):
    __slots__ = ("checkpoints", "enable_offload", "checkpoint_shape", "enable_tuning", "refined_ops_patterns")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_TUNING_FIELD_NUMBER: _ClassVar[int]
    REFINED_OPS_PATTERNS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedScalarFieldContainer[str]
    enable_offload: bool
    checkpoint_shape: _containers.RepeatedScalarFieldContainer[int]
    enable_tuning: bool
    refined_ops_patterns: _containers.RepeatedCompositeFieldContainer[RefinedOpsPattern]
    def __init__(self, checkpoints: _Optional[_Iterable[str]] = ..., enable_offload: _Optional[bool] = ..., checkpoint_shape: _Optional[_Iterable[int]] = ..., enable_tuning: _Optional[bool] = ..., refined_ops_patterns: _Optional[_Iterable[_Union[RefinedOpsPattern, _Mapping]]] = ...) -> None: ...

class GradientMergeConfigs(_message.Message):
    __slots__ = ("k_steps", "avg")
    K_STEPS_FIELD_NUMBER: _ClassVar[int]
    AVG_FIELD_NUMBER: _ClassVar[int]
    k_steps: int
    avg: bool
    def __init__(self, k_steps: _Optional[int] = ..., avg: _Optional[bool] = ...) -> None: ...

class LarsConfigs(_message.Message):
    __slots__ = ("lars_coeff", "lars_weight_decay", "epsilon", "exclude_from_weight_decay")
    LARS_COEFF_FIELD_NUMBER: _ClassVar[int]
    LARS_WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FROM_WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    lars_coeff: float
    lars_weight_decay: float
    epsilon: float
    exclude_from_weight_decay: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lars_coeff: _Optional[float] = ..., lars_weight_decay: _Optional[float] = ..., epsilon: _Optional[float] = ..., exclude_from_weight_decay: _Optional[_Iterable[str]] = ...) -> None: ...

class LambConfigs(_message.Message):
    __slots__ = ("lamb_weight_decay", "exclude_from_weight_decay")
    LAMB_WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FROM_WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    lamb_weight_decay: float
    exclude_from_weight_decay: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lamb_weight_decay: _Optional[float] = ..., exclude_from_weight_decay: _Optional[_Iterable[str]] = ...) -> None: ...

class LocalsgdConfigs(_message.Message):
    __slots__ = ("k_steps", "begin_step")
    K_STEPS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_STEP_FIELD_NUMBER: _ClassVar[int]
    k_steps: int
    begin_step: int
    def __init__(self, k_steps: _Optional[int] = ..., begin_step: _Optional[int] = ...) -> None: ...

class AdaptiveLocalsgdConfigs(_message.Message):
    __slots__ = ("init_k_steps", "begin_step")
    INIT_K_STEPS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_STEP_FIELD_NUMBER: _ClassVar[int]
    init_k_steps: int
    begin_step: int
    def __init__(self, init_k_steps: _Optional[int] = ..., begin_step: _Optional[int] = ...) -> None: ...

class DgcConfigs(_message.Message):
    __slots__ = ("rampup_begin_step", "rampup_step", "sparsity")
    RAMPUP_BEGIN_STEP_FIELD_NUMBER: _ClassVar[int]
    RAMPUP_STEP_FIELD_NUMBER: _ClassVar[int]
    SPARSITY_FIELD_NUMBER: _ClassVar[int]
    rampup_begin_step: int
    rampup_step: int
    sparsity: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rampup_begin_step: _Optional[int] = ..., rampup_step: _Optional[int] = ..., sparsity: _Optional[_Iterable[float]] = ...) -> None: ...

class ShardingConfigs(_message.Message):
    __slots__ = ("sharding_segment_strategy", "segment_broadcast_MB", "segment_anchors", "sharding_degree", "gradient_merge_acc_step", "optimize_offload", "dp_degree", "mp_degree", "pp_degree", "pp_allreduce_in_optimize", "optimize_cast", "hybrid_dp", "_dp_as_optimizer_sharding", "stage", "enable_tuning", "use_calc_stream", "fuse_broadcast_MB", "sharding_group_size", "as_outer_parallelism", "parallelism")
    SHARDING_SEGMENT_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BROADCAST_MB_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_ANCHORS_FIELD_NUMBER: _ClassVar[int]
    SHARDING_DEGREE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_MERGE_ACC_STEP_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZE_OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    DP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    MP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    PP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    PP_ALLREDUCE_IN_OPTIMIZE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZE_CAST_FIELD_NUMBER: _ClassVar[int]
    HYBRID_DP_FIELD_NUMBER: _ClassVar[int]
    _DP_AS_OPTIMIZER_SHARDING_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_TUNING_FIELD_NUMBER: _ClassVar[int]
    USE_CALC_STREAM_FIELD_NUMBER: _ClassVar[int]
    FUSE_BROADCAST_MB_FIELD_NUMBER: _ClassVar[int]
    SHARDING_GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    AS_OUTER_PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    sharding_segment_strategy: str
    segment_broadcast_MB: float
    segment_anchors: _containers.RepeatedScalarFieldContainer[str]
    sharding_degree: int
    gradient_merge_acc_step: int
    optimize_offload: bool
    dp_degree: int
    mp_degree: int
    pp_degree: int
    pp_allreduce_in_optimize: bool
    optimize_cast: bool
    hybrid_dp: bool
    _dp_as_optimizer_sharding: bool
    stage: int
    enable_tuning: bool
    use_calc_stream: bool
    fuse_broadcast_MB: float
    sharding_group_size: int
    as_outer_parallelism: bool
    parallelism: int
    def __init__(self, sharding_segment_strategy: _Optional[str] = ..., segment_broadcast_MB: _Optional[float] = ..., segment_anchors: _Optional[_Iterable[str]] = ..., sharding_degree: _Optional[int] = ..., gradient_merge_acc_step: _Optional[int] = ..., optimize_offload: _Optional[bool] = ..., dp_degree: _Optional[int] = ..., mp_degree: _Optional[int] = ..., pp_degree: _Optional[int] = ..., pp_allreduce_in_optimize: _Optional[bool] = ..., optimize_cast: _Optional[bool] = ..., hybrid_dp: _Optional[bool] = ..., _dp_as_optimizer_sharding: _Optional[bool] = ..., stage: _Optional[int] = ..., enable_tuning: _Optional[bool] = ..., use_calc_stream: _Optional[bool] = ..., fuse_broadcast_MB: _Optional[float] = ..., sharding_group_size: _Optional[int] = ..., as_outer_parallelism: _Optional[bool] = ..., parallelism: _Optional[int] = ...) -> None: ...

class PipelineConfigs(_message.Message):
    __slots__ = ("micro_batch_size", "accumulate_steps", "schedule_mode", "p2p_cache_shape", "enable_partial_send_recv", "micro_batch")
    MICRO_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_STEPS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_MODE_FIELD_NUMBER: _ClassVar[int]
    P2P_CACHE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_PARTIAL_SEND_RECV_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    micro_batch_size: int
    accumulate_steps: int
    schedule_mode: str
    p2p_cache_shape: bool
    enable_partial_send_recv: bool
    micro_batch: int
    def __init__(self, micro_batch_size: _Optional[int] = ..., accumulate_steps: _Optional[int] = ..., schedule_mode: _Optional[str] = ..., p2p_cache_shape: _Optional[bool] = ..., enable_partial_send_recv: _Optional[bool] = ..., micro_batch: _Optional[int] = ...) -> None: ...

class TensorParallelConfigs(_message.Message):
    __slots__ = ("tensor_parallel_degree", "tensor_init_seed")
    TENSOR_PARALLEL_DEGREE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_INIT_SEED_FIELD_NUMBER: _ClassVar[int]
    tensor_parallel_degree: int
    tensor_init_seed: int
    def __init__(self, tensor_parallel_degree: _Optional[int] = ..., tensor_init_seed: _Optional[int] = ...) -> None: ...

class HybridConfigs(_message.Message):
    __slots__ = ("dp_degree", "mp_degree", "pp_degree", "sharding_degree", "sep_degree", "order", "mp_configs", "pp_configs", "sharding_configs", "enable_optimizer_timer", "ep_degree", "moe_sharding_degree", "cp_degree", "cp_sharding_degree")
    DP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    MP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    PP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    SHARDING_DEGREE_FIELD_NUMBER: _ClassVar[int]
    SEP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MP_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    PP_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    SHARDING_CONFIGS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_OPTIMIZER_TIMER_FIELD_NUMBER: _ClassVar[int]
    EP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    MOE_SHARDING_DEGREE_FIELD_NUMBER: _ClassVar[int]
    CP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    CP_SHARDING_DEGREE_FIELD_NUMBER: _ClassVar[int]
    dp_degree: int
    mp_degree: int
    pp_degree: int
    sharding_degree: int
    sep_degree: int
    order: _containers.RepeatedScalarFieldContainer[str]
    mp_configs: MpConfig
    pp_configs: PpConfig
    sharding_configs: DygraphShardingConfig
    enable_optimizer_timer: bool
    ep_degree: int
    moe_sharding_degree: int
    cp_degree: int
    cp_sharding_degree: int
    def __init__(self, dp_degree: _Optional[int] = ..., mp_degree: _Optional[int] = ..., pp_degree: _Optional[int] = ..., sharding_degree: _Optional[int] = ..., sep_degree: _Optional[int] = ..., order: _Optional[_Iterable[str]] = ..., mp_configs: _Optional[_Union[MpConfig, _Mapping]] = ..., pp_configs: _Optional[_Union[PpConfig, _Mapping]] = ..., sharding_configs: _Optional[_Union[DygraphShardingConfig, _Mapping]] = ..., enable_optimizer_timer: _Optional[bool] = ..., ep_degree: _Optional[int] = ..., moe_sharding_degree: _Optional[int] = ..., cp_degree: _Optional[int] = ..., cp_sharding_degree: _Optional[int] = ...) -> None: ...

class ExecutionStrategy(_message.Message):
    __slots__ = ("num_threads", "num_iteration_per_drop_scope", "num_iteration_per_run", "use_thread_barrier")
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    NUM_ITERATION_PER_DROP_SCOPE_FIELD_NUMBER: _ClassVar[int]
    NUM_ITERATION_PER_RUN_FIELD_NUMBER: _ClassVar[int]
    USE_THREAD_BARRIER_FIELD_NUMBER: _ClassVar[int]
    num_threads: int
    num_iteration_per_drop_scope: int
    num_iteration_per_run: int
    use_thread_barrier: bool
    def __init__(self, num_threads: _Optional[int] = ..., num_iteration_per_drop_scope: _Optional[int] = ..., num_iteration_per_run: _Optional[int] = ..., use_thread_barrier: _Optional[bool] = ...) -> None: ...

class BuildStrategy(_message.Message):
    __slots__ = ("enable_sequential_execution", "fuse_elewise_add_act_ops", "fuse_bn_act_ops", "enable_auto_fusion", "fuse_relu_depthwise_conv", "fuse_broadcast_ops", "fuse_all_optimizer_ops", "enable_inplace", "enable_backward_optimizer_op_deps", "cache_runtime_context", "fuse_bn_add_act_ops", "enable_addto", "fix_op_run_order", "allow_cuda_graph_capture", "reduce_strategy", "fuse_gemm_epilogue", "debug_graphviz_path", "fused_attention", "fused_feedforward", "fuse_dot_product_attention", "fuse_resunit")
    ENABLE_SEQUENTIAL_EXECUTION_FIELD_NUMBER: _ClassVar[int]
    FUSE_ELEWISE_ADD_ACT_OPS_FIELD_NUMBER: _ClassVar[int]
    FUSE_BN_ACT_OPS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_AUTO_FUSION_FIELD_NUMBER: _ClassVar[int]
    FUSE_RELU_DEPTHWISE_CONV_FIELD_NUMBER: _ClassVar[int]
    FUSE_BROADCAST_OPS_FIELD_NUMBER: _ClassVar[int]
    FUSE_ALL_OPTIMIZER_OPS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_INPLACE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_BACKWARD_OPTIMIZER_OP_DEPS_FIELD_NUMBER: _ClassVar[int]
    CACHE_RUNTIME_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    FUSE_BN_ADD_ACT_OPS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_ADDTO_FIELD_NUMBER: _ClassVar[int]
    FIX_OP_RUN_ORDER_FIELD_NUMBER: _ClassVar[int]
    ALLOW_CUDA_GRAPH_CAPTURE_FIELD_NUMBER: _ClassVar[int]
    REDUCE_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    FUSE_GEMM_EPILOGUE_FIELD_NUMBER: _ClassVar[int]
    DEBUG_GRAPHVIZ_PATH_FIELD_NUMBER: _ClassVar[int]
    FUSED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    FUSED_FEEDFORWARD_FIELD_NUMBER: _ClassVar[int]
    FUSE_DOT_PRODUCT_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    FUSE_RESUNIT_FIELD_NUMBER: _ClassVar[int]
    enable_sequential_execution: bool
    fuse_elewise_add_act_ops: bool
    fuse_bn_act_ops: bool
    enable_auto_fusion: bool
    fuse_relu_depthwise_conv: bool
    fuse_broadcast_ops: bool
    fuse_all_optimizer_ops: bool
    enable_inplace: bool
    enable_backward_optimizer_op_deps: bool
    cache_runtime_context: bool
    fuse_bn_add_act_ops: bool
    enable_addto: bool
    fix_op_run_order: bool
    allow_cuda_graph_capture: bool
    reduce_strategy: int
    fuse_gemm_epilogue: bool
    debug_graphviz_path: str
    fused_attention: bool
    fused_feedforward: bool
    fuse_dot_product_attention: bool
    fuse_resunit: bool
    def __init__(self, enable_sequential_execution: _Optional[bool] = ..., fuse_elewise_add_act_ops: _Optional[bool] = ..., fuse_bn_act_ops: _Optional[bool] = ..., enable_auto_fusion: _Optional[bool] = ..., fuse_relu_depthwise_conv: _Optional[bool] = ..., fuse_broadcast_ops: _Optional[bool] = ..., fuse_all_optimizer_ops: _Optional[bool] = ..., enable_inplace: _Optional[bool] = ..., enable_backward_optimizer_op_deps: _Optional[bool] = ..., cache_runtime_context: _Optional[bool] = ..., fuse_bn_add_act_ops: _Optional[bool] = ..., enable_addto: _Optional[bool] = ..., fix_op_run_order: _Optional[bool] = ..., allow_cuda_graph_capture: _Optional[bool] = ..., reduce_strategy: _Optional[int] = ..., fuse_gemm_epilogue: _Optional[bool] = ..., debug_graphviz_path: _Optional[str] = ..., fused_attention: _Optional[bool] = ..., fused_feedforward: _Optional[bool] = ..., fuse_dot_product_attention: _Optional[bool] = ..., fuse_resunit: _Optional[bool] = ...) -> None: ...

class RefinedOpsPattern(_message.Message):
    __slots__ = ("main_ops", "num", "pre_ops", "suf_ops")
    MAIN_OPS_FIELD_NUMBER: _ClassVar[int]
    NUM_FIELD_NUMBER: _ClassVar[int]
    PRE_OPS_FIELD_NUMBER: _ClassVar[int]
    SUF_OPS_FIELD_NUMBER: _ClassVar[int]
    main_ops: _containers.RepeatedScalarFieldContainer[str]
    num: int
    pre_ops: _containers.RepeatedScalarFieldContainer[str]
    suf_ops: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, main_ops: _Optional[_Iterable[str]] = ..., num: _Optional[int] = ..., pre_ops: _Optional[_Iterable[str]] = ..., suf_ops: _Optional[_Iterable[str]] = ...) -> None: ...

class MpConfig(_message.Message):
    __slots__ = ("sync_param", "sync_grad", "sync_moment", "sync_mode", "mp_async_allreduce", "mp_skip_c_identity", "mp_fused_linear_param_grad_add", "need_broadcast_data", "recompute_allgather")
    SYNC_PARAM_FIELD_NUMBER: _ClassVar[int]
    SYNC_GRAD_FIELD_NUMBER: _ClassVar[int]
    SYNC_MOMENT_FIELD_NUMBER: _ClassVar[int]
    SYNC_MODE_FIELD_NUMBER: _ClassVar[int]
    MP_ASYNC_ALLREDUCE_FIELD_NUMBER: _ClassVar[int]
    MP_SKIP_C_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MP_FUSED_LINEAR_PARAM_GRAD_ADD_FIELD_NUMBER: _ClassVar[int]
    NEED_BROADCAST_DATA_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_ALLGATHER_FIELD_NUMBER: _ClassVar[int]
    sync_param: bool
    sync_grad: bool
    sync_moment: bool
    sync_mode: str
    mp_async_allreduce: bool
    mp_skip_c_identity: bool
    mp_fused_linear_param_grad_add: bool
    need_broadcast_data: bool
    recompute_allgather: bool
    def __init__(self, sync_param: _Optional[bool] = ..., sync_grad: _Optional[bool] = ..., sync_moment: _Optional[bool] = ..., sync_mode: _Optional[str] = ..., mp_async_allreduce: _Optional[bool] = ..., mp_skip_c_identity: _Optional[bool] = ..., mp_fused_linear_param_grad_add: _Optional[bool] = ..., need_broadcast_data: _Optional[bool] = ..., recompute_allgather: _Optional[bool] = ...) -> None: ...

class PpConfig(_message.Message):
    __slots__ = ("dp_comm_overlap", "delay_scale_loss", "enable_timer", "sharding_comm_overlap", "profiling", "release_gradients", "overlap_p2p_comm", "clear_every_step_cache", "use_batch_p2p_comm", "best_unbalanced_scheduler", "enable_offload_queue", "enable_dynamic_shape")
    DP_COMM_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    DELAY_SCALE_LOSS_FIELD_NUMBER: _ClassVar[int]
    ENABLE_TIMER_FIELD_NUMBER: _ClassVar[int]
    SHARDING_COMM_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    PROFILING_FIELD_NUMBER: _ClassVar[int]
    RELEASE_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_P2P_COMM_FIELD_NUMBER: _ClassVar[int]
    CLEAR_EVERY_STEP_CACHE_FIELD_NUMBER: _ClassVar[int]
    USE_BATCH_P2P_COMM_FIELD_NUMBER: _ClassVar[int]
    BEST_UNBALANCED_SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    ENABLE_OFFLOAD_QUEUE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_DYNAMIC_SHAPE_FIELD_NUMBER: _ClassVar[int]
    dp_comm_overlap: bool
    delay_scale_loss: bool
    enable_timer: bool
    sharding_comm_overlap: bool
    profiling: bool
    release_gradients: bool
    overlap_p2p_comm: bool
    clear_every_step_cache: bool
    use_batch_p2p_comm: bool
    best_unbalanced_scheduler: bool
    enable_offload_queue: bool
    enable_dynamic_shape: bool
    def __init__(self, dp_comm_overlap: _Optional[bool] = ..., delay_scale_loss: _Optional[bool] = ..., enable_timer: _Optional[bool] = ..., sharding_comm_overlap: _Optional[bool] = ..., profiling: _Optional[bool] = ..., release_gradients: _Optional[bool] = ..., overlap_p2p_comm: _Optional[bool] = ..., clear_every_step_cache: _Optional[bool] = ..., use_batch_p2p_comm: _Optional[bool] = ..., best_unbalanced_scheduler: _Optional[bool] = ..., enable_offload_queue: _Optional[bool] = ..., enable_dynamic_shape: _Optional[bool] = ...) -> None: ...

class DygraphShardingConfig(_message.Message):
    __slots__ = ("tensor_fusion", "accumulate_steps", "comm_overlap", "split_param", "fuse_optimizer", "use_reduce_avg", "comm_buffer_size_MB", "release_gradients", "free_grads_in_comm", "enable_fuse_optimizer_states")
    TENSOR_FUSION_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_STEPS_FIELD_NUMBER: _ClassVar[int]
    COMM_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    SPLIT_PARAM_FIELD_NUMBER: _ClassVar[int]
    FUSE_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    USE_REDUCE_AVG_FIELD_NUMBER: _ClassVar[int]
    COMM_BUFFER_SIZE_MB_FIELD_NUMBER: _ClassVar[int]
    RELEASE_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    FREE_GRADS_IN_COMM_FIELD_NUMBER: _ClassVar[int]
    ENABLE_FUSE_OPTIMIZER_STATES_FIELD_NUMBER: _ClassVar[int]
    tensor_fusion: bool
    accumulate_steps: int
    comm_overlap: bool
    split_param: bool
    fuse_optimizer: bool
    use_reduce_avg: bool
    comm_buffer_size_MB: int
    release_gradients: bool
    free_grads_in_comm: bool
    enable_fuse_optimizer_states: bool
    def __init__(self, tensor_fusion: _Optional[bool] = ..., accumulate_steps: _Optional[int] = ..., comm_overlap: _Optional[bool] = ..., split_param: _Optional[bool] = ..., fuse_optimizer: _Optional[bool] = ..., use_reduce_avg: _Optional[bool] = ..., comm_buffer_size_MB: _Optional[int] = ..., release_gradients: _Optional[bool] = ..., free_grads_in_comm: _Optional[bool] = ..., enable_fuse_optimizer_states: _Optional[bool] = ...) -> None: ...

class TableParameter(_message.Message):
    __slots__ = ("table_id", "table_name", "table_class", "shard_num", "type", "accessor", "compress_in_save", "enable_sparse_table_cache", "sparse_table_cache_rate", "sparse_table_cache_file_num", "enable_revert", "shard_merge_rate", "use_gpu_graph")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_CLASS_FIELD_NUMBER: _ClassVar[int]
    SHARD_NUM_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ACCESSOR_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_IN_SAVE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_SPARSE_TABLE_CACHE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_TABLE_CACHE_RATE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_TABLE_CACHE_FILE_NUM_FIELD_NUMBER: _ClassVar[int]
    ENABLE_REVERT_FIELD_NUMBER: _ClassVar[int]
    SHARD_MERGE_RATE_FIELD_NUMBER: _ClassVar[int]
    USE_GPU_GRAPH_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    table_name: str
    table_class: str
    shard_num: int
    type: TableType
    accessor: TableAccessorParameter
    compress_in_save: bool
    enable_sparse_table_cache: bool
    sparse_table_cache_rate: float
    sparse_table_cache_file_num: int
    enable_revert: bool
    shard_merge_rate: float
    use_gpu_graph: bool
    def __init__(self, table_id: _Optional[int] = ..., table_name: _Optional[str] = ..., table_class: _Optional[str] = ..., shard_num: _Optional[int] = ..., type: _Optional[_Union[TableType, str]] = ..., accessor: _Optional[_Union[TableAccessorParameter, _Mapping]] = ..., compress_in_save: _Optional[bool] = ..., enable_sparse_table_cache: _Optional[bool] = ..., sparse_table_cache_rate: _Optional[float] = ..., sparse_table_cache_file_num: _Optional[int] = ..., enable_revert: _Optional[bool] = ..., shard_merge_rate: _Optional[float] = ..., use_gpu_graph: _Optional[bool] = ...) -> None: ...

class TableAccessorParameter(_message.Message):
    __slots__ = ("accessor_class", "fea_dim", "embedx_dim", "embedx_threshold", "ctr_accessor_param", "table_accessor_save_param", "embed_sgd_param", "embedx_sgd_param", "graph_sgd_param")
    ACCESSOR_CLASS_FIELD_NUMBER: _ClassVar[int]
    FEA_DIM_FIELD_NUMBER: _ClassVar[int]
    EMBEDX_DIM_FIELD_NUMBER: _ClassVar[int]
    EMBEDX_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    CTR_ACCESSOR_PARAM_FIELD_NUMBER: _ClassVar[int]
    TABLE_ACCESSOR_SAVE_PARAM_FIELD_NUMBER: _ClassVar[int]
    EMBED_SGD_PARAM_FIELD_NUMBER: _ClassVar[int]
    EMBEDX_SGD_PARAM_FIELD_NUMBER: _ClassVar[int]
    GRAPH_SGD_PARAM_FIELD_NUMBER: _ClassVar[int]
    accessor_class: str
    fea_dim: int
    embedx_dim: int
    embedx_threshold: int
    ctr_accessor_param: CtrAccessorParameter
    table_accessor_save_param: _containers.RepeatedCompositeFieldContainer[TableAccessorSaveParameter]
    embed_sgd_param: SGDParameter
    embedx_sgd_param: SGDParameter
    graph_sgd_param: GraphSGDParameter
    def __init__(self, accessor_class: _Optional[str] = ..., fea_dim: _Optional[int] = ..., embedx_dim: _Optional[int] = ..., embedx_threshold: _Optional[int] = ..., ctr_accessor_param: _Optional[_Union[CtrAccessorParameter, _Mapping]] = ..., table_accessor_save_param: _Optional[_Iterable[_Union[TableAccessorSaveParameter, _Mapping]]] = ..., embed_sgd_param: _Optional[_Union[SGDParameter, _Mapping]] = ..., embedx_sgd_param: _Optional[_Union[SGDParameter, _Mapping]] = ..., graph_sgd_param: _Optional[_Union[GraphSGDParameter, _Mapping]] = ...) -> None: ...

class GraphSGDParameter(_message.Message):
    __slots__ = ("nodeid_slot", "feature_learning_rate")
    NODEID_SLOT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    nodeid_slot: int
    feature_learning_rate: float
    def __init__(self, nodeid_slot: _Optional[int] = ..., feature_learning_rate: _Optional[float] = ...) -> None: ...

class SGDParameter(_message.Message):
    __slots__ = ("name", "naive", "adagrad", "adam")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAIVE_FIELD_NUMBER: _ClassVar[int]
    ADAGRAD_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    name: str
    naive: SparseRuleParameter
    adagrad: SparseRuleParameter
    adam: SparseRuleParameter
    def __init__(self, name: _Optional[str] = ..., naive: _Optional[_Union[SparseRuleParameter, _Mapping]] = ..., adagrad: _Optional[_Union[SparseRuleParameter, _Mapping]] = ..., adam: _Optional[_Union[SparseRuleParameter, _Mapping]] = ...) -> None: ...

class SparseRuleParameter(_message.Message):
    __slots__ = ("learning_rate", "initial_g2sum", "initial_range", "weight_bounds", "beta1_decay_rate", "beta2_decay_rate", "ada_epsilon")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_G2SUM_FIELD_NUMBER: _ClassVar[int]
    INITIAL_RANGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    BETA1_DECAY_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA2_DECAY_RATE_FIELD_NUMBER: _ClassVar[int]
    ADA_EPSILON_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    initial_g2sum: float
    initial_range: float
    weight_bounds: _containers.RepeatedScalarFieldContainer[float]
    beta1_decay_rate: float
    beta2_decay_rate: float
    ada_epsilon: float
    def __init__(self, learning_rate: _Optional[float] = ..., initial_g2sum: _Optional[float] = ..., initial_range: _Optional[float] = ..., weight_bounds: _Optional[_Iterable[float]] = ..., beta1_decay_rate: _Optional[float] = ..., beta2_decay_rate: _Optional[float] = ..., ada_epsilon: _Optional[float] = ...) -> None: ...

class CtrAccessorParameter(_message.Message):
    __slots__ = ("nonclk_coeff", "click_coeff", "base_threshold", "delta_threshold", "delta_keep_days", "show_click_decay_rate", "delete_threshold", "delete_after_unseen_days", "ssd_unseenday_threshold", "show_scale", "zero_init", "load_filter_slots", "save_filter_slots")
    NONCLK_COEFF_FIELD_NUMBER: _ClassVar[int]
    CLICK_COEFF_FIELD_NUMBER: _ClassVar[int]
    BASE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DELTA_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DELTA_KEEP_DAYS_FIELD_NUMBER: _ClassVar[int]
    SHOW_CLICK_DECAY_RATE_FIELD_NUMBER: _ClassVar[int]
    DELETE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DELETE_AFTER_UNSEEN_DAYS_FIELD_NUMBER: _ClassVar[int]
    SSD_UNSEENDAY_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    SHOW_SCALE_FIELD_NUMBER: _ClassVar[int]
    ZERO_INIT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FILTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAVE_FILTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    nonclk_coeff: float
    click_coeff: float
    base_threshold: float
    delta_threshold: float
    delta_keep_days: float
    show_click_decay_rate: float
    delete_threshold: float
    delete_after_unseen_days: float
    ssd_unseenday_threshold: int
    show_scale: bool
    zero_init: bool
    load_filter_slots: _containers.RepeatedScalarFieldContainer[float]
    save_filter_slots: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, nonclk_coeff: _Optional[float] = ..., click_coeff: _Optional[float] = ..., base_threshold: _Optional[float] = ..., delta_threshold: _Optional[float] = ..., delta_keep_days: _Optional[float] = ..., show_click_decay_rate: _Optional[float] = ..., delete_threshold: _Optional[float] = ..., delete_after_unseen_days: _Optional[float] = ..., ssd_unseenday_threshold: _Optional[int] = ..., show_scale: _Optional[bool] = ..., zero_init: _Optional[bool] = ..., load_filter_slots: _Optional[_Iterable[float]] = ..., save_filter_slots: _Optional[_Iterable[float]] = ...) -> None: ...

class TableAccessorSaveParameter(_message.Message):
    __slots__ = ("param", "converter", "deconverter")
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CONVERTER_FIELD_NUMBER: _ClassVar[int]
    DECONVERTER_FIELD_NUMBER: _ClassVar[int]
    param: int
    converter: str
    deconverter: str
    def __init__(self, param: _Optional[int] = ..., converter: _Optional[str] = ..., deconverter: _Optional[str] = ...) -> None: ...
