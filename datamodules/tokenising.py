"""From a source to a store: parts are tokenised by several processes, each into files of its own, then joined.

    <key>.partial/parts/3.tokens  3.ends  3.sources    one part, counted from its own start
                        3.json                         written last: the part is done

A build that is killed goes on with the parts that are not done. Joining appends part after part and removes each when
it is on disk, so that it needs no second copy; it too goes on where it stopped. Memory holds some documents per
process, never a part.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for_sentinel
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import BinaryIO

import numpy as np

from datamodules.sources.source import Document, Part, Skipped, Source
from datamodules.token_store import ENDS, FORMAT, OWN, SOURCES, TOKENS, StoreHeader, token_type, write_header
from datamodules.tokenizers import Tokenizer, give_back_freed_memory

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 512, 1 << 18
_LITTLE = 1 << 23
"""Bytes of a source that are not worth starting processes for; the tokenizer's own threads share them."""
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class PartDone:
    """What tokenising one part gave."""

    tokens: int
    documents: int
    sources: list[str]
    """Names in the order of their first document; `N.sources` indexes this."""
    empty: int
    undecodable: int
    removed_anchors: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far tokenising is."""

    tokens: int
    """Written in this call, by processes that are not done too."""
    size_done: int
    """Bytes of the source in parts that are done."""
    size: int
    """Bytes of the source; 0 where nobody knows."""


Report = Callable[[Progress], object]


def tokenise(
    source: Source,
    source_key: list[str | int | None],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    processes: int,
    report: Report | None = None,
) -> None:
    """Makes a whole store in `folder`, going on from what an earlier call left there.

    Args:
        source: the documents.
        source_key: its key, for the header.
        folder: exists, and belongs to this source and tokenizer alone.
        processes: how many tokenise at once.
        report: called now and then.
    Raises:
        ValueError: what reading the source raises; ids outside the vocabulary; no document with text.
        OSError: the disk is full or broken.
    """
    parts = source.parts()
    scratch = folder / "parts"
    scratch.mkdir(exist_ok=True)
    done = {number: entry for number in range(len(parts)) if (entry := _read_done(scratch, number)) is not None}
    missing = [number for number in range(len(parts)) if number not in done]
    watch = _Watch(parts, scratch, tokenizer, set(done), report)
    if len(missing) > 1 and processes > 1 and sum(parts[number].size for number in missing) > _LITTLE:
        _in_processes(parts, missing, scratch, tokenizer, min(processes, len(missing)), watch)
    else:
        for number in missing:
            write_part(parts[number], number, scratch, tokenizer)
            watch.part_is_done(number)
    done |= {number: _known_done(scratch, number) for number in missing}
    header = _join([done[number] for number in range(len(parts))], folder, source_key, tokenizer)
    if not header.documents:
        raise ValueError(
            f"{source.setting} holds no text ({header.empty_documents} empty documents). "
            "Set a corpus with at least two documents that have some."
        )
    write_header(folder, header)


def write_part(part: Part, number: int, scratch: Path, tokenizer: Tokenizer) -> None:
    """Tokenises one part into its files."""
    dtype = token_type(tokenizer)
    skipped = Skipped()
    names: dict[str, int] = {}
    tokens = documents = empty = removed = 0
    with (
        (scratch / f"{number}.tokens").open("wb") as token_file,
        (scratch / f"{number}.ends").open("wb") as end_file,
        (scratch / f"{number}.sources").open("wb") as source_file,
    ):
        for batch in _batches(part.documents(skipped)):
            if _stop is not None and _stop.is_set():
                raise InterruptedError("asked to stop")
            encoded = list(_encoded(batch, tokenizer, dtype))
            kept = [(document, ids) for document, ids in zip(batch, encoded, strict=True) if ids.size]
            empty += len(batch) - len(kept)
            removed += sum(_begins_with_anchor(document, tokenizer) for document in batch)
            lengths = np.array([ids.size for _, ids in kept], np.int64)
            indices = [names.setdefault(document.source or OWN, len(names)) for document, _ in kept]
            if len(names) > 1 << 16:
                raise ValueError(
                    f"{batch[-1].where}: more than 65536 sources. Set source_field to a field of few values."
                )
            if kept:
                token_file.write(np.concatenate([ids for _, ids in kept]).tobytes())
            end_file.write((tokens + np.cumsum(lengths)).astype("<i8").tobytes())
            source_file.write(np.array(indices, "<u2").tobytes())
            tokens += int(lengths.sum())
            documents += len(kept)
        for file in (token_file, end_file, source_file):
            file.flush()
            os.fsync(file.fileno())
    done = PartDone(
        tokens=tokens,
        documents=documents,
        sources=list(names),
        empty=skipped.empty + empty,
        undecodable=skipped.undecodable,
        removed_anchors=removed,
    )
    temporary = scratch / f"{number}.json.new"
    temporary.write_text(json.dumps(asdict(done)))
    temporary.rename(scratch / f"{number}.json")


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Lists long enough for the tokenizer's threads and short enough to keep memory flat."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if len(batch) >= _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(batch: list[Document], tokenizer: Tokenizer, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Ids of each document as they are stored: text closed by the end token, ready-made ids less their anchor."""
    end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], dtype)
    texts = [document.content for document in batch if isinstance(document.content, str)]
    of_texts = iter(tokenizer.encode_batch(texts) if texts else [])
    for document in batch:
        if isinstance(document.content, str):
            ids = next(of_texts)
            yield np.concatenate([ids.astype(dtype), end]) if ids.size else ids.astype(dtype)
        else:
            ids = _check_ids(document.content, document.where, tokenizer)
            yield ids[int(_begins_with_anchor(document, tokenizer)) :].astype(dtype)


def _check_ids(ids: np.ndarray, where: str, tokenizer: Tokenizer) -> np.ndarray:
    outside = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocabulary_size))
    if outside.size:
        raise ValueError(
            f"{where}: id {ids[outside[0]]} at place {outside[0]} is none of the {tokenizer.vocabulary_size} of "
            "data.tokenizer. Set the tokenizer that made these ids."
        )
    return ids


def _begins_with_anchor(document: Document, tokenizer: Tokenizer) -> bool:
    content = document.content
    return not isinstance(content, str) and len(content) > 0 and int(content[0]) == tokenizer.anchor_id


class _Watch:
    """Reports progress from what is on disk."""

    def __init__(
        self, parts: list[Part], scratch: Path, tokenizer: Tokenizer, done: set[int], report: Report | None
    ) -> None:
        self.parts, self.scratch, self.report = parts, scratch, report
        self.token_bytes = token_type(tokenizer).itemsize
        self.done, self.size = done, sum(part.size for part in parts)
        self.before = set(done)
        self.looked = 0.0

    def part_is_done(self, number: int) -> None:
        self.done.add(number)
        self.look()

    def look(self) -> None:
        """Reports, but not so often that asking the disk about every part would be the work."""
        now = time.monotonic()
        whole = len(self.done) == len(self.parts)
        if self.report is None or (now - self.looked < _LOOK_SECONDS and not whole):
            return
        self.looked = now
        files = (self.scratch / f"{number}.tokens" for number in range(len(self.parts)) if number not in self.before)
        written = sum(file.stat().st_size for file in files if file.exists())
        size_done = sum(self.parts[number].size for number in self.done)
        self.report(Progress(tokens=written // self.token_bytes, size_done=size_done, size=self.size))


def _in_processes(
    parts: list[Part], missing: list[int], scratch: Path, tokenizer: Tokenizer, processes: int, watch: _Watch
) -> None:
    # Spawned, not forked: the caller may hold threads and a GPU.
    context = get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(stop, tokenizer))
    try:
        running: dict[Future[None], int] = {
            pool.submit(_write_part_in_worker, parts[number], number, scratch): number for number in missing
        }
        while running:
            finished, _ = wait(running, timeout=_LOOK_SECONDS, return_when=FIRST_COMPLETED)
            for future in finished:
                number = running.pop(future)
                future.result()
                watch.part_is_done(number)
            watch.look()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process that tokenises was killed, perhaps for want of memory. Run the same command again, which goes "
            f"on from there, with fewer than data.processes={processes}."
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


_stop: Event | None = None
"""In a process that tokenises: whether nobody waits for it any more."""
_tokenizer: Tokenizer | None = None
"""In a process that tokenises: its own copy, made once. A vocabulary of 128k takes a second to unpickle."""


def _write_part_in_worker(part: Part, number: int, scratch: Path) -> None:
    assert _tokenizer is not None
    write_part(part, number, scratch, _tokenizer)


def _start_worker(stop: Event, tokenizer: Tokenizer) -> None:
    """Leaves Ctrl-C to the parent, ends with it however that ends, and tokenises with one thread."""
    global _stop, _tokenizer
    _stop, _tokenizer = stop, tokenizer
    give_back_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        wait_for_sentinel([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _read_done(scratch: Path, number: int) -> PartDone | None:
    try:
        return PartDone(**json.loads((scratch / f"{number}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _known_done(scratch: Path, number: int) -> PartDone:
    done = _read_done(scratch, number)
    assert done is not None
    return done


def _join(done: list[PartDone], folder: Path, source_key: list[str | int | None], tokenizer: Tokenizer) -> StoreHeader:
    """Appends the parts' files to the store's, in order."""
    dtype = token_type(tokenizer)
    names: dict[str, int] = {}
    tokens = documents = 0
    with (
        _appendable(folder / TOKENS) as token_file,
        _appendable(folder / ENDS) as end_file,
        _appendable(folder / SOURCES) as source_file,
    ):
        for number, part in enumerate(done):
            scratch = folder / "parts" / str(number)
            index = np.array([names.setdefault(name, len(names)) for name in part.sources], "<u2")
            if len(names) > 1 << 16:
                raise ValueError("the corpus has more than 65536 sources. Set source_field to a field of few values.")
            tokens_of, ends_of, sources_of = (scratch.with_suffix(s) for s in (".tokens", ".ends", ".sources"))
            if tokens_of.exists():  # else it was appended before the last kill
                _append(
                    token_file, tokens * dtype.itemsize, np.memmap(tokens_of, np.uint8, "r") if part.tokens else b""
                )
                _append(end_file, documents * 8, (np.fromfile(ends_of, "<i8") + tokens).tobytes())
                _append(source_file, documents * 2, index[np.fromfile(sources_of, "<u2")].tobytes())
                for file in (token_file, end_file, source_file):
                    file.flush()
                    os.fsync(file.fileno())
                tokens_of.unlink()
                ends_of.unlink()
                sources_of.unlink()
            tokens += part.tokens
            documents += part.documents
    return StoreHeader(
        format=FORMAT,
        documents=documents,
        tokens=tokens,
        dtype=dtype.str,
        vocabulary_size=tokenizer.vocabulary_size,
        tokenizer_digest=tokenizer.digest,
        end_id=tokenizer.end_id,
        source_key=source_key,
        sources=list(names),
        empty_documents=sum(part.empty for part in done),
        undecodable_documents=sum(part.undecodable for part in done),
        removed_anchors=sum(part.removed_anchors for part in done),
    )


def _appendable(file: Path) -> BinaryIO:
    return file.open("r+b" if file.exists() else "w+b")


def _append(file: BinaryIO, at: int, data: "np.ndarray | bytes") -> None:
    """Writes at a place and cuts off what stood behind: what a kill left half written."""
    file.seek(at)
    file.write(memoryview(data))  # type: ignore[arg-type]  # numpy arrays are buffers
    file.truncate()
