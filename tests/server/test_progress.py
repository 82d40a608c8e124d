"""The progress of a prompt in the streams of every API, where a client asks for it."""

import json
import random

import httpx
import pytest

from dialects import bearer
from running import PATIENCE
from twinphase.batch import StepWork
from twinphase.phases.cost import FEATURES, CostModel, starting_prices
from twinphase.phases.work import ModelShape
from twinphase.server.live.eta import seconds_left

TEXT = "how long is a long prompt " * 40
MESSAGES = [{"role": "user", "content": TEXT}]
APIS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "stream": True},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2, "stream": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2, "stream": True, "model": "a"},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 16, "stream": True},
    "/api/chat": {"messages": MESSAGES, "model": "a", "options": {"num_predict": 2}},
    "/api/generate": {"prompt": TEXT, "model": "a", "options": {"num_predict": 2}},
}


def progress_of(server, path, body):
    """Each `prompt_progress` of a stream, and how many objects it has."""
    found = []
    count = 0
    url = server.url + path
    with httpx.stream("POST", url, json=body, headers=bearer("one"), timeout=PATIENCE) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            text = line.removeprefix("data: ")
            if text.startswith("{"):
                count += 1
                found.append(json.loads(text).get("prompt_progress"))
    return [one for one in found if one is not None], count


@pytest.mark.parametrize("path", APIS)
def test_a_stream_tells_how_far_its_prompt_is_and_when_it_will_be_done(limited, path):
    # Each asks for a text of its own, which is not cached.
    body = json.loads(json.dumps(APIS[path]).replace("how", path.replace("/", " ")))
    found, _ = progress_of(limited, path, {**body, "return_progress": True})
    assert len(found) > 1
    done = [one["processed"] for one in found]
    assert done == sorted(set(done)) and done[-1] == found[-1]["total"]
    assert found[-1]["eta_ms"] == 0 and all(one["eta_ms"] > 0 for one in found[:-1])
    assert all(one["time_ms"] > 0 for one in found)
    silent, count = progress_of(limited, path, body)
    assert silent == [] and count


def test_an_estimate_is_the_rest_at_the_pace_so_far():
    prices = dict.fromkeys(FEATURES, 0.0) | {"many_rows": 1e-3, "few_rows": 1e-3}
    costs = CostModel(list(prices.values()))
    assert costs.seconds(StepWork.of_chunk(0, 100, 1)) == pytest.approx(0.1, rel=1e-3)
    # Nothing is done yet: as predicted.
    assert seconds_left(costs, 0, 0, 100, 5.0) == pytest.approx(0.1, rel=1e-3)
    # A quarter took three times as long as predicted.
    assert seconds_left(costs, 0, 25, 100, 0.075) == pytest.approx(0.225, rel=1e-3)
    # Cached tokens took no time, and count for no pace.
    assert seconds_left(costs, 50, 75, 100, 0.050) == pytest.approx(0.050, rel=1e-3)
    assert seconds_left(costs, 0, 100, 100, 9.0) == 0.0


@pytest.mark.parametrize("context", [2e-7, 2.5e-7, 1e-6])
@pytest.mark.parametrize("row", [5e-4, 2e-3])
def test_the_first_chunks_of_a_long_prompt_teach_what_its_later_ones_will_take(row, context):
    """The server is new: it has computed three short prompts and a few tokens after each."""
    choose = random.Random(1)
    shape = ModelShape(135 * 10**6, 106 * 10**6, 98 * 10**6, 28 * 10**6, 30, 9, 3, 64)
    costs = CostModel(starting_prices(shape, None))

    def seconds(work):
        taken = 3e-3 + row * work.rows + context * work.prefill_contexts
        taken = (taken + 5e-7 * work.decode_contexts) * choose.uniform(0.98, 1.02)
        costs.observe(work, taken)
        return taken

    for _ in range(3):
        seconds(StepWork.of_chunk(0, 512, 0))
        seconds(StepWork.of_chunk(512, 88, 1))
        for number in range(20):
            seconds(StepWork.of_decodes(1, 600 + number))
    total = 32_000
    now = 0.0
    estimates = []
    for start in range(0, total, 512):
        done = min(start + 512, total)
        now += seconds(StepWork.of_chunk(start, done - start, int(done == total)))
        estimates.append((done / total, now, seconds_left(costs, 0, done, total, now)))
    errors = [(share, left / (now - at) - 1) for share, at, left in estimates[:-3]]
    assert max(abs(error) for share, error in errors if share > 1 / 16) <= 0.15
