"""What work costs in dollars: by the device time it took, or by its tokens. Pure values; accounts.py adds them up."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import UserError
from tokenmill.serve.config import CATALOG_PRICE, ServeConfig

_HOUR = 3600.0
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Of one model. `hour` is of the device it runs on; if that is None, tokens have prices, per million."""

    hour: float | None = None
    input: float = 0.0
    cached_input: float = 0.0
    output: float = 0.0
    basis: str = ""  # where they come from

    @property
    def by_device(self) -> bool:
        return self.hour is not None

    def of_time(self, seconds: float) -> float:
        """Of device time; 0 where tokens are paid for."""
        return seconds * self.hour / _HOUR if self.hour is not None else 0.0

    def of_tokens(self, prompt: int, cached: int, output: int) -> float:
        """`cached`: of the prompt. 0 where device time is paid for."""
        if self.hour is not None:
            return 0.0
        return ((prompt - cached) * self.input + cached * self.cached_input + output * self.output) / _MILLION


def prices_of(config: ServeConfig, device: str) -> Prices | None:
    """The prices that a server was started with; None if it bills nothing. `device`: "cpu" or "cuda". Looks at the
    machine if the catalog is asked: call it beside the event loop."""
    if config.bills_tokens:
        cached = config.cached_token_price
        paid = config.input_token_price, config.input_token_price if cached is None else cached
        return Prices(None, *paid, config.output_token_price, "token prices of this server")
    if not config.price:
        return None
    if config.price != CATALOG_PRICE:
        return Prices(float(config.price), basis="stated with --price")
    from tokenmill.hardware.catalog import load_catalog
    from tokenmill.hardware.device_price import hour_price
    from tokenmill.hardware.machine import detect_machine

    hour, basis = hour_price(load_catalog(), detect_machine(), device)
    if hour is None:
        raise UserError(f"the catalog has no price of {basis}", "give --price DOLLARS, per hour")
    return Prices(hour, basis=basis)
