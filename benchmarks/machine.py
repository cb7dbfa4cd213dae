"""A description of the machine for records of times: processor, threads, torch version, and other load."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine(device: str) -> dict[str, Any]:
    """The machine and its load now, for a record.

    Args:
        device: "cpu" or "cuda", whichever has done the work.
    """
    return {
        "name": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def _processor() -> str:
    """The name of the processor; Linux keeps it in a file, which `platform` does not read."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
