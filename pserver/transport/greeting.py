"""The first frames of a stream, at the connecting end: HELLO, and before it the server's proof."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pserver.config import split_endpoint
from pserver.errors import PServerError, Unreachable, from_wire
from pserver.security.access import Access
from pserver.security.question import Question
from pserver.transport.stream import Stream
from pserver.wire_pb2 import Frame, Hello, Kind


def greet(stream: Stream, hello: Hello, access: Access, endpoint: str, timeout: float) -> None:
    """Says HELLO on a new stream.

    With a key the server proves first that it has it too: until then it hears a random number.

    Args:
        hello: session, lane and number of the stream.
        access: what is proved, and asked of the server.
        endpoint: the server's control endpoint.
        timeout: for the server's answer, in seconds; the stream breaks then.

    Raises:
        NotAllowed: it is no server of this job, or one that does not take this key.
        Unreachable: it does not answer.
    """
    try:
        if access.secret is not None:
            _, port = split_endpoint(endpoint)
            question = Question(access.secret, port, f"the stream to {endpoint}")
            with _broken_after(timeout, stream):
                asked = Hello(nonce=question.nonce, role=question.role)
                stream.send(Frame(kind=Kind.HELLO, hello=asked))
                answer = _answer(stream, endpoint)
            question.answered(answer.nonce, answer.proof)
            hello.proof = question.hello_code(
                hello.session, hello.trainer_id, hello.lane, hello.stream, hello.tables
            )
        stream.send(Frame(kind=Kind.HELLO, hello=hello))
    except PServerError:
        stream.cancel()
        raise


def _answer(stream: Stream, endpoint: str) -> Hello:
    received = stream.receive()
    if received is None:
        raise Unreachable(f"{endpoint}: the stream ended before the server's HELLO")
    header, _ = received
    if header.kind == Kind.FAILURE:
        raise from_wire(header.failure.error, f"{endpoint}: {header.failure.message}")
    return header.hello  # empty in any other frame: no proof


@contextmanager
def _broken_after(timeout: float, stream: Stream) -> Iterator[None]:
    """Breaks the stream where this lasts longer: nothing else ends a wait for a frame."""
    timer = threading.Timer(timeout, stream.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
