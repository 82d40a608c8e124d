"""The text side of a model: its tokenizer and chat template.

It reads only the header of a model file or the JSON files of a folder, so that a server can have it
in its own process. `outputs.py` handles generated text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twinphase.constraint import Constraint
from twinphase.engine.frontends.checks import Message, Prompt, is_plain, plain_prompt
from twinphase.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from twinphase.models.loader import open_model
from twinphase.request import SAMPLING_DEFAULTS, GenerationDefaults, SamplingParams
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.catalogue import of_file
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.generation_config import read_generation_config, recommended
from twinphase.weights.gguf import quantization_name
from twinphase.weights.hub import resolve_model

if TYPE_CHECKING:
    from twinphase.sampling.structured import GrammarCompiler
    from twinphase.tokenizer.chat_template import ChatTemplate
    from twinphase.tokenizer.prompt_parts import ChatPrompt, Run

# These values are shown even if they are the defaults.
SHOWN = ("temperature", "top_p")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt that is ready for the engine.

    Attributes:
        text: text of the prompt; None if token ids were given.
        arrival, tokenized: times of the request's arrival and of the end of its tokenization,
            seconds.
        is_plain: the answer continues the prompt's text, with no chat template between them.
        runs: runs of a chat's tokens by part of the prompt.
        prediction_token_ids: the expected answer; a correct prediction makes the answer faster,
            never different.
    """

    text: str | None
    token_ids: list[int]
    arrival: float
    tokenized: float
    is_plain: bool
    runs: Sequence[Run] = ()
    prediction_token_ids: Sequence[int] = ()

    def last(self, num_tokens: int | None) -> EncodedPrompt:
        """The prompt's last `num_tokens` tokens; all of them if None."""
        cut = len(self.token_ids) - num_tokens if num_tokens is not None else 0
        if cut <= 0:
            return self
        runs = [
            (part, max(0, start - cut), end - cut) for part, start, end in self.runs if end > cut
        ]
        return replace(self, text=None, token_ids=self.token_ids[cut:], runs=runs)


@dataclass(frozen=True)
class SamplingDefaults:
    """The default sampling values of requests, by name, and their source.

    A parameter that is not in `values` has the default of `SamplingParams`.

    Attributes:
        system: system message of conversations without one; None leaves it to the chat template.
    """

    values: dict[str, Any]
    source: str
    system: str | None = None

    def replaced(self, values: Mapping[str, Any], source: str) -> SamplingDefaults:
        """These defaults with some values replaced."""
        own = {name: value for name, value in values.items() if name in SAMPLING_DEFAULTS}
        if not own:
            return self
        return replace(self, values=self.values | own, source=f"{self.source}, {source}")

    def __str__(self) -> str:
        shown = {name: SamplingParams.__dataclass_fields__[name].default for name in SHOWN}
        shown |= self.values
        values = ", ".join(
            f"{name} {value:g}" for name, value in shown.items() if value is not None
        )
        system = ""
        if self.system is not None:
            system = f", system message {self.system!r}" if self.system else ", no system message"
        return f"{values} (from {self.source}){system}"


class ModelText:
    """A model's tokenizer and chat template; reads only the header and the JSON files.

    Attributes:
        generation: source of the defaults; a front end sets it before the first conversation.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.generation = GenerationDefaults()

    @classmethod
    def of_model(cls, model: str | Path) -> ModelText:
        """Read the text side of a model by its name or path.

        Raises:
            TwinphaseError: the model cannot be found or read.
        """
        return cls(open_model(resolve_model(str(model)), header_only=True))

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """The default sampling values, from the source that `generation` names.

        Raises:
            CheckpointError: generation_config.json is missing or not valid.
        """
        wanted = self.generation
        found: tuple[dict[str, Any], str] = {}, ""
        system = None
        if wanted.generation_config == "auto":
            found = recommended(self.checkpoint)
            entry = of_file(self.checkpoint.path)
            system = entry.system if entry else None
        elif wanted.generation_config not in ("vllm", "none"):
            path = Path(wanted.generation_config)
            found = read_generation_config(path), str(path)
        values, source = found
        found_defaults = SamplingDefaults(values, source or "the API's defaults", system)
        override = wanted.override_generation_config or {}
        return found_defaults.replaced(override, "--override-generation-config")

    @property
    def quantization(self) -> str:
        """The usual name of the quantization, such as Q4_0."""
        return quantization_name(self.checkpoint)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_checkpoint(self.checkpoint)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; raw prompts do not pay for the import of jinja2."""
        from twinphase.tokenizer.chat_template import ChatTemplate

        template = ChatTemplate.from_checkpoint(self.checkpoint, self.tokenizer)
        if template.is_fallback:
            used = f"{template.fallback}'s format" if template.fallback else "their contents alone"
            logging.getLogger("twinphase").warning(
                "%s has no chat template: conversations are written in %s.",
                self.checkpoint.path.name,
                used,
            )
        return template

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        from twinphase.sampling.structured import GrammarCompiler

        tokenizer = self.tokenizer
        ids = range(tokenizer.vocab_size)
        return GrammarCompiler(
            [tokenizer.token_bytes(i) for i in ids],
            [i for i in ids if tokenizer.is_special(i)],
            tokenizer.eos_token_ids,
            self.checkpoint.tensors["token_embd.weight"].shape[0],
        )

    def constraint(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> Constraint | None:
        """The constraint on a request's output; see `make_constraint` and `filtered`."""
        if not params.constrained:
            return None
        from twinphase.sampling.token_filter import filtered

        return filtered(self._form(params, prompt_token_ids), params, self.encode_plain)

    def _form(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> Constraint | None:
        if not params.has_form:
            return None
        from twinphase.sampling.thinking import ThinkingTags, make_constraint

        tags = None
        # A template that is not valid is an error of chats only.
        with contextlib.suppress(UnsupportedModelError, CheckpointError):
            tags = self.chat_template.think_tags

        encode = self.encode_plain
        known = ThinkingTags(encode(tags.start), encode(tags.end)) if tags else None
        return make_constraint(params, prompt_token_ids, self.grammar_compiler, known)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Encode a text that is not a prompt, without special tokens around it."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def encode(self, prompt: Prompt, max_tokens: int | None) -> tuple[str | None, list[int]]:
        """The text of a prompt (None if it came as token ids) and its token ids.

        Args:
            prompt: text, token ids, or the messages of a conversation.
            max_tokens: maximum length; a prompt that certainly exceeds it is refused before it is
                encoded.

        Raises:
            InvalidRequestError: the prompt is empty or too long, or the model's template refuses
                the messages.
        """
        prompt = plain_prompt(prompt)
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("The prompt is empty.", "Give at least one character.")
            return prompt, self.tokenizer.encode(prompt, max_tokens=max_tokens)
        if is_plain(prompt):
            return None, list(cast(list[int], prompt))  # The engine checks each id.
        chat = self.encode_chat(cast(Sequence[Message], prompt), None, {}, max_tokens)
        return chat.text, chat.token_ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        max_tokens: int | None,
    ) -> ChatPrompt:
        """Encode a conversation; see `chat_prompt`."""
        from twinphase.tokenizer.prompt_parts import SYSTEM_ROLES, chat_prompt

        system = self.sampling_defaults.system
        roles = {message.get("role") for message in messages}
        if system is not None and not roles & SYSTEM_ROLES:
            messages = [{"role": "system", "content": system}, *messages]
        return chat_prompt(
            self.chat_template,
            self.tokenizer,
            messages,
            tools=tools,
            max_tokens=max_tokens,
            **variables,
        )
