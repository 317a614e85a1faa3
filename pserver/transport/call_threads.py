"""Threads for a gRPC server's calls, a few pools of them, by what the calls do.

A heartbeat that waits for a thread is a trainer that is taken for dead.  So calls that wait for
other trainers, calls that write files, and tensor streams each have threads of their own; however
many of them there are, those of the heartbeats stay free.

[Note: a call without its message]  grpcio gives a call a thread when its headers are there, and the
thread waits for the message.  A stranger who sends headers alone would take thread after thread.
So at most half of a pool waits so: where one more comes, the oldest is cancelled
(:class:`~pserver.half_open.HalfOpen`).  To be able to cancel it, a handler here gets an
iterator of messages and reads one: on the wire a unary call is just that.  The message is bytes, as
its size is looked at before it is parsed: parsed it takes up to forty times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import grpc
from google.protobuf.message import DecodeError, Message

from pserver.errors import CorruptFrame
from pserver.half_open import HalfOpen, address_of
from pserver.limits import PART_BYTES, SLACK_BYTES, Limits
from pserver.transport.checksums import check_message, of_message

THREADS = 32  # of a pool whose calls do not wait for other trainers
SMALL_BYTES = 2**16  # of the message of a call that is in none of the groups below
TEXT_BYTES = 2**20  # of the message of a call that says why a trainer has failed
TALK_BYTES = 2**22  # of the message of a call that tells other trainers something
BYTES_PER_SECOND = 2**20  # of the slowest connection on which a large message arrives in time

POOLS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("Heartbeat", "Announce", "Leave"), "beats"),
        **dict.fromkeys(("Barrier", "Finish"), "waits"),
        "Challenge": "challenges",  # one goes before each heartbeat, and strangers may ask for it
        **dict.fromkeys(("Install", "Save", "Load", "Shrink", "Observe"), "works"),
    }
)
OTHERS = "asks"  # the pool of all other calls

Answer = Callable[[bytes, grpc.ServicerContext], Message]
"""Answers a call: the bytes of its message, and its context."""


class CallThreads:
    """The pools of one gRPC server.

    Args:
        limits: how many there may be of what, and how large.
        peer: HOST:PORT of whoever calls.
    """

    def __init__(self, limits: Limits, peer: Callable[[grpc.ServicerContext], str]) -> None:
        self._limits, self._peer = limits, peer
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._waiting: dict[str, HalfOpen] = {}
        for name in {*POOLS.values(), OTHERS}:
            threads = THREADS + (limits.trainers if name == "waits" else 0)
            self._pools[name] = ThreadPoolExecutor(threads, thread_name_prefix=f"control {name}")
            largest = max(
                [self.most_bytes(call) for call, pool in POOLS.items() if pool == name],
                default=limits.manifest_bytes,
            )
            seconds = limits.hello_seconds + largest / BYTES_PER_SECOND
            self._waiting[name] = HalfOpen(THREADS // 2, seconds)

    def most_bytes(self, call: str) -> int:
        """The largest message of a call."""
        of_calls = {
            "Join": self._limits.manifest_bytes,
            "Install": PART_BYTES + SLACK_BYTES,
            **dict.fromkeys(("Barrier", "Rendezvous"), TALK_BYTES),
            "Trace": PART_BYTES + SLACK_BYTES,  # a part of a trainer's spans
            **dict.fromkeys(("Announce", "Leave"), TEXT_BYTES),
        }
        return of_calls.get(call, SMALL_BYTES)

    def handler(self, call: str, answer: Answer) -> grpc.RpcMethodHandler:
        """The handler of a unary call.

        Args:
            call: its name.
            answer: gives the reply to the bytes of a message, or aborts the call.
        """
        pool = POOLS.get(call, OTHERS)

        def serve(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            received = self._received(call, self._waiting[pool], messages, context)
            try:
                checked = check_message("a request", received, context.invocation_metadata())
                reply = answer(received, context).SerializeToString()
                if checked:
                    context.set_trailing_metadata((of_message(reply),))
                return reply
            except (CorruptFrame, DecodeError) as error:
                context.abort(grpc.StatusCode.INTERNAL, str(error))
                raise AssertionError("abort returns") from error  # it raises

        # grpc's own health service chooses its threads in the same way
        serve.experimental_thread_pool = self._pools[pool]  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(serve)

    def _received(
        self,
        call: str,
        waiting: HalfOpen,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> bytes:
        """A call's message."""
        number = waiting.begin(address_of(self._peer(context)), context.cancel)
        try:
            message = next(messages, None)
        finally:
            waiting.over(number)
        if message is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{call}: expected one message")
            raise AssertionError("abort returns")  # it raises
        if len(message) > (most := self.most_bytes(call)):
            what = f"{call}: expected a message of up to {most} bytes, got {len(message)}"
            hint = " (--max-program)" if call == "Join" else ""
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what + hint)
        return message

    def end_late(self) -> None:
        """Ends calls whose message has not come in time; somebody calls it now and then."""
        for waiting in self._waiting.values():
            waiting.end_late()

    def close(self) -> None:
        """Starts no further thread."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)
