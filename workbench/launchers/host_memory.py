"""Whether the kernel killed a process for memory: a SIGKILL alone does not say who sent it."""

from pathlib import Path


def oom_kills() -> int:
    """Processes of this control group that the kernel has killed for memory so far; 0 where it does not say."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = [Path(f"/sys/fs/cgroup{path}/memory.events"), Path("/sys/fs/cgroup/memory.events")]
        elif controllers == "memory":
            files = [
                Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"),
                Path("/sys/fs/cgroup/memory/memory.oom_control"),
            ]
        else:
            continue
        for file in files:
            try:
                counts = dict(row.split() for row in file.read_text(encoding="utf-8").splitlines())
                return int(counts["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return 0
