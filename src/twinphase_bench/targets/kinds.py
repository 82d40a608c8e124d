"""The kinds of targets of `twinphase bench`, and how each is opened.

A new one is a file in this folder and a line in `KINDS`. Each imports its engine only when it is
opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinphase import InvalidRequestError
from twinphase_bench.conditions import public
from twinphase_bench.targets.target import Target, TargetFacts

HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}(?:/\S*)?")
ENDPOINTS = {
    "auto": "auto",
    "completions": "completions",
    "chat/completions": "chat",
    "chat": "chat",
}
CompileProgress = Callable[[float, int, str], None]


@dataclass(frozen=True)
class TargetOptions:
    """What was given on the command line beside the target; None or empty: not given.

    Attributes:
        engine: fields of `EngineConfig`, for a model.
        api_key, model, endpoint, timeout: for a server; the last is the most seconds that a reply
            may take.
        seed: of the prompts.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    model: str | None = None
    endpoint: str | None = None
    seed: int = 0
    timeout: float | None = None

    @property
    def server(self) -> dict[str, Any]:
        """Arguments of `OpenAITarget.open`. An endpoint may be a path, as in vLLM's bench.

        Raises:
            InvalidRequestError: the endpoint is not one.
        """
        word = (self.endpoint or "auto").strip("/").removeprefix("v1/")
        if word not in ENDPOINTS:
            raise InvalidRequestError(
                f"--endpoint is {self.endpoint!r}.",
                "Use auto, completions (/v1/completions) or chat.",
            )
        found = {"model": self.model, "api_key": self.api_key, "endpoint": ENDPOINTS[word]}
        return found if self.timeout is None else {**found, "timeout": self.timeout}

    def check(self, text: str, kind: str) -> None:
        """Refuse what a target has no use for.

        Raises:
            InvalidRequestError: naming the option.
        """
        for name in self._given():
            if name not in KINDS[kind].options and not (
                "engine" in KINDS[kind].options and name in self.engine
            ):
                option = "--" + name.replace("_", "-")
                raise InvalidRequestError(
                    f"{option} has no meaning for {public(text)}.", "Leave it out."
                )
        _ = self.server
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise InvalidRequestError(f"--timeout is {self.timeout}.", "Give seconds, above 0.")

    def _given(self) -> Iterator[str]:
        yield from (
            name
            for name in ("api_key", "model", "endpoint", "timeout")
            if getattr(self, name) is not None
        )
        yield from self.engine


@dataclass(frozen=True)
class Kind:
    """A kind of target.

    Attributes:
        form: how it is written on the command line.
        prefixes: what its text begins with; a model has none.
        options: names that it takes; "engine" stands for all fields of `EngineConfig`.
        open: loads it or connects to it.
    """

    form: str
    prefixes: tuple[str, ...]
    options: frozenset[str]
    open: Callable[[str, TargetOptions, CompileProgress | None], Target]


def _model(text: str, options: TargetOptions, progress: CompileProgress | None) -> Target:
    from twinphase_bench.targets.engine import EngineTarget

    return EngineTarget(text, seed=options.seed, compile_progress=progress, **options.engine)


def _url(text: str, options: TargetOptions, _: CompileProgress | None) -> Target:
    from twinphase_bench.targets.phases_of_url import PhasesOfUrl

    return PhasesOfUrl(text, seed=options.seed, **options.server)


def _transformers(text: str, options: TargetOptions, _: CompileProgress | None) -> Target:
    from twinphase_bench.targets.static_batch import StaticBatchTarget
    from twinphase_bench.targets.transformers import Transformers

    return StaticBatchTarget(Transformers(text.partition(":")[2], **options.engine), options.seed)


def _llama_cpp(text: str, options: TargetOptions, _: CompileProgress | None) -> Target:
    from twinphase_bench.targets.llama_cpp import LlamaCpp
    from twinphase_bench.targets.static_batch import StaticBatchTarget

    return StaticBatchTarget(LlamaCpp(text.partition(":")[2], **options.engine), options.seed)


KINDS = {
    "model": Kind(
        "a model (FILE.gguf, smollm2, pypi:NAME, hf:ORG/REPO[:FILE])",
        (),
        frozenset({"engine"}),
        _model,
    ),
    "url": Kind(
        "the URL of a server (http://HOST:PORT)",
        ("http://", "https://"),
        frozenset({"api_key", "model", "endpoint", "timeout"}),
        _url,
    ),
    "transformers": Kind(
        "transformers:FOLDER", ("transformers:",), frozenset({"threads"}), _transformers
    ),
    "llama-cpp": Kind("llama-cpp:FILE.gguf", ("llama-cpp:",), frozenset({"threads"}), _llama_cpp),
}
FORMS = f"Give one of: {', '.join(kind.form for kind in KINDS.values())}."


def kind_of(text: str, is_model: Callable[[str], bool]) -> str:
    """The name in `KINDS` of what a text on the command line names; `is_model` knows our models.

    Raises:
        InvalidRequestError: it names nothing that can be measured.
    """
    for name, kind in KINDS.items():
        if text in kind.prefixes:
            raise InvalidRequestError(f"{text!r} lacks a name.", FORMS)
        if text.startswith(kind.prefixes):
            return name
    if is_model(text) and "://" not in text and not HOST_AND_PORT.fullmatch(text):
        return "model"
    if HOST_AND_PORT.fullmatch(text):
        raise InvalidRequestError(f"{text!r} is not a URL.", f"Did you mean http://{text}? {FORMS}")
    raise InvalidRequestError(f"{text!r} is not something that can be measured.", FORMS)


def open_target(
    text: str, kind: str, options: TargetOptions, compile_progress: CompileProgress | None = None
) -> Target:
    """Load or connect; slow. `compile_progress` is as for `LLM`, for a model.

    Raises:
        InvalidRequestError: an option that this kind has no use for.
        TwinphaseError: it cannot be loaded or reached, or a package is missing.
    """
    options.check(text, kind)
    target = KINDS[kind].open(text, options, compile_progress)
    target.facts = _shown(target.facts)
    return target


def open_load_target(text: str, kind: str, options: TargetOptions, swept: Any = None) -> Any:
    """A target for many requests at once: our engine, or a server (that of the sweep).

    Our engine is loaded again, because a sweep switches the prefix cache off and a load does not.

    Raises:
        TwinphaseError: as for `open_target`.
    """
    options.check(text, kind)
    target: Any
    if kind != "url":
        from twinphase_bench.targets.engine_load import EngineLoadTarget

        target = EngineLoadTarget(text, **options.engine)
    elif swept is not None:
        target = swept.target
    else:
        from twinphase_bench.client.client import run
        from twinphase_bench.targets.openai import OpenAITarget

        target = run(OpenAITarget.open(text, **options.server))
    target.facts = _shown(target.facts)
    return target


def _shown(facts: TargetFacts) -> TargetFacts:
    """Facts that may be shown around: no secrets of a URL, no home folder."""
    return replace(facts, name=public(facts.name), model=public(facts.model))
