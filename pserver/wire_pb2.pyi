from transpiler import program_pb2 as _program_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MeetMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEET_ALL: _ClassVar[MeetMode]
    MEET_PAST: _ClassVar[MeetMode]
    MEET_SAVE: _ClassVar[MeetMode]
    MEET_ROUND: _ClassVar[MeetMode]
    MEET_FIRST: _ClassVar[MeetMode]
    MEET_SET: _ClassVar[MeetMode]
    MEET_ASK: _ClassVar[MeetMode]
    MEET_ANSWER: _ClassVar[MeetMode]

class TraceAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRACE_CLOCK: _ClassVar[TraceAction]
    TRACE_BEGIN: _ClassVar[TraceAction]
    TRACE_LEAVE: _ClassVar[TraceAction]
    TRACE_READ: _ClassVar[TraceAction]
    TRACE_END: _ClassVar[TraceAction]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[Kind]
    HELLO: _ClassVar[Kind]
    VALUE: _ClassVar[Kind]
    GRADIENT: _ClassVar[Kind]
    COMMIT: _ClassVar[Kind]
    NORMS: _ClassVar[Kind]
    SCALE: _ClassVar[Kind]
    PULL: _ClassVar[Kind]
    DONE: _ClassVar[Kind]
    FAILURE: _ClassVar[Kind]
    DRAIN: _ClassVar[Kind]
    BYE: _ClassVar[Kind]
    PROBE: _ClassVar[Kind]
    ROWS: _ClassVar[Kind]
    LOOKUP: _ClassVar[Kind]
    SCAN: _ClassVar[Kind]
    ASSIGN: _ClassVar[Kind]
    CHECKSUM: _ClassVar[Kind]
    REFRESH: _ClassVar[Kind]
    STAGED: _ClassVar[Kind]
    RECORD: _ClassVar[Kind]
MEET_ALL: MeetMode
MEET_PAST: MeetMode
MEET_SAVE: MeetMode
MEET_ROUND: MeetMode
MEET_FIRST: MeetMode
MEET_SET: MeetMode
MEET_ASK: MeetMode
MEET_ANSWER: MeetMode
TRACE_CLOCK: TraceAction
TRACE_BEGIN: TraceAction
TRACE_LEAVE: TraceAction
TRACE_READ: TraceAction
TRACE_END: TraceAction
UNKNOWN: Kind
HELLO: Kind
VALUE: Kind
GRADIENT: Kind
COMMIT: Kind
NORMS: Kind
SCALE: Kind
PULL: Kind
DONE: Kind
FAILURE: Kind
DRAIN: Kind
BYE: Kind
PROBE: Kind
ROWS: Kind
LOOKUP: Kind
SCAN: Kind
ASSIGN: Kind
CHECKSUM: Kind
REFRESH: Kind
STAGED: Kind
RECORD: Kind

class ChallengeRequest(_message.Message):
    __slots__ = ("nonce", "role")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    role: str
    def __init__(self, nonce: _Optional[bytes] = ..., role: _Optional[str] = ...) -> None: ...

class ChallengeReply(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "trainer_id", "incarnation", "fingerprint", "manifest", "transports", "server_index", "coordinator")
    class ManifestEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    trainer_id: int
    incarnation: str
    fingerprint: str
    manifest: _containers.ScalarMap[str, str]
    transports: _containers.RepeatedScalarFieldContainer[str]
    server_index: int
    coordinator: str
    def __init__(self, protocol: _Optional[int] = ..., trainer_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., manifest: _Optional[_Mapping[str, str]] = ..., transports: _Optional[_Iterable[str]] = ..., server_index: _Optional[int] = ..., coordinator: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("ready", "install", "transport", "data_port", "heartbeat_timeout_seconds", "steps", "session", "run", "store", "awaits_servers", "wants_program", "late", "roll", "held", "held_by")
    READY_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    AWAITS_SERVERS_FIELD_NUMBER: _ClassVar[int]
    WANTS_PROGRAM_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    install: bool
    transport: str
    data_port: int
    heartbeat_timeout_seconds: float
    steps: _containers.RepeatedScalarFieldContainer[int]
    session: str
    run: str
    store: str
    awaits_servers: bool
    wants_program: bool
    late: bool
    roll: Roll
    held: bool
    held_by: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ready: _Optional[bool] = ..., install: _Optional[bool] = ..., transport: _Optional[str] = ..., data_port: _Optional[int] = ..., heartbeat_timeout_seconds: _Optional[float] = ..., steps: _Optional[_Iterable[int]] = ..., session: _Optional[str] = ..., run: _Optional[str] = ..., store: _Optional[str] = ..., awaits_servers: _Optional[bool] = ..., wants_program: _Optional[bool] = ..., late: _Optional[bool] = ..., roll: _Optional[_Union[Roll, _Mapping]] = ..., held: _Optional[bool] = ..., held_by: _Optional[_Iterable[int]] = ...) -> None: ...

class InstallRequest(_message.Message):
    __slots__ = ("session", "program", "part", "number", "parts")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    session: str
    program: _program_pb2.Program
    part: bytes
    number: int
    parts: int
    def __init__(self, session: _Optional[str] = ..., program: _Optional[_Union[_program_pb2.Program, _Mapping]] = ..., part: _Optional[bytes] = ..., number: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class InstallReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session", "activity", "report")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    session: str
    activity: str
    report: TrainerReport
    def __init__(self, session: _Optional[str] = ..., activity: _Optional[str] = ..., report: _Optional[_Union[TrainerReport, _Mapping]] = ...) -> None: ...

class TrainerReport(_message.Message):
    __slots__ = ("samples", "values", "memory_bytes", "lanes", "bytes_in", "bytes_out", "reconnects", "saves", "since_save_seconds", "passes", "batch", "batches", "settings", "wrong_lines")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    SINCE_SAVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    WRONG_LINES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    values: _containers.ScalarMap[str, float]
    memory_bytes: int
    lanes: _containers.RepeatedCompositeFieldContainer[LaneReport]
    bytes_in: int
    bytes_out: int
    reconnects: int
    saves: int
    since_save_seconds: float
    passes: int
    batch: int
    batches: int
    settings: _containers.ScalarMap[str, str]
    wrong_lines: int
    def __init__(self, samples: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., memory_bytes: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[LaneReport, _Mapping]]] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., reconnects: _Optional[int] = ..., saves: _Optional[int] = ..., since_save_seconds: _Optional[float] = ..., passes: _Optional[int] = ..., batch: _Optional[int] = ..., batches: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ..., wrong_lines: _Optional[int] = ...) -> None: ...

class LaneReport(_message.Message):
    __slots__ = ("steps", "step_seconds", "blocked_seconds", "wait_seconds", "waits")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    step_seconds: float
    blocked_seconds: float
    wait_seconds: float
    waits: int
    def __init__(self, steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., blocked_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., waits: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("failure", "error", "clock_ns", "roll", "position_asked", "waits")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    POSITION_ASKED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    failure: str
    error: str
    clock_ns: int
    roll: Roll
    position_asked: int
    waits: _containers.RepeatedCompositeFieldContainer[WaitStatus]
    def __init__(self, failure: _Optional[str] = ..., error: _Optional[str] = ..., clock_ns: _Optional[int] = ..., roll: _Optional[_Union[Roll, _Mapping]] = ..., position_asked: _Optional[int] = ..., waits: _Optional[_Iterable[_Union[WaitStatus, _Mapping]]] = ...) -> None: ...

class WaitStatus(_message.Message):
    __slots__ = ("trainer_id", "kind", "what", "number", "seconds", "for_whom")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FOR_WHOM_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    kind: str
    what: str
    number: int
    seconds: float
    for_whom: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, trainer_id: _Optional[int] = ..., kind: _Optional[str] = ..., what: _Optional[str] = ..., number: _Optional[int] = ..., seconds: _Optional[float] = ..., for_whom: _Optional[_Iterable[int]] = ...) -> None: ...

class Roll(_message.Message):
    __slots__ = ("changes", "absent", "preempted", "first")
    class PreemptedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    changes: int
    absent: _containers.RepeatedScalarFieldContainer[int]
    preempted: _containers.ScalarMap[int, int]
    first: int
    def __init__(self, changes: _Optional[int] = ..., absent: _Optional[_Iterable[int]] = ..., preempted: _Optional[_Mapping[int, int]] = ..., first: _Optional[int] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("trainer_id", "incarnation", "failure", "joined", "unreplaced")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    UNREPLACED_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    incarnation: str
    failure: str
    joined: bool
    unreplaced: bool
    def __init__(self, trainer_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., failure: _Optional[str] = ..., joined: _Optional[bool] = ..., unreplaced: _Optional[bool] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ("heartbeat_timeout_seconds",)
    HEARTBEAT_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_timeout_seconds: float
    def __init__(self, heartbeat_timeout_seconds: _Optional[float] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("session", "wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    session: str
    wait: bool
    def __init__(self, session: _Optional[str] = ..., wait: _Optional[bool] = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ("over", "missing")
    OVER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    over: bool
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, over: _Optional[bool] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("session", "failure", "success", "returns", "preempted", "step")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session: str
    failure: str
    success: bool
    returns: bool
    preempted: bool
    step: int
    def __init__(self, session: _Optional[str] = ..., failure: _Optional[str] = ..., success: _Optional[bool] = ..., returns: _Optional[bool] = ..., preempted: _Optional[bool] = ..., step: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("failure", "error")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    failure: str
    error: str
    def __init__(self, failure: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("session", "mode", "key", "text", "number", "ends", "averages", "overflows", "step", "problem")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    AVERAGES_FIELD_NUMBER: _ClassVar[int]
    OVERFLOWS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    session: str
    mode: MeetMode
    key: str
    text: str
    number: int
    ends: bool
    averages: int
    overflows: int
    step: int
    problem: str
    def __init__(self, session: _Optional[str] = ..., mode: _Optional[_Union[MeetMode, str]] = ..., key: _Optional[str] = ..., text: _Optional[str] = ..., number: _Optional[int] = ..., ends: _Optional[bool] = ..., averages: _Optional[int] = ..., overflows: _Optional[int] = ..., step: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("over", "texts", "roll", "number", "changes", "problem")
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    OVER_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    over: bool
    texts: _containers.ScalarMap[int, str]
    roll: Roll
    number: int
    changes: int
    problem: str
    def __init__(self, over: _Optional[bool] = ..., texts: _Optional[_Mapping[int, str]] = ..., roll: _Optional[_Union[Roll, _Mapping]] = ..., number: _Optional[int] = ..., changes: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("session", "path", "background", "number", "withdraw", "base")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    session: str
    path: str
    background: bool
    number: int
    withdraw: bool
    base: str
    def __init__(self, session: _Optional[str] = ..., path: _Optional[str] = ..., background: _Optional[bool] = ..., number: _Optional[int] = ..., withdraw: _Optional[bool] = ..., base: _Optional[str] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("file", "bytes", "done", "failure", "seconds", "pause_seconds", "identity")
    FILE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    file: str
    bytes: int
    done: bool
    failure: str
    seconds: float
    pause_seconds: float
    identity: str
    def __init__(self, file: _Optional[str] = ..., bytes: _Optional[int] = ..., done: _Optional[bool] = ..., failure: _Optional[str] = ..., seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ..., identity: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("session", "path")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    session: str
    path: str
    def __init__(self, session: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("file", "bytes")
    FILE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    file: str
    bytes: int
    def __init__(self, file: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class ShrinkRequest(_message.Message):
    __slots__ = ("session", "days", "threshold", "tables", "number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: str
    days: float
    threshold: float
    tables: _containers.RepeatedScalarFieldContainer[str]
    number: int
    def __init__(self, session: _Optional[str] = ..., days: _Optional[float] = ..., threshold: _Optional[float] = ..., tables: _Optional[_Iterable[str]] = ..., number: _Optional[int] = ...) -> None: ...

class ShrinkReply(_message.Message):
    __slots__ = ("removed",)
    class RemovedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.ScalarMap[str, int]
    def __init__(self, removed: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("variables",)
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    variables: bool
    def __init__(self, variables: _Optional[bool] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("state", "fingerprint", "mode", "slices", "bytes_held", "version", "trainers", "uptime_seconds", "bytes_in", "bytes_out", "transports", "failure", "variables", "tables", "failed_seconds", "kept_seconds", "time", "memory_bytes", "lanes", "events", "server_index", "trainers_expected", "run", "save", "recording", "epochs", "awaits_servers", "away", "reload", "waits", "settings")
    class VariablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: VariableBytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[VariableBytes, _Mapping]] = ...) -> None: ...
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    BYTES_HELD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    FAILED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_SERVERS_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    state: str
    fingerprint: str
    mode: str
    slices: int
    bytes_held: int
    version: int
    trainers: _containers.RepeatedCompositeFieldContainer[TrainerStatus]
    uptime_seconds: float
    bytes_in: int
    bytes_out: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    failure: str
    variables: _containers.MessageMap[str, VariableBytes]
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    failed_seconds: float
    kept_seconds: float
    time: float
    memory_bytes: int
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    server_index: int
    trainers_expected: int
    run: str
    save: SaveStatus
    recording: RecordingStatus
    epochs: _containers.RepeatedCompositeFieldContainer[EpochStatus]
    awaits_servers: bool
    away: _containers.RepeatedScalarFieldContainer[int]
    reload: ReloadStatus
    waits: _containers.RepeatedCompositeFieldContainer[WaitStatus]
    settings: _containers.ScalarMap[str, str]
    def __init__(self, state: _Optional[str] = ..., fingerprint: _Optional[str] = ..., mode: _Optional[str] = ..., slices: _Optional[int] = ..., bytes_held: _Optional[int] = ..., version: _Optional[int] = ..., trainers: _Optional[_Iterable[_Union[TrainerStatus, _Mapping]]] = ..., uptime_seconds: _Optional[float] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., failure: _Optional[str] = ..., variables: _Optional[_Mapping[str, VariableBytes]] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., failed_seconds: _Optional[float] = ..., kept_seconds: _Optional[float] = ..., time: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., server_index: _Optional[int] = ..., trainers_expected: _Optional[int] = ..., run: _Optional[str] = ..., save: _Optional[_Union[SaveStatus, _Mapping]] = ..., recording: _Optional[_Union[RecordingStatus, _Mapping]] = ..., epochs: _Optional[_Iterable[_Union[EpochStatus, _Mapping]]] = ..., awaits_servers: _Optional[bool] = ..., away: _Optional[_Iterable[int]] = ..., reload: _Optional[_Union[ReloadStatus, _Mapping]] = ..., waits: _Optional[_Iterable[_Union[WaitStatus, _Mapping]]] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RecordingStatus(_message.Message):
    __slots__ = ("recording", "entry", "record", "failure", "tables", "versions")
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    recording: str
    entry: int
    record: int
    failure: str
    tables: _containers.ScalarMap[str, str]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, recording: _Optional[str] = ..., entry: _Optional[int] = ..., record: _Optional[int] = ..., failure: _Optional[str] = ..., tables: _Optional[_Mapping[str, str]] = ..., versions: _Optional[_Iterable[int]] = ...) -> None: ...

class ReloadStatus(_message.Message):
    __slots__ = ("file", "steps", "rows", "steps_by_trainer")
    class StepsByTrainerEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    FILE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_TRAINER_FIELD_NUMBER: _ClassVar[int]
    file: str
    steps: int
    rows: int
    steps_by_trainer: _containers.ScalarMap[int, int]
    def __init__(self, file: _Optional[str] = ..., steps: _Optional[int] = ..., rows: _Optional[int] = ..., steps_by_trainer: _Optional[_Mapping[int, int]] = ...) -> None: ...

class EpochStatus(_message.Message):
    __slots__ = ("number", "unit", "samples", "decided", "leased", "skipped", "handed_back", "left_out", "over")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    HANDED_BACK_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    number: int
    unit: str
    samples: int
    decided: int
    leased: int
    skipped: int
    handed_back: int
    left_out: int
    over: bool
    def __init__(self, number: _Optional[int] = ..., unit: _Optional[str] = ..., samples: _Optional[int] = ..., decided: _Optional[int] = ..., leased: _Optional[int] = ..., skipped: _Optional[int] = ..., handed_back: _Optional[int] = ..., left_out: _Optional[int] = ..., over: _Optional[bool] = ...) -> None: ...

class SaveStatus(_message.Message):
    __slots__ = ("number", "file", "done", "failure", "bytes", "seconds", "pause_seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    file: str
    done: bool
    failure: str
    bytes: int
    seconds: float
    pause_seconds: float
    def __init__(self, number: _Optional[int] = ..., file: _Optional[str] = ..., done: _Optional[bool] = ..., failure: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("mode", "version", "queued", "steps", "step_seconds", "updates", "update_seconds", "wait_seconds", "stale_pushes", "stale_steps", "most_stale_steps")
    class WaitSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALE_PUSHES_FIELD_NUMBER: _ClassVar[int]
    STALE_STEPS_FIELD_NUMBER: _ClassVar[int]
    MOST_STALE_STEPS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    version: int
    queued: int
    steps: int
    step_seconds: float
    updates: int
    update_seconds: float
    wait_seconds: _containers.ScalarMap[int, float]
    stale_pushes: int
    stale_steps: int
    most_stale_steps: int
    def __init__(self, mode: _Optional[str] = ..., version: _Optional[int] = ..., queued: _Optional[int] = ..., steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., updates: _Optional[int] = ..., update_seconds: _Optional[float] = ..., wait_seconds: _Optional[_Mapping[int, float]] = ..., stale_pushes: _Optional[int] = ..., stale_steps: _Optional[int] = ..., most_stale_steps: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "time", "kind", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    kind: str
    text: str
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class VariableBytes(_message.Message):
    __slots__ = ("bytes_in", "bytes_out")
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    bytes_in: int
    bytes_out: int
    def __init__(self, bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("name", "rows", "bytes_held", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_HELD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    bytes_held: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., bytes_held: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("trainer_id", "state", "step", "transport", "silence_seconds", "activity", "report", "compute_seconds", "behind", "kept_seconds", "counts", "kept_lookup_bytes")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SILENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    KEPT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_LOOKUP_BYTES_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    state: str
    step: int
    transport: str
    silence_seconds: float
    activity: str
    report: TrainerReport
    compute_seconds: float
    behind: float
    kept_seconds: float
    counts: _containers.ScalarMap[str, int]
    kept_lookup_bytes: int
    def __init__(self, trainer_id: _Optional[int] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., transport: _Optional[str] = ..., silence_seconds: _Optional[float] = ..., activity: _Optional[str] = ..., report: _Optional[_Union[TrainerReport, _Mapping]] = ..., compute_seconds: _Optional[float] = ..., behind: _Optional[float] = ..., kept_seconds: _Optional[float] = ..., counts: _Optional[_Mapping[str, int]] = ..., kept_lookup_bytes: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("session", "transports", "pause", "end")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    session: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    pause: bool
    end: bool
    def __init__(self, session: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., pause: _Optional[bool] = ..., end: _Optional[bool] = ...) -> None: ...

class ObserveReply(_message.Message):
    __slots__ = ("session", "transport", "data_port", "heartbeat_timeout_seconds", "program", "fingerprint", "versions", "step", "hparams", "failure", "recording")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HPARAMS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    session: str
    transport: str
    data_port: int
    heartbeat_timeout_seconds: float
    program: _program_pb2.Program
    fingerprint: str
    versions: _containers.RepeatedScalarFieldContainer[int]
    step: int
    hparams: _containers.RepeatedCompositeFieldContainer[GroupHparams]
    failure: str
    recording: RecordingStatus
    def __init__(self, session: _Optional[str] = ..., transport: _Optional[str] = ..., data_port: _Optional[int] = ..., heartbeat_timeout_seconds: _Optional[float] = ..., program: _Optional[_Union[_program_pb2.Program, _Mapping]] = ..., fingerprint: _Optional[str] = ..., versions: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., hparams: _Optional[_Iterable[_Union[GroupHparams, _Mapping]]] = ..., failure: _Optional[str] = ..., recording: _Optional[_Union[RecordingStatus, _Mapping]] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetReply(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    def __init__(self, state: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("session", "number", "epoch", "most", "unstepped", "unused", "skipped", "stopped", "restored", "ended")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    UNSTEPPED_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    session: str
    number: int
    epoch: LeaseEpoch
    most: int
    unstepped: int
    unused: _containers.RepeatedCompositeFieldContainer[LeaseRange]
    skipped: _containers.RepeatedCompositeFieldContainer[LeaseRange]
    stopped: _containers.RepeatedScalarFieldContainer[int]
    restored: str
    ended: _containers.RepeatedCompositeFieldContainer[LeaseEnd]
    def __init__(self, session: _Optional[str] = ..., number: _Optional[int] = ..., epoch: _Optional[_Union[LeaseEpoch, _Mapping]] = ..., most: _Optional[int] = ..., unstepped: _Optional[int] = ..., unused: _Optional[_Iterable[_Union[LeaseRange, _Mapping]]] = ..., skipped: _Optional[_Iterable[_Union[LeaseRange, _Mapping]]] = ..., stopped: _Optional[_Iterable[int]] = ..., restored: _Optional[str] = ..., ended: _Optional[_Iterable[_Union[LeaseEnd, _Mapping]]] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("ranges", "batches", "over", "left", "stripes", "table")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[LeaseRange]
    batches: int
    over: bool
    left: int
    stripes: int
    table: str
    def __init__(self, ranges: _Optional[_Iterable[_Union[LeaseRange, _Mapping]]] = ..., batches: _Optional[int] = ..., over: _Optional[bool] = ..., left: _Optional[int] = ..., stripes: _Optional[int] = ..., table: _Optional[str] = ...) -> None: ...

class LeaseEpoch(_message.Message):
    __slots__ = ("number", "loader", "seed", "samples", "batch_size", "stripes", "drop_last", "unit", "whole", "positions", "segments", "begun", "uneven")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    DROP_LAST_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    loader: str
    seed: str
    samples: int
    batch_size: int
    stripes: int
    drop_last: bool
    unit: str
    whole: bool
    positions: int
    segments: int
    begun: int
    uneven: bool
    def __init__(self, number: _Optional[int] = ..., loader: _Optional[str] = ..., seed: _Optional[str] = ..., samples: _Optional[int] = ..., batch_size: _Optional[int] = ..., stripes: _Optional[int] = ..., drop_last: _Optional[bool] = ..., unit: _Optional[str] = ..., whole: _Optional[bool] = ..., positions: _Optional[int] = ..., segments: _Optional[int] = ..., begun: _Optional[int] = ..., uneven: _Optional[bool] = ...) -> None: ...

class LeaseEnd(_message.Message):
    __slots__ = ("epoch", "segment", "length")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    segment: int
    length: int
    def __init__(self, epoch: _Optional[int] = ..., segment: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class LeaseRange(_message.Message):
    __slots__ = ("epoch", "start", "stop")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    start: int
    stop: int
    def __init__(self, epoch: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("session", "action", "number", "trainer", "index", "parts", "part")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    session: str
    action: TraceAction
    number: int
    trainer: int
    index: int
    parts: int
    part: bytes
    def __init__(self, session: _Optional[str] = ..., action: _Optional[_Union[TraceAction, str]] = ..., number: _Optional[int] = ..., trainer: _Optional[int] = ..., index: _Optional[int] = ..., parts: _Optional[int] = ..., part: _Optional[bytes] = ...) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ("clock_ns", "parts", "part")
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    clock_ns: int
    parts: int
    part: bytes
    def __init__(self, clock_ns: _Optional[int] = ..., parts: _Optional[int] = ..., part: _Optional[bytes] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("server_index", "fingerprint", "incarnation", "transports", "last")
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    server_index: int
    fingerprint: str
    incarnation: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    last: int
    def __init__(self, server_index: _Optional[int] = ..., fingerprint: _Optional[str] = ..., incarnation: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., last: _Optional[int] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("ready", "session", "transport", "data_port", "heartbeat_timeout_seconds")
    READY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    session: str
    transport: str
    data_port: int
    heartbeat_timeout_seconds: float
    def __init__(self, ready: _Optional[bool] = ..., session: _Optional[str] = ..., transport: _Optional[str] = ..., data_port: _Optional[int] = ..., heartbeat_timeout_seconds: _Optional[float] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("kind", "step", "parts", "hello", "commit", "done", "failure", "norms", "sequence", "scan", "request", "lookup", "after", "payload", "log", "log_first", "log_heard")
    class AfterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SCAN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    LOG_FIRST_FIELD_NUMBER: _ClassVar[int]
    LOG_HEARD_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    step: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    hello: Hello
    commit: Commit
    done: Done
    failure: Failure
    norms: Norms
    sequence: int
    scan: Scan
    request: int
    lookup: int
    after: _containers.ScalarMap[int, int]
    payload: bytes
    log: _containers.RepeatedScalarFieldContainer[bytes]
    log_first: int
    log_heard: int
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., step: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., norms: _Optional[_Union[Norms, _Mapping]] = ..., sequence: _Optional[int] = ..., scan: _Optional[_Union[Scan, _Mapping]] = ..., request: _Optional[int] = ..., lookup: _Optional[int] = ..., after: _Optional[_Mapping[int, int]] = ..., payload: _Optional[bytes] = ..., log: _Optional[_Iterable[bytes]] = ..., log_first: _Optional[int] = ..., log_heard: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    size: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("session", "trainer_id", "lane", "stream", "tables", "nonce", "role", "proof", "follower", "server_index", "fingerprint")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    session: str
    trainer_id: int
    lane: int
    stream: int
    tables: bool
    nonce: bytes
    role: str
    proof: bytes
    follower: bool
    server_index: int
    fingerprint: str
    def __init__(self, session: _Optional[str] = ..., trainer_id: _Optional[int] = ..., lane: _Optional[int] = ..., stream: _Optional[int] = ..., tables: _Optional[bool] = ..., nonce: _Optional[bytes] = ..., role: _Optional[str] = ..., proof: _Optional[bytes] = ..., follower: _Optional[bool] = ..., server_index: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Scan(_message.Message):
    __slots__ = ("table", "cursor", "limit", "changed_since_save", "mark_saved", "materialized")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_SINCE_SAVE_FIELD_NUMBER: _ClassVar[int]
    MARK_SAVED_FIELD_NUMBER: _ClassVar[int]
    MATERIALIZED_FIELD_NUMBER: _ClassVar[int]
    table: str
    cursor: int
    limit: int
    changed_since_save: bool
    mark_saved: bool
    materialized: bool
    def __init__(self, table: _Optional[str] = ..., cursor: _Optional[int] = ..., limit: _Optional[int] = ..., changed_since_save: _Optional[bool] = ..., mark_saved: _Optional[bool] = ..., materialized: _Optional[bool] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("hparams", "absent", "overflow", "omit_values", "metadata", "scale", "written", "buffers", "norms", "leases", "steps", "changes_after", "last")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ScaleEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class WrittenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ChangesAfterEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HPARAMS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    OMIT_VALUES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_AFTER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    hparams: _containers.RepeatedCompositeFieldContainer[GroupHparams]
    absent: _containers.RepeatedScalarFieldContainer[str]
    overflow: bool
    omit_values: bool
    metadata: _containers.ScalarMap[str, str]
    scale: _containers.ScalarMap[str, float]
    written: _containers.ScalarMap[str, int]
    buffers: _containers.RepeatedScalarFieldContainer[str]
    norms: _containers.RepeatedCompositeFieldContainer[PushNorm]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRange]
    steps: int
    changes_after: _containers.ScalarMap[str, int]
    last: bool
    def __init__(self, hparams: _Optional[_Iterable[_Union[GroupHparams, _Mapping]]] = ..., absent: _Optional[_Iterable[str]] = ..., overflow: _Optional[bool] = ..., omit_values: _Optional[bool] = ..., metadata: _Optional[_Mapping[str, str]] = ..., scale: _Optional[_Mapping[str, float]] = ..., written: _Optional[_Mapping[str, int]] = ..., buffers: _Optional[_Iterable[str]] = ..., norms: _Optional[_Iterable[_Union[PushNorm, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[LeaseRange, _Mapping]]] = ..., steps: _Optional[int] = ..., changes_after: _Optional[_Mapping[str, int]] = ..., last: _Optional[bool] = ...) -> None: ...

class PushNorm(_message.Message):
    __slots__ = ("variable", "norm", "rows")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    variable: str
    norm: float
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, variable: _Optional[str] = ..., norm: _Optional[float] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class GroupHparams(_message.Message):
    __slots__ = ("group", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _program_pb2.Hparam
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_program_pb2.Hparam, _Mapping]] = ...) -> None: ...
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    group: int
    values: _containers.MessageMap[str, _program_pb2.Hparam]
    def __init__(self, group: _Optional[int] = ..., values: _Optional[_Mapping[str, _program_pb2.Hparam]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("version", "committed", "overflow", "cursor", "metadata", "checksums", "refused", "nonfinite", "outliers", "unknown_lookup", "changes")
    class ChecksumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ChangesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: RowChanges
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[RowChanges, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    OUTLIERS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    version: int
    committed: int
    overflow: bool
    cursor: int
    metadata: str
    checksums: _containers.ScalarMap[str, int]
    refused: bool
    nonfinite: _containers.RepeatedCompositeFieldContainer[NonFinite]
    outliers: _containers.RepeatedCompositeFieldContainer[OutlierPush]
    unknown_lookup: bool
    changes: _containers.MessageMap[str, RowChanges]
    def __init__(self, version: _Optional[int] = ..., committed: _Optional[int] = ..., overflow: _Optional[bool] = ..., cursor: _Optional[int] = ..., metadata: _Optional[str] = ..., checksums: _Optional[_Mapping[str, int]] = ..., refused: _Optional[bool] = ..., nonfinite: _Optional[_Iterable[_Union[NonFinite, _Mapping]]] = ..., outliers: _Optional[_Iterable[_Union[OutlierPush, _Mapping]]] = ..., unknown_lookup: _Optional[bool] = ..., changes: _Optional[_Mapping[str, RowChanges]] = ...) -> None: ...

class RowChanges(_message.Message):
    __slots__ = ("position", "any", "ids")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ANY_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    position: int
    any: bool
    ids: bytes
    def __init__(self, position: _Optional[int] = ..., any: _Optional[bool] = ..., ids: _Optional[bytes] = ...) -> None: ...

class NonFinite(_message.Message):
    __slots__ = ("trainer_id", "step", "variables")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    step: int
    variables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trainer_id: _Optional[int] = ..., step: _Optional[int] = ..., variables: _Optional[_Iterable[str]] = ...) -> None: ...

class OutlierPush(_message.Message):
    __slots__ = ("trainer_id", "step", "norm", "history")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    trainer_id: int
    step: int
    norm: PushNorm
    history: float
    def __init__(self, trainer_id: _Optional[int] = ..., step: _Optional[int] = ..., norm: _Optional[_Union[PushNorm, _Mapping]] = ..., history: _Optional[float] = ...) -> None: ...

class Norms(_message.Message):
    __slots__ = ("squared",)
    class SquaredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SQUARED_FIELD_NUMBER: _ClassVar[int]
    squared: _containers.ScalarMap[str, float]
    def __init__(self, squared: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("error", "message")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
