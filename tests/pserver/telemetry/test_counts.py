"""A count of a trainer's steps has one home: what reads it needs no change for another one."""

from __future__ import annotations

from pserver.config import ServerConfig
from pserver.job.status import trainer_statuses
from pserver.membership.members import Member, Membership
from pserver.telemetry.counts import COUNTS
from pserver.telemetry.job_view import notices
from pserver.telemetry.metrics import JobSteps
from pserver.wire_pb2 import StatusReply


def test_every_count_is_a_metric_a_number_of_the_status_and_its_line() -> None:
    """By trainer; a line has the sum, and there is none of what nobody has counted."""
    members, steps = Membership(2, 0.0), JobSteps()
    for number in range(2):
        members.add(Member(number, str(number), "tcp", 0.0))

    def said() -> tuple[StatusReply, list[str]]:
        found = trainer_statuses(members, steps.trainers, 0.0, ServerConfig())
        reply = StatusReply(trainers=found)
        return reply, [each.text for each in notices({"a:1": reply})]

    assert said()[1] == []
    for place, name in enumerate(COUNTS):
        steps.trainers.count(0, name, 1 + place)
        steps.trainers.count(1, name, 10)
    reply, lines = said()
    metrics = {each.name: each for each in steps.collect()}

    assert dict(reply.trainers[0].counts) == {name: 1 + n for n, name in enumerate(COUNTS)}
    for place, (name, count) in enumerate(COUNTS.items()):
        assert reply.trainers[1].counts[name] == 10
        samples = {each.labels["trainer"]: each.value for each in metrics[count.metric].samples}
        assert samples == {"0": 1.0 + place, "1": 10.0}
    told = [each.line.format(11 + place) for place, each in enumerate(COUNTS.values())]
    assert lines == [each for each in told if each]
