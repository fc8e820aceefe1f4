"""The constants of the traffic log's format, shared by its writer (traffic_log.py) and its reader in bench/.

docs/traffic_log.md describes the fields. Imports nothing.
"""

from __future__ import annotations

VERSION = 1
HEADER = "tokenmill_traffic_log"  # the key of a file's first line; its value is the version
PATTERN = "traffic-*.jsonl"
BLOCK_TOKENS = 16  # tokens of a hashed block
HASH_BYTES = 8
