"""vLLM's and OpenAI's fields that change the prompt or the listed answers."""

import pytest

from dialects import OPENAI, joined, parts, turn, user
from raw_client import send
from twinphase import SamplingParams

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TALK = [user("hello"), turn("assistant", "the world is ")]
INFILL = (300, 301, 302)  # as the tiny model has it: before a prefix, a suffix, a middle
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module", params=["server", "replicas", "drafting"])
def any_server(request):
    """The same requests are the same answers, whoever computes them."""
    return request.getfixturevalue(request.param)


def ask(server, path, **fields):
    """The only answer: prompt ids, output ids and text; streamed and whole, which have to agree."""
    status, body = server.post(path, {**GREEDY, **fields})
    assert status == 200, body
    (choice,) = body["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    with send(server, path, {**GREEDY, **fields, "stream": True}) as client:
        (streamed,) = joined(OPENAI, list(parts(client)))["choices"]
    assert (streamed["token_ids"], streamed["message"]["content"]) == (choice["token_ids"], text)
    return choice["prompt_token_ids"], choice["token_ids"], text


def answers(llm, token_ids):
    (found,) = llm.generate(
        {"prompt_token_ids": token_ids},
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        use_tqdm=False,
    )
    return found.outputs[0].token_ids


def test_prompts_are_cut_continued_and_filled_in(any_server, llm):
    encode = llm.tokenizer.encode
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe world is "
    turn = "<|im_end|>\n"
    begin = "<|im_start|>assistant\n"
    much = [9 + i % 250 for i in range(5000)]
    wanted = [
        (
            COMPLETION,
            {"prompt": "hello the world", "truncate_prompt_tokens": 3},
            encode("hello the world")[-3:],
        ),
        (COMPLETION, {"prompt": much, "truncate_prompt_tokens": -1}, much[-(4096 - 8) :]),
        (
            COMPLETION,
            {"prompt": "def a(", "suffix": "): hello"},
            [INFILL[0], *encode("def a("), INFILL[1], *encode("): hello"), INFILL[2]],
        ),
        (CHAT, {"messages": TALK, "continue_final_message": True}, encode(rendered)),
        (
            CHAT,
            {"messages": TALK, "continue_final_message": True, "add_generation_prompt": False},
            encode(rendered),
        ),
        (CHAT, {"messages": TALK, "add_generation_prompt": False}, encode(rendered + turn)),
        (CHAT, {"messages": TALK}, encode(rendered + turn + begin)),
        (
            CHAT,
            {"messages": TALK, "truncate_prompt_tokens": 5},
            encode(rendered + turn + begin)[-5:],
        ),
    ]
    for path, fields, prompt in wanted:
        found, token_ids, _ = ask(any_server, path, **fields)
        assert found == prompt, fields
        assert token_ids == answers(llm, prompt)
        if path == CHAT and "truncate_prompt_tokens" not in fields:
            assert any_server.post("/tokenize", fields)[1]["tokens"] == prompt
            text = any_server.post("/apply-template", fields)[1]["prompt"]
            assert encode(text) == prompt


def test_best_of_tells_the_likeliest_answers(any_server, llm):
    asked = {
        "prompt": ["hello", "the world"],
        "seed": 3,
        "max_tokens": 6,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, found = any_server.post(COMPLETION, {**asked, "n": 2, "best_of": 4})
    assert status == 200 and [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in found["choices"])
    assert found["usage"]["completion_tokens"] == 2 * 4 * 6
    expected = []
    for prompt in asked["prompt"]:
        params = [
            SamplingParams(seed=3 + i, max_tokens=6, ignore_eos=True, logprobs=0) for i in range(4)
        ]
        results = [one.outputs[0] for one in llm.generate([prompt] * 4, params, use_tqdm=False)]
        expected += sorted(results, key=lambda one: -one.cumulative_logprob)[:2]
    assert [choice["token_ids"] for choice in found["choices"]] == [
        one.token_ids for one in expected
    ]


def test_tokens_are_named_by_their_ids(server):
    named = {"return_tokens_as_token_ids": True, **GREEDY}
    choice = server.post(COMPLETION, {"prompt": "hello", "logprobs": 1, **named})[1]["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [
        name in top
        for name, top in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
        )
    ]
    chat = {"messages": TALK[:1], "logprobs": True, "top_logprobs": 1}
    choice = server.post(CHAT, {**chat, **named})[1]["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [
        f"token_id:{i}" for i in choice["token_ids"]
    ]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"].startswith("token_id:")
