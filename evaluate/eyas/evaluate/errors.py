"""Faults of an evaluation, each one message for the user."""

from eyas.cache_format.errors import EyasError

__all__ = ["DraftError", "PromptError"]


class DraftError(EyasError):
    """The draft's folder is not what engines load, or belongs to another target (exit 1)."""


class PromptError(EyasError):
    """The prompt files hold nothing that can be decoded (exit 1)."""
