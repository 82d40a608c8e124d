"""Checks of the arguments of `LLM` and `AsyncEngine`, so that wrong types get a clear error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, cast

from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError, RequestNotFoundError
from twinphase.models.tasks import is_encoder, own_task, rerank_prompt
from twinphase.request import SamplingParams
from twinphase.weights.checkpoint import Checkpoint

# Keys are "role" and "content", as in OpenAI's API.
Message = Mapping[str, Any]
# A mapping is vLLM's TextPrompt or TokensPrompt.
Prompt = str | list[int] | Sequence[Message] | Mapping[str, Any]
DO = {"generate": "generate text", "embed": "embed texts", "score": "score pairs of texts"}
USE = {
    "generate": "Use LLM.generate, or `twinphase serve` and /v1/completions.",
    "embed": "Use LLM.embed, or `twinphase serve` and /v1/embeddings.",
    "score": "Use LLM.score, or `twinphase serve` and /v1/rerank.",
}
RERANKERS = (
    "Load a reranker (a cross-encoder such as ms-marco-minilm, or Qwen3-Reranker with "
    'task="score"), or an embedding model, which compares texts by their vectors.'
)
MESSAGE = '{"role": "user", "content": "..."}'


def engine_config(values: Mapping[str, Any], base: EngineConfig = EngineConfig()) -> EngineConfig:
    """The configuration `base` with some fields replaced by `values`.

    Raises:
        InvalidRequestError: a name is not a field, or a value is out of its range.
    """
    names = [field.name for field in fields(EngineConfig)]
    for name in values:
        if name not in names:
            near = get_close_matches(name, names, 1)
            advice = f"Did you mean {near[0]}?" if near else f"The options are {', '.join(names)}."
            raise InvalidRequestError(f"There is no engine option {name!r}.", advice)
    return replace(base, **values)


def task_of(checkpoint: Checkpoint, config: EngineConfig) -> str:
    """The task to load the model for: `config.task`, or the model's own task.

    Returns:
        "generate", "embed" (texts to vectors), or "score" (pairs of texts to numbers).

    Raises:
        InvalidRequestError: the model cannot do `task`, or `pooling` is set for a task other than
            embed.
    """
    name = checkpoint.path.name
    own = own_task(checkpoint)
    task = config.task or own
    encoder = is_encoder(checkpoint)
    if task != own and (encoder or (own, task) == ("score", "generate")):
        kind = "an encoder, " if encoder else ""
        raise InvalidRequestError(
            f"{name} is {kind}made to {DO[own]}; it cannot {DO[task]}.", USE[own]
        )
    if task == "score" and not encoder and rerank_prompt(checkpoint) is None:
        raise InvalidRequestError(f"{name} is a decoder that scores no pairs.", RERANKERS)
    if config.pooling is not None and task != "embed":
        raise InvalidRequestError(
            f"pooling is {config.pooling!r}, but {name} is loaded to {DO[task]}.",
            "Leave it out, or add the task embed where the model has it.",
        )
    return task


def check_task(checkpoint: Checkpoint, task: str, wanted: str) -> str:
    """Return the task for `wanted`; models that embed can also score.

    Raises:
        InvalidRequestError: the model cannot do `wanted`.
    """
    if task == wanted or (task, wanted) == ("embed", "score"):
        return task
    raise wrong_task(checkpoint, task, wanted)


def wrong_task(checkpoint: Checkpoint, task: str, wanted: str) -> InvalidRequestError:
    """The error for a model that was loaded for a task other than `wanted`."""
    more = "; it writes none" if wanted == "generate" else ""
    fix = USE[task]
    if task == "generate":
        fix = 'Load it with task="embed".' if wanted == "embed" else RERANKERS
    return InvalidRequestError(f"{checkpoint.path.name} was loaded to {DO[task]}{more}.", fix)


def check_params(params: object) -> SamplingParams:
    """The parameters, or vLLM's defaults for None."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"The sampling parameters are of type {type(params).__name__}.",
            "Give SamplingParams(temperature=..., max_tokens=...).",
        )
    return params


def check_id(request_id: object) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequestError(
            f"The request id is {request_id!r}.", "Use a text that is not empty."
        )


def check_token_ids(token_ids: Iterable[object], name: str, vocab_size: int) -> None:
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"Token id {token_id!r} in {name} is not in the vocabulary.",
                f"Use integers from 0 to {vocab_size - 1}.",
            )


def unknown_request(request_id: str) -> RequestNotFoundError:
    return RequestNotFoundError(
        f"No unfinished request has the id {request_id!r}.",
        "It was never added, or has finished already.",
    )


def one_for_each(given: Any, kind: type, count: int, what: str) -> list[Any]:
    """A list of `count` values: `given` for each prompt, or `given` itself if it is such a list."""
    if isinstance(given, kind):
        return [given] * count
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise InvalidRequestError(
            f"The {what} are of type {type(given).__name__}.",
            f"Give {kind.__name__}, or a list of one for each prompt.",
        )
    if len(given) != count:
        raise InvalidRequestError(
            f"There are {count} prompts and {len(given)} {what}.", "Give one for each prompt."
        )
    return list(given)


def prompt_list(prompts: Any) -> list[Prompt]:
    """The prompts of `LLM.generate`: one, or several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise _wrong_prompt(prompts)
    return list(prompts)


def plain_prompt(prompt: Any) -> str | list[int] | Sequence[Message]:
    """The text or token ids of a mapping such as {"prompt": "..."} or {"prompt_token_ids": [...]}.

    Raises:
        InvalidRequestError: the prompt is not text, token ids, messages or such a mapping.
    """
    if isinstance(prompt, Mapping):
        keys = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not keys or set(prompt) - {"prompt_token_ids", "prompt"}:
            raise InvalidRequestError(
                f"A prompt has the keys {', '.join(map(repr, prompt))}.",
                "Give `prompt` or `prompt_token_ids`; messages are for chat().",
            )
        prompt = prompt[keys[0]]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (list, tuple)):
        raise _wrong_prompt(prompt)
    if not is_plain(prompt):
        _check_messages(cast(Sequence[object], prompt))
        return prompt
    if set(map(type, prompt)) - {int}:
        wrong = next(token_id for token_id in prompt if type(token_id) is not int)
        raise InvalidRequestError(
            f"Token id {wrong!r} in prompt is not an integer.",
            "Give a list of token ids, or one of messages.",
        )
    return list(prompt)


def is_plain(prompt: Any) -> bool:
    """True for text and token ids, False for messages."""
    if isinstance(prompt, (str, Mapping)):
        return True
    return not prompt or not isinstance(prompt[0], Mapping)


def conversations(messages: Any) -> list[Sequence[Message]]:
    """The conversations of `LLM.chat`: one, or several.

    Raises:
        InvalidRequestError: the argument is not a list of messages, or a message has no role or
            content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"chat() was given a value of type {type(messages).__name__}.",
            f"Give a list of messages: [{MESSAGE}]; plain text is for generate().",
        )
    if not messages:
        raise InvalidRequestError(
            "The conversation is empty.", f"Give at least one message: [{MESSAGE}]."
        )
    several = (
        [messages]
        if any(isinstance(message, (str, Mapping)) for message in messages)
        else list(messages)
    )
    for conversation in several:
        if not isinstance(conversation, Sequence) or isinstance(conversation, (str, bytes)):
            raise InvalidRequestError(
                f"A conversation is of type {type(conversation).__name__}.",
                f"Give lists of messages: [[{MESSAGE}]].",
            )
        _check_messages(conversation)
    return several


def _check_messages(messages: Sequence[object]) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"Message {number} is of type {type(message).__name__}.", f"Give {MESSAGE}."
            )
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"Message {number} has no role.", f"Give {MESSAGE}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise InvalidRequestError(f"Message {number} has no content.", f"Give {MESSAGE}.")


def _wrong_prompt(prompt: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"A prompt is of type {type(prompt).__name__}.",
        "Give texts, or lists of token ids or of messages.",
    )
