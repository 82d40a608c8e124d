"""OpenAI's unchanged Python client against a server: answers are the engine's own."""

import asyncio
import json
import re
from itertools import product
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from dialects import function, text_part, user
from raw_client import until
from twinphase import LLM, SamplingParams
from twinphase.constraint import StructuredOutputsParams
from twinphase.request import RequestCounts
from twinphase.server.observe import spec_decode_metrics
from twinphase.server.tools import HERMES, tool_grammar

USER = [user("hello world")]
WORDS = {"the": 20, " the": 20, "hello": 20, " world": 20, " and": 20, "ing": 20}


class Trip(BaseModel):
    model_config = {"extra": "forbid"}

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


TOOLS = [
    openai.pydantic_function_tool(Trip, name="book"),
    openai.pydantic_function_tool(Trip, name="cancel"),
]
TOOLS = json.loads(json.dumps(TOOLS))


@pytest.fixture(scope="module")
def llm(tiny_path):
    """The engine without a server: what every answer of `server` has to be."""
    return LLM(tiny_path)


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def model(server):
    return server.model


@pytest.fixture(scope="module")
def words(llm):
    """A bias to tokens that are words, so that a random model writes text."""
    return {
        str(llm.tokenizer.encode(word, add_special_tokens=False)[0]): bias
        for word, bias in WORDS.items()
    }


def plain(value):
    return json.loads(value.model_dump_json()) if isinstance(value, BaseModel) else value


def joined(chunks):
    """A streamed reply in the shape of a whole one."""
    choices = {}
    usage = None
    for chunk in map(plain, chunks):
        usage = chunk["usage"] or usage
        for piece in chunk["choices"]:
            delta = piece.get("delta") or {"content": piece["text"]}
            choice = choices.setdefault(
                piece["index"], {"text": "", "calls": [], "logprobs": None, "token_ids": []}
            )
            choice["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if call.get("id"):
                    assert call["index"] == len(choice["calls"]) and call["type"] == "function"
                    choice["calls"].append([call["function"]["name"], ""])
                choice["calls"][call["index"]][1] += call["function"]["arguments"]
            for key, entries in (piece.get("logprobs") or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                if entries is not None:
                    choice["logprobs"][key] = choice["logprobs"].get(key, []) + entries
            choice["token_ids"] += piece["token_ids"]
            assert choice.get("finish_reason") is None
            choice["finish_reason"] = piece["finish_reason"]
            choice["stop_reason"] = piece.get("stop_reason")
    return [choices[index] for index in sorted(choices)], usage


def whole(reply):
    """The same of a reply in one piece."""
    reply = plain(reply)
    choices = []
    for choice in reply["choices"]:
        message = choice.get("message") or {"content": choice["text"], "tool_calls": None}
        calls = [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message["tool_calls"] or []
        ]
        logprobs = choice["logprobs"] and {
            key: value for key, value in choice["logprobs"].items() if value is not None
        }
        kept = {key: choice[key] for key in ("token_ids", "finish_reason", "stop_reason")}
        choices.append(
            {"text": message["content"] or "", "calls": calls, "logprobs": logprobs, **kept}
        )
    return choices, reply["usage"]


SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "trip", "schema": Trip.model_json_schema(), "strict": True},
}
CASES = {  # fields of the request, and of the engine's parameters where they have other names
    "greedy": ({"temperature": 0, "max_tokens": 24}, {}),
    "sampled": (
        {
            "seed": 7,
            "temperature": 1.3,
            "top_p": 0.9,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.2,
            "extra_body": {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
            "max_tokens": 24,
        },
        {},
    ),
    "logprobs": (
        {"temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 9},
        {"logprobs": 3},
    ),
    "three": ({"seed": 5, "n": 3, "max_tokens": 12, "logprobs": True}, {"logprobs": 0}),
    "stop": ({"seed": 1, "stop": ["ing the", " and hello"], "max_tokens": 400}, {}),
    "words": (
        {
            "seed": 4,
            "max_tokens": 400,
            "stop": ["ing the", " world and"],
            "extra_body": {"bad_words": ["hello", "the the"], "include_stop_str_in_output": True},
        },
        {},
    ),
    "tokens": (
        {"seed": 6, "max_tokens": 30, "extra_body": {"allowed_token_ids": list(range(250, 290))}},
        {},
    ),
    "schema": ({"seed": 2, "response_format": SCHEMA, "max_tokens": 400}, {}),
    "tools": ({"seed": 3, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400}, {}),
}


def offline(llm, choices, case, fields, words):
    """Tokens and log probabilities of the same request without a server, for each choice."""
    request, others = CASES[case]
    given = {**request, **request.get("extra_body", {}), **others, **fields}
    names = SamplingParams.__dataclass_fields__.keys() & given.keys() - {"n", "seed"}
    params = {name: given[name] for name in names}
    if case == "schema":
        params["structured_outputs"] = StructuredOutputsParams(json=Trip.model_json_schema())
    if case == "tools":
        params["structured_outputs"] = tool_grammar(
            TOOLS, "required", None, HERMES, lambda text: None
        )
    bias = {int(token_id): value for token_id, value in words.items()}
    seeds = [None if given.get("seed") is None else given["seed"] + i for i in range(len(choices))]
    prompts = [{"prompt_token_ids": choice["prompt_token_ids"]} for choice in choices]
    wanted = [SamplingParams(**params, logit_bias=bias, seed=seed) for seed in seeds]
    return [result.outputs[0] for result in llm.generate(prompts, wanted, use_tqdm=False)]


@pytest.mark.parametrize("case", CASES)
def test_streamed_and_whole_answers_are_those_of_the_engine(client, model, llm, words, case):
    request = {"model": model, "messages": USER, "logit_bias": words, **CASES[case][0]}
    request["extra_body"] = {**request.get("extra_body", {}), "return_token_ids": True}
    reply = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    choices, usage = whole(reply)
    streamed, streamed_usage = joined(chunks)
    assert streamed == choices
    (fingerprint,) = {one.system_fingerprint for one in [reply, *chunks]}
    assert re.fullmatch("fp_[0-9a-f]{10}", fingerprint)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1) and chunks[
        -1
    ].choices == []
    cached = streamed_usage.pop("prompt_tokens_details")["cached_tokens"]
    assert usage.pop("prompt_tokens_details")["cached_tokens"] <= cached  # it was the second
    assert streamed_usage == usage
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    assert usage["prompt_tokens"] == len(reply.choices[0].prompt_token_ids)
    outputs = offline(llm, plain(reply)["choices"], case, {}, words)
    for choice, output in zip(choices, outputs, strict=True):
        assert choice["token_ids"] == output.token_ids
        if not choice["calls"]:
            assert (choice["text"], choice["finish_reason"]) == (output.text, output.finish_reason)
        entries = choice["logprobs"]["content"] if request.get("logprobs") else []
        assert len(entries) == len(output.logprobs or [])
        for entry, token_id, ranked in zip(
            entries, output.token_ids, output.logprobs or [], strict=False
        ):
            assert entry["logprob"] == ranked[token_id].logprob
            top = sorted((logprob.rank, logprob.logprob) for logprob in ranked.values())
            expected = [logprob for _, logprob in top[: request.get("top_logprobs", 0)]]
            assert [other["logprob"] for other in entry["top_logprobs"]] == expected
            assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    if case == "three":
        assert len({choice["text"] for choice in choices}) == 3
    if case == "stop":
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        assert (
            choices[0]["stop_reason"] in request["stop"]
            and choices[0]["stop_reason"] not in choices[0]["text"]
        )
    if case == "words":
        text = choices[0]["text"]
        assert choices[0]["finish_reason"] == "stop" and text.endswith(choices[0]["stop_reason"])
    if case == "tokens":
        assert all(250 <= i < 290 for i in choices[0]["token_ids"])
    if case == "schema":
        Trip.model_validate_json(choices[0]["text"])
    if case == "tools":
        assert choices[0]["finish_reason"] == "tool_calls" and choices[0]["text"] == ""
        assert [Trip.model_validate_json(arguments) for _, arguments in choices[0]["calls"]]


def test_completions_of_texts_and_of_tokens(client, model, llm, words):
    prompts = ["hello", " world and"]
    request = {
        "model": model,
        "max_tokens": 6,
        "seed": 1,
        "n": 2,
        "logprobs": 2,
        "logit_bias": words,
    }
    request["extra_body"] = {"return_token_ids": True}
    reply = client.completions.create(**request, prompt=prompts)
    chunks = client.completions.create(
        **request, prompt=prompts, stream=True, stream_options={"include_usage": True}
    )
    choices, usage = whole(reply)
    streamed, _ = joined(chunks)
    assert streamed == choices
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    assert [choice.prompt_token_ids for choice in reply.choices] == [ids[0], ids[0], ids[1], ids[1]]
    assert usage["prompt_tokens"] == sum(map(len, ids)) and usage["completion_tokens"] == 4 * 6
    assert whole(client.completions.create(**request, prompt=ids))[0] == choices
    params = [
        SamplingParams(
            max_tokens=6, seed=seed, logprobs=2, logit_bias={int(k): v for k, v in words.items()}
        )
        for seed in (1, 2, 1, 2)
    ]
    results = llm.generate([prompts[0], prompts[0], prompts[1], prompts[1]], params, use_tqdm=False)
    for choice, result in zip(choices, results, strict=True):
        output = result.outputs[0]
        logprobs = choice["logprobs"]
        assert (choice["text"], choice["token_ids"]) == (output.text, output.token_ids)
        chosen = [
            ranked[token_id]
            for ranked, token_id in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert logprobs["token_logprobs"] == [logprob.logprob for logprob in chosen]
        assert "".join(logprobs["tokens"]) == choice["text"]
        for start, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"].startswith(token, start)
    request = {
        "model": model,
        "prompt": prompts,
        "max_tokens": 2,
        "extra_body": {"return_token_ids": True},
        "seed": 1,
    }
    alone = client.completions.create(**request).choices
    echoed = client.completions.create(**request, echo=True).choices
    streamed, _ = joined(client.completions.create(**request, echo=True, stream=True))
    expected = [prompt + choice.text for prompt, choice in zip(prompts, alone, strict=True)]
    assert [choice.text for choice in echoed] == [choice["text"] for choice in streamed] == expected


def test_log_probabilities_of_prompts(client, model, llm):
    """As evaluation harnesses ask: prompt tokens alone, prompts as ids, several at once."""
    texts = ["one two hello", "the world is é and ü, or is it?"]
    prompts = [llm.tokenizer.encode(text) for text in texts]
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=2)
    expected = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    request = {
        "model": model,
        "prompt": prompts,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "extra_body": {"return_token_ids": True},
    }
    for max_tokens, whole in ((3, True), (0, False)):
        reply = client.completions.create(**request, max_tokens=max_tokens)
        streamed, _ = joined(
            client.completions.create(**request, max_tokens=max_tokens, stream=True)
        )
        assert reply.usage.completion_tokens == 2 * max_tokens
        for choice, streams, output, text in zip(
            reply.choices, streamed, expected, texts, strict=True
        ):
            known = output.prompt_logprobs + (output.outputs[0].logprobs if whole else [])
            ids = output.prompt_token_ids + (output.outputs[0].token_ids if whole else [])
            wanted = [
                one and one[token_id].logprob for one, token_id in zip(known, ids, strict=True)
            ]
            assert choice.logprobs.token_logprobs == wanted and wanted[0] is None
            assert [one and max(one.values()) for one in choice.logprobs.top_logprobs] == [
                one and max(entry.logprob for entry in one.values()) for one in known
            ]
            assert (
                choice.text == streams["text"] == text + (output.outputs[0].text if whole else "")
            )
            assert (
                choice.finish_reason == "length" and plain(choice.logprobs) == streams["logprobs"]
            )
            for start, token in zip(
                choice.logprobs.text_offset, choice.logprobs.tokens, strict=True
            ):
                assert "\ufffd" in token or choice.text.startswith(token, start)
    extra = {"extra_body": {"prompt_logprobs": 2}}
    reply = client.completions.create(model=model, prompt=prompts[0], max_tokens=1, **extra)
    chat = client.chat.completions.create(model=model, messages=USER, max_tokens=1, **extra)
    wanted = [
        one and {str(token_id): vars(entry) for token_id, entry in one.items()}
        for one in expected[0].prompt_logprobs
    ]
    assert reply.choices[0].prompt_logprobs == wanted
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens and chat.prompt_logprobs[0] is None
    for bad in (
        {"max_tokens": 0},
        {"stream": True, **extra},
        {"extra_body": {"prompt_logprobs": 21}},
    ):
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            client.completions.create(**{"model": model, "prompt": "a", "max_tokens": 1, **bad})


def test_limits_biases_and_fields_beyond_openais(client, model, llm):
    create = client.chat.completions.create
    for field in ("max_tokens", "max_completion_tokens"):
        reply = create(model=model, messages=USER, **{field: 3}, extra_body={"ignore_eos": True})
        assert reply.usage.completion_tokens == 3 and reply.choices[0].finish_reason == "length"
    (the,) = llm.tokenizer.encode("the", add_special_tokens=False)
    biased = create(
        model=model, messages=USER, temperature=0, logit_bias={str(the): 100}, max_tokens=4
    )
    assert biased.choices[0].message.content == "the" * 4
    free = create(
        model=model,
        messages=USER,
        temperature=0,
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )
    first = free.choices[0].token_ids[0]
    banned = create(
        model=model,
        messages=USER,
        temperature=0,
        logit_bias={str(first): -100},
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )
    assert banned.choices[0].token_ids != [first]

    def answer(**body):
        reply = client.chat.completions.create(
            model=model, messages=USER, max_tokens=8, extra_body=body
        )
        return reply.choices[0].message.content

    greedy = answer(temperature=0)
    assert answer(temperature=5, top_k=1) == answer(temperature=5, min_p=1) == greedy
    assert answer(temperature=0, repetition_penalty=1.9) != greedy


@pytest.mark.parametrize(
    "form, pattern",
    [
        ({"structured_outputs": {"regex": "(ab|c){3}"}}, "(ab|c){3}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, "a[0-9]b"),
        ({"structured_outputs": {"grammar": 'start: "x" /[yz]/'}}, "x[yz]"),
        ({"structured_outputs": {"json": {"enum": ["a"]}}}, '"a"'),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": 'start: "p" "q"'}, "pq"),
        ({"guided_json": {"const": 17}}, "17"),
    ],
)
def test_an_answer_has_the_form_asked_for(client, model, form, pattern):
    reply = client.chat.completions.create(
        model=model, messages=USER, max_tokens=50, extra_body=form
    )
    assert (
        re.fullmatch(pattern, reply.choices[0].message.content)
        and reply.choices[0].finish_reason == "stop"
    )
    reply = client.completions.create(model=model, prompt="a", max_tokens=50, extra_body=form)
    assert re.fullmatch(pattern, reply.choices[0].text)


def test_a_salt_keeps_prefixes_apart(client, model):
    messages = [user("the " * 40)]

    def cached(salt):
        body = {"cache_salt": salt} if salt else {}
        reply = client.chat.completions.create(
            model=model, messages=messages, max_tokens=1, extra_body=body
        )
        return reply.usage.prompt_tokens_details.cached_tokens

    assert [cached(salt) > 0 for salt in (None, None, "a", "a", "b")] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_a_long_prompt_tells_how_far_it_is_read(limited):
    options = {"return_progress": True}
    told = []
    with limited.client("one") as client:
        for letter in "xyzuvwabcdef":  # who reads late is told of several chunks at once
            prompt = letter * 2000
            stream = client.completions.create(
                model="b", prompt=prompt, max_tokens=1, stream=True, extra_body=options
            )
            seen = [chunk.prompt_progress for chunk in stream if not chunk.choices]
            assert seen and all(progress["total"] == 2000 for progress in seen)
            read = [progress["processed"] for progress in seen]
            assert (
                read == sorted(set(read))
                and read[-1] == 2000
                and all(count % 16 == 0 for count in read)
            )
            told.append(len(read))
            if told[-1] > 1:
                break
    assert told[-1] > 1, told


def test_usage_in_every_chunk_counts_up(client, model):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model=model, prompt="a", max_tokens=5, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts) and counts[-1] >= 1


def test_what_agents_send_is_taken(client, model):
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "developer", "content": "Be brief.", "name": "x"}, *USER],
        max_tokens=2,
        user="u",
        metadata={"run": "1"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        n=1,
        stop=None,
        safety_identifier="s",
        prompt_cache_key="k",
        modalities=["text"],
        tools=[],
        temperature=1,
        top_p=1,
        response_format={"type": "text"},
        logprobs=False,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        extra_body=dict.fromkeys(
            ["audio", "functions", "reasoning_effort", "verbosity", "max_tokens", "seed"]
        ),
    )
    assert reply.object == "chat.completion" and reply.model == model


@pytest.mark.parametrize(
    "choice, names",
    [
        ("required", {"book", "cancel"}),
        (function({"name": "cancel"}), {"cancel"}),
    ],
)
def test_calls_name_a_tool_and_obey_its_schema(client, model, llm, choice, names):
    (newline,) = llm.tokenizer.encode("\n")  # begins another call
    request = {
        "model": model,
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 2000,
        "seed": 1,
    }
    request |= {"n": 8, "logit_bias": {str(newline): 3}}
    found = [reply.message.tool_calls for reply in client.chat.completions.parse(**request).choices]
    calls = [call for calls in found for call in calls]
    assert {call.function.name for call in calls} == names
    assert all(Trip.model_validate_json(call.function.arguments) for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    assert (max(map(len, found)) > 1) == (choice == "required")  # a named one is called once
    one_each = client.chat.completions.create(**request, parallel_tool_calls=False).choices
    assert {len(reply.message.tool_calls) for reply in one_each} == {1}


def test_without_calls_tools_leave_the_answer_free(client, model, words):
    request = {
        "model": model,
        "messages": USER,
        "tools": TOOLS,
        "max_tokens": 8,
        "seed": 1,
        "logit_bias": words,
    }
    free = client.chat.completions.create(**request, tool_choice="none").choices[0]
    auto = client.chat.completions.create(**request, tool_choice="auto").choices[0]
    assert free.message.content == auto.message.content and free.message.tool_calls is None


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own model
def test_parsed_answers_go_back_into_the_conversation(client, model):
    request = {
        "model": model,
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 2000,
        "seed": 1,
    }
    with client.chat.completions.stream(messages=USER, **request) as stream:
        message = stream.get_final_completion().choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls
    ]
    for sent_back in (message, message.model_dump()):
        messages = [*USER, sent_back, *results]
        endless = {"ignore_eos": True}
        reply = client.chat.completions.create(
            model=model, messages=messages, max_tokens=2, extra_body=endless
        )
        assert reply.usage.completion_tokens == 2
    parsed = client.chat.completions.parse(
        model=model, messages=USER, response_format=Trip, max_tokens=2000, seed=1
    )
    assert parsed.choices[0].message.parsed.city in ("Rome", "Oslo")
    again = [*USER, parsed.choices[0].message.model_dump(), *USER]
    assert client.chat.completions.create(model=model, messages=again, max_tokens=1).choices


def test_a_model_goes_by_all_its_names(limited):
    with limited.client("one") as client:
        assert [model.id for model in client.models.list()] == ["a", "b"]
        assert client.models.retrieve("b").max_model_len == 4096
        for name in ("a", "b"):
            assert client.completions.create(model=name, prompt="x", max_tokens=1).model == name


def test_many_at_once_get_what_each_would_get_alone(server, model, client):
    def request(i):
        return {
            "model": model,
            "messages": [user(f"hello {i}")],
            "seed": i,
            "max_tokens": 20,
        }

    async def ask(asynchronous, i):
        stream = await asynchronous.chat.completions.create(**request(i), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as asynchronous:
            return await asyncio.gather(*(ask(asynchronous, i) for i in range(8)))

    alone = [
        client.chat.completions.create(**request(i)).choices[0].message.content for i in range(8)
    ]
    assert asyncio.run(ask_all()) == alone


def test_the_urgent_go_first_where_priorities_count(limited):
    done = []

    async def begin(client, priority, max_tokens):
        body = {"priority": priority, "ignore_eos": True}
        request = {"model": "a", "prompt": "x", "max_tokens": max_tokens, "stream": True}
        return await client.completions.create(**request, extra_body=body)

    async def finish(name, stream):
        _ = [chunk async for chunk in stream]
        done.append(name)

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{limited.url}/v1", api_key="one") as client:
            first = await begin(client, -9, 4000)
            waiting = []
            with limited.paused():  # both come while the first one runs, however fast that is
                for priority in (5, -5):
                    waiting.append(asyncio.create_task(begin(client, priority, 99)))
                    here = 1 + len(waiting)
                    await asyncio.to_thread(
                        until, lambda here=here: limited.get("/health")[1]["running"] == here
                    )
            late, urgent = await asyncio.gather(*waiting)
            await first.close()
            await asyncio.gather(finish("late", late), finish("urgent", urgent))

    asyncio.run(run())
    assert done == ["urgent", "late"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_changes_nothing_but_the_speed(client, drafting, model, words, temperature):
    asked = dict(
        model=model,
        messages=USER,
        max_tokens=48,
        seed=5,
        temperature=temperature,
        logit_bias=words,
        logprobs=True,
        top_logprobs=2,
        n=2,
        presence_penalty=0.1,
    )
    plain = client.chat.completions.create(**asked)
    answers = [(one.message.content, one.logprobs) for one in plain.choices]
    (first, _), (second, _) = answers
    predictions = (
        first,
        second[:40] + "no" + second[40:],
        [text_part(first)],
        "never said",
    )
    with drafting.client() as other:
        for prediction, asks in product(predictions, (client, other)):
            told = asks.chat.completions.create(
                **asked, prediction={"type": "content", "content": prediction}
            )
            assert [(one.message.content, one.logprobs) for one in told.choices] == answers
            details = told.usage.completion_tokens_details
            timings = told.timings
            accepted = (
                details.accepted_prediction_tokens
            )  # of both answers; timings are of the first
            assert accepted <= 2 * 48 and timings.get("draft_n_accepted", 0) <= min(
                48, timings.get("draft_n", 0)
            )
            assert asks is client or prediction is not first or accepted > 0
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_an_answer_tells_of_its_drafted_tokens_where_the_server_is_told_to(drafting, client, model):
    asked = dict(
        model=model,
        messages=USER,
        max_tokens=32,
        temperature=0,
        logit_bias={"40": 100},
        stream=True,
    )
    with drafting.client() as own:
        last = [chunk for chunk in own.chat.completions.create(**asked) if chunk.choices][-1]
    told = last.metrics["speculative_decoding"]
    timings = last.timings
    assert sum(told["per_step_drafted"]) == told["num_draft_tokens"] == timings["draft_n"] > 0
    assert (
        sum(told["per_step_accepted"])
        == told["num_accepted_draft_tokens"]
        == timings["draft_n_accepted"]
        > 0
    )
    assert (
        sum(told["acceptance_histogram"]) == told["num_spec_steps"] == len(told["per_step_drafted"])
    )
    assert (
        sum(n * count for n, count in enumerate(told["acceptance_histogram"]))
        == told["num_accepted_draft_tokens"]
    )
    said = {"model": model, "messages": USER, "stream": False}
    few = {"model": model, "input": "hello", "max_output_tokens": 2}
    for path, body in (
        ("/v1/messages", said | {"max_tokens": 2}),
        ("/api/chat", said),
        ("/v1/responses", few),
    ):
        status, answer = drafting.post(
            path, body | ({"options": {"num_predict": 2}} if "api" in path else {})
        )
        assert status == 200 and "speculative_decoding" in answer["metrics"], path
    assert (
        told["mean_acceptance_length"]
        == 1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]
    )
    plain = [chunk for chunk in client.chat.completions.create(**asked) if chunk.choices][-1]
    assert not hasattr(plain, "metrics")


def test_drafted_tokens_as_histograms():
    counts = RequestCounts("a", 4, 20, draft_steps=((4, 2), (4, 0), (2, 2)))
    told = spec_decode_metrics(counts, "summary")["metrics"]["speculative_decoding"]
    assert told == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 0.4,
        "acceptance_histogram": [1, 0, 2],
        "acceptance_histogram_by_draft_length": {"2": [0, 0, 1], "4": [1, 0, 1]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 10,
    }
    assert spec_decode_metrics(counts, "none") == {}
