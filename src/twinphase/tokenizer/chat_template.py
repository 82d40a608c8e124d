"""Renders messages as the text that a chat model was trained on, with the model's template.

Templates are programs by the authors of model files, so they run in `template_sandbox.py`. The
conventions are those of Hugging Face. `prompt_parts.py` encodes the text, because it knows which
control tokens come from the template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from twinphase.errors import InvalidRequestError, UnsupportedModelError
from twinphase.tokenizer.family_templates import CHATML, family_template
from twinphase.tokenizer.template_files import template_texts
from twinphase.tokenizer.template_sandbox import ENVIRONMENT, budget
from twinphase.tokenizer.think_tags import ThinkTags, think_tags

if TYPE_CHECKING:
    from twinphase.tokenizer.tokenizer import Tokenizer
    from twinphase.weights.checkpoint import Checkpoint

MAX_PART_NAME_CHARACTERS = 64
# Matches a template that tests whether there is content, as DeepSeek's do to find tool calls.
_ASKS_FOR_NONE = re.compile(
    r"\bcontent(['\"]\s*\])?\s*(\sis\s+(not\s+)?|[!=]=\s*)none\b", re.IGNORECASE
)


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: the Jinja text.
        tool_source: the template for requests with tools; most models use one template for all.
        is_fallback: whether the model has no template of its own.
        fallback: family whose template is used instead; None if the template belongs to no family.
    """

    def __init__(
        self, source: str | None, *, tool_use: str | None = None, **special_tokens: str
    ) -> None:
        """Compile Jinja text, or ChatML for None.

        Args:
            source: text of the template.
            tool_use: text of the template for requests with tools, if there is one.
            special_tokens: values that templates use by name; `bos_token` and `eos_token` are empty
                if not given.

        Raises:
            UnsupportedModelError: the text is not a valid template, or uses a forbidden feature.
        """
        self.is_fallback = source is None
        self.fallback: str | None = "ChatML" if source is None else None
        self.source = CHATML if source is None else source
        self.tool_source = tool_use or self.source
        self._tokens = {"bos_token": "", "eos_token": "", **special_tokens}
        self._template = _compile(self.source)
        self._tool_template = self._template if tool_use is None else _compile(tool_use)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a model; otherwise its family's, or one that joins the contents.

        Raises:
            UnsupportedModelError: the template is not valid.
            CheckpointError: a template's file cannot be read.
        """
        texts = template_texts(checkpoint)
        names = dict(tokenizer.special_names)
        if "default" in texts:
            return cls(texts["default"], tool_use=texts.get("tool_use"), **names)

        def is_control(token: str) -> bool:
            token_id = tokenizer.token_id(token)
            return token_id is not None and tokenizer.is_special(token_id)

        source, family = family_template(is_control)
        if family is None and not tokenizer.adds_bos:
            names.pop("bos_token", None)
        template = cls(source, tool_use=texts.get("tool_use"), **names)
        template.is_fallback = True
        template.fallback = family
        return template

    @cached_property
    def think_tags(self) -> ThinkTags | None:
        """The tags around the model's thinking; None for a model that does not think."""
        return think_tags(self.source) or think_tags(self.tool_source)

    @cached_property
    def supports_tools(self) -> bool:
        """Whether the template renders `tools` itself."""
        tokens = ENVIRONMENT.lex(self.tool_source)
        return any(type_ == "name" and value == "tools" for _, type_, value in tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render messages in the model's format.

        Args:
            messages: mappings with "role" and "content", as in OpenAI's API. Several texts in one
                content are joined by newlines, as in vLLM; missing content is rendered as empty,
                unless the template tests for it.
            add_generation_prompt: end with the beginning of the assistant's turn.
            tools: function descriptions, if the template supports tools (`supports_tools`).
            variables: further variables of the template.

        Raises:
            InvalidRequestError: a content is not text, or the template refuses the messages, fails,
                or exceeds its budget.
        """
        source, template = (
            (self.tool_source, self._tool_template) if tools else (self.source, self._template)
        )
        asks_for_none = _ASKS_FOR_NONE.search(source) is not None
        messages = [_with_one_text(message, i, asks_for_none) for i, message in enumerate(messages)]
        given = {**self._tokens, **variables, "messages": messages, "tools": tools}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            with budget(len(str(messages)) + len(str(tools))) as limit:
                return _join(template.generate(given), limit)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"The chat template rejects the messages: {_one_line(error)}.",
                "Change the messages.",
            ) from None
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            # A template is a program, and may fail on content that is not text or on an unexpected
            # role.
            raise InvalidRequestError(
                f"The chat template fails on the messages: {_one_line(error)}.",
                "Check roles and contents.",
            ) from None


def content_texts(message: Mapping[str, Any], index: int) -> list[tuple[str, str | None]] | None:
    """The texts of a message's content, each with the client's name for that part, if any.

    Returns None for a message without content.

    Content is a text or a list of {"type": "text", "text": ...}. The field "part" of an entry is an
    extension: a name for reports of its tokens, such as that of a retrieved document.

    Args:
        message: message as in OpenAI's API.
        index: index of the message, for errors.

    Raises:
        InvalidRequestError: the content is not text, or the name is invalid.
    """
    at = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{at} is of type {type(message).__name__}.", "Give `role` and `content`."
        )
    content = message.get("content")
    if content is None:
        return None
    if isinstance(content, str):
        return [(content, None)]
    if not isinstance(content, (list, tuple)):
        raise InvalidRequestError(
            f"{at}.content is of type {type(content).__name__}.", "Give a text."
        )
    return [_text_entry(entry, f"{at}.content[{i}]") for i, entry in enumerate(content)]


def _with_one_text(message: Mapping[str, Any], index: int, asks_for_none: bool) -> dict[str, Any]:
    texts = content_texts(message, index)
    if texts is None:
        return {**message, "content": None if asks_for_none else ""}
    return {**message, "content": "\n".join(text for text, _ in texts)}


def _text_entry(entry: Any, at: str) -> tuple[str, str | None]:
    kind = entry.get("type") if isinstance(entry, Mapping) else type(entry).__name__
    if not isinstance(entry, Mapping) or kind != "text":
        raise InvalidRequestError(
            f"{at} is of type {str(kind)[:40]!r}.",
            "Only entries of type 'text' can be read: of models that see or hear, twinphase "
            "computes the text model alone.",
        )
    text = entry.get("text")
    part = entry.get("part")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{at}.text is of type {type(text).__name__}.", "Give a text.")
    if part is not None and not (
        isinstance(part, str) and 0 < len(part) <= MAX_PART_NAME_CHARACTERS
    ):
        raise InvalidRequestError(
            f"{at}.part is not a valid name.",
            f"Give a text of 1 to {MAX_PART_NAME_CHARACTERS} characters.",
        )
    return text, part


def _compile(source: str) -> jinja2.Template:
    try:
        # Constant expressions are evaluated during compilation.
        with budget(0):
            return ENVIRONMENT.from_string(source)
    except (jinja2.TemplateError, RecursionError, MemoryError, ValueError, SyntaxError) as error:
        raise UnsupportedModelError(
            f"The model's chat template is not valid: {_one_line(error)}.",
            "Use the model without its template.",
        ) from None


def _join(pieces: Any, limit: int) -> str:
    parts = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > limit:
            raise jinja2.TemplateRuntimeError(f"its output exceeds {limit} characters")
        parts.append(piece)
    return "".join(parts)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
