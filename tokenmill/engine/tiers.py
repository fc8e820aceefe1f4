"""Makes the KV tiers and peers that a configuration names, under a name that no other model, KV dtype or layout shares.

Called once, when an engine is built. Options that make no sense are refused here; storage that cannot be used at the
moment is not: its tier is off until it can.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config import ResolvedConfig
from tokenmill.engine.kv.page_names import root_name
from tokenmill.engine.kv.tier.base import PageTier
from tokenmill.engine.kv.tier.disk import DiskTier
from tokenmill.engine.kv.tier.host import HostTier
from tokenmill.engine.kv.tier.redis import RedisAddress, RedisTier
from tokenmill.engine.kv.tier.secret import own_secret, read_secret, state_directory
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.engine.kv.transfer.page_server import PageServer
from tokenmill.engine.kv.transfer.peer import PeerPages
from tokenmill.engine.kv.transfer.publisher import Publisher
from tokenmill.engine.kv.transfer.staging import Staging
from tokenmill.engine.kv.transfer.wire import parse_address
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.runtime.build import Runtime

_log = get_logger(__name__)


@dataclass(slots=True)
class PageSharing:
    """Where pages of the prefix cache go and come from, outside the pool: what an engine was told to use."""

    tiers: TierStack | None = None
    publisher: Publisher | None = None
    server: PageServer | None = None

    @property
    def listens_at(self) -> str:
        """Where other engines fetch pages; empty if they cannot."""
        return self.server.address if self.server is not None else ""

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


def build_tiers(config: ResolvedConfig, path: Path, runtime: Runtime) -> PageSharing:
    _check_addresses(config)
    transfers = bool(config.kv_listen or config.kv_peer)
    if not (config.kv_host_memory or config.kv_disk or config.kv_redis or transfers):
        return PageSharing()
    if not config.prefix_caching:
        raise UserError(
            "KV tiers and peers keep pages of the prefix cache, which is off", "leave --no-prefix-caching out"
        )
    if runtime.layout.states:
        raise UserError(
            "KV tiers and peers do not keep recurrent states, which this model's prefix cache needs",
            "leave --kv-host-memory, --kv-disk, --kv-redis, --kv-listen and --kv-peer out",
        )
    page_bytes = runtime.store.stored_page_bytes
    identity = root_name(path, config.load_format, page_meaning(config, runtime))
    secret = read_secret(Path(config.kv_secret_file).expanduser()) if config.kv_secret_file else b""
    tiers: list[PageTier] = []
    if config.kv_host_memory:
        tiers.append(HostTier(config.kv_host_memory))
    if config.kv_disk:
        folder = Path(config.kv_disk).expanduser()
        tiers.append(DiskTier(folder, config.kv_disk_size, identity, page_bytes, secret))
    if config.kv_redis:
        tiers.append(RedisTier(config.kv_redis, identity, page_bytes, secret or _user_secret("redis tier")))
    if tiers:
        _log.info("KV tiers: %s; pages of %.1f KiB", ", ".join(tier.name for tier in tiers), page_bytes / 1024)
    shared = secret or (_user_secret("KV transfers") if transfers else b"")
    peers = None
    if config.kv_peer:
        peers = PeerPages(config.kv_peer, shared, identity, page_bytes, config.kv_source_timeout)
    sharing = PageSharing(TierStack(tiers, runtime.store, identity, page_bytes, peers))
    if config.kv_listen:
        staging = Staging(config.kv_staging, page_bytes)
        sharing.publisher = Publisher(staging, runtime.store)
        sharing.server = PageServer(config.kv_listen, staging, shared, identity)
        _log.info("pages are fetched at %s, %d at a time", sharing.server.address, staging.num_slots)
    return sharing


def _check_addresses(config: ResolvedConfig) -> None:
    for name, address in (("kv_listen", config.kv_listen), *(("kv_peer", each) for each in config.kv_peer)):
        try:
            if address:
                parse_address(address)
        except ValueError as error:
            raise UserError(f"{name}: {error}", "give HOST:PORT") from None


def _user_secret(what: str) -> bytes:
    """A secret of this user, kept for the next start. Servers of other users and hosts have another."""
    path = state_directory() / "kv-secret"
    try:
        secret = own_secret(path)
    except OSError as error:
        raise UserError(
            f"no secret for the {what}: {error.strerror or error}", "give one with --kv-secret-file"
        ) from None
    _log.warning(
        "%s: the secret in %s is used; servers that share pages need the same one (--kv-secret-file)", what, path
    )
    return secret


def shown_address(redis: str) -> str:
    """The address without user and password, for settings that get printed."""
    return f"redis://{RedisAddress.parse(redis)}" if redis else ""


def page_meaning(config: ResolvedConfig, runtime: Runtime) -> str:
    """What beside the weights decides the content of a page: part of the name of all pages."""
    parts = (
        config.quantization,
        runtime.store.meaning(),
        runtime.store.stored_page_bytes,
        config.kv_native_layers,
        runtime.layout,
        sys.byteorder,
    )
    return "\n".join(map(repr, parts))
