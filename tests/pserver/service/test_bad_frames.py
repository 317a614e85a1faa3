"""What a real server does with frames that are out of place or contradict the plan: it says what
was expected, and the step that they were part of leaves no trace.
"""

from __future__ import annotations

from typing import Any

import pytest

from pserver.errors import (
    CorruptFrame,
    PServerError,
    Refused,
)
from pserver.wire_pb2 import (
    Commit,
    Frame,
    HeartbeatRequest,
    Kind,
    Part,
)
from tests.support.stranger import (
    Servers,
    Stranger,
    answer,
    ask,
    assert_untouched,
    commit,
    gradient,
)


@pytest.mark.parametrize("kind", [Kind.PULL, Kind.COMMIT, Kind.BYE, 99])
def test_a_stream_without_hello_is_refused(stranger: Stranger, kind: Any) -> None:
    """Whatever else comes first."""
    with pytest.raises(Refused, match="expected HELLO as the first frame"):
        ask(stranger.connect(), Frame(kind=kind))


def test_a_session_that_nobody_holds_is_refused(servers: Servers, stranger: Stranger) -> None:
    """Stale, invented, or another trainer's: on a stream and in a heartbeat."""
    for session in ("", "0" * 32, "\u00e9"):
        with pytest.raises(Refused, match="session is not known here"):
            answer(stranger.hello(session=session))
        with pytest.raises(Refused, match="session is not known here"):
            stranger.control.heartbeat(HeartbeatRequest(session=session))
    with pytest.raises(Refused, match="belongs to trainer 0, not to trainer 5"):
        answer(stranger.hello(trainer_id=5))


def test_a_lane_that_the_plan_does_not_have_is_refused(stranger: Stranger) -> None:
    """HELLO says which lane the stream is for."""
    stranger.installed()
    with pytest.raises(Refused, match="lane"):
        answer(stranger.hello(lane=7))
    assert_untouched(stranger)


def test_a_step_before_the_program_is_refused(stranger: Stranger) -> None:
    """A server that has not been installed takes no gradients and no values, and gives none."""
    for header, payload in (
        (gradient(), b"\0" * 24),
        (Frame(kind=Kind.PULL), b""),
        (commit(), b""),
    ):
        with pytest.raises(PServerError, match="not been installed"):
            ask(stranger.hello(), header, payload)


FRAMES = {
    "dtype": (gradient(dtype="float64"), b"\0" * 24, "'w': expected dtype float32, got 'float64'"),
    "no dtype": (
        gradient(dtype="float33"),
        b"\0" * 24,
        "'w': expected dtype float32, got 'float33'",
    ),
    "shape": (gradient(shape=(3, 2)), b"\0" * 24, r"'w': expected shape \[2, 3\], got \[3, 2\]"),
    "huge shape": (gradient(shape=(2**62, 2**62)), b"\0" * 24, r"'w': expected shape \[2, 3\]"),
    "beyond the end": (
        gradient(offset=4),
        b"\0" * 24,
        "'w': expected whole elements.*within 24, got bytes 4 to 28",
    ),
    "far beyond the end": (gradient(offset=2**63), b"\0" * 24, "'w': expected whole elements"),
    "inside an element": (gradient(offset=2, size=4), b"\0" * 4, "'w': expected whole elements"),
    "a gap": (
        gradient(offset=12, size=12),
        b"\0" * 12,
        "'w': expected bytes from 0 on, got them from 12",
    ),
    "too few bytes": (
        gradient(),
        b"\0" * 12,
        "expected 24 bytes of payload as the parts say, got 12",
    ),
    "too many bytes": (
        gradient(size=12),
        b"\0" * 24,
        "expected 12 bytes of payload as the parts say, got 24",
    ),
    "elsewhere": (gradient(name="v.block1"), b"\0" * 24, "'v.block1'.*belongs elsewhere"),
    "not updated": (
        gradient(name="mean", shape=(3,), size=12),
        b"\0" * 12,
        "'mean'.*belongs elsewhere",
    ),
    "not committed": (
        commit(absent=()),
        b"",
        "step 1: expected 24 bytes of the gradient of 'w', got 0",
    ),
    "absent elsewhere": (
        commit(absent=("w", "b", "x")),
        b"",
        "'x', absent in step 1, is not updated",
    ),
    "no numbers": (
        Frame(kind=Kind.COMMIT, step=1, commit=Commit(absent=["w", "b"])),
        b"",
        "no hyper-parameters for group 0",
    ),
    "step ahead": (commit(absent=("w", "b"), step=7), b"", "expected step 1, got step 7"),
    "a server's frame": (
        Frame(kind=Kind.DONE),
        b"",
        "expected GRADIENT, COMMIT, VALUE, PULL or BYE, got DONE",
    ),
    "an unknown kind": (
        Frame(kind=99),  # type: ignore[arg-type]
        b"",
        "expected GRADIENT.*got kind 99",
    ),
    "an unknown value": (
        Frame(kind=Kind.VALUE, parts=[Part(name="x", dtype="float32", shape=[1], size=4)]),
        b"\0" * 4,
        "no variable 'x'",
    ),
    "an unknown pull": (Frame(kind=Kind.PULL, parts=[Part(name="x")]), b"", "no variable 'x'"),
}


@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_that_contradicts_the_plan_is_refused_and_nothing_changes(
    stranger: Stranger, what: str
) -> None:
    """The peer is told what was expected and what came; the step that it was part of is not
    applied, not even in part.
    """
    header, payload, words = FRAMES[what]
    stream = stranger.installed()

    with pytest.raises(PServerError, match=words):
        ask(stream, header, payload)
    assert_untouched(stranger)


def test_half_a_gradient_twice_is_not_a_gradient(stranger: Stranger) -> None:
    """The bytes add up, the parts do not."""
    stream = stranger.installed()
    stream.send(gradient(size=12), [b"\0" * 12])

    with pytest.raises(CorruptFrame, match="'w': expected bytes from 12 on, got them from 0"):
        ask(stream, gradient(size=12), b"\0" * 12)
    assert_untouched(stranger)


def test_half_a_gradient_and_then_silence_leaves_no_trace(stranger: Stranger) -> None:
    """The connection is cut in the middle of a step; the same step, sent whole over another stream,
    is applied once.
    """
    stream = stranger.installed()
    stream.send(gradient(size=12), [b"\1" * 12])
    stream.cancel()

    assert_untouched(stranger)


def test_gradients_of_two_steps_do_not_mix(stranger: Stranger) -> None:
    """A second step's gradient before the first one's COMMIT."""
    stream = stranger.installed()
    stream.send(gradient(), [b"\0" * 24])
    later = gradient("b", (3,), 0, 12)
    later.step = 2

    with pytest.raises(CorruptFrame, match="gradients of step 2 among those of step 1"):
        ask(stream, later, b"\0" * 12)
    assert_untouched(stranger)
