import inspect

import pytest

from twinphase.engine.frontends.text import EncodedPrompt
from twinphase.errors import InvalidRequestError
from twinphase.request import SamplingParams
from twinphase.server.jobs import RESERVED, Job, count_prompts
from twinphase.server.openai_types import CompletionRequest
from twinphase.tokenizer.chat_template import ChatTemplate
from twinphase.tokenizer.prompt_parts import chat_prompt, find_parts


def make_job(num_prompts=1, n=1, seed=2**64 - 2):
    prompts = [EncodedPrompt("a", [i], 0.0, 0.0, True) for i in range(num_prompts)]
    body = CompletionRequest(prompt="a")
    return Job("id", "chat", "m", prompts, SamplingParams(seed=seed), n, body)


def test_answers_are_numbered_prompt_by_prompt():
    job = make_job(2, n=3)
    assert [job.prompt_of(i).token_ids for i in range(job.num_choices)] == [[0]] * 3 + [[1]] * 3
    assert [job.request_id(i) for i in range(6)] == [f"id-{i}" for i in range(6)]
    assert make_job().request_id(0) == "id"


def test_seeds_go_on_from_the_first_and_begin_again_at_their_end():
    assert [make_job(2, n=3).params_of(i).seed for i in range(6)] == [2**64 - 2, 2**64 - 1, 0] * 2
    assert make_job(n=3, seed=None).params_of(2).seed is None


def test_template_variables_cannot_take_the_names_of_what_renders_them():
    taken = {
        name
        for call in (chat_prompt, find_parts, ChatTemplate.render)
        for name in inspect.signature(call).parameters
    }
    assert taken - {"variables"} <= RESERVED


@pytest.mark.parametrize(
    "prompt, count",
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), ([], 0), (["a"] * 9, 9)],
)
def test_prompts_are_texts_or_tokens_and_not_too_many(prompt, count):
    body = CompletionRequest(prompt=prompt)
    if 0 < count <= 8:
        assert count_prompts(body, 8) == count
    else:
        with pytest.raises(InvalidRequestError, match=f"`prompt` has {count} prompts. Use 1 to 8"):
            count_prompts(body, 8)
