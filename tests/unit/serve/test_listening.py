"""TCP, Unix sockets and TLS: what listens, who may connect, and wrong files named before anything is loaded."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

from tests.unit.serve.live_server import live, until
from tokenmill.errors import UserError
from tokenmill.serve.config import SSL_PASSWORD_VARIABLE, ServeConfig
from tokenmill.serve.transport.connections import PROBE_RESERVE
from tokenmill.serve.transport.listening import (
    address_of,
    is_local,
    is_loopback,
    listening,
    load_certificate,
    raise_file_limit,
    tls_context,
)

_CLOSE = b"GET /hello HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def _certificate(folder: Path, name: str, password: str = "") -> tuple[str, str]:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl program to make a certificate with")
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    protection = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *protection]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, *subject, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return str(certificate), str(key)


def test_a_unix_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")

    async def ask() -> None:
        async with live(uds=path) as server:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert (await server.ask(_CLOSE)).endswith(b"GET /hello ")

    asyncio.run(ask())
    assert not os.path.exists(path)
    config = ServeConfig(uds=path, uds_permissions="660")
    with listening(config) as listener:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        assert address_of(listener, config) == f"unix:{path}"


def test_a_stale_unix_socket_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    config = ServeConfig(uds=str(path))
    with listening(config) as listener:
        listener.listen()
        with pytest.raises(UserError, match="another server listens"), listening(config):
            pass
        assert path.exists()
    path.write_text("a file")
    with pytest.raises(UserError, match="is not a socket"), listening(config):
        pass
    assert path.read_text() == "a file"
    with pytest.raises(UserError, match="cannot listen"), listening(ServeConfig(uds=str(tmp_path / "no" / "s"))):
        pass
    with pytest.raises(UserError, match="three octal digits"), listening(ServeConfig(uds="x", uds_permissions="9")):
        pass


def test_a_port_that_is_taken_is_a_user_error() -> None:
    with listening(ServeConfig(port=0)) as listener:
        listener.listen()
        config = ServeConfig(port=listener.getsockname()[1])
        assert address_of(listener, config) == f"http://127.0.0.1:{config.port}"
        with pytest.raises(UserError, match="cannot listen"), listening(config):
            pass


def test_tls_serves_https_from_1_2_and_reads_its_certificate_again(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path, "first")
    config = ServeConfig(ssl_certfile=certificate, ssl_keyfile=key)
    context = tls_context(config)
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2

    async def ask() -> None:
        async with live(tls=context, tls_handshake_timeout=0.2) as server:
            trusting = ssl.create_default_context(cafile=certificate)
            assert (await (await server.connect(_CLOSE, trusting)).rest()).endswith(b"GET /hello ")
            silent = await server.connect()  # no handshake
            assert await silent.rest() == b""
            plain = await server.connect(_CLOSE)
            assert b"200" not in await plain.rest()

            for old_file, new_file in zip((certificate, key), _certificate(tmp_path, "second"), strict=True):
                os.replace(new_file, old_file)
            load_certificate(context, config)
            renewed = ssl.create_default_context(cafile=certificate)
            assert (await (await server.connect(_CLOSE, renewed)).rest()).endswith(b"GET /hello ")
            with pytest.raises(ssl.SSLCertVerificationError):
                await server.connect(_CLOSE, trusting)
            await until(lambda: len(server.server.table) == 0)

    asyncio.run(ask())


def test_handshakes_that_never_end_take_no_more_connections_than_others(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path, "server")
    context = tls_context(ServeConfig(ssl_certfile=certificate, ssl_keyfile=key))

    async def ask() -> None:
        async with asyncio.timeout(20), live(tls=context, max_connections=5) as server:
            flood = [await server.connect(b"\x16\x03\x01") for _ in range(100)]
            trusting = ssl.create_default_context(cafile=certificate)
            health = await server.connect(_CLOSE.replace(b"/hello", b"/health"), trusting)
            assert (await health.rest()).endswith(b"GET /health ")
            assert len(server.server.table) <= 5 + PROBE_RESERVE
            assert server.counted["connections"] >= 100 - 5 - PROBE_RESERVE
            for client in flood:
                client.close()
            await until(lambda: len(server.server.table) == 0)

    asyncio.run(ask())


def test_client_certificates_are_checked_where_required(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path, "server")
    mine, my_key = _certificate(tmp_path, "client")
    config = ServeConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=mine, ssl_cert_reqs=2)

    async def ask() -> None:
        async with live(tls=tls_context(config)) as server:
            known = ssl.create_default_context(cafile=certificate)
            known.load_cert_chain(mine, my_key)
            assert (await (await server.connect(_CLOSE, known)).rest()).endswith(b"GET /hello ")
            unknown = ssl.create_default_context(cafile=certificate)
            unknown.maximum_version = ssl.TLSVersion.TLSv1_2  # there the handshake itself fails
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await server.connect(_CLOSE, unknown)

    asyncio.run(ask())


def test_wrong_tls_files_are_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = _certificate(tmp_path, "mine")
    _, other_key = _certificate(tmp_path, "other")
    locked, locked_key = _certificate(tmp_path, "locked", password="s3cret")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for options in (
        {"ssl_certfile": str(tmp_path / "missing")},
        {"ssl_certfile": certificate, "ssl_keyfile": str(tmp_path / "missing")},
        {"ssl_certfile": str(text), "ssl_keyfile": key},
        {"ssl_certfile": certificate, "ssl_keyfile": other_key},
        {"ssl_certfile": locked, "ssl_keyfile": locked_key},
        {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": str(text)},
        {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_cert_reqs": 2},
        {"ssl_keyfile": key},
    ):
        with pytest.raises(UserError) as raised:
            tls_context(ServeConfig(**options))  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)
        assert raised.value.remedy
    monkeypatch.setenv(SSL_PASSWORD_VARIABLE, "s3cret")
    assert tls_context(ServeConfig(ssl_certfile=locked, ssl_keyfile=locked_key)) is not None
    assert tls_context(ServeConfig()) is None


def test_which_addresses_are_local() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.3.2.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com")))
    assert is_local(ServeConfig(uds="/x", host="0.0.0.0"))
    assert not is_local(ServeConfig(host="0.0.0.0"))


def test_connections_fit_the_open_files_that_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limit = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _which: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, new: limit.__setitem__(slice(None), list(new)))
    assert raise_file_limit(500) == 500
    assert limit == [1024, 4096]
    assert raise_file_limit(2000) == 2000
    assert limit[0] > 2000
    assert 3000 < raise_file_limit(100_000) < 4096
    assert limit == [4096, 4096]
