"""`twinphase explain`: shows a request's time, its bounds, their causes, and what to change."""

from __future__ import annotations

from pathlib import Path

import typer

from twinphase.arguments import API_KEY, JSON, URL
from twinphase.errors import InvalidRequestError


def explain(
    what: str = typer.Argument(
        None,
        help="Id of a server's request, or a file: a saved ledger, an answer, a load's "
        "result.json, or a recording of the live page.",
    ),
    url: str = URL,
    api_key: str = API_KEY,
    last: bool = typer.Option(
        False, "--last", help="Explain the last request that the server finished."
    ),
    json: bool = JSON,
    out: Path = typer.Option(None, help="Write a page for browsers into this file, FILE.html."),
) -> None:
    """Explain one request: a waterfall of its time, the bound of each phase, causes and changes."""
    if out is not None and out.suffix != ".html":
        raise InvalidRequestError(
            f"--out {out} is not the name of a page.", "Give a file that ends with .html."
        )
    if (what is None) is not last:
        raise InvalidRequestError(
            "explain needs one thing to explain.", "Give a request's id, a JSON file, or --last."
        )
    from twinphase.commands import explain_page
    from twinphase.commands import explain_source as source
    from twinphase.commands import explain_view as view
    from twinphase.terminal import note, print_json

    file = source.as_file(what) if what is not None else None
    found = source.from_file(file) if file else source.from_server(url, api_key, what)
    if json:
        print_json(found)
    else:
        print("\n".join(view.lines(found)))
    if out is not None:
        timeline = source.timeline_of(file, url, api_key, found["id"])
        explain_page.write_page(found, timeline, out)
        note(str(out))
