"""Requests of every kind, and what the engine alone answers to each: by itself, one at a time, no prefix cache.

For: `soak`. Not for: timing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sse_client import events

from twinphase import LLM, SamplingParams
from twinphase.bench.client.client import Reply
from twinphase.request import StructuredOutputsParams

__all__ = ["Answer", "Sample", "answers_of", "fill", "make_pool"]

TOPICS = ("the sea", "a lighthouse", "bread", "winter", "an old clock", "rivers", "a small dog", "maps", "rain", "gold")
SYSTEM = "You are a patient teacher. " + "Answer in plain words, give one example, and never use a list. " * 12
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
VOCABULARY = (1000, 40000)
GREEDY = {"temperature": 0.0}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Answer:
    """One choice of a reply."""

    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass
class Sample:
    """A request.

    Attributes:
        kind: for the report.
        path: of the API.
        body: without `stream`.
        answers: of the engine alone.
        prompt_tokens: of the prompt, as the engine counts it.
    """

    kind: str
    path: str
    body: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)
    prompt_tokens: int = 0


def make_pool(seed: int = 0) -> list[Sample]:
    """Sixty different requests."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(*VOCABULARY) for _ in range(count)]

    def drawn(**others: Any) -> dict[str, Any]:
        return {"temperature": round(rng.uniform(0.6, 1.2), 2), "seed": rng.randrange(2**31), **others}

    def chat(text: str, system: str | None = None) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}] if system else []
        return {"messages": [*messages, {"role": "user", "content": text}]}

    prefix = ids(512)
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}
    samples = []
    for index, topic in enumerate(TOPICS):
        whole = {**GREEDY, "max_tokens": rng.randint(16, 64), "ignore_eos": True}
        stops = {"stop": [" the", ".", "\n\n"][: 1 + index % 3], "max_tokens": 64}
        more = ids(rng.randint(16, 200))
        samples += [
            Sample("chat", CHAT, {**chat(f"Tell me about {topic}."), **GREEDY, "max_tokens": 48}),
            Sample("shared system", CHAT, {**chat(f"Why {topic}?", SYSTEM), **drawn(top_p=0.9), "max_tokens": 64}),
            Sample("long prompt", COMPLETION, {"prompt": ids(rng.randint(600, 1500)), **whole}),
            Sample("shared prefix", COMPLETION, {"prompt": prefix + more, **drawn(top_k=40), "max_tokens": 64}),
            Sample("n=2", CHAT, {**chat(f"About {topic}."), **drawn(presence_penalty=0.5), "n": 2, "max_tokens": 32}),
            Sample("stop strings", COMPLETION, {"prompt": f"I like {topic} because", **stops, **drawn(min_p=0.02)})
            if index % 2
            else Sample("schema", CHAT, {**chat(f"A person and {topic}."), **drawn(), **form, "max_tokens": 96}),
        ]
    return samples


def fill(samples: Sequence[Sample], llm: LLM) -> None:
    """Have the engine answer each, alone."""
    for sample in samples:
        body = dict(sample.body)
        n, format = body.pop("n", 1), body.pop("response_format", None)
        prompt, messages = body.pop("prompt", None), body.pop("messages", None)
        if format:
            body["structured_outputs"] = StructuredOutputsParams(json=format["json_schema"]["schema"])
        for index in range(n):
            params = SamplingParams(**{**body, "seed": body["seed"] + index} if "seed" in body else body)
            if messages:
                (output,) = llm.chat(messages, params, use_tqdm=False)
            else:
                (output,) = llm.generate([prompt], params, use_tqdm=False)
            found = output.outputs[0]
            sample.answers.append(Answer(found.token_ids, found.text, found.finish_reason))
            sample.prompt_tokens = len(output.prompt_token_ids)


def answers_of(reply: Reply, sample: Sample, stream: bool) -> list[Answer]:
    """What a whole reply says, however it came; token ids were asked for."""
    chat = sample.path == CHAT
    if not stream:
        choices = reply.json()["choices"]
        texts = [choice["message"]["content"] if chat else choice["text"] for choice in choices]
        return [
            Answer(choice["token_ids"], text or "", choice["finish_reason"])
            for choice, text in zip(choices, texts, strict=True)
        ]
    token_ids: list[list[int]] = [[] for _ in sample.answers]
    texts, reasons = [""] * len(sample.answers), [""] * len(sample.answers)
    for _, data in events(reply):
        for choice in data.get("choices", ()):
            index = choice["index"]
            token_ids[index] += choice["token_ids"]
            texts[index] += (choice["delta"].get("content") or "") if chat else choice["text"]
            reasons[index] = choice["finish_reason"] or reasons[index]
    return [Answer(*each) for each in zip(token_ids, texts, reasons, strict=True)]
