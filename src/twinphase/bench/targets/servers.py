"""Which server answers at a URL, by what it says of itself; "unknown" where it says nothing.

Not for its claims about time (`foreign_claims.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ACCEPTS_IGNORE_EOS", "ACCEPTS_TOKEN_IDS", "Server", "detect"]

GetJson = Callable[[str], Awaitable[Any]]  # of a route at the server's root; None where there is no JSON
GetText = Callable[[str], Awaitable[str]]
# Servers that go on behind the end of text when told to; others ignore the field, or refuse it.
ACCEPTS_IGNORE_EOS = {"twinphase", "vllm", "sglang", "llama.cpp"}
ACCEPTS_TOKEN_IDS = {"twinphase", "vllm", "sglang", "llama.cpp"}  # as the prompt of /v1/completions
OWNERS = {"twinphase": "twinphase", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "library": "ollama"}
PREFIXES = {"twinphase:": "twinphase", "vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llama.cpp"}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "ollama": "Ollama"}


@dataclass(frozen=True)
class Server:
    """What is known of a server.

    Attributes:
        kind: "twinphase", "vllm", "sglang", "llama.cpp" (its own server), "llama-cpp-python", "ollama", "unknown".
        version: as it says; "" where it does not.
        found_by: the route that told.
        context_length: longest prompt + output, tokens; None is unknown.
        details: what else it says that a reader should know.
    """

    kind: str
    version: str = ""
    found_by: str = ""
    context_length: int | None = None
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{TITLES.get(self.kind, self.kind)} {self.version}".strip()


async def detect(model: Mapping[str, Any], get_json: GetJson, get_text: GetText) -> Server:
    """Ask a server who it is.

    Args:
        model: its entry in /v1/models.
        get_json: reads a route.
        get_text: the same for text; "" where there is none.
    """
    owner = str(model.get("owned_by") or "").lower()
    kind, found_by = OWNERS.get(owner, "unknown"), f"owned_by {owner!r} in /v1/models"
    context = model.get("max_model_len")
    context = context if isinstance(context, int) else None
    details: dict[str, str] = {}
    if kind in ("unknown", "llama.cpp"):
        props = await get_json("/props")
        settings = props.get("default_generation_settings") if isinstance(props, dict) else None
        if isinstance(props, dict) and isinstance(settings, dict):
            context = settings.get("n_ctx") if isinstance(settings.get("n_ctx"), int) else context
            details = {key: str(props[key]) for key in ("total_slots", "model_path") if key in props}
            return Server("llama.cpp", str(props.get("build_info") or ""), "/props", context, details)
    if kind in ("unknown", "ollama") and (version := _version(await get_json("/api/version"))):
        return Server("ollama", version, "/api/version", context)
    if kind == "sglang":
        for route in ("/server_info", "/get_server_info"):
            info = await get_json(route)
            if isinstance(info, dict) and (version := _version(info)):
                return Server(kind, version, found_by, context)
    if kind == "unknown":
        text = await get_text("/metrics")
        kind = next((name for prefix, name in PREFIXES.items() if f"\n{prefix}" in f"\n{text}"), "unknown")
        found_by = "/metrics"
    if kind == "unknown" and owner == "me":  # also says so in the title of its OpenAPI document
        document = await get_json("/openapi.json")
        info = document.get("info") if isinstance(document, dict) else None
        if isinstance(info, dict) and "llama.cpp" in str(info.get("title")):
            return Server("llama-cpp-python", str(info.get("version") or ""), "/openapi.json", context)
    version = _version(await get_json("/version")) if kind in ("twinphase", "vllm") else ""
    return Server(kind, version, found_by if kind != "unknown" else "", context)


def _version(found: Any) -> str:
    return str(found.get("version") or "") if isinstance(found, dict) else ""
