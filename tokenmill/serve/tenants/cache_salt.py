"""Cache salts: which requests may find each other's prompts in the prefix cache.

A salt is a keyed hash of the key's name or group and of the request's own `cache_salt`, under a secret of the server:
it tells nothing about either, and nobody can choose the salt of another key. The secret must stay the same for as long
as KV tiers are to be of use.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from tokenmill.engine.kv.tier.secret import own_secret
from tokenmill.log import get_logger
from tokenmill.serve.tenants.keys import PRIVATE_CACHE, Client

SECRET_VARIABLE = "TOKENMILL_CACHE_SECRET"
_log = get_logger(__name__)
_FILE = "cache_secret"
_SALT_BYTES = 16


class CacheSalts:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def salt(self, client: Client, own: str = "") -> bytes:
        """The salt of a request of `client` that names its `own` salt. Empty on a server without keys if it names
        none."""
        if not client.name and not own:
            return b""
        private = client.cache == PRIVATE_CACHE
        scope = f"{'key' if private else 'group'}\0{client.name if private else client.cache}\0{own}"
        return hmac.digest(self._secret, scope.encode("utf-8", "surrogatepass"), hashlib.sha256)[:_SALT_BYTES]


def load_cache_secret(stated: str, kv_disk: str, kv_redis: str) -> bytes:
    """The secret from the keys file (`stated`) or the environment, else one kept in the folder of the disk tier, else a
    random one for this process. The folder's disk may hang: call it beside the event loop."""
    stated = stated or os.environ.get(SECRET_VARIABLE, "")
    if stated:
        return hashlib.sha256(stated.encode("utf-8", "surrogatepass")).digest()
    if kv_disk:
        try:
            return hashlib.sha256(own_secret(Path(kv_disk).expanduser() / _FILE)).digest()
        except OSError as error:
            _log.warning("the cache secret cannot be kept in %s: %s", kv_disk, error.strerror or error)
    if kv_disk or kv_redis:
        _log.warning("KV tiers are of no use after a restart: set %s or cache_secret in the keys file", SECRET_VARIABLE)
    return secrets.token_bytes(32)
