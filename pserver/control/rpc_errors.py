"""The conversion between gRPC statuses and our errors."""

from __future__ import annotations

import logging
from typing import NoReturn

import grpc

from pserver.errors import PServerError, Refused, TimedOut, Unreachable, from_wire
from pserver.telemetry.logs import LimitedLog

bugs = LimitedLog(logging.getLogger(__name__))

ERROR_KEY = "pserver-error"  # trailing metadata: the error's name
MAX_DETAILS = 4000  # characters of a message: gRPC drops a reply whose metadata passes 8 KB


def abort_with(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    """Ends a call with the gRPC status of ``error``, whose name goes into the trailing metadata.

    A ValueError is a mistake of the caller.  Any other error that is not ours is a mistake in this
    server: its traceback goes to the log, one sentence to the caller.
    """
    if isinstance(error, ValueError):
        error = Refused(str(error))
    if isinstance(error, PServerError):
        name, status, details = type(error).__name__, grpc.StatusCode[error.status], str(error)
    else:
        bugs.log(type(error).__name__, "a control call failed", logging.ERROR, error)
        name, status = PServerError.__name__, grpc.StatusCode.INTERNAL
        details = f"the server failed with {type(error).__name__}; its log says where"
    if len(details) > MAX_DETAILS:
        details = details[:MAX_DETAILS] + " ..."
    context.set_trailing_metadata(((ERROR_KEY, name),))
    context.abort(status, details)
    raise AssertionError("abort returns")  # it raises


def about(server: str, text: str) -> str:
    """A sentence about a server, which it names once."""
    return text if text.startswith(server) else f"{server}: {text}"


def from_rpc_error(error: grpc.RpcError, server: str, call: str) -> PServerError:
    """The error for a failed call to ``server``, which its endpoint names, or its number as well.

    An error that the server named keeps its name; the status decides about all others.
    """
    status, details = error.code(), error.details() or "no details"
    if name := named(error):
        return from_wire(name, about(server, details))
    if status is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(f"{server} does not answer {call}: {details}")
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimedOut(f"{server} has not answered {call} within its timeout")
    if status is grpc.StatusCode.CANCELLED:
        return Unreachable(f"{server}: {call} was cancelled: {details}")
    if status in (
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    ):
        too_long = call == "Join" and status is grpc.StatusCode.RESOURCE_EXHAUSTED
        hint = " (the plan may be too large: see pserver serve --max-program)" if too_long else ""
        return Refused(f"{server} refuses {call}: {details}{hint}")
    return PServerError(f"{server}: {call} failed with {status.name}: {details}")


def named(error: grpc.RpcError) -> str:
    """The name that the server gave its error; "" if the server did not raise it."""
    return next((value for key, value in error.trailing_metadata() or () if key == ERROR_KEY), "")
