"""Which weights a model or an adapter has, told from its files without reading all of them.

Of each file of weights the digest covers its name, its size, when it was last changed, the header of the safetensors format, and
bytes at fixed places. In the cache of a hub a file is a link to one that is named by a hash of what is in it: that name stands for
the time, so that two downloads are alike. Knows no vLLM.
"""
from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What decides which of those files are used, and how.
BESIDE = (".index.json", "adapter_config.json")
# Places at which bytes are read, in all files together, and how many bytes at each.
PLACES, PLACE_NBYTES = 128, 2048
# More than any header has; what claims more is no safetensors file.
MOST_HEADER_NBYTES = 1 << 26
_HEADER = struct.Struct("<Q")
# SHA-256, or SHA-1 of small files.
_BLOB = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")

UNKNOWN = "unknown"

log = logging.getLogger("shmkv")
_told: set[str] = set()


def weight_files(where: Path) -> list[Path]:
    """The files of weights in a folder, by name, or the one file that is meant; [] if there is nothing."""
    if where.is_file():
        return [where]
    if not where.is_dir():
        return []
    files = sorted(path for path in where.iterdir() if path.name.endswith((*WEIGHTS, *BESIDE)) and path.is_file())
    return files if any(path.name.endswith(WEIGHTS) for path in files) else []


def digest_of(files: Sequence[Path]) -> str:
    """Of all files together. OSError if one cannot be read."""
    whole = hashlib.sha256()
    for path in files:
        whole.update(_of_file(path, max(2, PLACES // len(files))))
    return whole.hexdigest()[:32]


def _of_file(path: Path, places: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        target = path.resolve()
        is_blob = target.parent.name == "blobs" and _BLOB.fullmatch(target.name)
        stamp = target.name if is_blob else str(status.st_mtime_ns)
        digest.update(repr((path.name, status.st_size, stamp)).encode())
        begin = _header_end(file.fileno(), status.st_size) if path.suffix == ".safetensors" else 0
        digest.update(os.pread(file.fileno(), begin, 0))
        # The last place ends with the file, where archives have the checksums of what is in them.
        room = max(0, status.st_size - begin - PLACE_NBYTES)
        for place in range(places):
            digest.update(os.pread(file.fileno(), PLACE_NBYTES, begin + room * place // (places - 1)))
    return digest.digest()


def _header_end(file: int, nbytes: int) -> int:
    """Where the header of a safetensors file ends: 8 bytes that say how long it is, then so many."""
    if nbytes < _HEADER.size:
        return 0
    (length,) = _HEADER.unpack(os.pread(file, _HEADER.size, 0))
    return _HEADER.size + int(length) if length <= min(nbytes - _HEADER.size, MOST_HEADER_NBYTES) else 0


def found_in(name: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Where a path, or what a hub calls `name`, lies on this host; None if it does not. Asks nobody outside. `cache`: folder of the
    hub's files, None: its default."""
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (ImportError, OSError, ValueError):      # not there; no name of a hub
        return None


def weights_of(name: str, revision: str | None = None, cache: str | None = None) -> str:
    """A digest of the weights that are meant, or UNKNOWN, which the log tells once. Takes milliseconds."""
    where = found_in(name, revision, cache)
    try:
        files = [] if where is None else weight_files(where)
        if files:
            return digest_of(files)
        reason = "they are not on this host" if where is None else f"there are none in {where}"
    except OSError as error:
        reason = str(error)
    if name not in _told:
        _told.add(name)
        log.warning("the files of the weights of %r cannot be looked at (%s): other weights of that name and of the same "
                    "configuration would not be noticed", name, reason)
    return UNKNOWN


class Adapters:
    """The adapters that an engine was asked for, with the digest of each, which is made once. What a request costs is a look at the
    times of the files."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, str | None]] = {}

    def weights_of(self, path: str) -> str | None:
        """The digest of an adapter. None from when its files have changed: whether this engine still computes with the old ones,
        nobody here can tell."""
        stamps = _stamps(path)
        seen, digest = self._known.get(path, (stamps, UNKNOWN))
        if digest == UNKNOWN:                   # the first time, or it is to be downloaded yet
            seen, digest = stamps, weights_of(path)
        elif digest is not None and stamps != seen:
            log.warning("the files of the adapter at %r have changed: its blocks are not shared any more by this engine", path)
            digest = None
        self._known[path] = seen, digest
        return digest


def _stamps(path: str) -> object:
    """What is otherwise when one of an adapter's files is."""
    where = found_in(path)
    try:
        files = [] if where is None else [(each.name, each.stat()) for each in weight_files(where)]
    except OSError:                             # replaced at this very moment
        return None
    return [(name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in files]
