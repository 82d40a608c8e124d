"""Detects the server at a URL by what it reports; "unknown" if it reports nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Gets a route at the server's root; None if the reply is not JSON.
GetJson = Callable[[str], Awaitable[Any]]
GetText = Callable[[str], Awaitable[str]]
# Servers that can continue after the end of text, and whose /v1/completions accepts token ids as
# the prompt; others ignore or refuse `ignore_eos`.
WITH_EXTENSIONS = {"twinphase", "vllm", "sglang", "llama.cpp"}
# Servers by a model's `owned_by`, which is also the prefix of their metrics' names.
OWNERS = {
    "twinphase": "twinphase",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "library": "ollama",
}
VERSION_ROUTES = {
    "twinphase": ["/version"],
    "vllm": ["/version"],
    "sglang": ["/server_info", "/get_server_info"],
}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "ollama": "Ollama"}


@dataclass(frozen=True)
class Server:
    """The known facts about a server.

    Attributes:
        kind: "twinphase", "vllm", "sglang", "llama.cpp" (its own server), "llama-cpp-python",
            "ollama", "unknown".
        version: reported version; "" if unknown.
        found_by: the route whose reply identified it.
        context_length: maximum prompt + output, in tokens; None is unknown.
        details: other reported facts for the report.
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
    """Detect a server; `model` is its entry in /v1/models."""

    async def page(route: str) -> dict[str, Any]:
        found = await get_json(route)
        return found if isinstance(found, dict) else {}

    owner = str(model.get("owned_by") or "").lower()
    context = _count(model.get("max_model_len"))
    kind = OWNERS.get(owner, "unknown")
    found_by = f"owned_by {owner!r} in /v1/models"
    if kind in ("unknown", "llama.cpp"):
        props = await page("/props")
        if isinstance(settings := props.get("default_generation_settings"), dict):
            details: dict[str, str] = {
                key: str(props[key]) for key in ("total_slots", "model_path") if key in props
            }
            context = _count(settings.get("n_ctx")) or context
            return Server(
                "llama.cpp", str(props.get("build_info") or ""), "/props", context, details
            )
    if kind in ("unknown", "ollama") and (version := (await page("/api/version")).get("version")):
        return Server("ollama", str(version), "/api/version", context)
    if kind == "unknown":
        text = await get_text("/metrics")
        kind = next(
            (name for owner, name in OWNERS.items() if f"\n{owner}:" in f"\n{text}"),
            "unknown",
        )
        found_by = "/metrics"
    if kind == "unknown" and owner == "me":  # The title of its OpenAPI document has this name too.
        info = (await page("/openapi.json")).get("info")
        if isinstance(info, dict) and "llama.cpp" in str(info.get("title")):
            return Server(
                "llama-cpp-python", str(info.get("version") or ""), "/openapi.json", context
            )
    for route in VERSION_ROUTES.get(kind, ()):
        if version := (await page(route)).get("version"):
            return Server(kind, str(version), found_by, context)
    return Server(kind, "", found_by if kind != "unknown" else "", context)


def _count(found: Any) -> int | None:
    return found if isinstance(found, int) else None
