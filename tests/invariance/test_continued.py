"""Answers that another engine continues: the same tokens and log probabilities."""

from __future__ import annotations

import pytest
from mix_engines import MOST_BLOCKS, TAGS, VOCAB, constraint_of, make_drafter, make_engine
from mixes import FORMS

from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.config import EngineConfig
from twinphase.constraint import StructuredOutputsParams
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.errors import InvalidRequestError
from twinphase.request import Request, SamplingParams

PROMPT = [10, 11, 12, 13] * 9
HOT = {"temperature": 1.5, "seed": 7, "logprobs": 3, "max_tokens": 60, "ignore_eos": True}
PENALTIES = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logit_bias": {12: 3.0},
}
ASKED = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, logprobs=2, ignore_eos=True),
    "hot": SamplingParams(**HOT),
    "penalties": SamplingParams(**{**HOT, **PENALTIES}),
    "stops": SamplingParams(
        **{**HOT, "ignore_eos": False, "min_tokens": 20, "stop_token_ids": list(range(30, 200))}
    ),
    "thinking": SamplingParams(**HOT, thinking_token_budget=6),
    **{
        next(iter(form)): SamplingParams(
            **{**HOT, "ignore_eos": False}, structured_outputs=StructuredOutputsParams(**form)
        )
        for form in FORMS
    },
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("continued")
    with own_cache(folder / "cache"):
        yield LoadedEngine(
            write_tiny_gguf(folder / "tiny.gguf", vocab=VOCAB),
            EngineConfig(threads=1, num_kv_blocks=MOST_BLOCKS),
        )


@pytest.mark.parametrize("guesser", ["none", "mixed", "suffix"])
@pytest.mark.parametrize("name", ASKED)
def test_any_cut_of_an_answer_is_continued_with_the_same_bits(loaded, name, guesser):
    """All cuts at once in a new engine; half of them find prefixes that others computed."""
    params = ASKED[name]
    prompt = PROMPT + (list(TAGS.start) if name == "thinking" else [])
    whole = Request("whole", prompt, params, 0.0)
    logprobs = run(loaded, [whole], "none")["whole"]
    tokens = whole.output_token_ids
    cuts = sorted({*range(1, len(tokens), 5), len(tokens) - 1} - {0})
    requests = [
        Request(str(cut), prompt, params, 0.0, cache_salt=str(cut) if cut % 2 else None)
        for cut in cuts
    ]
    for cut, request in zip(cuts, requests, strict=True):
        request.output_token_ids = tokens[:cut]
    found = run(loaded, requests, guesser, tokens)
    for cut, request in zip(cuts, requests, strict=True):
        assert (request.output_token_ids, request.finish_reason) == (tokens, whole.finish_reason)
        assert repr(found[str(cut)]) == repr(logprobs[cut:])
        assert request.counts.num_cached_tokens <= len(prompt)
    assert cuts


def run(loaded, requests, guesser, right=()):
    """The log probabilities of each request, once all have finished in a fresh engine."""
    engine = make_engine(loaded, MOST_BLOCKS, lambda: 0.0, max_num_batched_tokens=64)
    engine.drafter = make_drafter(guesser, engine, lambda request: right)
    for request in requests:
        request.constraint = constraint_of(
            loaded, request.sampling_params, request.prompt_token_ids
        )
        engine.add_request(request)
    found = {request.request_id: [] for request in requests}
    while engine.has_work:
        for name, entries in engine.step().output.logprobs.items():
            found[name] += entries
        engine.scheduler.check_integrity()
    assert engine.scheduler.kv_cache.pool.num_held == 0
    return found


def test_an_answer_that_has_ended_is_not_continued(loaded):
    engine = make_engine(loaded, MOST_BLOCKS, lambda: 0.0)
    for params, output in (
        (SamplingParams(max_tokens=2), [10, 11]),
        (SamplingParams(max_tokens=9, stop_token_ids=[12]), [10, 12]),
        (SamplingParams(max_tokens=None), [10] * 512),
    ):
        with pytest.raises(InvalidRequestError, match="has ended"):
            engine.add_request(Request("a", PROMPT, params, output_token_ids=output))
    with pytest.raises(InvalidRequestError, match="output"):
        engine.add_request(Request("a", PROMPT, SamplingParams(), output_token_ids=[10**6]))
    assert not engine.has_work
