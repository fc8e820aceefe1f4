"""Options of servers that split the work: one computes prompts, another decodes. Part of ServeConfig."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.config import option, parse_count

ROLES = ("both", "prefill", "decode")
PREFILL_KEY = "prefill_api_key"


@dataclass(frozen=True, slots=True)
class RoleOptions:
    role: str = option(
        "both",
        "Part of the work that this server does: prefill (computes prompts, whose pages others fetch), decode (may "
        "fetch them) or both (docs/split.md).",
        choices=ROLES,
        metavar="ROLE",
    )
    prefill_url: tuple[str, ...] = option(
        (),
        "Server of role prefill that long prompts are sent to, such as http://10.0.0.5:8000; repeatable, each with its "
        "--kv-peer in the same order.",
        metavar="URL",
    )
    prefill_api_key: str = option("", "API key for --prefill-url.", metavar="KEY")
    split_min_tokens: int = option(
        2048,
        "Least number of uncached prompt tokens that are sent to --prefill-url; shorter prompts are computed here.",
        metavar="TOKENS",
        parse=parse_count,
        low=1,
    )
