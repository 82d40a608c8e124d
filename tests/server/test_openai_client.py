"""OpenAI's unchanged Python client against a server: answers are the engine's own."""

import asyncio
import json
import re
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

import dialects
from dialects import OPENAI, function, user
from raw_client import until
from twinphase import SamplingParams
from twinphase.constraint import StructuredOutputsParams
from twinphase.server.tools import HERMES, tool_grammar

USER = [user("hello world")]


class Trip(BaseModel):
    model_config = {"extra": "forbid"}

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


TOOLS = [
    openai.pydantic_function_tool(Trip, name="book"),
    openai.pydantic_function_tool(Trip, name="cancel"),
]
TOOLS = json.loads(json.dumps(TOOLS))


def plain(value):
    return json.loads(value.model_dump_json()) if isinstance(value, BaseModel) else value


def joined(chunks):
    """A streamed reply in the shape of a complete one."""
    return whole(dialects.joined(OPENAI, [plain(chunk) for chunk in chunks]))


def whole(reply):
    """The compared parts of a reply's answers, and its usage."""
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
    "greedy": ({"temperature": 0, "max_completion_tokens": 24}, {"max_tokens": 24}),
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


def offline(llm, choices, case, words):
    """Tokens and log probabilities of the same request without a server, for each choice."""
    request, others = CASES[case]
    given = {**request, **request.get("extra_body", {}), **others}
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
    outputs = offline(llm, plain(reply)["choices"], case, words)
    for choice, output in zip(choices, outputs, strict=True):
        assert choice["token_ids"] == output.token_ids
        if not choice["calls"]:
            assert choice["text"] == output.text
            ends = choice["finish_reason"], choice["stop_reason"]
            assert ends == (output.finish_reason, output.stop_reason)
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
    if "stop" in request:
        (choice,) = choices
        assert choice["stop_reason"] in request["stop"]
        assert choice["text"].endswith(choice["stop_reason"]) == (case == "words")
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
