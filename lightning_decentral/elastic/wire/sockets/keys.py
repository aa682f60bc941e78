"""Key of a run: everybody with this file is a member, and all connections speak TLS 1.3. There is no other authority.

the file         a private key and its self-signed certificate, the same on all machines
handshake        both ends show the certificate and prove that they have its private key; no other one is trusted
what it is not   a member's own identity: whoever has the file may act as any member, and as the lobby"""

import os
import socket
import ssl
import stat
import subprocess

KEY = "LIGHTNING_DECENTRAL_KEY"
HANDSHAKE = b"\x16"  # the first byte of a TLS connection; a frame that is short enough for a greeting begins with zero
NO_TIMES = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME: a machine with a wrong clock is a member, too
MAKES = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", "36500", "-subj", "/CN=lightning_decentral", "-keyout", "/dev/stdout"),
)
NEEDS_KEY = f"this run has a key: give each worker the file, Elastic(key=FILE) or {KEY}=FILE"
NEEDS_NONE = f"this run has no key: start the lobby with --key FILE, or leave out Elastic(key=...) and {KEY}"


class WrongKey(ConnectionError):
    """Raised if the other end has another key, or none; the text has the remedy."""


class Key:
    """Both roles of a connection under the key in a file. ValueError if there is none, or others may read it."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                raise ValueError(f"other users may read the key {path}: make a new one, or `chmod 600 {path}`")
            self.server = _context(ssl.PROTOCOL_TLS_SERVER, path)
            self.server.num_tickets = 0  # bytes that a sender never reads would reset its connection
            self._client = _context(ssl.PROTOCOL_TLS_CLIENT, path)
        except OSError as error:
            remedy = "make one by `lightning-decentral lobby --new-key FILE`, and copy it to each machine"
            raise ValueError(f"{path!r} is no key ({error.strerror or error}): {remedy}") from None

    def secured(self, connection: socket.socket, place: str) -> socket.socket:
        """Make the handshake as the one who has connected, within the connection's timeout. WrongKey if the other end
        has another key or none; OSError if the connection has ended."""
        try:
            return self._client.wrap_socket(connection)
        except ssl.SSLCertVerificationError:
            raise WrongKey(f"{place} has another key than {self.path}: give all machines the same file") from None
        except ssl.SSLError as error:
            if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                raise  # the other end has gone
            raise WrongKey(f"{place} answers without a key ({error.reason}): {NEEDS_NONE}") from None


def _context(role: int, path: str) -> ssl.SSLContext:
    made = ssl.SSLContext(role)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the key itself is known, whatever the address
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= NO_TIMES
    made.load_cert_chain(path, password=lambda: "")  # asks nobody for one
    made.load_verify_locations(path)
    return made


def key_of(path: str) -> Key | None:
    """Return the key in this file, or in the one that the environment names; None without both."""
    found = path or os.environ.get(KEY, "")
    return Key(found) if found else None


def new_key(path: str) -> None:
    """Make a key in a new file that only this user may read. ValueError if it exists or can't be made."""
    try:
        made = subprocess.run(MAKES, check=True, capture_output=True).stdout
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(made)
    except FileExistsError:
        raise ValueError(f"{path} exists: a key isn't overwritten, give another file") from None
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"no key can be written to {path} ({error}): it takes the program openssl") from None
