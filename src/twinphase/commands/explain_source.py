"""Where an explanation comes from: a server that is asked, or a file that is read. Both give the same plain values.

Beside what `Explanation.as_dict` has, they have "id" (a request's, or a file's name) and "kind": "ledger", or "client"
for the result of a load, of which only a client's side is known.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from twinphase.bench.load.diagnosis import ClientExplanation, explain_client
from twinphase.bench.load.results import read_loads
from twinphase.errors import EngineUnavailableError, InvalidRequestError, RequestNotFoundError, TwinphaseError
from twinphase.explain.explanation import Explanation, explain_evidence
from twinphase.explain.levers import Lever, rank
from twinphase.explain.saved import ACCEPTED, SavedLedgerError, read_ledger
from twinphase.phases.report import FORMULAS

__all__ = ["as_file", "from_file", "from_server"]

LARGEST = 1 << 30  # bytes of a file that is read
LARGEST_REPLY = 64 << 20
LARGEST_NUMBER = 1e18
PATIENCE = 60.0  # seconds for the server to answer
RESULTS = {"lab": "a lab result", "roofline": "a roofline", "compare": "a comparison of results"}
# Of a bench result, by the names in its data.
PARTS = {"load": "a load's result", "saturation": "a search for saturation", "phase sweep": "a phase sweep",
         "claims": "a check of claims"}  # fmt: skip
NEITHER = "Is it a twinphase server? Give --url as it logged it when it started."


def as_file(what: str) -> Path | None:
    """The file that is meant, if one is: what exists, or looks like a path."""
    path = Path(what)
    try:
        if path.is_dir():
            return path / "result.json"
        return path if path.exists() or path.suffix == ".json" or "/" in what else None
    except (OSError, ValueError):  # too long, or a NUL: no path
        return None


def from_file(path: Path) -> dict[str, Any]:
    """The explanation of what a file holds.

    Raises:
        SavedLedgerError: it cannot be read, is not JSON, or nothing of what is taken.
        WaterfallError: its ledger does not add up.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise SavedLedgerError(f"{path} is larger than {LARGEST >> 30} GiB.", ACCEPTED)
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise SavedLedgerError(f"{path} cannot be read: {error.strerror}.", ACCEPTED) from None
    except (ValueError, RecursionError) as error:
        raise SavedLedgerError(f"{path} is not JSON: {error}.", ACCEPTED) from None
    if isinstance(found, dict) and found.get("format") == "twinphase-result":
        if found.get("kind") == "explain" and isinstance(found.get("data"), dict):  # of `explain --out`
            return _checked(found["data"], str(path))
        explained = explain_client(read_loads(found.get("data"), _what(found)))
        return {"id": str(path), "kind": "client", **asdict(explained)}
    if isinstance(found, dict) and "waterfall" in found and "diagnoses" in found:
        return _checked(found, str(path))
    explanation = explain_evidence(read_ledger(found)).as_dict()
    if explanation["waterfall"] is None:
        raise SavedLedgerError("No time has passed in this ledger.", ACCEPTED)
    if isinstance(found, dict) and found.get("explanation") is not None:
        _join(explanation, _checked(found["explanation"], str(path)))
    return {"id": str(path), "kind": "ledger", **explanation}


def _what(result: dict[str, Any]) -> str:
    """What a result is, in words."""
    kind, data = result.get("kind"), result.get("data")
    if kind == "bench":
        parts = data if isinstance(data, dict) else {}
        return next((name for part, name in PARTS.items() if part in parts), "a bench result")
    return RESULTS.get(str(kind), "a result")


def _join(explanation: dict[str, Any], engines: dict[str, Any]) -> None:
    """Add what the engine itself said in `run --explain --json`, which knows nothing of what came before the request.

    Its causes are those of a ledger with every interval; the shares of TTFT are made those of the whole wait.
    """
    falls = explanation["waterfall"]
    rest = engines["waterfall"]["first_token"] or 0.0
    waited = (rest / falls["first_token"]) if falls["first_token"] else 1.0
    own = [one for one in explanation["diagnoses"] if one["cause"] == "cold_start"]
    for one in engines["diagnoses"]:
        early = one["phase"] == "prefill" and one["share"] is not None
        own.append({**one, "share": one["share"] * waited} if early else dict(one))
    levers = [Lever(**lever) for lever in (*explanation["levers"], *engines["levers"])]
    explanation |= {
        "diagnoses": sorted(own, key=lambda one: (one["phase"] != "prefill", -(one["share"] or 0.0))),
        "levers": [asdict(lever) for lever in rank(levers)],
        "alone": engines["alone"],
        "error": engines["error"],
    }


def _checked(found: Any, name: str) -> dict[str, Any]:
    """An explanation that was saved, with an id and a kind, if all of it is what it should be."""
    try:
        if not isinstance(found, dict):
            raise ValueError(f"it is a JSON {type(found).__name__}")
        kind: type[Explanation | ClientExplanation] = Explanation
        if found.get("kind", "ledger") == "client":
            kind = ClientExplanation
        elif found.get("kind", "ledger") != "ledger":
            raise ValueError(f"its kind is {found['kind']!r:.40}")
        explanation = msgspec.convert(found, kind)
        if explanation.waterfall is None:
            raise ValueError("nothing has happened in it")
        phases = {one.phase for one in explanation.diagnoses} | set(getattr(explanation, "efficiency", None) or {})
        if not phases <= {"prefill", "decode"}:
            raise ValueError("it has phases other than prefill and decode")
        _check_finite(found)
    except (ValueError, ArithmeticError) as error:  # msgspec's own is a ValueError
        raise SavedLedgerError(f"The explanation is damaged: {error}.", ACCEPTED) from None
    return {**asdict(explanation), "id": str(found.get("id") or name), "kind": found.get("kind", "ledger")} | (
        {"dominant": explanation.dominant.value, "formulas": FORMULAS} if isinstance(explanation, Explanation) else {}
    )


def _check_finite(found: Any) -> None:
    """Numbers that are none (JSON has no NaN, but Python writes it), or too large to reckon with."""
    rest = [found]
    while rest:
        value = rest.pop()
        if isinstance(value, (dict, list)):
            rest += value.values() if isinstance(value, dict) else value
        elif isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:
            raise ValueError("a number in it is NaN, infinite or too large")


def from_server(url: str, api_key: str | None, request_id: str | None) -> dict[str, Any]:
    """The explanation of a server's request; of the last one that finished if no id is given.

    Raises:
        InvalidRequestError: the URL is none.
        RequestNotFoundError: the server does not know the request, or has finished none yet.
        EngineUnavailableError: nobody answers.
        TwinphaseError: the server refuses, or is not ours.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        raise InvalidRequestError(f"--url is {url!r}.", "Use http://HOST:PORT.")
    if request_id is None:
        listed = _get(f"{base}/v1/requests", api_key).get("data")
        finished = [one for one in listed or [] if isinstance(one, dict) and one.get("finished")]
        if not finished:
            raise RequestNotFoundError("The server has finished no request of this key yet.", "Send one.")
        request_id = str(finished[0].get("id"))
    quoted = urllib.parse.quote(request_id, safe="")
    found = _get(f"{base}/v1/requests/{quoted}/explain", api_key)
    if not found.get("waterfall"):
        raise TwinphaseError(f"Nothing has happened to request {request_id!r} yet.", "Ask again later.")
    return _checked(found, request_id)


def _get(url: str, api_key: str | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE) as reply:
            found = json.loads(reply.read(LARGEST_REPLY))
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error.code, error.read(LARGEST_REPLY)) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise EngineUnavailableError(
            f"No server answers at {url}: {reason}.", "Start one with `twinphase serve`, or give its --url."
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise TwinphaseError(f"What answers at {url} does not speak this protocol: {error}.", NEITHER) from None
    if not isinstance(found, dict):
        raise TwinphaseError(f"What answers at {url} gave no JSON object.", NEITHER)
    return found


def _refused(url: str, status: int, body: bytes) -> TwinphaseError:
    """The server's own words where it has some."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return TwinphaseError(f"{url} answered with status {status}.", NEITHER)
    if status == 401:
        return InvalidRequestError(message, "Give --api-key, or set TWINPHASE_API_KEY.")
    return RequestNotFoundError(message) if status == 404 else TwinphaseError(message)
