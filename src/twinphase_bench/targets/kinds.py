"""The kinds of targets of `twinphase bench`, and how to open them.

A new kind needs a file in this folder and a line in `KINDS`. Each file imports its engine only when
it is opened.
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
    """Options of the target on the command line; None or empty means that an option was not given.

    Attributes:
        engine: fields of `EngineConfig`, for a model.
        api_key, model, endpoint, timeout: options of a server; `timeout` is the maximum seconds of
            a reply.
        seed: random seed of the prompts.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    model: str | None = None
    endpoint: str | None = None
    seed: int = 0
    timeout: float | None = None

    @property
    def server(self) -> dict[str, Any]:
        """Arguments of `OpenAITarget.open`; an endpoint may be a path, as in vLLM's bench.

        Raises:
            InvalidRequestError: the endpoint is not valid.
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
        """Refuse options that have no effect for a target.

        Raises:
            InvalidRequestError: an option has no effect; the message names it.
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
        form: form on the command line.
        prefixes: prefixes of its text; a model has none.
        options: names of its options; "engine" stands for all fields of `EngineConfig`.
        open: loads the model, or connects to the server.
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
    """The name in `KINDS` for a text on the command line; `is_model` recognizes model names.

    Raises:
        InvalidRequestError: the text does not name a target.
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
    """Load a model or connect to a server, which may be slow; `compile_progress` is as for `LLM`.

    Raises:
        InvalidRequestError: an option has no effect for this kind.
        TwinphaseError: the target cannot be loaded or reached, or a package is missing.
    """
    options.check(text, kind)
    target = KINDS[kind].open(text, options, compile_progress)
    target.facts = _shown(target.facts)
    return target


def open_load_target(text: str, kind: str, options: TargetOptions, swept: Any = None) -> Any:
    """A target for loads: this project's engine, or the server that was swept.

    The engine is loaded again, because a sweep disables the prefix cache and a load does not.

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
    """The facts without secrets in URLs and without the home folder."""
    return replace(facts, name=public(facts.name), model=public(facts.model))
