"""A target for loads: any server at a URL that speaks OpenAI's protocol.

Token counts are the server's (`usage`). Prompts are text, which every such server accepts; given
token ids are sent as ids if the server is known to accept them. `server_times.py` has the server's
own latencies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from twinphase import InvalidRequestError, TwinphaseError
from twinphase.phases.observation import Observation
from twinphase_bench.client.client import (
    SEND_NOW,
    Address,
    Reply,
    ServerUnreachableError,
    exchange,
    without_secrets,
)
from twinphase_bench.client.sse import MAX_MESSAGE_CHARACTERS, observe
from twinphase_bench.load.workload import WORDS, Sizing, TextMaker
from twinphase_bench.targets.servers import WITH_EXTENSIONS, Server, detect
from twinphase_bench.targets.target import LoadTarget, Prompt, TargetFacts

# A connection is opened this long before its request is due, or earlier if the server is far away.
MIN_LEAD_SECONDS = 0.1
LEAD_PER_CONNECT_TIME = 4.0
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GET_SECONDS = 30.0
# A shorter API key is not removed from messages, because it would match ordinary text.
MIN_SECRET_CHARACTERS = 4
# Enough words for a stable average of tokens per word.
PROBE_WORDS = 240
PREFILL = (
    "client TTFT of a request alone: intended send to first piece of output, server and network in "
    "it"
)
DECODE = (
    "gaps between pieces of output at the client, over the tokens that the server's usage counts"
)


class TargetFailedError(TwinphaseError):
    """The target refuses a request that the measurement needs, or does not answer."""


@dataclass(frozen=True)
class Dialect:
    """The form of requests to this server.

    Attributes:
        endpoint: "completions" or "chat".
        ignore_eos: whether to request outputs of exact length, which continue after the end of
            text.
        include_usage: whether to request token counts in the stream.
        limit: name of the field that limits the output.
    """

    endpoint: str
    ignore_eos: bool = True
    include_usage: bool = True
    limit: str = "max_tokens"


class OpenAITarget(LoadTarget):
    """A server at a URL; `OpenAITarget.open` makes it.

    Attributes:
        facts: facts for the report.
        server: the detected server.
        dialect: form of the requests.
        notes: missing features of the server, for the report.
        lead: seconds before a request is due at which `send` or `start` must be called.
    """

    def __init__(
        self, address: Address, model: str, *, api_key: str = "", timeout: float = 600.0
    ) -> None:
        """`address` is resolved, with a path without "/v1"; this does not connect yet."""
        self.address = address
        self.model = model
        self.timeout = timeout
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._api_key = api_key
        self.dialect = Dialect("completions")
        self.server = Server("unknown")
        self.lead = MIN_LEAD_SECONDS
        self.notes: list[str] = []
        self.facts = TargetFacts(
            name=address.url,
            kind="openai",
            engine="unknown",
            model=model,
            precision="unknown",
            context_length=None,
            prefill_definition=PREFILL,
            decode_definition=DECODE,
        )
        self._sizing: Sizing | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        endpoint: str = "auto",
        timeout: float = 600.0,
    ) -> OpenAITarget:
        """Detect the server, its model, and the form of its requests.

        Args:
            url: `http://host:port`, or that with the API's path, `.../v1`.
            model: name of the model; if None, the first one that the server lists.
            api_key: OPENAI_API_KEY of the environment if None.
            endpoint: "completions", "chat", or "auto": the first of these that answers.
            timeout: seconds that a reply may take.

        Raises:
            ServerUnreachableError: no server answers at the URL.
            InvalidRequestError: the URL, the key or the endpoint is not valid.
            TargetFailedError: the server cannot be measured.
        """
        if endpoint not in ("auto", *ROUTES):
            raise InvalidRequestError(
                f"--endpoint is {endpoint!r}.", "Use auto, completions or chat."
            )
        key = os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key
        if not key.isprintable() or not key.isascii():
            raise InvalidRequestError(
                "The API key has characters that no header can carry.", "Check --api-key."
            )
        address = await Address.parse(url).resolve()
        address = replace(address, path=address.path.removesuffix("/v1"))
        target = cls(address, model or "", api_key=key, timeout=timeout)
        entry = await target._find_model(model)
        target.server = await detect(entry, target._json, target._text)
        await target._agree(endpoint)
        target.facts = target._facts(without_secrets(url))
        return target

    async def ask(
        self, route: str, body: Mapping[str, Any] | None = None, intended: float = SEND_NOW
    ) -> Reply:
        """GET a route, such as "/v1/models", or POST if there is a body."""
        data = b"" if body is None else msgspec.json.encode(body)
        method, timeout = ("POST", self.timeout) if data else ("GET", GET_SECONDS)
        head = self.address.head(method, f"{self.address.path}{route}", self._headers, len(data))
        return await exchange(self.address, head + data, intended=intended, timeout=timeout)

    async def start(self, prompt: Prompt, max_tokens: int, intended: float = SEND_NOW) -> Reply:
        """Send a request when it is due; return the unparsed reply, because parsing takes time."""
        reply = await self.ask(
            ROUTES[self.dialect.endpoint], self.body(prompt, max_tokens), intended
        )
        reply.asked_tokens = max_tokens
        return reply

    def read(self, reply: Reply) -> Observation:
        """The observation of a reply, without the API key, which some servers repeat in errors."""
        seen = observe(reply)
        if len(self._api_key) >= MIN_SECRET_CHARACTERS:
            seen.error = seen.error.replace(self._api_key, "(the API key)")
        if seen.num_output_tokens is None and seen.finish_reason == "length" and reply.asked_tokens:
            seen.num_output_tokens = (
                reply.asked_tokens
            )  # The server states that it generated as many tokens as requested.
        return seen

    async def send(
        self, prompt: Prompt, max_tokens: int, intended: float = SEND_NOW
    ) -> Observation:
        """Send a request when it is due, and receive and parse its whole answer."""
        return self.read(await self.start(prompt, max_tokens, intended))

    def body(
        self, prompt: Prompt, max_tokens: int, dialect: Dialect | None = None
    ) -> dict[str, Any]:
        """The JSON of a request."""
        how = dialect or self.dialect
        body: dict[str, Any] = {
            "model": self.model,
            how.limit: max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if how.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            ids = prompt.token_ids and (self.server.kind in WITH_EXTENSIONS or not prompt.text)
            body["prompt"] = list(prompt.token_ids) if ids else prompt.text
        if how.ignore_eos:
            body["ignore_eos"] = True
        if how.include_usage:
            body["stream_options"] = {"include_usage": True}
        return body

    async def sizing(self) -> Sizing:
        """Measure the server's tokens per word, by its own count of three prompts."""
        if self._sizing is None:
            word = WORDS[0]
            many_words = TextMaker(0x512E).words(PROBE_WORDS, 0)
            counts = [
                await self._count_prompt(Prompt(text))
                for text in (word, f"{word} {word}", many_words)
            ]
            if None in counts:
                self.notes.append(
                    "the server does not count prompt tokens: prompt lengths are in words"
                )
                self._sizing = Sizing(1.0, 0.0, counted=False)
            else:
                one, two, many = (count or 0 for count in counts)
                # The second word added this number of tokens, and so did the first.
                overhead = max(0, 2 * one - two)
                if many <= overhead:
                    raise TargetFailedError(
                        f"{self.facts.name} counts {many} tokens for {PROBE_WORDS} words."
                    )
                self._sizing = Sizing((many - overhead) / PROBE_WORDS, overhead)
        return self._sizing

    async def _count_prompt(self, prompt: Prompt) -> int | None:
        """Tokens of a prompt by the server's count, which some report only without streaming."""
        seen = await self.send(prompt, 1)
        if seen.error and not seen.error.startswith("no output"):
            raise TargetFailedError(f"{self.facts.name} failed on a short prompt: {seen.error}")
        if seen.num_prompt_tokens is not None:
            return seen.num_prompt_tokens
        body = {**self.body(prompt, 1), "stream": False}
        body.pop("stream_options", None)
        found = (await self.ask(ROUTES[self.dialect.endpoint], body)).json()
        usage = found.get("usage") if isinstance(found, dict) else None
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) and count > 0 else None

    async def _json(self, route: str) -> Any:
        reply = await self.ask(route)
        return reply.json() if reply.status == 200 else None

    async def _text(self, route: str) -> str:
        reply = await self.ask(route)
        return reply.body.decode(errors="replace") if reply.status == 200 else ""

    async def _find_model(self, model: str | None) -> Mapping[str, Any]:
        reply = await self.ask("/v1/models")
        _check_key(reply)
        if reply.connected > reply.connect_began:
            self.lead = max(MIN_LEAD_SECONDS, LEAD_PER_CONNECT_TIME * reply.connect_seconds)
        if reply.error and not reply.status:
            raise ServerUnreachableError(
                f"{self.address.url} gives no HTTP reply: {reply.error}.",
                "Check the URL: http:// or https://, and a name that its certificate has.",
            )
        found = reply.json()
        listed = found.get("data") if isinstance(found, dict) else None
        entries = [entry for entry in listed or () if isinstance(entry, dict) and entry.get("id")]
        if model is not None:
            return next((entry for entry in entries if entry["id"] == model), {})
        if not isinstance(listed, list):
            raise InvalidRequestError(
                f"{self.address.url} does not look like an OpenAI-compatible server (GET "
                f"/v1/models: {reply.status}).",
                "Check host and port; if it is one that lists no models, give --model NAME.",
            )
        if not entries:
            raise InvalidRequestError(
                f"{self.address.url} lists no model (http {reply.status}).", "Give --model NAME."
            )
        self.model = str(entries[0]["id"])
        if len(entries) > 1:
            self.notes.append(f"the server lists {len(entries)} models; the first was taken")
        return entries[0]

    async def _agree(self, endpoint: str) -> None:
        """Find the dialect by requests for two tokens, with fewer and fewer optional fields."""
        prompt = Prompt(TextMaker(seed=0xA63E).words(8, 0))
        refusals = []
        for name in ROUTES if endpoint == "auto" else (endpoint,):
            for dialect in _dialects(name):
                reply = await self.ask(ROUTES[name], self.body(prompt, 2, dialect))
                _check_key(reply)
                if reply.status == 200:
                    self._note(dialect, endpoint, self.read(reply))
                    self.dialect = dialect
                    return
                refusals.append(f"{name}: {self.read(reply).error}")
                if reply.status not in (400, 422):  # The error is not about an unknown field.
                    break
        raise TargetFailedError(
            f"{self.address.url} does not answer a request of two tokens. "
            f"{refusals[-1][:MAX_MESSAGE_CHARACTERS].rstrip('. ')}.",
            "Check the model's name and the server's log.",
        )

    def _note(self, dialect: Dialect, wanted: str, seen: Observation) -> None:
        if wanted == "auto" and dialect.endpoint == "chat":
            self.notes.append("the server has no /v1/completions: /v1/chat/completions was used")
        if not dialect.ignore_eos:
            self.notes.append(
                "the server refuses `ignore_eos`: outputs may be shorter than asked for"
            )
        elif self.server.kind not in WITH_EXTENSIONS:
            self.notes.append(
                "the server may ignore `ignore_eos`: outputs may be shorter than asked for"
            )
        if seen.num_output_tokens is None:
            self.notes.append(
                "the server's stream has no `usage`: an output that ended by its length has the "
                "length asked for, others are not counted and have no TPOT"
            )

    def _facts(self, url: str) -> TargetFacts:
        server = self.server
        details = {
            "endpoint": ROUTES[self.dialect.endpoint],
            "recognised by": server.found_by or "nothing",
        }
        details |= {**server.details, **({"notes": "; ".join(self.notes)} if self.notes else {})}
        return replace(
            self.facts,
            name=url,
            engine=server.title,
            model=self.model,
            context_length=server.context_length,
            details=details,
        )


def _check_key(reply: Reply) -> None:
    if reply.status in (401, 403):
        raise InvalidRequestError(
            "The server requires an API key.", "Give --api-key, or set OPENAI_API_KEY."
        )


def _dialects(endpoint: str) -> list[Dialect]:
    """Forms of a request, from the most fields to the fewest."""
    both = [Dialect(endpoint, eos, usage) for usage in (True, False) for eos in (True, False)]
    if endpoint == "chat":
        both.append(Dialect(endpoint, False, True, "max_completion_tokens"))
    return both
