"""A certificate authority for tests, with a certificate for the loopback address and one for a client."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files."""

    ca_file: Path
    cert_file: Path
    key_file: Path
    client_cert_file: Path
    client_key_file: Path

    def server_context(self, *, ask_client: bool = False) -> ssl.SSLContext:
        """Return the context of a server. With `ask_client`, clients need a certificate of the same authority."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.cert_file, self.key_file)
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca_file)
        return context


def make_certificates(folder: Path) -> Certificates:
    """Create all five files in `folder`. The certificates are valid until tomorrow, for `localhost` and 127.0.0.1."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("authority of the tests", ca_key, "authority of the tests", ca_key, is_ca=True)
    made = Certificates(*(folder / name for name in ("ca.pem", "cert.pem", "key.pem", "client.pem", "client-key.pem")))
    _write(made.ca_file, ca)
    for name, cert_file, key_file in [
        ("localhost", made.cert_file, made.key_file), ("client", made.client_cert_file, made.client_key_file)
    ]:
        key = ec.generate_private_key(ec.SECP256R1())
        _write(cert_file, _certificate(name, key, "authority of the tests", ca_key, is_ca=False))
        key_file.touch(mode=0o600)
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return made


def ending_certificate(days: int) -> bytes:
    """Return a certificate, in PEM, that ends in so many days."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _certificate("self", key, "self", key, is_ca=False, days=days).public_bytes(serialization.Encoding.PEM)


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey, *, is_ca: bool,
    days: int = 1,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 99 * _DAY)
        .not_valid_after(now + days * _DAY)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(issuer_id, critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256())
