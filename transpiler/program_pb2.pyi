from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEMPORARY: _ClassVar[Role]
    INPUT: _ClassVar[Role]
    PARAMETER: _ClassVar[Role]
    BUFFER: _ClassVar[Role]
    GRADIENT: _ClassVar[Role]
    STATE: _ClassVar[Role]
    DELTA: _ClassVar[Role]
    SIZE: _ClassVar[Role]
    OUTPUT: _ClassVar[Role]
    TABLE: _ClassVar[Role]
TEMPORARY: Role
INPUT: Role
PARAMETER: Role
BUFFER: Role
GRADIENT: Role
STATE: Role
DELTA: Role
SIZE: Role
OUTPUT: Role
TABLE: Role

class Program(_message.Message):
    __slots__ = ("blocks", "deployment")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    deployment: Deployment
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., deployment: _Optional[_Union[Deployment, _Mapping]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("index", "variables", "ops")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    index: int
    variables: _containers.RepeatedCompositeFieldContainer[Variable]
    ops: _containers.RepeatedCompositeFieldContainer[Op]
    def __init__(self, index: _Optional[int] = ..., variables: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ..., ops: _Optional[_Iterable[_Union[Op, _Mapping]]] = ...) -> None: ...

class Variable(_message.Message):
    __slots__ = ("name", "shape", "dtype", "role", "of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedCompositeFieldContainer[Dimension]
    dtype: str
    role: Role
    of: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[_Union[Dimension, _Mapping]]] = ..., dtype: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., of: _Optional[str] = ...) -> None: ...

class Dimension(_message.Message):
    __slots__ = ("size", "symbol")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    size: int
    symbol: str
    def __init__(self, size: _Optional[int] = ..., symbol: _Optional[str] = ...) -> None: ...

class Op(_message.Message):
    __slots__ = ("type", "arguments", "outputs", "location")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Argument
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Argument, _Mapping]] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    type: str
    arguments: _containers.MessageMap[str, Argument]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    location: str
    def __init__(self, type: _Optional[str] = ..., arguments: _Optional[_Mapping[str, Argument]] = ..., outputs: _Optional[_Iterable[str]] = ..., location: _Optional[str] = ...) -> None: ...

class Argument(_message.Message):
    __slots__ = ("none", "boolean", "integer", "real", "text", "variable", "symbol", "tensor", "list", "block")
    NONE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    none: Nothing
    boolean: bool
    integer: int
    real: float
    text: str
    variable: str
    symbol: Symbol
    tensor: Literal
    list: Arguments
    block: Block
    def __init__(self, none: _Optional[_Union[Nothing, _Mapping]] = ..., boolean: _Optional[bool] = ..., integer: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., variable: _Optional[str] = ..., symbol: _Optional[_Union[Symbol, _Mapping]] = ..., tensor: _Optional[_Union[Literal, _Mapping]] = ..., list: _Optional[_Union[Arguments, _Mapping]] = ..., block: _Optional[_Union[Block, _Mapping]] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Arguments(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Argument]
    def __init__(self, items: _Optional[_Iterable[_Union[Argument, _Mapping]]] = ...) -> None: ...

class Symbol(_message.Message):
    __slots__ = ("kind", "value")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    value: str
    def __init__(self, kind: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Literal(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Deployment(_message.Message):
    __slots__ = ("plan", "endpoints", "trainer_id", "server_index", "wait_port", "runtime_split_send_recv", "soft_wait_ms", "optimizer", "execution")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    WAIT_PORT_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_SPLIT_SEND_RECV_FIELD_NUMBER: _ClassVar[int]
    SOFT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    trainer_id: int
    server_index: int
    wait_port: bool
    runtime_split_send_recv: bool
    soft_wait_ms: int
    optimizer: int
    execution: Execution
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., endpoints: _Optional[_Iterable[str]] = ..., trainer_id: _Optional[int] = ..., server_index: _Optional[int] = ..., wait_port: _Optional[bool] = ..., runtime_split_send_recv: _Optional[bool] = ..., soft_wait_ms: _Optional[int] = ..., optimizer: _Optional[int] = ..., execution: _Optional[_Union[Execution, _Mapping]] = ...) -> None: ...

class Execution(_message.Message):
    __slots__ = ("threads", "benchmarks", "workspace_mb", "iterations", "runs_per_cleanup", "compiles", "ordered", "reuses", "fuses_broadcasts", "dump_path", "dump_fields", "dump_params", "dump_stats")
    THREADS_FIELD_NUMBER: _ClassVar[int]
    BENCHMARKS_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_MB_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    RUNS_PER_CLEANUP_FIELD_NUMBER: _ClassVar[int]
    COMPILES_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    REUSES_FIELD_NUMBER: _ClassVar[int]
    FUSES_BROADCASTS_FIELD_NUMBER: _ClassVar[int]
    DUMP_PATH_FIELD_NUMBER: _ClassVar[int]
    DUMP_FIELDS_FIELD_NUMBER: _ClassVar[int]
    DUMP_PARAMS_FIELD_NUMBER: _ClassVar[int]
    DUMP_STATS_FIELD_NUMBER: _ClassVar[int]
    threads: int
    benchmarks: bool
    workspace_mb: int
    iterations: int
    runs_per_cleanup: int
    compiles: bool
    ordered: bool
    reuses: bool
    fuses_broadcasts: bool
    dump_path: str
    dump_fields: _containers.RepeatedScalarFieldContainer[str]
    dump_params: _containers.RepeatedScalarFieldContainer[str]
    dump_stats: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, threads: _Optional[int] = ..., benchmarks: _Optional[bool] = ..., workspace_mb: _Optional[int] = ..., iterations: _Optional[int] = ..., runs_per_cleanup: _Optional[int] = ..., compiles: _Optional[bool] = ..., ordered: _Optional[bool] = ..., reuses: _Optional[bool] = ..., fuses_broadcasts: _Optional[bool] = ..., dump_path: _Optional[str] = ..., dump_fields: _Optional[_Iterable[str]] = ..., dump_params: _Optional[_Iterable[str]] = ..., dump_stats: _Optional[_Iterable[str]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("lanes", "trainers", "servers", "groups", "placements", "clip", "graph", "tables", "collective", "averaged", "lost_trainer")
    LANES_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_FIELD_NUMBER: _ClassVar[int]
    LOST_TRAINER_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedCompositeFieldContainer[Lane]
    trainers: int
    servers: int
    groups: _containers.RepeatedCompositeFieldContainer[Rule]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    clip: Clip
    graph: str
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    collective: Collective
    averaged: _containers.RepeatedScalarFieldContainer[str]
    lost_trainer: str
    def __init__(self, lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ..., trainers: _Optional[int] = ..., servers: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Rule, _Mapping]]] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., clip: _Optional[_Union[Clip, _Mapping]] = ..., graph: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., collective: _Optional[_Union[Collective, _Mapping]] = ..., averaged: _Optional[_Iterable[str]] = ..., lost_trainer: _Optional[str] = ...) -> None: ...

class Collective(_message.Message):
    __slots__ = ("mode", "rings", "inner", "bucket_bytes", "steps", "last_bytes", "most", "dtype", "waits", "sharded", "gradient_scale", "begin", "adaptive")
    MODE_FIELD_NUMBER: _ClassVar[int]
    RINGS_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    SHARDED_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    mode: str
    rings: int
    inner: int
    bucket_bytes: int
    steps: int
    last_bytes: int
    most: int
    dtype: str
    waits: bool
    sharded: bool
    gradient_scale: str
    begin: int
    adaptive: bool
    def __init__(self, mode: _Optional[str] = ..., rings: _Optional[int] = ..., inner: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., steps: _Optional[int] = ..., last_bytes: _Optional[int] = ..., most: _Optional[int] = ..., dtype: _Optional[str] = ..., waits: _Optional[bool] = ..., sharded: _Optional[bool] = ..., gradient_scale: _Optional[str] = ..., begin: _Optional[int] = ..., adaptive: _Optional[bool] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "dim", "dtype", "rows", "segments", "lane", "seed", "initial", "count", "probability", "show_click", "ttl", "capacity", "eviction", "memory_bytes", "compression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    SHOW_CLICK_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    dtype: str
    rows: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    lane: int
    seed: int
    initial: Initial
    count: CountFilterEntry
    probability: ProbabilityEntry
    show_click: ShowClickEntry
    ttl: float
    capacity: int
    eviction: str
    memory_bytes: int
    compression: str
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., dtype: _Optional[str] = ..., rows: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., lane: _Optional[int] = ..., seed: _Optional[int] = ..., initial: _Optional[_Union[Initial, _Mapping]] = ..., count: _Optional[_Union[CountFilterEntry, _Mapping]] = ..., probability: _Optional[_Union[ProbabilityEntry, _Mapping]] = ..., show_click: _Optional[_Union[ShowClickEntry, _Mapping]] = ..., ttl: _Optional[float] = ..., capacity: _Optional[int] = ..., eviction: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., compression: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("begin", "end", "group")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    group: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class Initial(_message.Message):
    __slots__ = ("kind", "low", "high")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    kind: str
    low: float
    high: float
    def __init__(self, kind: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class CountFilterEntry(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class ProbabilityEntry(_message.Message):
    __slots__ = ("probability",)
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    probability: float
    def __init__(self, probability: _Optional[float] = ...) -> None: ...

class ShowClickEntry(_message.Message):
    __slots__ = ("show", "click", "threshold", "nonclk_coeff", "click_coeff", "decay", "delete_threshold", "delete_after_unseen_days")
    SHOW_FIELD_NUMBER: _ClassVar[int]
    CLICK_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    NONCLK_COEFF_FIELD_NUMBER: _ClassVar[int]
    CLICK_COEFF_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    DELETE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DELETE_AFTER_UNSEEN_DAYS_FIELD_NUMBER: _ClassVar[int]
    show: str
    click: str
    threshold: float
    nonclk_coeff: float
    click_coeff: float
    decay: float
    delete_threshold: float
    delete_after_unseen_days: float
    def __init__(self, show: _Optional[str] = ..., click: _Optional[str] = ..., threshold: _Optional[float] = ..., nonclk_coeff: _Optional[float] = ..., click_coeff: _Optional[float] = ..., decay: _Optional[float] = ..., delete_threshold: _Optional[float] = ..., delete_after_unseen_days: _Optional[float] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("mode", "merge", "max_merge_var_num", "send_queue_size", "send_wait_times", "thread_pool_size", "independent_recv_thread", "min_send_grad_num_before_recv", "k_steps", "staleness", "dc_asgd", "outer", "nonfinite", "buffers", "optimizer", "gradient_scale", "outlier_push", "outlier_factor", "lost_trainer", "row_invalidation", "look_ahead")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    MAX_MERGE_VAR_NUM_FIELD_NUMBER: _ClassVar[int]
    SEND_QUEUE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEND_WAIT_TIMES_FIELD_NUMBER: _ClassVar[int]
    THREAD_POOL_SIZE_FIELD_NUMBER: _ClassVar[int]
    INDEPENDENT_RECV_THREAD_FIELD_NUMBER: _ClassVar[int]
    MIN_SEND_GRAD_NUM_BEFORE_RECV_FIELD_NUMBER: _ClassVar[int]
    K_STEPS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    DC_ASGD_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    OUTLIER_PUSH_FIELD_NUMBER: _ClassVar[int]
    OUTLIER_FACTOR_FIELD_NUMBER: _ClassVar[int]
    LOST_TRAINER_FIELD_NUMBER: _ClassVar[int]
    ROW_INVALIDATION_FIELD_NUMBER: _ClassVar[int]
    LOOK_AHEAD_FIELD_NUMBER: _ClassVar[int]
    mode: str
    merge: str
    max_merge_var_num: int
    send_queue_size: int
    send_wait_times: int
    thread_pool_size: int
    independent_recv_thread: bool
    min_send_grad_num_before_recv: int
    k_steps: int
    staleness: int
    dc_asgd: float
    outer: Rule
    nonfinite: str
    buffers: str
    optimizer: int
    gradient_scale: str
    outlier_push: str
    outlier_factor: float
    lost_trainer: str
    row_invalidation: bool
    look_ahead: int
    def __init__(self, mode: _Optional[str] = ..., merge: _Optional[str] = ..., max_merge_var_num: _Optional[int] = ..., send_queue_size: _Optional[int] = ..., send_wait_times: _Optional[int] = ..., thread_pool_size: _Optional[int] = ..., independent_recv_thread: _Optional[bool] = ..., min_send_grad_num_before_recv: _Optional[int] = ..., k_steps: _Optional[int] = ..., staleness: _Optional[int] = ..., dc_asgd: _Optional[float] = ..., outer: _Optional[_Union[Rule, _Mapping]] = ..., nonfinite: _Optional[str] = ..., buffers: _Optional[str] = ..., optimizer: _Optional[int] = ..., gradient_scale: _Optional[str] = ..., outlier_push: _Optional[str] = ..., outlier_factor: _Optional[float] = ..., lost_trainer: _Optional[str] = ..., row_invalidation: _Optional[bool] = ..., look_ahead: _Optional[int] = ...) -> None: ...

class Rule(_message.Message):
    __slots__ = ("type", "hparams", "flags", "update")
    class HparamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Hparam
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Hparam, _Mapping]] = ...) -> None: ...
    class FlagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bool] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    HPARAMS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    type: str
    hparams: _containers.MessageMap[str, Hparam]
    flags: _containers.ScalarMap[str, bool]
    update: Block
    def __init__(self, type: _Optional[str] = ..., hparams: _Optional[_Mapping[str, Hparam]] = ..., flags: _Optional[_Mapping[str, bool]] = ..., update: _Optional[_Union[Block, _Mapping]] = ...) -> None: ...

class Hparam(_message.Message):
    __slots__ = ("values", "pair")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    pair: bool
    def __init__(self, values: _Optional[_Iterable[float]] = ..., pair: _Optional[bool] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("name", "shape", "dtype", "group", "slices", "lane", "compression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    group: int
    slices: _containers.RepeatedCompositeFieldContainer[Slice]
    lane: int
    compression: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., group: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[Slice, _Mapping]]] = ..., lane: _Optional[int] = ..., compression: _Optional[str] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("name", "begin", "end", "shape", "server")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    name: str
    begin: int
    end: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    server: int
    def __init__(self, name: _Optional[str] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., server: _Optional[int] = ...) -> None: ...

class Clip(_message.Message):
    __slots__ = ("kind", "low", "high")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    kind: str
    low: float
    high: float
    def __init__(self, kind: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...
