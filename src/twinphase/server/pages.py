"""The server's pages: the live page or an overview (`/`), and the API routes (`/docs`).

All their files come from this server; the package fastapi-offline contains Swagger UI.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from twinphase import __version__
from twinphase.server.live.files import PageFiles
from twinphase.server.service import Service

INDEX = "index.html"
ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
LINKS = {
    "/docs": "every route and field, to try out",
    "/v1/models": "the names of the model (OpenAI's API is below /v1, Ollama's below /api)",
    "/health": "whether requests are taken",
    "/metrics": "for Prometheus",
    "/v1/requests": "where the time of the last requests went",
    "/openapi.json": "the routes for programs",
}
STYLE = "body{font:16px/1.5 sans-serif;margin:2em auto;max-width:44em;padding:0 1em}"
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>twinphase</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<link rel="icon" href="docs/favicon.png"><style>{style}</style>
<h1>twinphase is running</h1><p>Version {version}, state: {state}. It serves {models}.</p>
<ul>{links}</ul></html>
"""


def add_pages(app: FastAPI, service: Service) -> None:
    page = PageFiles() if service.config.page else None

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        """The live page for browsers, plain text for other clients, such as Ollama's."""
        if "text/html" not in request.headers.get("accept", ""):
            lines = [f"{path:<14} {what}" for path, what in LINKS.items()]
            text = "\n".join(["twinphase is running", *lines, ""])
            return PlainTextResponse(text, headers={"Vary": "Accept"})
        if page is not None:
            return page.reply(INDEX, request.headers, vary="Accept, Accept-Encoding")
        links = [
            f'<li><a href="{path[1:]}">{path}</a>: {escape(what)}' for path, what in LINKS.items()
        ]
        models = " and ".join(f"<b>{escape(name)}</b>" for name in service.model_names)
        values = {"version": __version__, "state": escape(service.stage), "models": models}
        return _page(PAGE.format(style=STYLE, links="".join(links), **values))

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        if page is None or name not in page or name == INDEX:
            raise HTTPException(404)
        return page.reply(name, request.headers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Swagger UI."""
        script, style, icon = (f"docs/{name}" for name in ASSETS)
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title="twinphase",
            swagger_js_url=script,
            swagger_css_url=style,
            swagger_favicon_url=icon,
            # Otherwise the page would query a validator on the internet.
            swagger_ui_parameters={"validatorUrl": None},
        )
        return _page(bytes(page.body).decode(), "img-src 'self' data:; connect-src 'self'")

    @app.get("/docs/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise HTTPException(404)
        return FileResponse(Path(str(files("fastapi_offline"))) / "static" / name)


def _page(text: str, more: str = "img-src 'self'") -> Response:
    """An HTML response whose policy allows only this server's files and the text's own scripts."""
    inline = {}
    for kind in ("script", "style"):
        found = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digests = (hashlib.sha256(one.encode()).digest() for one in found)
        inline[kind] = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in digests)
    policy = (
        f"default-src 'none'; script-src 'self' {inline['script']}; "
        f"style-src 'self' {inline['style']}; {more}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Vary": "Accept"})
