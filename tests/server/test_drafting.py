"""Drafted tokens over HTTP: they change no answer, and are reported where the server is told to."""

from itertools import product

import pytest

from dialects import text_part, user
from twinphase.request import RequestCounts
from twinphase.server.observe import spec_decode_metrics

USER = [user("hello world")]


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
            accepted = details.accepted_prediction_tokens  # Of both answers.
            assert accepted <= 2 * 48
            accepted_by_first = timings.get("draft_n_accepted", 0)
            assert accepted_by_first <= min(48, timings.get("draft_n", 0))
            assert asks is client or prediction is not first or accepted > 0
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_a_request_limits_its_drafts_and_gets_the_same_answer(drafting, words):
    asked = {"messages": USER, "max_tokens": 40, "seed": 5, "logit_bias": words, "logprobs": True}
    first = drafting.post("/v1/chat/completions", asked)[1]["choices"][0]
    text = first["message"]["content"]
    asked["prediction"] = {"type": "content", "content": text}
    lengths = {}
    for limit in (None, 2, 0):
        body = {**asked, "num_speculative_tokens": limit}
        answer = drafting.post("/v1/chat/completions", body)[1]
        choice = answer["choices"][0]
        assert (choice["message"], choice["logprobs"]) == (first["message"], first["logprobs"])
        lengths[limit] = answer["metrics"]["speculative_decoding"]["per_step_drafted"]
    assert max(lengths[None]) > 2 == max(lengths[2]) and lengths[0] == []
    talk = {"input": "hello", "max_output_tokens": 2, "num_speculative_tokens": 0}
    assert drafting.post("/v1/responses", talk)[0] == 200
    for wrong in (65, -1):
        body = {**asked, "num_speculative_tokens": wrong}
        status, answer = drafting.post("/v1/chat/completions", body)
        assert status == 400 and "num_speculative_tokens" in answer["error"]["message"]


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
    steps = tuple(zip(told["per_step_drafted"], told["per_step_accepted"], strict=True))
    counts = RequestCounts("a", 4, 32, draft_steps=steps)
    assert {"speculative_decoding": told} == spec_decode_metrics(counts, "detailed")["metrics"]
    assert told["num_draft_tokens"] == timings["draft_n"]
    assert told["num_accepted_draft_tokens"] == timings["draft_n_accepted"] > 0
    talk = {"model": model, "messages": USER, "stream": False}
    for path, body in (
        ("/v1/messages", talk | {"max_tokens": 2}),
        ("/api/chat", talk | {"options": {"num_predict": 2}}),
        ("/v1/responses", {"model": model, "input": "hello", "max_output_tokens": 2}),
    ):
        status, answer = drafting.post(path, body)
        assert status == 200 and "speculative_decoding" in answer["metrics"], path
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
