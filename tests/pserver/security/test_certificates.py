"""Promises of certificates: what they say, and who has signed a list of revoked ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from pserver.security.certificates import (
    Authority,
    bearer_in,
    bearer_in_pem,
    certificate_bytes,
    key_bytes,
    new_key,
    revoked_serials,
)

NOW = datetime(2026, 5, 1, tzinfo=UTC)
AUTHORITY = Authority.new(NOW)


def issued(role: str = "trainer", host: str = "a", days: int = 365) -> x509.Certificate:
    return AUTHORITY.issue(new_key().public_key(), role, [host], NOW, days)


@pytest.mark.parametrize("role", ["server", "trainer", "operator"])
def test_a_certificate_says_who_has_the_key(role: str) -> None:
    """The role and the host come back as they were given, also through PEM."""
    bearer = bearer_in_pem(certificate_bytes(issued(role, "node-1.example")))

    assert (bearer.role, bearer.host) == (role, "node-1.example")
    assert str(bearer) == f"{role} node-1.example"
    assert bearer.until == NOW + timedelta(days=365)


@pytest.mark.parametrize(("host", "kind"), [("a", x509.DNSName), ("10.0.0.2", x509.IPAddress)])
def test_a_certificate_names_its_host_and_the_loopback(
    host: str, kind: type[x509.GeneralName]
) -> None:
    """A name is a name and an address an address: hosts are verified by the one that is dialled."""
    names = issued(host=host).extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    assert host in [str(name) for name in names.get_values_for_type(kind)]  # type: ignore[type-var]
    assert "localhost" in names.get_values_for_type(x509.DNSName)
    assert "127.0.0.1" in [str(each) for each in names.get_values_for_type(x509.IPAddress)]


@pytest.mark.parametrize("role", ["trainer", "operator"])
def test_only_a_server_may_stand_at_a_port(role: str) -> None:
    """A stolen trainer's key does not make a server."""
    uses = [
        issued(each).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        for each in ("server", role)
    ]

    assert [ExtendedKeyUsageOID.SERVER_AUTH in use for use in uses] == [True, False]


@pytest.mark.parametrize("host", ["", "..", "a/b", "a b", "*", "*.example", "a:1", "-a", "ä"])
def test_what_is_no_host_is_refused(host: str) -> None:
    """A host's name becomes a folder's."""
    with pytest.raises(ValueError, match="expected the name or the address of a host"):
        issued(host=host)


def test_a_role_is_one_of_three() -> None:
    """There is no key for everything."""
    with pytest.raises(ValueError, match="expected one of the roles"):
        issued("root")


def test_the_end_is_warned_of() -> None:
    """Thirty days before it, and afterwards."""
    bearer = bearer_in(issued())

    assert bearer.warning(NOW) == ""
    assert "expires in 10 days" in bearer.warning(bearer.until - timedelta(days=10))
    assert "has expired" in bearer.warning(bearer.until)


def test_no_certificate_outlives_its_authority() -> None:
    """It would count for nothing then."""
    certificate = issued(days=100_000)

    assert certificate.not_valid_after_utc <= AUTHORITY.certificate.not_valid_after_utc


def test_a_list_of_revoked_keys_is_the_authoritys() -> None:
    """Whoever can write the file cannot lengthen or shorten the list."""
    pem = certificate_bytes(AUTHORITY.certificate)
    other = Authority.new(NOW)

    assert revoked_serials(AUTHORITY.revocations([7, 5, 7], NOW), pem) == {5, 7}
    with pytest.raises(ValueError, match="that the authority has signed"):
        revoked_serials(other.revocations([5], NOW), pem)


def test_an_authority_comes_back_from_its_files() -> None:
    """With the same key, so that what it signs counts."""
    back = Authority.from_pem(key_bytes(AUTHORITY.key), certificate_bytes(AUTHORITY.certificate))
    certificate = back.issue(new_key().public_key(), "server", ["a"], NOW)

    certificate.verify_directly_issued_by(AUTHORITY.certificate)
