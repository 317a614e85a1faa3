"""Promises of the proofs: who is let in, and what is worth nothing the second time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pserver.errors import NotAllowed, Refused
from pserver.security import tokens
from pserver.security.access import OPEN, OPEN_GUARD, Access, Guard, check
from pserver.security.tokens import NONCE_BYTES, Proof, ProofRequest, Role, Secret, Stale

PORT = 6174


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def secret() -> Secret:
    """The job's."""
    return Secret.make()


@pytest.fixture
def clock() -> Clock:
    """The server's."""
    return Clock()


@pytest.fixture
def guard(secret: Secret, clock: Clock) -> Guard:
    """The server's door."""
    return Guard(Access(secret), PORT, clock)


def proof(guard: Guard, secret: Secret, name: str = "Join", request: bytes = b"x") -> Proof:
    """What a client shows that has asked this server."""
    question = ProofRequest(secret, PORT, "the server")
    question.answered(*guard.answer(question.role, question.nonce))
    return question.proof(name, request)


@pytest.mark.parametrize("role", [Role.TRAINER, Role.OPERATOR])
def test_a_key_of_the_job_is_let_in(guard: Guard, secret: Secret, role: Role) -> None:
    """With its own role."""
    assert guard.admit("Join", b"x", proof(guard, secret.of(role))) is role


def test_without_a_proof_one_is_told_how_to_get_a_key(guard: Guard) -> None:
    """The variable, and who finds it by himself."""
    with pytest.raises(NotAllowed, match="set PSERVER_TOKEN_FILE to the job's token file"):
        guard.admit("Join", b"x", None)


def test_a_proof_holds_for_its_own_call_only(guard: Guard, secret: Secret) -> None:
    """Another name, another request, another role, another nonce: each is refused."""
    shown = proof(guard, secret.of(Role.TRAINER))
    wrong = [
        ("Drain", b"x", shown),
        ("Join", b"y", shown),
        ("Join", b"x", replace(shown, role="operator")),
        ("Join", b"x", replace(shown, client_nonce=bytes(NONCE_BYTES))),
        ("Join", b"x", replace(shown, code=bytes(32))),
        ("Join", b"x", replace(shown, code=b"")),
    ]
    for name, request, other in wrong:
        with pytest.raises(NotAllowed):
            guard.admit(name, request, other)

    assert guard.admit("Join", b"x", shown) is Role.TRAINER


def test_a_proof_is_used_once(guard: Guard, secret: Secret) -> None:
    """Whoever has recorded a call gains nothing."""
    shown = proof(guard, secret)
    guard.admit("Join", b"x", shown)
    with pytest.raises(NotAllowed, match="got one that was used before"):
        guard.admit("Join", b"x", shown)


def test_a_challenge_ends(guard: Guard, secret: Secret, clock: Clock) -> None:
    """And then, as where the server was started again, one asks for another."""
    shown = proof(guard, secret)
    clock.now += tokens.LASTING_SECONDS + 1
    with pytest.raises(Stale, match="has expired"):
        guard.admit("Join", b"x", shown)
    with pytest.raises(Stale, match="did not issue the challenge"):
        Guard(Access(secret), PORT).admit("Join", b"x", shown)


def test_strangers_leave_nothing_behind(
    guard: Guard, secret: Secret, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Challenges cost no memory, and calls of the job's own processes are bounded and forgotten."""
    monkeypatch.setattr(tokens, "MOST_USED", 3)
    for _ in range(1000):
        guard.answer("trainer", bytes(NONCE_BYTES))
    for _ in range(3):
        guard.admit("Join", b"x", proof(guard, secret))
    with pytest.raises(NotAllowed, match="expected at most 3 calls"):
        guard.admit("Join", b"x", proof(guard, secret))
    clock.now += tokens.LASTING_SECONDS + 1

    assert guard.admit("Join", b"x", proof(guard, secret)) is Role.OPERATOR


@pytest.mark.parametrize(
    ("role", "nonce"), [("king", 32), ("trainer", 31), ("", 32), ("server", 32)]
)
def test_what_is_no_question_is_refused(guard: Guard, role: str, nonce: int) -> None:
    """An unknown role, a nonce of another size."""
    with pytest.raises(Refused, match="expected a key of trainer or operator"):
        guard.answer(role, bytes(nonce))


def test_a_server_of_another_job_is_seen_through(secret: Secret) -> None:
    """So is one that listens elsewhere, to which a stranger passes questions on; and one that is
    open.
    """
    for guard in (Guard(Access(Secret.make()), PORT), Guard(Access(secret), PORT + 1)):
        question = ProofRequest(secret, PORT, "server 0")
        with pytest.raises(NotAllowed, match="server 0 does not prove that it holds this job's"):
            question.answered(*guard.answer(question.role, question.nonce))
    with pytest.raises(NotAllowed, match="server 0 is open and asks for no key"):
        ProofRequest(secret, PORT, "server 0").answered(*OPEN_GUARD.answer("operator", bytes(32)))


def test_a_role_is_enough_or_named() -> None:
    """The message says which key is needed."""
    check(Role.OPERATOR, Role.TRAINER, "Join")
    with pytest.raises(NotAllowed, match="Drain needs the operator's key, got the trainer's"):
        check(Role.TRAINER, Role.OPERATOR, "Drain")
    assert OPEN.role is Role.OPERATOR
