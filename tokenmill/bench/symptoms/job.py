"""`doctor --url`: two looks at a server's metrics, and what they tell."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from tokenmill.bench.symptoms.reading import read
from tokenmill.bench.symptoms.rules import diagnose
from tokenmill.bench.symptoms.scrape import metrics_url, scrape


def examine(url: str, api_key: str = "", seconds: float = 5.0) -> dict[str, Any]:
    """The verdict, the findings with the worst first, and the numbers behind them."""
    address = metrics_url(url)
    first = scrape(address, api_key)
    if seconds:
        time.sleep(seconds)
    reading = read(first, scrape(address, api_key) if seconds else first)
    findings = diagnose(reading)
    worst = findings[0].severity if findings else "none"
    verdicts = {"none": "healthy", "hint": "healthy", "warning": "needs attention", "critical": "in trouble"}
    return {
        "url": address,
        "server": reading.server,
        "verdict": verdicts[worst],
        "findings": [asdict(each) for each in findings],
        "reading": asdict(reading),
    }
