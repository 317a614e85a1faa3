"""What scripts have written into variables, as a server takes it: before the step's gradients,
once, and in sync only where all trainers have written the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pserver.errors import CorruptFrame, FingerprintMismatch, PServerError, Refused, Unprepared
from pserver.job.job import Job
from pserver.transport import frames, inprocess
from pserver.transport.arrays import Assignment, checksum
from pserver.wire_pb2 import Frame, Hello, Kind, Part
from tests.support.job_frames import DEADLINE, Trainer, plan_of, together

W = torch.arange(6.0).view(2, 3)
PICKED = Assignment(torch.tensor([7.0, 8.0]), torch.tensor([1, 4]))


def pulled(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What the server holds."""
    return trainer.ask(Frame(kind=Kind.PULL))[1]


def assign(trainer: Trainer, step: int, **assignments: Assignment) -> None:
    """Sends ASSIGN frames."""
    for name, assignment in assignments.items():
        trainer.post(Kind.ASSIGN, step, **dict(assignment.parts(name)))


@pytest.mark.parametrize("assignment", [Assignment(W), PICKED], ids=["whole", "elements"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_assignment_comes_before_the_gradient_of_its_step(
    served: Any, mode: str, assignment: Assignment
) -> None:
    """The server assigns, then takes the optimizer's step; the next step goes on from there."""
    trainer = Trainer(*served, plan_of(mode=mode), 0)
    after = assignment.applied_to(torch.ones(2, 3))
    said = {"w": checksum(after)} if mode == "sync" else {}

    assign(trainer, 1, w=assignment)
    _, values = trainer.step(1, written=said, w=torch.full((2, 3), 2.0), absent=("b",))
    assert torch.equal(values["w"], after - 1.0)

    _, values = trainer.step(2, w=torch.full((2, 3), 2.0), absent=("b",))
    assert torch.equal(values["w"], after - 2.0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_variable_that_is_only_held_can_be_assigned(served: Any, mode: str) -> None:
    """A buffer: no gradient, and in sync no checksum either."""
    trainer = Trainer(*served, plan_of(mode=mode), 0)

    assign(trainer, 1, mean=Assignment(torch.tensor([1.0, 2.0, 3.0])))
    trainer.step(1, absent=("w", "b"))

    assert torch.equal(pulled(trainer)["mean"], torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_overflows_keeps_what_was_written(served: Any, mode: str) -> None:
    """The gradient is dropped, the assignment is not."""
    trainer = Trainer(*served, plan_of(mode=mode), 0)
    said = {"w": checksum(W)} if mode == "sync" else {}

    assign(trainer, 1, w=Assignment(W))
    done, _ = trainer.step(1, written=said, overflow=True, w=torch.ones(2, 3), b=torch.ones(3))

    assert done.overflow and torch.equal(pulled(trainer)["w"], W)


def test_in_async_the_last_writer_wins(served: Any) -> None:
    """Each trainer's elements, in the order in which the steps arrive."""
    plan = plan_of(mode="async", trainers=2)
    first, second = Trainer(*served, plan, 0), Trainer(*served, plan, 1)

    assign(first, 1, w=Assignment(torch.tensor([5.0, 5.0]), torch.tensor([0, 1])))
    first.step(1, absent=("w", "b"))
    assign(second, 1, w=Assignment(torch.tensor([6.0, 6.0]), torch.tensor([1, 2])))
    _, values = second.step(1, absent=("w", "b"))

    assert values["w"].flatten().tolist() == [5, 6, 6, 1, 1, 1]


def test_an_assignment_that_comes_again_is_assigned_once(served: Any) -> None:
    """The same step over another stream, after a second trainer has written too."""
    job, listener = served
    plan = plan_of(mode="async", trainers=2)
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    assign(first, 1, w=Assignment(torch.full((2, 3), 5.0)))
    first.step(1, absent=("w", "b"))
    assign(second, 1, w=Assignment(torch.full((2, 3), 6.0)))
    second.step(1, absent=("w", "b"))

    first.stream = inprocess.connect("127.0.0.1", listener.port, timeout_seconds=DEADLINE)
    first.stream.send(Frame(kind=Kind.HELLO, hello=Hello(session=first.session)))
    assign(first, 1, w=Assignment(torch.full((2, 3), 5.0)))
    first.step(1, absent=("w", "b"))

    assert torch.equal(pulled(first)["w"], torch.full((2, 3), 6.0))


def test_half_an_assignment_leaves_no_trace(served: Any) -> None:
    """The stream breaks before the commit."""
    job, listener = served
    trainer = Trainer(job, listener, plan_of(mode="async"), 0)
    assign(trainer, 1, w=Assignment(W))
    trainer.stream.cancel()

    trainer.stream = inprocess.connect("127.0.0.1", listener.port, timeout_seconds=DEADLINE)
    trainer.stream.send(Frame(kind=Kind.HELLO, hello=Hello(session=trainer.session)))
    _, values = trainer.step(1, w=torch.full((2, 3), 2.0), absent=("b",))

    assert torch.equal(values["w"], torch.zeros(2, 3))


# ---- sync: all trainers write the same ----


def of_three(served: tuple[Job, inprocess.InprocessListener]) -> list[Trainer]:
    plan = plan_of(trainers=3)
    return [Trainer(*served, plan, number) for number in range(3)]


def stepping(trainer: Trainer, **written: int) -> Callable[[], Any]:
    """A step without gradients, to be run beside the others'."""
    return lambda: trainer.step(1, written=written, absent=("w", "b"))


def test_in_sync_trainer_0_sends_the_bytes_and_all_their_checksums(served: Any) -> None:
    """One update of all trainers, which have the written values."""
    trainers = of_three(served)
    assign(trainers[0], 1, w=Assignment(W))

    for _, values in together(*(stepping(trainer, w=checksum(W)) for trainer in trainers)):
        assert torch.equal(values["w"], W)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ((W, W, None), "into 'w': trainer 0, 1 wrote values .*; trainer 2 did not write"),
        ((W, W + 1, W), "into 'w': trainer 0, 2 wrote values .*; trainer 1 wrote values"),
        ((None, W, None), "into 'w': trainer 0, 2 did not write; trainer 1 wrote values"),
    ],
)
def test_in_sync_a_trainer_that_wrote_otherwise_or_not_ends_the_job(
    served: Any, said: tuple[torch.Tensor | None, ...], words: str
) -> None:
    """Every trainer is told which variable, and who wrote what."""
    trainers = of_three(served)
    if said[0] is not None:
        assign(trainers[0], 1, w=Assignment(said[0]))

    def step(trainer: Trainer, values: torch.Tensor | None) -> None:
        written = {} if values is None else {"w": checksum(values)}
        with pytest.raises(FingerprintMismatch, match=words):
            stepping(trainer, **written)()

    together(
        *(
            lambda trainer=trainer, values=values: step(trainer, values)
            for trainer, values in zip(trainers, said, strict=True)
        )
    )


def test_in_sync_what_the_server_holds_already_was_not_written(served: Any) -> None:
    """A trainer that says the checksum of the server's own values agrees with those that say
    nothing.
    """
    trainers = of_three(served)
    untouched = checksum(torch.ones(2, 3))

    results = together(
        stepping(trainers[0]), stepping(trainers[1], w=untouched), stepping(trainers[2])
    )

    assert all(torch.equal(values["w"], torch.ones(2, 3)) for _, values in results)


# ---- what a stranger sends ----

HUGE = 2**62


def part(name: str, dtype: str, shape: tuple[int, ...], size: int) -> Part:
    return Part(name=name, dtype=dtype, shape=shape, size=size)


BAD_FRAMES = {
    "unknown": (part("x", "float32", (1,), 4), "'x' cannot be assigned"),
    "elements of unknown": (part("x@elements", "int64", (1,), 8), "cannot be assigned"),
    "dtype": (part("w", "float64", (2, 3), 48), r"'w': expected float32 \[2, 3\], got 'float64'"),
    "shape": (part("w", "float32", (6,), 24), r"'w': expected float32 \[2, 3\]"),
    "positions": (part("w@elements", "int32", (2,), 8), r"'w@elements': expected int64 \[2\]"),
    "more than there are": (part("w@elements", "int64", (HUGE,), 8), r"expected int64 \[6\]"),
    "in two dimensions": (part("w@values", "float32", (1, 2), 8), r"expected float32 \[0\]"),
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_an_assignment_that_fits_no_variable_is_refused(served: Any, what: str) -> None:
    """Before any memory is taken for it."""
    trainer = Trainer(*served, plan_of(mode="async"), 0)
    bad, words = BAD_FRAMES[what]

    trainer.stream.send(Frame(kind=Kind.ASSIGN, step=1, parts=[bad]), [b"\0" * bad.size])
    with pytest.raises(PServerError, match=words):
        trainer.answer()


def arrays(**parts: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name.replace("_", "@"): tensor for name, tensor in parts.items()}


ONES = torch.ones(2)
BAD_ARRAYS = {
    "twice": (arrays(w_elements=torch.tensor([1, 1]), w_values=ONES), "expected ascending"),
    "negative": (arrays(w_elements=torch.tensor([-1, 1]), w_values=ONES), "expected ascending"),
    "beyond": (arrays(w_elements=torch.tensor([1, 6]), w_values=ONES), "elements from 0 to 5"),
    "too few": (arrays(w_elements=torch.tensor([1, 2, 3]), w_values=ONES), "each of 3 elements"),
    "no values": (arrays(w_elements=torch.tensor([1])), "elements with values"),
    "no elements": (arrays(w_values=ONES), "elements with values"),
    "both": (arrays(w=W, w_elements=torch.tensor([1]), w_values=ONES[:1]), "the whole slice, or"),
}


@pytest.mark.parametrize("what", BAD_ARRAYS)
def test_an_assignment_that_is_not_whole_is_refused(served: Any, what: str) -> None:
    """Positions twice, out of range, without values: nothing is assigned."""
    trainer = Trainer(*served, plan_of(mode="async"), 0)
    tensors, words = BAD_ARRAYS[what]

    for header, payload in frames.frames(Kind.ASSIGN, 1, tensors.items()):
        trainer.stream.send(header, payload)
    with pytest.raises(CorruptFrame, match=words):
        trainer.step(1, absent=("w", "b"))
    held = trainer.job.installed().slices.values["w"]
    assert torch.equal(held, torch.ones(2, 3))


def test_assignments_of_two_steps_do_not_mix(served: Any) -> None:
    """A second step's before the first one's commit, or an earlier one's at the commit."""
    trainer = Trainer(*served, plan_of(mode="async"), 0)
    assign(trainer, 1, b=Assignment(torch.zeros(3)))
    assign(trainer, 2, w=Assignment(W))

    with pytest.raises(CorruptFrame, match="assignments of step 2 among those of step 1"):
        trainer.answer()


@pytest.mark.parametrize(
    ("mode", "number", "written", "words"),
    [
        ("async", 0, {"w": 1}, "expected no checksums in a lane without joint steps"),
        ("sync", 0, {}, "assigns 'w' without its checksum"),
    ],
)
def test_an_assignment_in_another_form_than_its_lane_takes_is_refused(
    served: Any, mode: str, number: int, written: dict[str, int], words: str
) -> None:
    """Checksums belong to lanes that wait for all, and there trainer 0 sends the bytes."""
    plan = plan_of(mode=mode, trainers=2)
    trainers = [Trainer(*served, plan, each) for each in range(2)]
    assign(trainers[number], 1, w=Assignment(W))

    with pytest.raises(Refused, match=words):
        trainers[number].step(1, written=written, absent=("w", "b"))


def test_a_checksum_of_nothing_or_of_other_bytes_is_refused(served: Any) -> None:
    """A variable that is not here, and values that have another checksum."""
    trainer = Trainer(*served, plan_of(), 0)
    with pytest.raises(Unprepared, match="'x' cannot be written"):
        trainer.step(1, written={"x": 1}, absent=("w", "b"))


@pytest.mark.parametrize("sent", [True, False], ids=["others", "none"])
def test_written_values_must_have_their_checksum(served: Any, sent: bool) -> None:
    """The checksum says one thing, the bytes another one, or there are none: the job ends."""
    trainer = Trainer(*served, plan_of(), 0)
    if sent:
        assign(trainer, 1, w=Assignment(W))
    with pytest.raises(PServerError, match="values"):
        trainer.step(1, written={"w": checksum(W + 1)}, absent=("w", "b"))
    held = trainer.job.installed().slices.values["w"]
    assert torch.equal(held, torch.ones(2, 3))
