"""Certificates: an authority, and what it signs.  Pure: no files, no sockets.

A certificate names the hosts of its key, and its role as a URI among the alternative names::

    DNS:a  DNS:localhost  IP:127.0.0.1  IP:::1  URI:pserver:role/trainer

Only a server's may stand at a listening port (extended key usage): a trainer's key can't pass for a
server.  Keys are ECDSA P-256, which gRPC's library takes at either end.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pserver.security.bearer import ROLES, Bearer

ROLE_URI = "pserver:role/"
HERE = ("localhost", "127.0.0.1", "::1")  # every host's own names
AUTHORITY_DAYS = 3650
DAYS = 365  # of a certificate, by default
SKEW = timedelta(minutes=5)  # between the clocks of hosts
NOBODY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pserver authority")])

PrivateKey = ec.EllipticCurvePrivateKey


def new_key() -> PrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_bytes(key: PrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def certificate_bytes(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def bearer_in(certificate: x509.Certificate) -> Bearer:
    """The bearer that a certificate names, unchecked."""
    uris: list[str] = []
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    roles = [uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)]
    role = roles[0] if len(roles) == 1 and roles[0] in ROLES else ""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    host = str(names[0].value).partition(" ")[2] if names else ""
    dates = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return Bearer(role, host, certificate.serial_number, *dates)


def bearer_in_pem(pem: bytes) -> Bearer:
    """The bearer that a certificate in PEM names, unchecked.

    Raises:
        ValueError: it is none.
    """
    return bearer_in(x509.load_pem_x509_certificate(pem))


def is_signed(pem: bytes, authority: bytes) -> bool:
    """Whether an authority has signed a certificate; both as PEM.

    Raises:
        ValueError: one of them is none, or the authority signs none.
    """
    signed = x509.load_pem_x509_certificate(pem)
    try:
        signed.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Authority:
    """A key that signs the others, and its certificate.

    Example::

        authority = Authority.new(now)
        certificate = authority.issue(new_key().public_key(), "trainer", ["a"], now)
    """

    key: PrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, now: datetime, days: int = AUTHORITY_DAYS) -> Authority:
        """A new authority."""
        key = new_key()
        signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = (
            _builder(NOBODY, key.public_key(), now, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(signs, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        )
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def from_pem(cls, key: bytes, certificate: bytes) -> Authority:
        """The authority that these two files hold.

        Raises:
            ValueError: they hold something else.
        """
        loaded = serialization.load_pem_private_key(key, None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("expected an elliptic-curve key of the authority, got another")
        return cls(loaded, x509.load_pem_x509_certificate(certificate))

    def issue(
        self,
        key: ec.EllipticCurvePublicKey,
        role: str,
        names: Collection[str],
        now: datetime,
        days: int = DAYS,
    ) -> x509.Certificate:
        """A certificate for a public key.

        Args:
            role: one of ``ROLES``.
            names: of the host, names or addresses; the first one is its name in messages.
            days: until it expires.

        Raises:
            ValueError: there is no such role, or a name is not a host's.
        """
        if role not in ROLES:
            raise ValueError(f"expected one of the roles {', '.join(ROLES)}, got {role!r}")
        first = next(iter(names))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role} {first}"[:64])])
        hosts = [general_name(name) for name in dict.fromkeys((*names, *HERE))]
        alternative = [*hosts, x509.UniformResourceIdentifier(ROLE_URI + role)]
        use = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role == "server":
            use.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        builder = (
            _builder(subject, key, now, min(days, self._days_left(now)))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .add_extension(x509.ExtendedKeyUsage(use), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False
            )
        )
        return builder.sign(self.key, hashes.SHA256())

    def revocations(self, serials: Iterable[int], now: datetime) -> bytes:
        """The signed list of revoked certificates, as PEM.

        Processes accept it however old it is.
        """
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(NOBODY)
            .last_update(now - SKEW)
            .next_update(now + timedelta(days=AUTHORITY_DAYS))
        )
        for serial in sorted(set(serials)):
            entry = x509.RevokedCertificateBuilder().serial_number(serial)
            builder = builder.add_revoked_certificate(entry.revocation_date(now).build())
        signed = builder.sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def _days_left(self, now: datetime) -> int:
        return (self.certificate.not_valid_after_utc - now).days


def revoked_serials(pem: bytes, authority: bytes) -> frozenset[int]:
    """The serial numbers on a list that the authority has signed.

    Args:
        pem: the list.
        authority: its certificate, as PEM.

    Raises:
        ValueError: it is not such a list, or another authority has signed it.
    """
    found = x509.load_pem_x509_crl(pem)
    key = x509.load_pem_x509_certificate(authority).public_key()
    try:
        signed = isinstance(key, ec.EllipticCurvePublicKey) and found.is_signature_valid(key)
    except InvalidSignature:
        signed = False
    if not signed:
        raise ValueError("expected a list of revoked keys that the authority has signed")
    return frozenset(each.serial_number for each in found)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(NOBODY)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def general_name(name: str) -> x509.GeneralName:
    """A host's name or address in the form of certificates.

    Raises:
        ValueError: it is neither an address nor a name.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9_]+([.-]+[A-Za-z0-9_]+)*", name):
        raise ValueError(f"expected the name or the address of a host, got {name!r}")
    return x509.DNSName(name)
