"""Makes the KV tiers that a configuration names, under a name that no other model, KV dtype or layout shares.

Called once, when an engine is built. Options that make no sense are refused here; storage that cannot be used at the
moment is not: its tier is off until it can.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from tokenmill.checkpoint.identity import model_hash
from tokenmill.config import ResolvedConfig
from tokenmill.engine.kv.tier.base import PageTier
from tokenmill.engine.kv.tier.disk import DiskTier
from tokenmill.engine.kv.tier.host import HostTier
from tokenmill.engine.kv.tier.redis import RedisAddress, RedisTier
from tokenmill.engine.kv.tier.secret import own_secret, read_secret, state_directory
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.runtime.build import Runtime

_log = get_logger(__name__)
_VERSION = 1  # of how pages are computed and laid out: raise it when either changes


def build_tiers(config: ResolvedConfig, path: Path, runtime: Runtime) -> TierStack | None:
    if not (config.kv_host_memory or config.kv_disk or config.kv_redis):
        return None
    if not config.prefix_caching:
        raise UserError("KV tiers keep pages of the prefix cache, which is off", "leave --no-prefix-caching out")
    if runtime.layout.states:
        raise UserError(
            "KV tiers do not keep recurrent states, which this model's prefix cache needs",
            "leave --kv-host-memory, --kv-disk and --kv-redis out",
        )
    page_bytes = runtime.store.stored_page_bytes
    identity = page_identity(config, path, runtime, page_bytes)
    secret = read_secret(Path(config.kv_secret_file).expanduser()) if config.kv_secret_file else b""
    tiers: list[PageTier] = []
    if config.kv_host_memory:
        tiers.append(HostTier(config.kv_host_memory))
    if config.kv_disk:
        folder = Path(config.kv_disk).expanduser()
        tiers.append(DiskTier(folder, config.kv_disk_size, identity, page_bytes, secret))
    if config.kv_redis:
        tiers.append(RedisTier(config.kv_redis, identity, page_bytes, secret or _redis_secret()))
    _log.info("KV tiers: %s; pages of %.1f KiB", ", ".join(tier.name for tier in tiers), page_bytes / 1024)
    return TierStack(tiers, runtime.store, identity, page_bytes)


def _redis_secret() -> bytes:
    """A secret of this user, kept for the next start. Other servers cannot read entries that are signed with it."""
    path = state_directory() / "kv-secret"
    try:
        secret = own_secret(path)
    except OSError as error:
        raise UserError(
            f"no secret to sign Redis entries with: {error.strerror or error}", "give one with --kv-secret-file"
        ) from None
    _log.warning(
        "redis tier: entries are signed with the secret in %s; servers that share this Redis need the same one "
        "(--kv-secret-file)",
        path,
    )
    return secret


def shown_address(redis: str) -> str:
    """The address without user and password, for settings that get printed."""
    return f"redis://{RedisAddress.parse(redis)}" if redis else ""


def page_identity(config: ResolvedConfig, path: Path, runtime: Runtime, page_bytes: int) -> bytes:
    """16 bytes that are the same exactly where a page of the same tokens has the same content."""
    weights = f"dummy of {model_hash(path)}" if config.load_format == "dummy" else model_hash(path)
    parts = (
        _VERSION,
        weights,
        config.quantization,
        runtime.store.meaning(),
        page_bytes,
        config.kv_native_layers,
        runtime.layout,
        sys.byteorder,
    )
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).digest()[:16]
