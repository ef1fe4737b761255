"""How much of the machine this process may use: processors and memory, as its cgroup and affinity say."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")
_UNLIMITED_V1 = 1 << 60


def available_cpus(cgroup_root: Path = _CGROUP_ROOT, self_cgroup: Path = _SELF_CGROUP) -> int:
    """Processors worth a thread: those of the affinity mask, or the cgroup's quota rounded up when smaller."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders(cgroup_root, self_cgroup) if (quota := _cpu_quota(folder))]
    return max(1, min([num_cpus, *(math.ceil(quota) for quota in quotas)]))


def available_memory_bytes(cgroup_root: Path = _CGROUP_ROOT, self_cgroup: Path = _SELF_CGROUP) -> int:
    """Physical memory, or the smallest limit of the cgroups this process is in when smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        limit for folder in _cgroup_folders(cgroup_root, self_cgroup) if (limit := _memory_limit(folder))
    ]
    return min([physical, *limits])


def _cgroup_folders(root: Path, self_cgroup: Path) -> list[Path]:
    """Folders that may hold limits: this process's cgroup and all above it (v2), and the v1 controllers."""
    folders = [root, root / "cpu", root / "memory"]
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / controllers.split(",")[0]
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            folders.append(folder)
            folder = folder.parent
    return folders


def _cpu_quota(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split()
    if len(fields) == 2 and fields[0] != "max":
        return int(fields[0]) / int(fields[1])
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name)
        if text and text != "max" and int(text) < _UNLIMITED_V1:
            return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
