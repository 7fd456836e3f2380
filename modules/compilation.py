"""What torch.compile needs of this machine. Asking loads no compiler of torch's."""

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def why_no_compilation(device_type: str) -> str | None:
    """Why torch.compile cannot serve on that device here, as a full sentence with the way out; None where it can."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE=1 in the environment switches torch.compile off. Unset it."
    if device_type == "cpu":
        return _cpu_lacks(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    if find_spec("triton") is None:
        return f"On {device_type} torch.compile generates code for Triton, which is not installed: pip install triton."
    if not any(shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang") if name):
        return (
            "Triton builds its launcher with a C compiler, and neither gcc nor clang is found. Install one, or name it "
            "in the environment variable CC."
        )
    return _headers_lack()


@cache
def _cpu_lacks(compiler: str) -> str | None:
    """As torch finds out: a C++ compiler is what answers to --version."""
    try:
        works = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        works = False
    if not works:
        return (
            f"On cpu torch.compile generates C++, and the compiler {compiler!r} is not found or does not run. Install "
            "g++, or name another in the environment variable CXX."
        )
    return _headers_lack()


def _headers_lack() -> str | None:
    if (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return None
    return "What torch.compile generates needs Python's C headers, and Python.h is not found. Install python3-dev."
