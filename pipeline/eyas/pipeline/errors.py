"""Faults of the chat data and of the target, each one message for the user."""

from eyas.cache_format.errors import EyasError

__all__ = ["CaptureError", "DataError", "TargetError"]


class DataError(EyasError):
    """The chat data cannot be planned: no usable row, unreadable source, a template that defeats loss masks."""


class TargetError(EyasError):
    """The target cannot be loaded, or does not have the structure that capture relies on."""


class CaptureError(EyasError):
    """Capture ended with shards pending or with more quarantined rows than the error budget allows."""
