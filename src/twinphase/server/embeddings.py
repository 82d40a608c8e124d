"""Embeds texts over HTTP, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from twinphase.engine.frontends.text import EncodedPrompt
from twinphase.errors import ContextLengthError, InvalidRequestError
from twinphase.server.access import Ticket
from twinphase.server.exchange import Exchange
from twinphase.server.jobs import prompt_list
from twinphase.server.openai_types import EmbeddingRequest
from twinphase.server.replies import ignored
from twinphase.server.service import Service
from twinphase.server.strict import unread_fields

Inputs = Sequence[str | list[int]]


def _inputs(body: EmbeddingRequest, limit: int) -> Inputs:
    """The texts, or lists of token ids, of a request: at least 1 and at most `limit`."""
    inputs = prompt_list(body.input)
    if not 0 < len(inputs) <= limit:
        raise InvalidRequestError(
            f"`input` has {len(inputs)} texts.", f"Use 1 to {limit} in a request."
        )
    if not all(inputs):
        raise InvalidRequestError(
            f"Text {inputs.index(type(inputs[0])())} of `input` is empty.", "Leave it out."
        )
    return inputs


def _check_dimensions(wanted: int, size: int, sizes: Sequence[int] | None) -> None:
    """Refuse to cut vectors of `size` numbers to a length that the model was not trained for."""
    problem = f"dimensions is {wanted}, but this model's vectors have {size} numbers"
    if sizes is None:
        raise InvalidRequestError(
            f"{problem}, and its config.json does not say that they may be cut.",
            "Leave dimensions out. For a model that was trained for it (Matryoshka), set "
            "is_matryoshka or matryoshka_dimensions there.",
        )
    if wanted > size or (sizes and wanted not in sizes):
        allowed = ", ".join(map(str, sizes)) or f"1 to {size}"
        raise InvalidRequestError(
            f"{problem}, and may be cut to {allowed} only.", "Use one of these, or leave it out."
        )


def _cut(vector: Sequence[float], size: int) -> list[float]:
    """The first `size` numbers, scaled to a vector of length 1."""
    part = vector[:size]
    length = math.sqrt(math.fsum(x * x for x in part))
    return [x / max(length, 1e-12) for x in part]


class Embeddings(Exchange):
    """The vectors of a request's texts, in order."""

    def __init__(self, service: Service, body: EmbeddingRequest) -> None:
        service.check_task("embed", body.model)
        super().__init__(service, 1)  # However many texts it has.
        self._inputs = _inputs(body, service.config.max_prompts)
        self._body = body

    async def _answer(self, ticket: Ticket) -> None:
        service = self._service
        engine = service.require_engine()
        facts = service.facts
        assert facts is not None, "the engine is running"
        dimensions = self._body.dimensions or facts.embedding_size
        if dimensions != facts.embedding_size:
            _check_dimensions(dimensions, facts.embedding_size, facts.matryoshka_sizes)
        prompts = []
        for number, given in enumerate(self._inputs):
            prompt = await engine.encode(given, self._arrival)
            self._check_length(number, prompt, facts.config.max_model_len or 0)
            prompts.append(prompt)
            await asyncio.sleep(0)  # This lets other answers continue.
        ticket.queue(sum(len(prompt.token_ids) for prompt in prompts))
        found = await engine.embed_all(prompts, tenant=self._tenant, weight=ticket.tenant.weight)
        vectors = [output.outputs.embedding for output in found]
        if dimensions != facts.embedding_size:
            vectors = [_cut(vector, dimensions) for vector in vectors]
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        headers = ignored(unread_fields(self._body))
        await self._send_json(lambda: self._reply(vectors, num_tokens), headers)
        service.metrics.embedded(len(prompts), num_tokens, perf_counter() - self._arrival)

    def _check_length(self, number: int, prompt: EncodedPrompt, limit: int) -> None:
        length = len(prompt.token_ids)
        if length > limit:
            raise ContextLengthError(
                f"Text {number} of `input` has {length} tokens; the model takes {limit}.",
                f"Shorten it by {length - limit} tokens, or embed it in parts.",
            )

    def _reply(self, vectors: Sequence[Sequence[float]], num_tokens: int) -> dict[str, Any]:
        encode = _base64 if self._body.encoding_format == "base64" else list
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {
            "object": "list",
            "data": data,
            "model": self._body.model or self._service.model_names[0],
            "usage": usage,
        }


def _base64(vector: Sequence[float]) -> str:
    """Float32 numbers in little endian, as base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
