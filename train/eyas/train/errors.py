"""What can go wrong for a user of the trainer: a message says what, where, expected and found, what to do next."""

from eyas.cache_format.errors import EyasError


class TrainError(EyasError):
    """Training cannot start or cannot go on (exit 1)."""


class SupervisionError(TrainError):
    """The store does not hold the supervision, or the draft vocabulary, that was asked for."""


class CheckpointError(TrainError):
    """A checkpoint is missing, incomplete, or belongs to another configuration or another store."""


class ExportError(TrainError):
    """The draft cannot be exported, or what was written does not satisfy the engines' contract."""
