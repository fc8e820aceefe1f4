"""The hardware catalog: every device the documents name, names and their mistakes, custom devices, price files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import find_device, load_catalog, parse_gpu

NAMED = """a100-40 a100-80 a30 a10g a40 a6000 h100 h100-sxm h100-pcie h200 b200 gb200 b300 gb300 rubin l4 l40s
rtx-pro-6000 5090 4090 3090 3080 3060 2080ti t4 v100 mi250x mi300x mi325x mi355x b60 gaudi3 tpu-v4 tpu-v5e tpu-v5p
tpu-v6e tpu-v7 groq cerebras sambanova tenstorrent n300 m1-max m2-ultra m3-max m3-ultra m4 m4-pro m4-max m5
jetson-orin thor orin-nano dgx-spark strix-halo xeon emr gnr genoa turin graviton4 neoverse-n1 desktop
pi5 iphone-15-pro iphone-16-pro pixel snapdragon-x lunar-lake"""


@pytest.mark.parametrize("name", NAMED.split())
def test_every_named_device_is_known_and_sane(name: str) -> None:
    device = find_device(name)
    assert 0 < device.usable_gib <= device.memory_gb * 1.001
    assert device.bandwidth_gb_s > 0
    assert device.tflops
    assert device.source
    assert device.source_date
    if device.price:
        assert 0 < device.price.low <= device.price.high
        assert device.price.date


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("h100", "h100-sxm", 1),
        ("h100x4", "h100-sxm", 4),
        ("8xH200", "h200-sxm", 8),
        ("NVIDIA A100-80", "a100-80", 1),
        ("a100-40x2", "a100-40", 2),
        ("h200_sxm", "h200-sxm", 1),
    ],
)
def test_counts_and_spellings(text: str, name: str, count: int) -> None:
    group = parse_gpu(text)
    assert (group.device.name, group.count) == (name, count)


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UserError, match="nearest: h100-sxm"):
        find_device("h1000")


def test_zero_devices_is_refused() -> None:
    with pytest.raises(UserError, match="at least one device"):
        parse_gpu("h100x0")


def test_custom_device() -> None:
    group = parse_gpu("custom:mem=80,bw=3350,bf16=989,fp8=1979,link=450,price=2.5x4")
    assert group.count == 4
    device = group.device
    assert (device.memory_gb, device.bandwidth_gb_s, device.rate("fp8")) == (80, 3350, 1979)
    assert device.price is not None
    assert device.price.middle == pytest.approx(2.5)
    assert device.link.gb_s == 450


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("custom:mem=80", "needs at least mem, bw and one rate"),
        ("custom:me=80,bw=1,bf16=1", "unknown key 'me'"),
        ("custom:mem=lots,bw=1,bf16=1", "not a number"),
        ("custom:mem=-1,bw=1,bf16=1", "must be above 0"),
    ],
)
def test_bad_custom_device(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        find_device(text)


def test_native_dtypes_decide_the_rate() -> None:
    assert not find_device("a100").supports("fp8")  # weight-only there: memory yes, arithmetic no
    assert find_device("a100").rate("fp8") == 312
    assert find_device("h100").rate("fp8") == 1979  # dense; 3958 is with sparsity
    assert not find_device("t4").supports("bf16")
    assert find_device("t4").rate("bf16") == 65


def test_price_file_replaces_only_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(
        '[[device]]\nname = "h100"\nprice = 1.25\n'
        '[[device]]\nname = "my-card"\nmemory_gb = 48\nbandwidth_gb_s = 900\ntflops = { bf16 = 200 }\n'
        '[[api]]\nprovider = "mine"\nmodel = "llama-3.1-70b"\ninput = 0.5\noutput = 0.7\n'
    )
    catalog = load_catalog(file)
    h100 = catalog.find_device("h100-sxm")
    assert h100.price is not None
    assert (h100.price.low, h100.price.high) == (1.25, 1.25)
    assert h100.bandwidth_gb_s == 3350
    assert catalog.find_device("my-card").rate("bf16") == 200
    assert any(api.provider == "mine" and api.cached_input == 0.5 for api in catalog.apis)
    assert len(catalog.apis) == len(load_catalog().apis) + 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[device]]\nname = "h100"\nprice = -1\n', "at least 0"),
        ('[[device]]\nname = "h100"\nprice = { low = 3, high = 1 }\n', "below low"),
        ('[[device]]\nname = "h100"\nbandwith_gb_s = 1\n', "did you mean 'bandwidth_gb_s'"),
        ('[[device]]\nname = "new"\n', "lacks memory_gb"),
        ("[[device", "not TOML"),
        ("[h100]\nprice = 2\n", "unknown table 'h100'"),
        ('[[api]]\nmodel = "x"\ninput = -0.1\noutput = 1\n', "at least 0"),
    ],
)
def test_bad_price_file(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=problem):
        load_catalog(file)
