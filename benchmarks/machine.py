"""The machine that times come from: a description for records, and memory that does not disturb them."""

from __future__ import annotations

import ctypes
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


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, as allocators made for such loads do; False if it is not glibc.

    By default it gives large blocks back to the system and takes them again in the next step, and clears
    every page. How much of a step that is depends on where blocks lie by chance.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_max = -1, -4
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def _processor() -> str:
    """The name of the processor; Linux keeps it in a file, which `platform` does not read."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
