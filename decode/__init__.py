"""Generating text: `generate` for whole answers, `stream` for tokens as they come."""

from decode.engine import Generation, generate, stream

__all__ = ["Generation", "generate", "stream"]
