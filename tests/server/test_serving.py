"""The server as a whole: what each route gives."""

import pytest

CHAT = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}


def test_an_answer_says_where_its_time_went(server):
    status, body = server.post("/v1/chat/completions", CHAT)
    assert status == 200
    timings = body["timings"]
    assert sum(timings["ledger_ms"].values()) == pytest.approx(timings["e2e_ms"], abs=0.02)
    parts = timings["prompt_parts"]
    assert sum(part["tokens"] for part in parts) == body["usage"]["prompt_tokens"]
    assert {part["kind"] for part in parts} == {"template", "question"}
    assert timings["predicted_n"] == body["usage"]["completion_tokens"] == 5
