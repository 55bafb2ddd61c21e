"""The errors a user of a store can meet.

    EyasError                    any fault with a message for the user       exit code 1
      ConfigError                bad flags or configuration                  exit code 2
      StoreError                 a fault of a store, by what a caller would do about it
        StoreNotFoundError       nothing there, or not a store
        FormatVersionError       written by another format version
        IdentityMismatchError    the store belongs to another run
        CorruptStoreError        bytes missing, torn, swapped or flipped
        MissingFieldError        the store does not hold this field
        IncompleteStoreError     shards are still missing
        StoreLockedError         another run writes here
        NonFiniteError           a row holds NaN or Inf
        DiskFullError            no space left

A message says what failed, where (path, shard, field, sample), what was expected and found, and what to do next.
"""

__all__ = [
    "ConfigError",
    "CorruptStoreError",
    "DiskFullError",
    "EyasError",
    "FormatVersionError",
    "IdentityMismatchError",
    "IncompleteStoreError",
    "MissingFieldError",
    "NonFiniteError",
    "StoreError",
    "StoreLockedError",
    "StoreNotFoundError",
]


class EyasError(Exception):
    """Any fault that is reported to the user as one message, without a traceback."""


class ConfigError(EyasError, ValueError):
    """A flag or a configuration value is wrong."""


class StoreError(EyasError):
    """A fault of a store."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """The path holds no store."""


class FormatVersionError(StoreError):
    """The store was written by a format version that this code does not read."""


class IdentityMismatchError(StoreError):
    """The store's identity differs from the run that wants to continue it."""


class CorruptStoreError(StoreError):
    """Stored bytes are missing, torn, swapped or flipped.

    Attributes:
        shard: shard number, or None when the fault is outside a shard.
        field: field or file name the fault was found in.
    """

    def __init__(self, message: str, *, shard: int | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.shard = shard
        self.field = field


class MissingFieldError(StoreError):
    """The store does not hold a field that was asked for."""


class IncompleteStoreError(StoreError):
    """Shards of the plan have no receipt yet."""


class StoreLockedError(StoreError):
    """Another run holds the store's lock."""


class NonFiniteError(StoreError):
    """An array to be stored holds NaN or Inf.

    Attributes:
        field: name of the field.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class DiskFullError(StoreError):
    """The file system has no space left."""
