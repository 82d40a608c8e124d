"""Gets an explanation from a server or a file, as plain values.

The values are those of `Explanation.as_dict`, with "id" (a request's id or a file's name) and
"kind": "ledger", or "client" for the result of a load, which has only a client's measurements.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from twinphase.commands.explain_saved import ACCEPTED, SavedLedgerError, check_numbers, read_ledger
from twinphase.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    RequestNotFoundError,
    TwinphaseError,
)
from twinphase.explain.explanation import Explanation, explain_evidence
from twinphase.explain.levers import Lever, rank
from twinphase.explain.load_diagnosis import ClientExplanation, explain_client
from twinphase.explain.loads import read_loads
from twinphase.server.live.recording import is_recording, read_recording

MAX_FILE_BYTES = 1 << 30
MAX_REPLY_BYTES = 64 << 20
REPLY_TIMEOUT_SECONDS = 60.0
# Descriptions of results by kind; bench results are described by the names in their data.
RESULTS = {"lab": "a lab result", "roofline": "a roofline", "compare": "a comparison of results"}
BENCH_RESULTS = {"load": "a load's result", "phase sweep": "a phase sweep"}
DEFAULT_URL = "http://127.0.0.1:8000"
# OpenSSL's codes for a certificate with another host name or IP address.
WRONG_NAME_CODES = (62, 64)
CHECK_URL = "Is it a twinphase server? Give --url as the server logged it when it started."


def as_file(what: str) -> Path | None:
    """The path in `what`, if it exists or looks like a path."""
    path = Path(what)
    try:
        if path.is_dir():
            return path / "result.json"
        return path if path.exists() or path.suffix == ".json" or "/" in what else None
    except (OSError, ValueError):  # The text is too long for a path, or contains a null byte.
        return None


def from_file(path: Path) -> dict[str, Any]:
    """The explanation of a file's content.

    Raises:
        SavedLedgerError: the file cannot be read, is not JSON, or has none of the accepted forms.
        ResultError: the file is a result, but not that of a load.
        WaterfallError: the parts of its ledger do not add up.
        RecordingError: the file is a damaged recording.
    """
    if is_recording(path):
        return _from_recording(path)
    found = _read_json(path)
    is_object = isinstance(found, dict)
    if is_object and found.get("format") == "twinphase-result":
        explained = explain_client(read_loads(found.get("data"), _result_name(found)))
        return {"id": str(path), "kind": "client", **asdict(explained)}
    if is_object and "waterfall" in found and "diagnoses" in found:
        return _checked(found, str(path))
    explanation = explain_evidence(read_ledger(found)).as_dict()
    if explanation["waterfall"] is None:
        raise SavedLedgerError("No time has passed in this ledger.", ACCEPTED)
    if found.get("explanation") is not None:
        _add_engines_own(explanation, _checked(found["explanation"], str(path)))
    return {"id": str(path), "kind": "ledger", **explanation}


def _from_recording(path: Path) -> dict[str, Any]:
    """The explanation of the last request in a recording that has a ledger."""
    lanes = read_recording(path).lanes.values()
    finished = [lane for lane in lanes if isinstance(lane.get("timings"), dict)]
    if not finished:
        raise SavedLedgerError(
            f"No request of the recording {path} ended in it.", "Record until an answer ends."
        )
    lane = finished[-1]
    explanation = explain_evidence(read_ledger(lane["timings"])).as_dict()
    return {"id": str(lane.get("id", path)), "kind": "ledger", **explanation}


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SavedLedgerError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB.", ACCEPTED)
        return json.loads(path.read_bytes())
    except OSError as error:
        raise SavedLedgerError(f"{path} cannot be read: {error.strerror}.", ACCEPTED) from None
    except (ValueError, RecursionError) as error:
        raise SavedLedgerError(f"{path} is not JSON: {error}.", ACCEPTED) from None


def _result_name(result: dict[str, Any]) -> str:
    """A description of a result's kind."""
    if result.get("kind") != "bench":
        return RESULTS.get(str(result.get("kind")), "a result")
    parts = result["data"] if isinstance(result.get("data"), dict) else {}
    return next((name for part, name in BENCH_RESULTS.items() if part in parts), "a bench result")


def _add_engines_own(explanation: dict[str, Any], engines: dict[str, Any]) -> None:
    """Add the engine's own explanation from `run --explain --json`, which begins at the arrival.

    Its causes come from a ledger with all intervals; their shares of TTFT are scaled to the whole
    waiting time.
    """
    first_token = explanation["waterfall"]["first_token"]
    scale = (engines["waterfall"]["first_token"] or 0.0) / first_token if first_token else 1.0
    causes = [one for one in explanation["diagnoses"] if one["cause"] == "cold_start"]
    for one in engines["diagnoses"]:
        scaled = one["phase"] == "prefill" and one["share"] is not None
        causes.append({**one, "share": one["share"] * scale} if scaled else dict(one))
    levers = [Lever(**lever) for lever in (*explanation["levers"], *engines["levers"])]
    explanation |= {
        "diagnoses": sorted(
            causes, key=lambda one: (one["phase"] != "prefill", -(one["share"] or 0.0))
        ),
        "levers": [asdict(lever) for lever in rank(levers)],
        "alone": engines["alone"],
        "error": engines["error"],
    }


def _checked(found: Any, name: str) -> dict[str, Any]:
    """A saved explanation, validated, with an id and a kind."""
    try:
        if not isinstance(found, dict):
            raise ValueError(f"it is a JSON {type(found).__name__}")
        check_numbers(found)
        kind = msgspec.convert(found.get("kind", "ledger"), str)
        form: type[Explanation | ClientExplanation] = {
            "ledger": Explanation,
            "client": ClientExplanation,
        }[kind]
        explanation = msgspec.convert(found, form)
        if explanation.waterfall is None:
            raise ValueError("nothing has happened in it")
        phases = {one.phase for one in explanation.diagnoses} | set(
            getattr(explanation, "efficiency", None) or {}
        )
        if not phases <= {"prefill", "decode"}:
            raise ValueError("it has phases other than prefill and decode")
    except (ValueError, KeyError, ArithmeticError) as error:  # msgspec's error is a ValueError.
        raise SavedLedgerError(f"The explanation is damaged: {error!s:.200}.", ACCEPTED) from None
    plain = explanation.as_dict() if isinstance(explanation, Explanation) else asdict(explanation)
    return {**plain, "id": str(found.get("id") or name), "kind": kind}


def from_server(url: str | None, api_key: str | None, request_id: str | None) -> dict[str, Any]:
    """The explanation of a server's request, by default of the last one that finished.

    Raises:
        InvalidRequestError: the URL is not valid.
        RequestNotFoundError: the server does not know the request, or has not finished one yet.
        EngineUnavailableError: no server answers.
        TwinphaseError: the server refuses, or is not a twinphase server.
    """
    base = server_base(url)
    if request_id is None:
        listed = get_json(f"{base}/v1/requests", api_key).get("data")
        finished = [one for one in listed or [] if isinstance(one, dict) and one.get("finished")]
        if not finished:
            raise RequestNotFoundError(
                "The server has finished no request of this key yet.", "Send one."
            )
        request_id = str(finished[0].get("id"))
    found = get_json(
        f"{base}/v1/requests/{urllib.parse.quote(request_id, safe='')}/explain", api_key
    )
    if not found.get("waterfall"):
        raise TwinphaseError(
            f"Nothing has happened to request {request_id!r} yet.", "Ask again later."
        )
    return _checked(found, request_id)


def timeline_of(
    file: Path | None, url: str | None, api_key: str | None, request_id: str
) -> dict[str, Any] | None:
    """The intervals and token times of a request, validated; None if only sums are known.

    They are those of GET /v1/requests/{id}/timeline; times are in ms from the request's arrival.

    Raises:
        TwinphaseError: as `from_file` and `from_server`.
    """
    if file is None:
        name = urllib.parse.quote(request_id, safe="")
        found = get_json(f"{server_base(url)}/v1/requests/{name}/timeline", api_key)
    elif is_recording(file):
        return None
    else:
        found = _read_json(file)
    if "intervals" not in found:
        return None
    request = read_ledger(found).request
    return {
        "id": request_id,
        "request": {
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_cached_tokens": request.num_cached_tokens,
        },
        "intervals": [
            {name: interval[name] for name in ("kind", "start_ms", "end_ms")}
            for interval in found["intervals"]
        ],
        "token_times_ms": found.get("token_times_ms", []),
        "e2e_ms": found["e2e_ms"],
    }


def server_base(url: str | None) -> str:
    """The base URL of a server, without /v1 at the end.

    Without a URL, it is the only server that this user runs on this machine, or the default.

    Raises:
        InvalidRequestError: the URL is not valid.
    """
    if url is None:
        from twinphase.server.started import started_servers

        running = started_servers()
        url = running[0].url if len(running) == 1 else DEFAULT_URL
    base = url.rstrip("/").removesuffix("/v1")
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        raise InvalidRequestError(
            f"The server's URL is {url!r}.", "Use http://HOST:PORT or https://HOST:PORT."
        )
    return base


def get_json(url: str, api_key: str | None) -> dict[str, Any]:
    """The JSON object in a server's reply.

    Raises:
        EngineUnavailableError: no server answers.
        TwinphaseError: the server refuses, or is not a twinphase server.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=REPLY_TIMEOUT_SECONDS
        ) as reply:
            found = json.loads(reply.read(MAX_REPLY_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error.code, error.read(MAX_REPLY_BYTES)) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        if (problem := _tls_problem(url, reason)) is not None:
            raise problem from None
        raise EngineUnavailableError(
            f"No server answers at {url}: {reason}.",
            "Start one with `twinphase serve`, or give its --url.",
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise TwinphaseError(
            f"The reply of the server at {url} cannot be read: {error}.", CHECK_URL
        ) from None
    if not isinstance(found, dict):
        raise TwinphaseError(f"The server at {url} did not send a JSON object.", CHECK_URL)
    return found


def _tls_problem(url: str, reason: object) -> TwinphaseError | None:
    """The error if a server answers, but TLS fails; None for other reasons."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        why = reason.verify_message.rstrip(".")
        fix = "Set SSL_CERT_FILE to a PEM file with its certificate, or that of its authority."
        if reason.verify_code in WRONG_NAME_CODES:
            fix = "Give --url with a name that the certificate has."
        return TwinphaseError(f"The certificate of {url} is not trusted: {why}.", fix)
    if isinstance(reason, ssl.SSLError):
        cause = f"The server at {url} does not speak TLS, or uses another version: {reason.reason}."
        return TwinphaseError(cause, "Give --url with http:// if the server has no certificate.")
    closed = isinstance(reason, (http.client.RemoteDisconnected, ConnectionResetError))
    if closed and url.startswith("http:"):
        cause = f"The server at {url} closed the connection without a reply."
        return TwinphaseError(cause, "If it has a certificate, give --url with https://.")
    return None


def _refused(url: str, status: int, body: bytes) -> TwinphaseError:
    """The error with the server's message, if there is one."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return TwinphaseError(f"{url} answered with status {status}.", CHECK_URL)
    if status == 401:
        return InvalidRequestError(message, "Give --api-key, or set TWINPHASE_API_KEY.")
    return RequestNotFoundError(message) if status == 404 else TwinphaseError(message)
