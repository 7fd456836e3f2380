"""Hashes of files' content, remembered so that gigabytes are read once and not at every start.

A hash is trusted while the file's path, size, inode and times are those it had when it was read, and only if the file
had then been at rest for some seconds: a change in the same tick of the clock could not be seen.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

_AT_REST_NANOSECONDS = 3_000_000_000


class FileDigests:
    """SHA-256 of files.

    Args:
        folder: where what was read is remembered; None for nowhere. Nothing is written before `save`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._fresh: dict[Path, dict[str, list[int | str]]] = {}

    def of(self, files: Iterable[tuple[str, Path]]) -> str:
        """One hash of all names and contents.

        Args:
            files: (name that counts, file), in a fixed order.
        Raises:
            OSError: a file cannot be read.
        """
        files = list(files)
        memory = self._memory_of(files)
        known = (self._fresh.get(memory) or _read(memory)) if memory is not None else {}
        now: dict[str, list[int | str]] = {}
        digest = hashlib.sha256()
        for name, file in files:
            path = str(file.absolute())
            stat = os.stat(file)
            signature = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
            entry = known.get(path)
            if entry is None or entry[:-1] != signature:
                began = time.time_ns()
                with file.open("rb") as stream:
                    entry = [*signature, hashlib.file_digest(stream, "sha256").hexdigest()]
                if began - max(stat.st_mtime_ns, stat.st_ctime_ns) > _AT_REST_NANOSECONDS:
                    now[path] = entry
            else:
                now[path] = entry
            digest.update(f"{name}\n{entry[-1]}\n".encode())
        if memory is not None and now != known:
            self._fresh[memory] = now
        return digest.hexdigest()

    def save(self) -> None:
        """Remembers what was read."""
        for file, entries in self._fresh.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(entries))
            os.replace(temporary, file)
        self._fresh.clear()

    def _memory_of(self, files: list[tuple[str, Path]]) -> Path | None:
        if self.folder is None or not files:
            return None
        first = str(files[0][1].absolute().parent) if len(files) > 1 else str(files[0][1].absolute())
        return self.folder / f"{hashlib.sha256(first.encode()).hexdigest()[:24]}.json"


def _read(file: Path) -> dict[str, list[int | str]]:
    try:
        entries = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
