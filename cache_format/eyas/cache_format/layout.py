"""Paths of a store, and the only two ways a file comes into being: replaced whole, or created once."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas.cache_format.errors import DiskFullError, StoreError

__all__ = [
    "StorePaths",
    "create_once",
    "remove_tree",
    "replace_file",
    "sync_folder",
    "translate_disk_full",
]

REMOVALS = 10
"""Times a folder is deleted again when a writer that nobody waits for adds to it meanwhile."""


class StorePaths:
    """Names of everything inside a store folder."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.manifest = self.root / "manifest.json"
        self.plan = self.root / "plan.arrow"
        self.vocab = self.root / "vocab.safetensors"
        self.target = self.root / "target"
        self.shards = self.root / "shards"
        self.receipts = self.root / "receipts"
        self.quarantine_folder = self.root / "quarantine"
        self.complete = self.root / "complete.json"
        self.lock = self.root / "lock"

    def shard(self, shard: int) -> Path:
        """Folder of one shard: its samples and its attempts."""
        return self.shards / f"{shard:06d}"

    def samples(self, shard: int) -> Path:
        """Token ids, masks and spans of one shard, written at plan time."""
        return self.shard(shard) / "samples.arrow"

    def attempt(self, shard: int, attempt: str) -> Path:
        """Folder of one attempt's arrays."""
        return self.shard(shard) / attempt

    def receipt(self, shard: int) -> Path:
        """The commit of one shard."""
        return self.receipts / f"{shard:06d}.json"

    def quarantine(self, shard: int) -> Path:
        """Rows of one shard that could not be captured."""
        return self.quarantine_folder / f"{shard:06d}.jsonl"


@contextmanager
def translate_disk_full(where: Path) -> Iterator[None]:
    """Turn "no space left on device" into an error that says what to do."""
    try:
        yield
    except Exception as error:
        if _is_disk_full(error):
            raise DiskFullError(
                f"no space left while writing {where}; committed shards stay valid: free some space and run the "
                "same command again to go on"
            ) from error
        raise


def _is_disk_full(error: BaseException | None) -> bool:
    """Libraries hide the error number: safetensors keeps its text alone, torch raises an error of its own over it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__context__
    return False


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, data: bytes) -> None:
    with translate_disk_full(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, replacing an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_synced(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def create_once(path: Path, data: bytes) -> bool:
    """Create a file with this content unless it exists; return whether this call created it.

    The file appears whole: it is written and synced under another name and then linked, which fails when the name
    is taken. Two writers can race; exactly one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        _write_synced(temporary, data)
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        raise StoreError(
            f"{path.parent} lies on a file system without hard links ({error.strerror}), which commits need; choose "
            "another folder"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def remove_tree(folder: Path) -> None:
    """Delete a folder and everything in it, also while another process deletes it too or still writes into it."""
    for attempt in range(REMOVALS):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or (folder.exists() and attempt == REMOVALS - 1):
                raise
        if not folder.exists():
            return
