"""Make the certificate of a job's own etcd from the job's token.

Every node with the token makes the same certificate, uses it as server and as client, and trusts only this
one. The certificate stays in memory.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from datetime import datetime
from ipaddress import ip_address

from fleetrun.envs.contract import derive_key, split_endpoint
from fleetrun.errors import NotSupportedError

_BEGIN, _END = datetime(2020, 1, 1), datetime(2120, 1, 1)  # clocks of nodes may differ


class Certificate:
    """PEM files in memory. `certificate` and `key` are their paths, in this process and in processes that
    inherit the descriptors `fds`.
    """

    def __init__(self, token: str, endpoints: Collection[str]) -> None:
        """Make a certificate for servers at these endpoints. Raises NotSupportedError without the package
        cryptography.
        """
        certificate, key = _made(token, sorted({split_endpoint(each)[0] for each in endpoints}))
        self.fds = tuple(_in_memory(data) for data in (certificate, key))
        self.certificate, self.key = (f"/proc/self/fd/{fd}" for fd in self.fds)


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    os.write(fd, data)
    return fd


def _made(token: str, hosts: Sequence[str]) -> tuple[bytes, bytes]:
    """Return the certificate and the key. Ed25519 signatures are deterministic (RFC 8032), so all nodes make
    the same bytes.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ModuleNotFoundError:
        raise NotSupportedError(
            "the package cryptography is missing; a token needs it if several nodes serve the store",
            hint="pip install 'fleetrun[etcd]'",
        ) from None
    key = Ed25519PrivateKey.from_private_bytes(derive_key(token, b"etcd"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleetrun")])
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, None)
    )
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return made.public_bytes(form.Encoding.PEM), private
