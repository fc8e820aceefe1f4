"""Where the server listens: a TCP port or a Unix socket, plain or with TLS. Wrong files and addresses are user errors
that appear before a model is loaded.

Knows nothing of HTTP. Called by server.py at the start and at the end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterator

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.config import SSL_PASSWORD_VARIABLE, ServeConfig
from tokenmill.serve.transport.connections import PROBE_RESERVE

_log = get_logger(__name__)
_OTHER_FILES = 256  # model, engine, tiers, libraries


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listening address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(config: ServeConfig) -> bool:
    return bool(config.uds) or is_loopback(config.host)


@contextlib.contextmanager
def listening(config: ServeConfig) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet. A Unix socket's file is removed at the end."""
    if not config.uds:
        with _bind_tcp(config.host, config.port) as listener:
            yield listener
        return
    with _bind_unix(config.uds, _permissions(config.uds_permissions)) as listener:
        created = os.stat(config.uds)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(config.uds), created):
                    os.unlink(config.uds)


def address_of(listener: socket.socket, config: ServeConfig) -> str:
    """The URL of the server, for people and for `--json`."""
    if config.uds:
        return f"unix:{config.uds}"
    scheme = "https" if config.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """None: plain HTTP."""
    if not config.ssl_certfile:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(config, name):
                raise UserError(f"--{name.replace('_', '-')} is given without --ssl-certfile", "give both")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, config)
    if config.ssl_ca_certs:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise _wrong_file("ssl_ca_certs", config.ssl_ca_certs, error) from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_cert_reqs and not config.ssl_ca_certs:
        raise UserError("client certificates cannot be checked without authorities", "give --ssl-ca-certs")
    return context


def load_certificate(context: ssl.SSLContext, config: ServeConfig) -> None:
    """Also called on a running server: new connections then get the new certificate."""
    for name, path in (("ssl_certfile", config.ssl_certfile), ("ssl_keyfile", config.ssl_keyfile)):
        if path and not os.access(path, os.R_OK):
            raise _wrong_file(name, path, OSError("it does not exist or cannot be read"))
    # Never None: OpenSSL would ask for a password on the terminal.
    password = os.environ.get(SSL_PASSWORD_VARIABLE, "")
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, password)
    except (OSError, ssl.SSLError) as error:
        files = " and ".join(each for each in (config.ssl_certfile, config.ssl_keyfile) if each)
        raise UserError(
            f"{files} are not a certificate and its key: {_one_line(error)}",
            f"give PEM files that belong together; {SSL_PASSWORD_VARIABLE} has the password of an encrypted key",
        ) from None


def raise_file_limit(max_connections: int) -> int:
    """Let the process open a file per connection; returns the connections that the system allows."""
    import resource

    needed = max_connections + PROBE_RESERVE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    allowed = max(1, soft - PROBE_RESERVE - _OTHER_FILES)
    _log.warning(
        "at most %d connections instead of %d: the system allows %d open files (ulimit -n)",
        allowed,
        max_connections,
        soft,
    )
    return allowed


def _bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"cannot listen on {host}:{port}: {error}", "choose another --port or --host") from None
    return listener


def _bind_unix(path: str, permissions: int) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # nobody else can connect before chmod
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {path}: {error}", "choose another --uds") from None
    finally:
        os.umask(before)
    os.chmod(path, permissions)
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket that no server listens on, as a killed one leaves it; anything else is not ours to remove."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise UserError(f"{path} exists and is not a socket", "choose another --uds")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise UserError(f"cannot listen on {path}: {error}", "choose another --uds") from None
        else:
            raise UserError(f"another server listens on {path}", "stop it, or choose another --uds")


def _permissions(text: str) -> int:
    if len(text) != 3 or not all(digit in "01234567" for digit in text):
        raise UserError(f"--uds-permissions {text} is not a mode", "give three octal digits such as 600 or 660")
    return int(text, 8)


def _wrong_file(name: str, path: str, error: Exception) -> UserError:
    return UserError(f"--{name.replace('_', '-')} {path}: {_one_line(error)}", "give a readable PEM file")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
