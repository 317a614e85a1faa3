from google.protobuf.internal import containers as _containers
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
    __slots__ = ("staged", "silence")
    STAGED_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    staged: StagedStep
    silence: Silence
    def __init__(self, staged: _Optional[_Union[StagedStep, _Mapping]] = ..., silence: _Optional[_Union[Silence, _Mapping]] = ...) -> None: ...

class StagedStep(_message.Message):
    __slots__ = ("lane", "step")
    LANE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    lane: int
    step: ProcessStep
    def __init__(self, lane: _Optional[int] = ..., step: _Optional[_Union[ProcessStep, _Mapping]] = ...) -> None: ...

class Silence(_message.Message):
    __slots__ = ("process", "text")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    process: Process
    text: str
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("number", "time", "joined", "lost", "decided")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    joined: JoinRecord
    lost: LossRecord
    decided: StepRecord
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., joined: _Optional[_Union[JoinRecord, _Mapping]] = ..., lost: _Optional[_Union[LossRecord, _Mapping]] = ..., decided: _Optional[_Union[StepRecord, _Mapping]] = ...) -> None: ...

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

class StepRecord(_message.Message):
    __slots__ = ("lane", "steps")
    LANE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    lane: int
    steps: _containers.RepeatedCompositeFieldContainer[ProcessStep]
    def __init__(self, lane: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[ProcessStep, _Mapping]]] = ...) -> None: ...
