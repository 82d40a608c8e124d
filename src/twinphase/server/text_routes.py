"""Routes about the model and its text: names, tokens, the chat template."""

from __future__ import annotations

import asyncio
from time import time
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel

from twinphase.errors import InvalidRequestError
from twinphase.server.jobs import encode_chat
from twinphase.server.openai_types import (
    ChatCompletionRequest,
    DetokenizeRequest,
    ErrorResponse,
    TokenizeRequest,
)
from twinphase.server.service import Service

Documented = dict[int | str, dict[str, Any]]
OBJECT = {"application/json": {"schema": {"type": "object"}}}


def documented(
    error: type[BaseModel], stream_type: str = "text/event-stream"
) -> tuple[Documented, Documented]:
    """A dialect's responses for /openapi.json: errors only, and with bodies and streams."""
    errors: Documented = {"4XX": {"model": error}, "5XX": {"model": error}}
    return errors, {200: {"content": {**OBJECT, stream_type: {}}}, **errors}


ERRORS, ANSWER = documented(ErrorResponse)


def add_text(api: APIRouter, service: Service) -> None:
    _add_models(api, service)
    _add_tokens(api, service)


def _add_models(api: APIRouter, service: Service) -> None:
    @api.get("/v1/models", responses=ERRORS)
    async def list_models() -> dict[str, Any]:
        """List the model's names."""
        return {"object": "list", "data": [describe(name) for name in service.model_names]}

    @api.get("/v1/models/{model:path}", responses=ERRORS)
    async def get_model(model: str) -> dict[str, Any]:
        """Describe the model by one of its names."""
        service.check_model(model)
        return describe(model)

    def describe(name: str) -> dict[str, Any]:
        facts = {"id": name, "object": "model", "created": started, "owned_by": "twinphase"}
        return {
            **facts,
            "root": service.model,
            "parent": None,
            "max_model_len": service.max_model_len,
        }

    started = int(time())

    @api.get("/tokenizer_info", responses=ERRORS)
    async def get_tokenizer_info() -> dict[str, Any]:
        """Special tokens by name, the chat template and the context, as in vLLM."""
        text = service.host.text
        names = text.tokenizer.special_names
        return {
            **names,
            "chat_template": text.chat_template.source,
            "model_max_length": service.max_model_len,
        }


def _add_tokens(api: APIRouter, service: Service) -> None:
    @api.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation as the chat template writes it."""
        service.check_model(body.model)
        text = service.host.text
        limit = service.max_model_len

        def read() -> dict[str, Any]:
            if body.messages is not None:
                token_ids = encode_chat(text, body, service.config.tool_prompt, limit).token_ids
            else:
                special = body.add_special_tokens is not False
                token_ids = text.tokenizer.encode(
                    body.prompt or "", add_special_tokens=special, max_tokens=limit
                )
            found: dict[str, Any] = {
                "count": len(token_ids),
                "max_model_len": limit,
                "tokens": token_ids,
            }
            found["token_strs"] = None
            if body.return_token_strs:
                found["token_strs"] = [text.tokenizer.name(i) for i in token_ids]
            return found

        return Response(
            await asyncio.to_thread(lambda: msgspec.json.encode(read())),
            media_type="application/json",
        )

    @api.post("/apply-template", responses=ERRORS)
    async def apply_template(body: ChatCompletionRequest) -> dict[str, str]:
        """The prompt that a chat request becomes, as text, as in llama.cpp."""
        service.check_task("generate", body.model)
        known = service.config.tool_prompt, service.max_model_len
        chat = await asyncio.to_thread(encode_chat, service.host.text, body, *known)
        return {"prompt": chat.text}

    @api.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Text of token ids, control tokens by their names."""
        service.check_model(body.model)
        tokenizer = service.host.text.tokenizer
        unknown = next((i for i in body.tokens if i >= tokenizer.vocab_size), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"Token id {unknown} is not in the vocabulary.",
                f"Use 0 to {tokenizer.vocab_size - 1}.",
            )
        return {
            "prompt": await asyncio.to_thread(
                tokenizer.decode, body.tokens, skip_special_tokens=False
            )
        }
