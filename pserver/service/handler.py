"""Serves one stream from its HELLO to its end: for a trainer, an observer or another server."""

from __future__ import annotations

import logging

from pserver.errors import JobFailed, PServerError, Refused, Unreachable
from pserver.job.job import Job
from pserver.security.guard import OPEN_GUARD, Guard, check
from pserver.security.permissions import role_for_call
from pserver.service.answers import tell
from pserver.service.first_frame import hello_of, member_of
from pserver.service.reading_service import ReadingService
from pserver.service.tensor_service import TensorService
from pserver.service.working_streams import WorkingStreams
from pserver.transport.stream import SequencedStream, Stream
from pserver.wire_pb2 import Hello


def handle(stream: Stream, job: Job, working: WorkingStreams, guard: Guard = OPEN_GUARD) -> None:
    """Serves one stream until its BYE.  Sends every error to the peer and logs it; raises none.

    Args:
        working: is told while a request is being worked on.
        guard: whom the server lets in.
    """
    who = ""
    stream = numbered = SequencedStream(stream, job.traffic)
    try:
        hello, role = hello_of(stream, guard)
        if hello.follower:
            check(role, role_for_call("Follow", None), "a server's link")
            who = f"server {hello.server_index}"
            numbered.admit()
            _link(numbered, job, hello)
            return
        observation = job.observations.find(hello.session)
        if observation is not None:
            check(role, role_for_call("Observe", None), "an observer's stream")
            numbered.admit()
            ReadingService(numbered, job, observation).serve()
            return
        member = member_of(hello, job)
        who = f"trainer {member.trainer}"
        numbered.admit()
        place = "tables" if hello.tables else f"lane {hello.lane}"
        with job.tracing.spans.thread(f"trainer {member.trainer}, {place}"):
            TensorService(numbered, job, member, hello, role, working).serve()
    except Unreachable as error:
        _say(job, who, stream, "broke", error)
    except PServerError as error:
        _say(job, who, stream, "ends", error)
        tell(stream, error)
    except Exception as error:
        job.log.say("bug", f"the stream of {_name(who, stream)} ends", logging.ERROR, error)
        tell(stream, JobFailed(f"the server failed: {type(error).__name__}: {error}"))
    finally:
        working.rests(numbered)
        stream.close()


def _link(stream: SequencedStream, job: Job, hello: Hello) -> None:
    """Serves a stream of another server of the job."""
    links = job.links
    if links is None:
        raise Refused("this server coordinates no job now")
    links.serve(stream, hello)


def _say(job: Job, who: str, stream: Stream, how: str, error: PServerError) -> None:
    """Logs how a stream has ended."""
    kind = f"{who or 'stranger'} {how} {type(error).__name__}"
    job.log.say(kind, f"the stream of {_name(who, stream)} {how}: {error}")


def _name(who: str, stream: Stream) -> str:
    return f"{who} ({stream.peer})" if who else stream.peer
