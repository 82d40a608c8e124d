"""Serves the live page's files, which browsers cache and revalidate.

The page loads and runs these files only, and connects to this server only.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from starlette.responses import Response

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

# Comments on lines of their own in scripts and style sheets; they are a seventh of the bytes.
COMMENT_LINES = re.compile(rb"^ *(?://[^\n]*|/\*.*?\*/)\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class _File:
    data: bytes
    packed: bytes  # Content compressed with gzip.
    etag: str
    media_type: str


class PageFiles:
    """All files of the page, read once from the package."""

    def __init__(self) -> None:
        folder = files("twinphase.server") / "page"
        self._files: dict[str, _File] = {}
        for entry in folder.iterdir():
            media_type = TYPES.get(entry.name[entry.name.rfind(".") :])
            if media_type is not None:
                data = entry.read_bytes()
                if entry.name.endswith((".js", ".css")):
                    data = COMMENT_LINES.sub(b"", data)
                etag = f'W/"{hashlib.sha256(data).hexdigest()[:32]}"'
                self._files[entry.name] = _File(
                    data, gzip.compress(data, mtime=0), etag, media_type
                )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def reply(
        self, name: str, request_headers: Mapping[str, str], vary: str = "Accept-Encoding"
    ) -> Response:
        """The reply with a file, or 304 if the browser has it; `vary` is its Vary header."""
        file = self._files[name]
        headers = {**HEADERS, "ETag": file.etag, "Vary": vary}
        if file.etag in request_headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request_headers.get("accept-encoding", ""):
            return Response(file.data, 200, headers, file.media_type)
        return Response(file.packed, 200, headers | {"Content-Encoding": "gzip"}, file.media_type)
