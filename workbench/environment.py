"""What a run ran on: code version, packages, hardware."""

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from typing import Any

from workbench.home import PROJECT_ROOT

PACKAGES = ("modules", "datamodules", "workbench")


@cache
def code_version() -> str:
    """Hash of every .py file of our three packages: the code that decides a run's numbers, committed or not."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((PROJECT_ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(PROJECT_ROOT)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def git_commit() -> tuple[str, bool]:
    """The checkout's commit and whether files differ from it; ("", False) outside git."""
    git = ["git", "-C", str(PROJECT_ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "", False
    return commit.stdout.strip(), bool(status.stdout.strip())


def device_name(device_type: str) -> str:
    """`NVIDIA H200` for cuda; the processor's name for cpu."""
    if device_type == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@cache
def packages() -> dict[str, str]:
    """Every installed distribution and its version."""
    return {item.metadata["Name"]: item.version for item in metadata.distributions()}


def describe(device_type: str) -> dict[str, Any]:
    """Everything needed to tell two runs' machines apart, as a JSON-ready dictionary."""
    import torch

    commit, dirty = git_commit()
    return {
        "code_version": code_version(),
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": device_type,
        "device_name": device_name(device_type),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "cuda": torch.version.cuda,
        "packages": packages(),
    }
