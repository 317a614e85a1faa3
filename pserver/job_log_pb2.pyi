from pserver import wire_pb2 as _wire_pb2
from transpiler import program_pb2 as _program_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Process(_message.Message):
    __slots__ = ("trainer", "incarnation")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    trainer: int
    incarnation: str
    def __init__(self, trainer: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class ProcessStep(_message.Message):
    __slots__ = ("process", "step")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    process: Process
    step: int
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Notices(_message.Message):
    __slots__ = ("notices",)
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    notices: _containers.RepeatedCompositeFieldContainer[Notice]
    def __init__(self, notices: _Optional[_Iterable[_Union[Notice, _Mapping]]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("staged", "silence", "call")
    STAGED_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    staged: StagedStep
    silence: Silence
    call: Call
    def __init__(self, staged: _Optional[_Union[StagedStep, _Mapping]] = ..., silence: _Optional[_Union[Silence, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ...) -> None: ...

class StagedStep(_message.Message):
    __slots__ = ("lane", "step", "rows", "refused")
    LANE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    lane: int
    step: ProcessStep
    rows: int
    refused: str
    def __init__(self, lane: _Optional[int] = ..., step: _Optional[_Union[ProcessStep, _Mapping]] = ..., rows: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("process", "kind", "number")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    process: Process
    kind: str
    number: int
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., kind: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Silence(_message.Message):
    __slots__ = ("process", "text")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    process: Process
    text: str
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("records", "standing", "resumes")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    standing: Standing
    resumes: bool
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., resumes: _Optional[bool] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("number", "time", "joined", "lost", "decided", "called", "left", "loaded")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    CALLED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    joined: JoinRecord
    lost: LossRecord
    decided: StepRecord
    called: Call
    left: LeaveRecord
    loaded: LoadRecord
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., joined: _Optional[_Union[JoinRecord, _Mapping]] = ..., lost: _Optional[_Union[LossRecord, _Mapping]] = ..., decided: _Optional[_Union[StepRecord, _Mapping]] = ..., called: _Optional[_Union[Call, _Mapping]] = ..., left: _Optional[_Union[LeaveRecord, _Mapping]] = ..., loaded: _Optional[_Union[LoadRecord, _Mapping]] = ...) -> None: ...

class JoinRecord(_message.Message):
    __slots__ = ("process", "steps")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    process: Process
    steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., steps: _Optional[_Iterable[int]] = ...) -> None: ...

class LossRecord(_message.Message):
    __slots__ = ("process", "text")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    process: Process
    text: str
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class LeaveRecord(_message.Message):
    __slots__ = ("process", "preempted_after")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_AFTER_FIELD_NUMBER: _ClassVar[int]
    process: Process
    preempted_after: int
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., preempted_after: _Optional[int] = ...) -> None: ...

class LoadRecord(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("lane", "steps", "consumed", "refused")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    LANE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    lane: int
    steps: _containers.RepeatedCompositeFieldContainer[ProcessStep]
    consumed: _containers.RepeatedCompositeFieldContainer[ConsumedSamples]
    refused: _containers.ScalarMap[int, str]
    def __init__(self, lane: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[ProcessStep, _Mapping]]] = ..., consumed: _Optional[_Iterable[_Union[ConsumedSamples, _Mapping]]] = ..., refused: _Optional[_Mapping[int, str]] = ...) -> None: ...

class ConsumedSamples(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranges: _Optional[_Iterable[int]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("arrays", "opening", "records", "applied", "values", "rows", "shrunk", "closing")
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SHRUNK_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    opening: Opening
    records: Records
    applied: AppliedSteps
    values: LoadedValues
    rows: LoadedRows
    shrunk: ShrunkTable
    closing: Closing
    def __init__(self, arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., records: _Optional[_Union[Records, _Mapping]] = ..., applied: _Optional[_Union[AppliedSteps, _Mapping]] = ..., values: _Optional[_Union[LoadedValues, _Mapping]] = ..., rows: _Optional[_Union[LoadedRows, _Mapping]] = ..., shrunk: _Optional[_Union[ShrunkTable, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("name", "dtype", "shape", "kind", "trainer")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VALUE: _ClassVar[Array.Kind]
        GRADIENT: _ClassVar[Array.Kind]
        BEFORE: _ClassVar[Array.Kind]
        IDS: _ClassVar[Array.Kind]
        ROWS: _ClassVar[Array.Kind]
        STATISTICS: _ClassVar[Array.Kind]
        THEN: _ClassVar[Array.Kind]
        KNOWN: _ClassVar[Array.Kind]
        WHOLE: _ClassVar[Array.Kind]
        ELEMENTS: _ClassVar[Array.Kind]
        ELEMENT_VALUES: _ClassVar[Array.Kind]
        BUFFER: _ClassVar[Array.Kind]
    VALUE: Array.Kind
    GRADIENT: Array.Kind
    BEFORE: Array.Kind
    IDS: Array.Kind
    ROWS: Array.Kind
    STATISTICS: Array.Kind
    THEN: Array.Kind
    KNOWN: Array.Kind
    WHOLE: Array.Kind
    ELEMENTS: Array.Kind
    ELEMENT_VALUES: Array.Kind
    BUFFER: Array.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    kind: Array.Kind
    trainer: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., kind: _Optional[_Union[Array.Kind, str]] = ..., trainer: _Optional[int] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("recording", "program")
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    recording: str
    program: _program_pb2.Program
    def __init__(self, recording: _Optional[str] = ..., program: _Optional[_Union[_program_pb2.Program, _Mapping]] = ...) -> None: ...

class AppliedSteps(_message.Message):
    __slots__ = ("record", "time", "lane", "steps", "coefficients")
    class CoefficientsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COEFFICIENTS_FIELD_NUMBER: _ClassVar[int]
    record: int
    time: float
    lane: int
    steps: _containers.RepeatedCompositeFieldContainer[AppliedStep]
    coefficients: _containers.ScalarMap[str, float]
    def __init__(self, record: _Optional[int] = ..., time: _Optional[float] = ..., lane: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[AppliedStep, _Mapping]]] = ..., coefficients: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AppliedStep(_message.Message):
    __slots__ = ("step", "hparams", "overflow", "refused", "written")
    class WrittenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    HPARAMS_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    step: ProcessStep
    hparams: _containers.RepeatedCompositeFieldContainer[RecordedHparams]
    overflow: bool
    refused: bool
    written: _containers.ScalarMap[str, int]
    def __init__(self, step: _Optional[_Union[ProcessStep, _Mapping]] = ..., hparams: _Optional[_Iterable[_Union[RecordedHparams, _Mapping]]] = ..., overflow: _Optional[bool] = ..., refused: _Optional[bool] = ..., written: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RecordedHparams(_message.Message):
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

class LoadedValues(_message.Message):
    __slots__ = ("last", "versions", "hparams")
    LAST_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HPARAMS_FIELD_NUMBER: _ClassVar[int]
    last: bool
    versions: _containers.RepeatedScalarFieldContainer[int]
    hparams: _containers.RepeatedCompositeFieldContainer[RecordedHparams]
    def __init__(self, last: _Optional[bool] = ..., versions: _Optional[_Iterable[int]] = ..., hparams: _Optional[_Iterable[_Union[RecordedHparams, _Mapping]]] = ...) -> None: ...

class LoadedRows(_message.Message):
    __slots__ = ("table", "metadata", "replaced")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    table: str
    metadata: str
    replaced: bool
    def __init__(self, table: _Optional[str] = ..., metadata: _Optional[str] = ..., replaced: _Optional[bool] = ...) -> None: ...

class ShrunkTable(_message.Message):
    __slots__ = ("table", "time", "days", "threshold", "number")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    table: str
    time: float
    days: float
    threshold: float
    number: int
    def __init__(self, table: _Optional[str] = ..., time: _Optional[float] = ..., days: _Optional[float] = ..., threshold: _Optional[float] = ..., number: _Optional[int] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: str
    def __init__(self, failure: _Optional[str] = ...) -> None: ...

class OwnEntry(_message.Message):
    __slots__ = ("plan", "log", "record", "leases", "lease", "barrier", "put_off", "round", "text", "unheard")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    PUT_OFF_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    plan: str
    log: LogState
    record: LoggedRecord
    leases: str
    lease: LeaseChange
    barrier: PassedBarrier
    put_off: PutOffSave
    round: CompletedRound
    text: KeptText
    unheard: ProcessSamples
    def __init__(self, plan: _Optional[str] = ..., log: _Optional[_Union[LogState, _Mapping]] = ..., record: _Optional[_Union[LoggedRecord, _Mapping]] = ..., leases: _Optional[str] = ..., lease: _Optional[_Union[LeaseChange, _Mapping]] = ..., barrier: _Optional[_Union[PassedBarrier, _Mapping]] = ..., put_off: _Optional[_Union[PutOffSave, _Mapping]] = ..., round: _Optional[_Union[CompletedRound, _Mapping]] = ..., text: _Optional[_Union[KeptText, _Mapping]] = ..., unheard: _Optional[_Union[ProcessSamples, _Mapping]] = ...) -> None: ...

class LogState(_message.Message):
    __slots__ = ("servers", "time", "recent")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[Standing]
    time: float
    recent: Records
    def __init__(self, servers: _Optional[_Iterable[_Union[Standing, _Mapping]]] = ..., time: _Optional[float] = ..., recent: _Optional[_Union[Records, _Mapping]] = ...) -> None: ...

class LoggedRecord(_message.Message):
    __slots__ = ("record", "rows")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    record: Record
    rows: _containers.RepeatedCompositeFieldContainer[ChangedRows]
    def __init__(self, record: _Optional[_Union[Record, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[ChangedRows, _Mapping]]] = ...) -> None: ...

class ChangedRows(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, servers: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseChange(_message.Message):
    __slots__ = ("join", "lease", "decided", "remove", "expect", "give_up", "wait_for")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    GIVE_UP_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_FIELD_NUMBER: _ClassVar[int]
    join: LeaseJoin
    lease: LeaseAnswer
    decided: ProcessSamples
    remove: Process
    expect: LeaseAdmission
    give_up: int
    wait_for: int
    def __init__(self, join: _Optional[_Union[LeaseJoin, _Mapping]] = ..., lease: _Optional[_Union[LeaseAnswer, _Mapping]] = ..., decided: _Optional[_Union[ProcessSamples, _Mapping]] = ..., remove: _Optional[_Union[Process, _Mapping]] = ..., expect: _Optional[_Union[LeaseAdmission, _Mapping]] = ..., give_up: _Optional[int] = ..., wait_for: _Optional[int] = ...) -> None: ...

class LeaseJoin(_message.Message):
    __slots__ = ("process", "again")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    process: Process
    again: bool
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., again: _Optional[bool] = ...) -> None: ...

class LeaseAnswer(_message.Message):
    __slots__ = ("process", "request")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    process: Process
    request: _wire_pb2.LeaseRequest
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., request: _Optional[_Union[_wire_pb2.LeaseRequest, _Mapping]] = ...) -> None: ...

class LeaseAdmission(_message.Message):
    __slots__ = ("trainer", "consumed")
    class ConsumedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: ConsumedSamples
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[ConsumedSamples, _Mapping]] = ...) -> None: ...
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    trainer: int
    consumed: _containers.MessageMap[int, ConsumedSamples]
    def __init__(self, trainer: _Optional[int] = ..., consumed: _Optional[_Mapping[int, ConsumedSamples]] = ...) -> None: ...

class ProcessSamples(_message.Message):
    __slots__ = ("process", "consumed")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    process: Process
    consumed: ConsumedSamples
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., consumed: _Optional[_Union[ConsumedSamples, _Mapping]] = ...) -> None: ...

class PassedBarrier(_message.Message):
    __slots__ = ("key", "texts", "past")
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    key: str
    texts: _containers.ScalarMap[int, str]
    past: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., texts: _Optional[_Mapping[int, str]] = ..., past: _Optional[_Iterable[str]] = ...) -> None: ...

class PutOffSave(_message.Message):
    __slots__ = ("key", "why")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    key: str
    why: str
    def __init__(self, key: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class CompletedRound(_message.Message):
    __slots__ = ("number", "changes", "processes", "texts")
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    changes: int
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    texts: _containers.ScalarMap[int, str]
    def __init__(self, number: _Optional[int] = ..., changes: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., texts: _Optional[_Mapping[int, str]] = ...) -> None: ...

class KeptText(_message.Message):
    __slots__ = ("key", "trainer", "text")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    key: str
    trainer: int
    text: str
    def __init__(self, key: _Optional[str] = ..., trainer: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("last", "processes", "loaded")
    LAST_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    last: int
    processes: _containers.RepeatedCompositeFieldContainer[ProcessStanding]
    loaded: int
    def __init__(self, last: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[ProcessStanding, _Mapping]]] = ..., loaded: _Optional[int] = ...) -> None: ...

class ProcessStanding(_message.Message):
    __slots__ = ("process", "begun", "decided", "rows", "lost", "left", "preempted_after", "calls")
    class CallsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_AFTER_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    process: Process
    begun: _containers.RepeatedScalarFieldContainer[int]
    decided: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    lost: str
    left: bool
    preempted_after: int
    calls: _containers.ScalarMap[str, int]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., begun: _Optional[_Iterable[int]] = ..., decided: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., lost: _Optional[str] = ..., left: _Optional[bool] = ..., preempted_after: _Optional[int] = ..., calls: _Optional[_Mapping[str, int]] = ...) -> None: ...
