"""The devices that tests run on here: the CPU, and a GPU where torch finds one. Imported by registry-driven tests."""

from __future__ import annotations

import torch

CPU = torch.device("cpu")
DEVICES = [CPU, torch.device("cuda", 0)] if torch.cuda.is_available() else [CPU]


BACKEND_OF = {"cpu": "cpu", "cuda": "triton"}  # kernels/base.py: whose kernels run there


def device_name(device: torch.device) -> str:
    return device.type
