"""Requests of every kind, and what the engine alone, without a prefix cache, answers to each."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dialects import ANTHROPIC, OLLAMA, PATHS, form, joined, whole
from serving.processes import COMPLETIONS, events, random_prompt
from twinphase import LLM, SamplingParams
from twinphase.constraint import StructuredOutputsParams
from twinphase_bench.client.client import Reply

TOPICS = (
    "the sea",
    "a lighthouse",
    "bread",
    "winter",
    "an old clock",
    "rivers",
    "a small dog",
    "maps",
    "rain",
    "gold",
)
SYSTEM = (
    "You are a patient teacher. "
    + "Answer in plain words, give one example, and never use a list. " * 12
)
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
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
NAME = "served"  # of the model, which the other APIs' requests have to name
DIALECTS = {path: dialect for dialect, path in PATHS.items() if dialect in (ANTHROPIC, OLLAMA)}
REASONS = {
    ANTHROPIC: {"stop": "end_turn", "length": "max_tokens"},
    OLLAMA: {},
    RESPONSES: {"stop": "completed", "length": "incomplete"},
}
Answer = tuple[
    list[int], str, str
]  # token ids, or in other APIs than OpenAI's how many there are; text, finish_reason


@dataclass
class Sample:
    """A request, with what the engine alone answers to each of its choices."""

    kind: str
    path: str
    body: dict[str, Any]  # without `stream`
    alone: dict[str, Any] | None = None  # the same chat in OpenAI's words, if `body` is in others
    answers: list[Answer] = field(default_factory=list)
    prompt_tokens: int = 0


def make_samples() -> list[Sample]:
    """Sixty different requests, the same each time."""
    rng = random.Random(0)
    prefix = random_prompt(rng, 512)
    form = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA},
        }
    }

    def drawn(**others: Any) -> dict[str, Any]:
        return {
            "temperature": round(rng.uniform(0.6, 1.2), 2),
            "seed": rng.randrange(2**31),
            **others,
        }

    def chat(text: str, system: str | None = None) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}] if system else []
        return {"messages": [*messages, {"role": "user", "content": text}]}

    samples = []
    for index, topic in enumerate(TOPICS):
        whole = {"temperature": 0.0, "max_tokens": rng.randint(16, 64), "ignore_eos": True}
        stops = {"stop": [" the", ".", "\n\n"][: 1 + index % 3], "max_tokens": 64}
        shared = prefix + random_prompt(rng, rng.randint(16, 200))
        long = random_prompt(rng, rng.randint(600, 1500))
        samples += [
            Sample(
                "chat",
                CHAT,
                {**chat(f"Tell me about {topic}."), "temperature": 0.0, "max_tokens": 48},
            ),
            Sample(
                "shared system",
                CHAT,
                {**chat(f"Why {topic}?", SYSTEM), **drawn(top_p=0.9), "max_tokens": 64},
            ),
            Sample("long prompt", COMPLETIONS, {"prompt": long, **whole}),
            Sample(
                "shared prefix",
                COMPLETIONS,
                {"prompt": shared, **drawn(top_k=40), "max_tokens": 64},
            ),
            Sample(
                "n=2",
                CHAT,
                {
                    **chat(f"About {topic}."),
                    **drawn(presence_penalty=0.5),
                    "n": 2,
                    "max_tokens": 32,
                },
            ),
            Sample(
                "stop strings",
                COMPLETIONS,
                {"prompt": f"I like {topic} because", **stops, **drawn(min_p=0.02)},
            )
            if index % 2
            else Sample(
                "schema",
                CHAT,
                {**chat(f"A person and {topic}."), **drawn(), **form, "max_tokens": 96},
            ),
        ]
    return samples


def make_other_samples() -> list[Sample]:
    """Chats in the words of the other APIs, plain ones and with a schema."""
    samples = []
    for index, topic in enumerate(TOPICS):
        chat = {
            "messages": [{"role": "user", "content": f"What about {topic}?"}],
            "temperature": 0.0,
            "max_tokens": 48,
        }
        alone = dict(chat)
        fields: dict[str, dict[str, Any]] = {ANTHROPIC: {}, OLLAMA: {}}
        if index % 2:
            named = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
            alone |= {"response_format": named, "max_tokens": 96}
            fields = {dialect: form(dialect, SCHEMA) for dialect in fields}
        options = {"temperature": 0.0, "num_predict": alone["max_tokens"]}
        told = {"model": NAME, "messages": chat["messages"]}
        claude = {
            **told,
            "temperature": 0.0,
            "max_tokens": alone["max_tokens"],
            **fields[ANTHROPIC],
        }
        samples += [
            Sample("Anthropic", PATHS[ANTHROPIC], claude, alone),
            Sample("Ollama", PATHS[OLLAMA], {**told, "options": options, **fields[OLLAMA]}, alone),
        ]
        item = {"model": NAME, "input": chat["messages"][0]["content"], "temperature": 0.0}
        item |= {"max_output_tokens": 48, "store": bool(index % 2)}
        samples.append(Sample("Responses", RESPONSES, item, chat))
    return samples


def answer_alone(samples: Sequence[Sample], llm: LLM) -> None:
    """Have the engine answer each request by itself."""
    for sample in samples:
        body = dict(sample.alone or sample.body)
        n = body.pop("n", 1)
        format = body.pop("response_format", None)
        prompt = body.pop("prompt", None)
        messages = body.pop("messages", None)
        if format:
            body["structured_outputs"] = StructuredOutputsParams(
                json=format["json_schema"]["schema"]
            )
        for index in range(n):
            params = SamplingParams(
                **{**body, "seed": body["seed"] + index} if "seed" in body else body
            )
            if messages:
                (output,) = llm.chat(messages, params, use_tqdm=False)
            else:
                (output,) = llm.generate([prompt], params, use_tqdm=False)
            found = output.outputs[0]
            if sample.alone:
                reason = REASONS[DIALECTS.get(sample.path, RESPONSES)].get(
                    found.finish_reason, found.finish_reason
                )
                sample.answers.append(([len(found.token_ids)], found.text, reason))
            else:
                sample.answers.append((found.token_ids, found.text, found.finish_reason))
            sample.prompt_tokens = len(output.prompt_token_ids)


def answers_of(reply: Reply, sample: Sample, stream: bool) -> list[Answer]:
    """What a whole reply says, however it came; token ids were asked for."""
    dialect = DIALECTS.get(sample.path)
    if dialect:
        found = joined(dialect, parts_of(reply, sample)) if stream else reply.json()
        said = whole(dialect, found)
        return [([said.num_output], said.text, said.reason)]
    if sample.path == RESPONSES:
        return [_response_of(events(reply)[-1]["response"] if stream else reply.json())]
    token_ids: list[list[int]] = [[] for _ in sample.answers]
    texts = [""] * len(sample.answers)
    reasons = [""] * len(sample.answers)
    for message in events(reply) if stream else [reply.json()]:
        for choice in message.get("choices", ()):
            index = choice["index"]
            part = choice.get("delta") or choice.get("message") or {}
            token_ids[index] += choice["token_ids"]
            texts[index] += (part.get("content") or "") if sample.path == CHAT else choice["text"]
            reasons[index] = choice["finish_reason"] or reasons[index]
    return list(zip(token_ids, texts, reasons, strict=True))


def _response_of(body: dict[str, Any]) -> Answer:
    """The answer in a body of the Responses API."""
    contents = [part for item in body["output"] for part in item.get("content", ())]
    text = "".join(part["text"] for part in contents)
    return [body["usage"]["output_tokens"]], text, body["status"]


def parts_of(reply: Reply, sample: Sample) -> list[dict[str, Any]]:
    """JSON of a stream's events, or lines, as far as they came."""
    if DIALECTS.get(sample.path) == OLLAMA:
        return [
            json.loads(line)
            for line in reply.body.splitlines(keepends=True)
            if line.endswith(b"\n")
        ]
    return events(reply)
