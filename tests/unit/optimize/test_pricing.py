"""What a token costs: the price of the device that was found, goodput within objectives, savings with intervals."""

from __future__ import annotations

import pytest

from tests.unit.optimize.outcomes import candidate, gpu_with_a_rival_that_wins, latency, quality_off
from tokenmill.hardware.catalog import load_catalog
from tokenmill.hardware.device_price import find_gpu, this_device
from tokenmill.hardware.machine import Machine
from tokenmill.optimize.pricing import machine_price, token_price
from tokenmill.optimize.results import CandidateResult, saving


def _machine(cpu: str = "Neoverse-N1", *gpus: str) -> Machine:
    return Machine("Linux", "aarch64", cpu, (), 2, 24 << 30, 20 << 30, gpus)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200, 143771 MiB", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3, 81559 MiB", "h100-sxm"),
        ("NVIDIA H100 PCIe, 81559 MiB", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB, 81920 MiB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB, 40960 MiB", "a100-40"),
        ("NVIDIA A100 80GB PCIe, 81920 MiB", "a100-pcie"),
        ("NVIDIA GeForce RTX 4090, 24564 MiB", "rtx-4090"),
        ("Tesla T4, 15360 MiB", "t4"),
        ("NVIDIA L4, 23034 MiB", "l4"),
        ("NVIDIA B200, 183359 MiB", "b200-sxm"),
        ("NVIDIA RTX A6000, 49140 MiB", "rtx-a6000"),
    ],
)
def test_a_gpu_is_found_by_the_name_its_driver_reports(reported: str, name: str) -> None:
    device = find_gpu(load_catalog(), reported)
    assert device is not None
    assert device.name == name


def test_a_gpu_that_no_row_describes_has_an_assumed_price_and_says_so() -> None:
    assert find_gpu(load_catalog(), "Acme Turbo 9000, 1024 MiB") is None
    price, basis = machine_price(load_catalog(), _machine("", "Acme Turbo 9000, 1024 MiB"), None, "cuda")
    assert price == 1.0
    assert basis == "assumed: no price is known for Acme Turbo 9000; give --price for yours"


def test_a_gpu_is_paid_for_whole_and_a_cpu_by_its_share_of_memory() -> None:
    catalog, machine = load_catalog(), _machine("Neoverse-N1", "NVIDIA H200, 143771 MiB")
    device = catalog.find_device("h200")
    assert device.price is not None
    price, basis = machine_price(catalog, machine, None, "cuda")
    assert price == pytest.approx(device.price.middle)
    assert basis.startswith("one h200-sxm (")
    slice_price, slice_basis = machine_price(catalog, machine, None, "cpu")
    assert slice_price < price
    assert "of a neoverse-n1 by memory" in slice_basis
    assert machine_price(catalog, machine, 2.5, "cuda") == (2.5, "stated with --price")
    found = this_device(catalog, machine, "cpu")
    assert found is not None
    assert found.name == "neoverse-n1"


def test_tokens_outside_the_objective_are_paid_for_but_not_counted() -> None:
    result = candidate("fp8", cost=0.5, latency=latency(300, 20, 1000.0))
    per_goodput, per_throughput = token_price(result, 3.6, True), token_price(result, 3.6, False)
    assert per_goodput == pytest.approx(1.0)  # $3.6 for 3.6 million tokens
    assert per_throughput == pytest.approx(1000 * 1.0 / 200.0)
    result.sustained = latency(480, 39, 2000.0)
    assert token_price(result, 3.6, True) == pytest.approx(0.5)
    result.sustained = latency(900, 90, 0.0, met=False)
    assert token_price(result, 3.6, True) is None
    assert token_price(CandidateResult("x", "x", "auto", 1), 3.6, True) is None


def test_savings_by_throughput_have_the_interval_of_both() -> None:
    found = saving(candidate("a", cost=0.4), candidate("b", cost=0.8), in_objective=False)
    assert found is not None
    assert found.share == pytest.approx(0.5)
    assert found.low == pytest.approx(1 - 0.4 * 1.03 / (0.8 * 0.97))
    assert found.high == pytest.approx(1 - 0.4 * 0.97 / (0.8 * 1.03))
    assert saving(candidate("a", cost=0.4), None, in_objective=False) is None


def test_savings_within_objectives_are_by_goodput() -> None:
    slow, fast = candidate("a", cost=1.0, latency=latency(400, 30, 500)), candidate("b", cost=0.9)
    fast.latency = latency(300, 20, 1000)
    found = saving(fast, slow, in_objective=True)
    assert found is not None
    assert (found.share, found.low) == (pytest.approx(0.5), None)
    slow.sustained, fast.sustained = slow.latency, fast.latency
    slow.goodput_range, fast.goodput_range = (490.0, 510.0), (980.0, 1020.0)
    found = saving(fast, slow, in_objective=True)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(1 - 510 / 980), pytest.approx(1 - 490 / 1020))


def test_a_replay_is_never_compared_with_a_throughput_run() -> None:
    remote = CandidateResult("url", "stored", "auto", 0, engine="vllm", latency=latency(300, 20, 50))
    chosen = candidate("a", cost=0.4)
    assert saving(chosen, remote, in_objective=False) is None
    assert token_price(remote, 3.6, in_objective=False) is None
    chosen.latency = latency(300, 20, 100)
    found = saving(chosen, remote, in_objective=False)
    assert found is not None
    assert (found.share, found.low) == (pytest.approx(0.5), None)


def test_the_winner_is_whoever_is_cheapest_by_the_same_measure() -> None:
    outcome = gpu_with_a_rival_that_wins()
    assert outcome.winner is outcome.rivals[0]
    outcome.rivals[0].verdict = "harmed"
    assert outcome.winner is outcome.chosen
    outcome.rivals[0].verdict, outcome.objectives = "passed", ""
    assert outcome.chosen is not None
    outcome.chosen.latency = None
    assert outcome.winner is outcome.chosen  # a replay against a throughput run: no comparison


def test_the_target_is_judged_within_the_objective() -> None:
    outcome = quality_off()
    assert outcome.cost_reduction == pytest.approx(1 - 5000 / 8000)
    outcome.objectives = ""
    assert outcome.cost_reduction == pytest.approx(0.45)
