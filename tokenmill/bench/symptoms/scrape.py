"""The Prometheus text of a server -> samples by name. Knows HTTP and the text format, not what the numbers mean."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx

from tokenmill.errors import UserError

_TIMEOUT = 10.0  # seconds
_MAX_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one moment."""

    moment: float  # monotonic clock
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.samples

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all series with these labels; None if there is none."""
        found = [each.value for each in self.samples.get(name, ()) if labels.items() <= each.labels.items()]
        return sum(found) if found else None

    def highest(self, name: str) -> float | None:
        return max((each.value for each in self.samples.get(name, ())), default=None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of a label."""
        sums: dict[str, float] = {}
        for each in self.samples.get(name, ()):
            sums[each.labels.get(label, "")] = sums.get(each.labels.get(label, ""), 0.0) + each.value
        return sums


def metrics_url(url: str) -> str:
    """The address of the metrics of a server, whichever of its addresses is given."""
    plain = url.rstrip("/")
    if "://" not in plain:
        plain = f"http://{plain}"
    return plain if plain.endswith("/metrics") else f"{plain.removesuffix('/v1')}/metrics"


def scrape(url: str, api_key: str = "", clock: Callable[[], float] = time.monotonic) -> Scrape:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(url, headers=headers, timeout=_TIMEOUT, follow_redirects=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"{url} cannot be read: {error or type(error).__name__}", "check the address, and that it runs"
        ) from None
    if answer.status_code in (401, 403):
        raise UserError(f"{url} answers {answer.status_code}", "give --api-key a key with the right `metrics`")
    if answer.status_code in (404, 501):
        remedy = "start llama-server with --metrics; Ollama has none"
        raise UserError(f"{url} answers {answer.status_code}: the server shows no metrics", remedy)
    if answer.status_code != 200 or len(answer.content) > _MAX_BYTES:
        raise UserError(f"{url} answers {answer.status_code} with {len(answer.content)} bytes", "check the address")
    return Scrape(clock(), parse(answer.text, url))


def parse(text: str, url: str = "the answer") -> dict[str, list[Sample]]:
    from prometheus_client.parser import text_string_to_metric_families

    if text.startswith('"'):  # some builds of llama.cpp send the text as a JSON string
        text = json.loads(text)
    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for each in family.samples:
                samples.setdefault(each.name, []).append(Sample(dict(each.labels), float(each.value)))
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"{url} is not Prometheus text: {error}", "give the address of a server") from None
    if not samples:
        raise UserError(f"{url} has no metrics", "give the address of a server")
    return samples


def quantile(earlier: Scrape | None, later: Scrape, name: str, share: float) -> float | None:
    """The bound of the bucket in which that share of a histogram's values ends; None: it has none since `earlier`."""
    counts = dict(_buckets(later, name))
    for bound, count in _buckets(earlier, name) if earlier is not None else ():
        counts[bound] = counts.get(bound, 0.0) - count
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    return next((bound for bound in sorted(counts) if counts[bound] >= share * total), None)


def _buckets(scraped: Scrape, name: str) -> Iterator[tuple[float, float]]:
    for bound, count in scraped.by(f"{name}_bucket", "le").items():
        yield float(bound), count
