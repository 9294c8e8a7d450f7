"""Certificates for 127.0.0.1, made anew for each run of the tests."""

from __future__ import annotations

import atexit
import shutil
import ssl
import tempfile
from pathlib import Path

from tests.needed import needed

trustme = needed("trustme")

_FOLDER = Path(tempfile.mkdtemp(prefix="tetri-certificates-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_authority = trustme.CA()
_issued = _authority.issue_cert("127.0.0.1")

AUTHORITY = _FOLDER / "authority.pem"
CERTIFICATE = _FOLDER / "certificate.pem"
CERTIFICATE_KEY = _FOLDER / "certificate-key.pem"
_authority.cert_pem.write_to_path(AUTHORITY)
_issued.cert_chain_pems[0].write_to_path(CERTIFICATE)
_issued.private_key_pem.write_to_path(CERTIFICATE_KEY)


def write_certificate_with_key(path: Path) -> None:
    """Write a new certificate and its private key into one file."""
    _authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)


def trusting(*, has_certificate: bool = False) -> ssl.SSLContext:
    """Make a client's context that trusts the certificates of this module."""
    context = ssl.create_default_context(cafile=str(AUTHORITY))
    if has_certificate:
        context.load_cert_chain(CERTIFICATE, CERTIFICATE_KEY)
    return context
