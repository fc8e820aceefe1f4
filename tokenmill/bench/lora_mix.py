"""Which adapter each request of a benchmark uses: shares of the requests, the rest goes to the base.

`sql=0.5,chat=0.2` or just names, which then share all requests evenly. Requests of one adapter are spread over the
whole run. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenmill.errors import UserError


def parse_mix(text: str, known: Sequence[str] | None = None) -> dict[str, float]:
    """Shares by name. `known`: the adapters there are, each with an equal share if the text is empty; None: only the
    server knows."""
    entries = [each.strip().rpartition("=") for each in text.split(",") if each.strip()]
    if not entries:
        names = known or ()
        return {name: 1 / len(names) for name in names}
    if not any(equals for _, equals, _ in entries):
        shares = {name: 1 / len(entries) for _, _, name in entries}
    else:
        shares = {name: _share(share, name) for name, _, share in entries}
    if len(shares) < len(entries):
        raise UserError(f"--lora-mix {text} names an adapter twice", "give each one share")
    if sum(shares.values()) > 1 + 1e-9:
        raise UserError(f"the shares of --lora-mix {text} add up to more than 1", "what is left of 1 goes to the base")
    unknown = [name for name in shares if known is not None and name not in known]
    if unknown:
        raise UserError(f"--lora-mix names '{unknown[0]}', which is not given with --lora", "add it, or leave it out")
    return shares


def assign(shares: Mapping[str, float], count: int) -> list[str | None]:
    """The adapter of each of `count` requests (None: the base): at any moment all have had their share so far."""
    wanted: dict[str | None, float] = dict(shares.items())
    wanted[None] = 1.0 - sum(shares.values())
    given: dict[str | None, int] = dict.fromkeys(wanted, 0)
    order: list[str | None] = []
    for number in range(1, count + 1):
        name = max(wanted, key=lambda each: wanted[each] * number - given[each])
        given[name] += 1
        order.append(name)
    return order


def _share(text: str, name: str) -> float:
    try:
        share = float(text)
        if not 0 < share <= 1 or not name:
            raise ValueError
    except ValueError:
        raise UserError(f"'{name}={text}' is not a share of --lora-mix", "write it like sql=0.5") from None
    return share
