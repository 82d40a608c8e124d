"""Scores pairs of texts over HTTP: vLLM's score API, and the rerank API of Jina and Cohere."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from twinphase.errors import InvalidRequestError
from twinphase.server.access import Ticket
from twinphase.server.exchange import Exchange
from twinphase.server.openai_types import RerankRequest, ScoreRequest
from twinphase.server.replies import ignored
from twinphase.server.service import Service
from twinphase.server.strict import unread_fields
from twinphase.server.text_routes import ERRORS, OBJECT, Documented

SCORES: Documented = {200: {"content": OBJECT}, **ERRORS}


class _Pairs(Exchange):
    """The scores of a request's pairs, in order."""

    def __init__(
        self,
        service: Service,
        body: ScoreRequest | RerankRequest,
        first: dict[str, Sequence[str]],
        second: dict[str, Sequence[str]],
    ) -> None:
        """`first` and `second` are the texts of all pairs, by the name of their field."""
        service.check_task("score", body.model)
        super().__init__(service, 1)  # It counts once, for any number of pairs.
        self._body = body
        for name, texts in (first | second).items():
            _check_texts(name, texts, service.config.max_prompts)
        self._first = [text for texts in first.values() for text in texts]
        self._second = [text for texts in second.values() for text in texts]

    async def _answer(self, ticket: Ticket) -> None:
        service = self._service
        body = self._body
        engine = service.require_engine()
        pairs = await engine.encode_pairs(self._first, self._second, body.truncate_prompt_tokens)
        ticket.queue(pairs.num_tokens)
        outputs = await engine.score(
            pairs,
            use_activation=body.use_activation,
            tenant=self._tenant,
            weight=ticket.tenant.weight,
        )
        scores = [output.outputs.score for output in outputs]
        usage = {"prompt_tokens": pairs.num_tokens, "total_tokens": pairs.num_tokens}
        model = body.model or service.model_names[0]
        reply = {"model": model, "usage": usage}
        await self._send_json(lambda: reply | self._reply(scores), ignored(unread_fields(body)))
        seconds = perf_counter() - self._arrival
        service.metrics.embedded(len(scores), pairs.num_tokens, seconds)

    @abstractmethod
    def _reply(self, scores: Sequence[float]) -> dict[str, Any]:
        """The reply without `model` and `usage`."""


class Scores(_Pairs):
    """POST /v1/score."""

    def __init__(self, service: Service, body: ScoreRequest) -> None:
        first = body.text_1 if isinstance(body.text_1, list) else [body.text_1]
        second = body.text_2 if isinstance(body.text_2, list) else [body.text_2]
        super().__init__(service, body, {"text_1": first}, {"text_2": second})

    def _reply(self, scores: Sequence[float]) -> dict[str, Any]:
        return {
            "id": f"score-{secrets.token_hex(16)}",
            "object": "list",
            "created": int(time.time()),
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ],
        }


class Ranking(_Pairs):
    """POST /v1/rerank: the best documents first."""

    def __init__(self, service: Service, body: RerankRequest) -> None:
        self._documents = [
            document if isinstance(document, str) else document.text for document in body.documents
        ]
        self._top_n = body.top_n or len(self._documents)
        self._with_texts = body.return_documents
        super().__init__(service, body, {"query": [body.query]}, {"documents": self._documents})

    def _reply(self, scores: Sequence[float]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return {
            "id": f"rerank-{secrets.token_hex(16)}",
            "results": [
                {"index": index}
                | ({"document": {"text": self._documents[index]}} if self._with_texts else {})
                | {"relevance_score": scores[index]}
                for index in order[: self._top_n]
            ],
        }


def _check_texts(name: str, texts: Sequence[str], limit: int) -> None:
    if not 0 < len(texts) <= limit:
        raise InvalidRequestError(
            f"`{name}` has {len(texts)} texts.", f"Use 1 to {limit} in a request."
        )
    if "" in texts:
        raise InvalidRequestError(f"Text {texts.index('')} of `{name}` is empty.", "Leave it out.")


def add_scores(api: APIRouter, service: Service) -> None:
    """Add the routes, under each of vLLM's paths."""

    async def score(body: ScoreRequest) -> Response:
        """Score pairs of texts, as vLLM's API does."""
        return Scores(service, body)

    async def rerank(body: RerankRequest) -> Response:
        """Order documents by how well they answer a query, as Jina's and Cohere's APIs do."""
        return Ranking(service, body)

    for path in ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"):
        api.add_api_route(
            path,
            score if path.endswith("score") else rerank,
            methods=["POST"],
            responses=SCORES,
            response_class=Response,
            operation_id=path.strip("/").replace("/", "_"),
        )
