"""The page at /: one file, and a policy that lets the browser run its own script and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def _hash_of(tag: str, page: str) -> str:
    match = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert match is not None
    digest = hashlib.sha256(match[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


HTML = (resources.files("decode.server") / "page.html").read_text(encoding="utf-8")
HEADERS = {
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hash_of('style', HTML)}",
            f"script-src {_hash_of('script', HTML)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
