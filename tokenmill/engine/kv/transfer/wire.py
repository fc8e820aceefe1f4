"""What two engines say to each other about pages: the handshake and the frames, over any stream socket.

    server: HELLO   version, its nonce
    client: LOGIN   its nonce, its page identity, proof of the secret over both nonces and the identity
    server: WELCOME proof of the secret, where its memory can be mapped   | REFUSED why
    client: GET     lease, keys      server: PAGE or SLOT for each key in order, WAIT meanwhile, END with a reason
    client: RENEW lease | DONE lease server: nothing

A frame is a type, a length and that many bytes. Both sides prove that they know the deployment's secret without sending
it; the identity covers weights, KV dtype and layout, so that engines with other pages refuse each other when they
connect. Pages carry their key and a checksum over key and content; nothing is encrypted. Knows sockets, not engines.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import zlib
from dataclasses import dataclass

HELLO, LOGIN, WELCOME, REFUSED, GET, PAGE, SLOT, WAIT, END, RENEW, DONE = range(1, 12)
KEY_BYTES = 17  # a page's name and its group
MAX_LEASE = 64  # characters
MAX_KEYS = 1 << 20  # of one GET
_VERSION = b"TMKVX\x00\x00\x01"  # the last byte is the version
_FRAME = struct.Struct("<BxxxI")
_SLOT_PLACE = struct.Struct("<IQ")
_CRC = struct.Struct("<I")
_NONCE = 32
_PROOF = hashlib.sha256().digest_size
_MAX_CONTROL = 1 << 12  # bytes of a frame that holds neither pages nor keys


class WireError(Exception):
    """What came is not what the other side should have sent. `reason` is a word for counters."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text or reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Mapping:
    """Where a process of the same host finds the staged pages: slots of equal size in a file of process `pid`."""

    pid: int
    descriptor: int
    inode: int  # of that file: another process's descriptor of the same number has another

    def encode(self) -> bytes:
        return struct.pack("<qqQ", self.pid, self.descriptor, self.inode)

    @classmethod
    def decode(cls, data: bytes) -> Mapping:
        return cls(*struct.unpack("<qqQ", data))


NOT_MAPPED = Mapping(-1, -1, 0)


def checksum(key: bytes, page: memoryview | bytes | bytearray) -> int:
    return zlib.crc32(page, zlib.crc32(key))


# --- frames ---


def send_frame(connection: socket.socket, kind: int, *parts: bytes | memoryview) -> None:
    """In one piece where it is short: what is sent in two waits for the other side's acknowledgement."""
    size = sum(len(part) for part in parts)
    head = _FRAME.pack(kind, size)
    if size <= _MAX_CONTROL:
        connection.sendall(b"".join((head, *parts)))
        return
    connection.sendall(b"".join((head, *parts[:-1])))
    connection.sendall(parts[-1])


def read_head(connection: socket.socket) -> tuple[int, int]:
    """(type, length) of the next frame."""
    kind, size = _FRAME.unpack(read_exactly(connection, _FRAME.size))
    return kind, size


def read_exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    read_into(connection, memoryview(data))
    return data


def read_into(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer; raises ConnectionError where the other side ends before."""
    at = 0
    while at < len(view):
        count = connection.recv_into(view[at:])
        if not count:
            raise ConnectionError("the connection was closed")
        at += count


def read_control(connection: socket.socket, kind: int, size: int | None = None) -> bytes:
    """The content of a frame that must be of this type, and of this size if one is stated."""
    found, length = read_head(connection)
    if found == REFUSED and length <= _MAX_CONTROL:
        raise WireError("incompatible", read_exactly(connection, length).decode("utf-8", "replace"))
    if found != kind or length > _MAX_CONTROL or size not in (None, length):
        raise WireError("protocol", f"frame of type {found} and {length} bytes")
    return bytes(read_exactly(connection, length))


# --- the handshake ---


def welcome(connection: socket.socket, secret: bytes, identity: bytes, mapping: Mapping) -> None:
    """The server's side. Raises WireError for a client that does not know the secret or has other pages."""
    nonce = secrets.token_bytes(_NONCE)
    send_frame(connection, HELLO, _VERSION, nonce)
    login = read_control(connection, LOGIN, _NONCE + len(identity) + _PROOF)
    theirs, wanted, proof = login[:_NONCE], login[_NONCE:-_PROOF], login[-_PROOF:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", nonce, theirs, wanted)):
        raise WireError("secret")
    if wanted != identity:
        text = f"its pages are {identity.hex()[:12]}, not {wanted.hex()[:12]}: weights, KV dtype or page size differ"
        send_frame(connection, REFUSED, text.encode())
        raise WireError("incompatible", text)
    send_frame(connection, WELCOME, _proof(secret, b"server", nonce, theirs, identity), mapping.encode())


def log_in(connection: socket.socket, secret: bytes, identity: bytes) -> Mapping:
    """The client's side: where the server's memory can be mapped. Raises WireError."""
    hello = read_control(connection, HELLO, len(_VERSION) + _NONCE)
    if hello[: len(_VERSION)] != _VERSION:
        raise WireError("version", "it speaks another version of the protocol")
    nonce, ours = hello[len(_VERSION) :], secrets.token_bytes(_NONCE)
    send_frame(connection, LOGIN, ours, identity, _proof(secret, b"client", nonce, ours, identity))
    answer = read_control(connection, WELCOME, _PROOF + len(NOT_MAPPED.encode()))
    if not hmac.compare_digest(answer[:_PROOF], _proof(secret, b"server", nonce, ours, identity)):
        raise WireError("secret")
    return Mapping.decode(answer[_PROOF:])


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"tokenmill kv transfer" + b"".join(parts), "sha256")


# --- leases and keys ---


def encode_get(lease: str, keys: list[bytes], maps: bool) -> bytes:
    """`maps`: the client can read the slots itself."""
    name = lease.encode()
    return bytes([maps, len(name)]) + name + b"".join(keys)


def decode_get(data: bytes | bytearray) -> tuple[str, list[bytes], bool]:
    if len(data) < 2 or len(data) < 2 + data[1] or (len(data) - 2 - data[1]) % KEY_BYTES:
        raise WireError("protocol", "a request that makes no sense")
    begin = 2 + data[1]
    keys = [bytes(data[at : at + KEY_BYTES]) for at in range(begin, len(data), KEY_BYTES)]
    return lease_name(data[2:begin]), keys, bool(data[0])


def lease_name(data: bytes | bytearray) -> str:
    name = bytes(data).decode("ascii", "replace")
    if not 0 < len(name) <= MAX_LEASE:
        raise WireError("protocol", "a lease without a name")
    return name


def page_head(key: bytes, crc: int) -> bytes:
    return key + _CRC.pack(crc)


def slot_of(key: bytes, crc: int, slot: int, offset: int) -> bytes:
    """Where a page lies in the mapped file: its slot, and the byte at which that begins."""
    return key + _CRC.pack(crc) + _SLOT_PLACE.pack(slot, offset)


HEAD_BYTES = KEY_BYTES + _CRC.size
SLOT_BYTES = HEAD_BYTES + _SLOT_PLACE.size


def decode_head(data: bytes | bytearray) -> tuple[bytes, int]:
    """(key, checksum) at the beginning of a page or a slot."""
    return bytes(data[:KEY_BYTES]), _CRC.unpack(data[KEY_BYTES:HEAD_BYTES])[0]


def decode_offset(data: bytes | bytearray) -> int:
    return int(_SLOT_PLACE.unpack(data[HEAD_BYTES:SLOT_BYTES])[1])


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT; IPv6 hosts in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"'{text}' is not an address like 10.0.0.5:7800")
    return host, int(port)
