"""Attention of Hugging Face's transformers: `hopwell.transformers.register()`."""

from .interface.transformers import register

__all__ = ["register"]
