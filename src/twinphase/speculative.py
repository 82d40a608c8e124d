"""`--speculative-config`: the proposers and how many tokens they draft, in vLLM's keys.

What vLLM has and this has not is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from twinphase.errors import InvalidRequestError
from twinphase.settings import ConfigField, check_value

# A step has 512 rows for all requests.
MOST_DRAFTED = 64
USUAL_DRAFTED = 16
USUAL_BY_HEADS = 3
# Of a model's own layer for further tokens, which reads its own output from the second one on.
USUAL_BY_MTP = 2
DRAFTED = ConfigField("Tokens.", minimum=1, maximum=MOST_DRAFTED)
NUMBERS = {
    "suffix_decoding_max_cached_requests": ("int", ConfigField("Answers.", minimum=0)),
    "suffix_decoding_max_spec_factor": (
        "float",
        ConfigField("Drafts per token that agrees.", above=0),
    ),
}
# As in vLLM, if neither bound is given.
USUAL_NGRAM = 5
HEADS = ("medusa", "eagle3")
METHODS = ("auto", "ngram", "suffix", "draft_model", *HEADS, "mtp", "none")
ELSEWHERE = ("self", "heads", "eagle", "mlp_speculator", "dflash", "dspark", "custom_class")
OFF = ("none", "off")
KEYS = {
    "auto": ("num_speculative_tokens",),
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "num_speculative_tokens",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
    ),
    "draft_model": ("num_speculative_tokens", "model"),
    **dict.fromkeys(HEADS, ("num_speculative_tokens", "model")),
    "mtp": ("num_speculative_tokens",),
    "none": (),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Where drafts come from.

    Attributes:
        method: "auto" (prediction, forced tokens, suffixes, and the model's own layer for further
            tokens where it has one) or another of `METHODS`.
        num_speculative_tokens: tokens to draft for a request in one step, at most; fewer where
            fewer pay.
        prompt_lookup_min, prompt_lookup_max: of `ngram`, tokens that have to agree, and that count.
        suffix_decoding_max_cached_requests: of `suffix`, answers to others that drafts come from,
            per tenant; 0 is none, None as many as fit.
        suffix_decoding_max_spec_factor: of `suffix`, most tokens to draft for each token that
            agrees; None is no bound.
        model: of `draft_model`, its name or path; of `medusa` and `eagle3`, the folder of the
            heads; empty otherwise.
    """

    method: str = "auto"
    num_speculative_tokens: int = USUAL_DRAFTED
    prompt_lookup_min: int = USUAL_NGRAM
    prompt_lookup_max: int = USUAL_NGRAM
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    model: str = ""


def speculative_config(given: str | Mapping[str, Any] | None) -> SpeculativeConfig:
    """The configuration of a method's name or of an object with vLLM's keys; None is "none".

    Raises:
        InvalidRequestError: an unknown method or key, a value out of its range, or a text that is
            not JSON.
    """
    if given is None or isinstance(given, str) and given in OFF:
        return SpeculativeConfig("none")
    if isinstance(given, str) and given in METHODS:
        given = {
            "method": given,
            **({"num_speculative_tokens": USUAL_DRAFTED} if given == "ngram" else {}),
        }
    values = _object(given)
    method = values.get("method", "draft_model" if "model" in values else "auto")
    if method in OFF:
        method = "none"
    if method not in METHODS:
        known = "is not supported here" if method in ELSEWHERE else "is not known"
        _refuse(f"has the method {method!r}, which {known}.", f"Use one of: {', '.join(METHODS)}.")
    for key in values:
        if key != "method" and key not in KEYS[method]:
            allowed = ", ".join(KEYS[method]) or "no other key"
            _refuse(
                f"has {key!r}, which the method {method!r} does not take.", f"It takes {allowed}."
            )
    if method == "mtp":
        values.setdefault("num_speculative_tokens", USUAL_BY_MTP)
    if method in HEADS:
        values.setdefault("num_speculative_tokens", USUAL_BY_HEADS)
        if not isinstance(values.get("model"), str) or not values["model"]:
            _refuse(
                f"has the method {method!r} without a model.",
                "Give the folder of the heads as its model.",
            )
    for key, value in values.items():
        if key not in ("method", "model"):
            kind, field = NUMBERS.get(key, ("int", DRAFTED))
            check_value(f"speculative_config.{key}", value, kind, field)
    if method in ("ngram", "draft_model") and "num_speculative_tokens" not in values:
        _refuse(
            f"has the method {method!r} without num_speculative_tokens.",
            "Say how many tokens to draft at most.",
        )
    if method == "draft_model" and (
        not isinstance(values.get("model"), str) or not values["model"]
    ):
        _refuse(
            "has the method 'draft_model' without a model.",
            "Add the name or path of a small model as `model`.",
        )
    if method == "ngram":
        least = values.get("prompt_lookup_min")
        most = values.get("prompt_lookup_max")
        values["prompt_lookup_min"] = least or most or USUAL_NGRAM
        values["prompt_lookup_max"] = most or least or USUAL_NGRAM
        if values["prompt_lookup_min"] > values["prompt_lookup_max"]:
            _refuse(
                f"has prompt_lookup_min {least} above prompt_lookup_max {most}.",
                "Lower the one, or raise the other.",
            )
    return SpeculativeConfig(**{**values, "method": method})


def _object(given: str | Mapping[str, Any]) -> dict[str, Any]:
    values: Any = given
    if isinstance(given, str):
        try:
            values = json.loads(given)
        except (ValueError, RecursionError):
            _refuse(
                f"is {given[:60]!r}, neither a method nor valid JSON.",
                "Use auto, none, or an object such as "
                """'{"method": "ngram", "num_speculative_tokens": 5}'.""",
            )
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        _refuse(f"is of type {type(values).__name__}.", "Use a method's name, or a JSON object.")
    return dict(values)


def _refuse(what: str, fix: str) -> NoReturn:
    raise InvalidRequestError(f"speculative_config {what}", fix)
