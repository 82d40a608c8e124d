"""The draft model: computed tokens, freed blocks, and that drafting changes no answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from steps import own_cache
from tiny_gguf import tiny_vocabulary, write_tiny_gguf
from twinphase.batch import Batch, StepOutput
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.config import EngineConfig
from twinphase.engine.loading.drafting import (
    draft_config,
    make_draft_model,
    open_draft_model,
)
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.errors import InvalidRequestError
from twinphase.outcome import FinishReason
from twinphase.phases.cost import FEATURES, CostModel
from twinphase.request import Request, SamplingParams
from twinphase.speculation.draft_model import DraftModel
from twinphase.speculation.speculator import Speculator

EOS = 63
CONTROL = 3  # GGUF's type of control tokens


class Counter:
    """The token after t is t + 1; records each step's rows as {request: (start, tokens)}."""

    def __init__(self) -> None:
        self.steps: list[dict[str, tuple[int, list[int]]]] = []
        self.broken: set[str] = set()

    def __call__(self, batch: Batch) -> StepOutput:
        self.steps.append(
            {one.request_id: (one.num_computed_tokens, one.token_ids) for one in batch.scheduled}
        )
        for share in batch.scheduled:
            needed = share.num_computed_tokens + len(share.token_ids)
            assert len(set(share.block_ids)) * 4 >= needed, "a row has no block to go to"
        sampled = [share for share in batch.scheduled if share.samples]
        output = StepOutput({one.request_id: [one.token_ids[-1] + 1] for one in sampled})
        for name in self.broken & set(output.token_ids):
            del output.token_ids[name]
            output.errors[name] = "struck by the test"
        return output


def draft_model(num_blocks: int = 100, k: int = 3, **options: Any) -> tuple[DraftModel, Counter]:
    counter = Counter()
    options = {
        "vocab_size": 64,
        "max_model_len": 200,
        "max_num_batched_tokens": 16,
        "eos_token_ids": [EOS],
        **options,
    }
    times = CostModel([1e-3] * len(FEATURES))
    clock = count(step=0.001)
    model = DraftModel(
        counter,
        KVCacheManager(num_blocks, 4),
        times,
        num_speculative_tokens=k,
        clock=lambda: float(next(clock)),
        **options,
    )
    return model, counter


def request(
    name: str = "a", prompt: Sequence[int] = (1, 2, 3, 4, 5), *output: int, **params: Any
) -> Request:
    params = {"temperature": 0.0, "max_tokens": 50, **params}
    return Request(name, list(prompt), SamplingParams(**params), output_token_ids=list(output))


def test_drafts_follow_the_known_tokens():
    model, counter = draft_model()
    assert model.draft([request("a", [1, 2, 3, 4, 5], 6)]) == {"a": [7, 8, 9]}
    assert counter.steps == [{"a": (0, [1, 2, 3, 4, 5, 6])}, {"a": (6, [7])}, {"a": (7, [8])}]


def test_only_what_it_has_not_seen_is_computed():
    """After accepted drafts, the last one and the next token; otherwise the replacing token."""
    model, counter = draft_model()
    one = request("a", [1, 2, 3, 4, 5], 6)
    assert model.num_missing(one) == 6
    model.draft([one])
    one.output_token_ids += [7, 8, 9, 10]  # all right
    assert model.draft([one]) == {"a": [11, 12, 13]}
    assert counter.steps[3] == {"a": (8, [9, 10])}
    one.output_token_ids += [11, 40]  # the second was wrong
    assert model.draft([one]) == {"a": [41, 42, 43]}
    assert counter.steps[6] == {"a": (11, [40])}
    assert model.draft([one]) == {"a": [41, 42, 43]}, "nothing was accepted: the same again"
    assert counter.steps[9] == {"a": (11, [40])}


def test_requests_are_drafted_in_one_step_per_token():
    model, counter = draft_model()
    drafts = model.draft(
        [request("a", [1], 2), request("b", [10], 11, max_tokens=3), request("c", [20], 21)]
    )
    assert drafts == {"a": [3, 4, 5], "b": [12], "c": [22, 23, 24]}, (
        "b has room for a draft and the token behind it"
    )
    assert [set(step) for step in counter.steps] == [{"a", "b", "c"}, {"a", "c"}, {"a", "c"}]


def test_limits_are_of_a_request_and_nothing_is_computed_where_they_are_zero():
    model, counter = draft_model()
    both = [request("a", [1], 2), request("b", [10], 11)]
    assert model.draft(both, {"a": 1, "b": 0}) == {"a": [3]}
    assert [set(step) for step in counter.steps] == [{"a"}]
    both[1].output_token_ids += [12, 13]
    assert model.draft(both, {"a": 0, "b": 9}) == {"b": [14, 15, 16]}, (
        "it catches up when it is wanted again"
    )
    assert counter.steps[1] == {"b": (0, [10, 11, 12, 13])}


def test_a_draft_ends_where_the_output_would():
    model, _ = draft_model()
    assert model.draft([request("a", [1], EOS - 2)]) == {"a": [EOS - 1, EOS]}
    assert model.draft([request("b", [1], 7, stop_token_ids=[9])]) == {"b": [8, 9]}


def test_a_long_prompt_is_caught_up_with_in_chunks_beside_the_others():
    model, counter = draft_model()
    long = request("long", [*range(1, 38)], 38)
    short = request("short", [1], 2)
    model.draft([short])
    short.output_token_ids += [3, 4, 5, 6]
    given = []
    for _ in range(3):
        before = len(counter.steps)
        given.append(model.draft([long, short]))
        first = counter.steps[before]
        assert sum(len(tokens) for _, tokens in first.values()) <= 16
        assert [set(step) for step in counter.steps[before + 1 :]] == [set(given[-1])] * 2
    assert [set(drafts) for drafts in given] == [{"short"}, {"short"}, {"long", "short"}]
    chunks = [
        tokens for step in counter.steps for name, (_, tokens) in step.items() if name == "long"
    ]
    assert [token for chunk in chunks[:3] for token in chunk] == [*range(1, 39)]


def test_an_slo_makes_the_chunks_small():
    """A row takes 2 ms or more by these prices; chunks are at least a block."""
    model, counter = draft_model(slo_seconds=lambda: 1e-3)
    model.draft([request("a", [*range(1, 30)], 30)])
    assert [len(tokens) for _, tokens in counter.steps[0].values()] == [4]


def test_a_short_answer_to_a_long_prompt_is_not_begun_unless_most_of_the_prompt_is_known():
    model, counter = draft_model()
    short = request("a", [*range(1, 38)], 38, max_tokens=4)
    assert model.draft([short]) == {}
    assert counter.steps == []
    for _ in range(3):
        model.draft([request("b", [*range(1, 38)], 38)])
    assert model.draft([short]) == {"a": [39, 40]}


def test_what_others_computed_is_found_again_and_salts_stay_apart():
    model, counter = draft_model()
    first = request("a", [*range(1, 11)], 11)
    model.draft([first])
    first.output_token_ids += [12]
    model.draft([first])
    model.forget(first)
    salted = replace(request("b", [*range(1, 11)], 40), cache_salt="other")
    model.draft([request("c", [*range(1, 11)], 40), salted])
    starts = {name: start for name, (start, _) in counter.steps[6].items()}
    assert starts == {"b": 0, "c": 8}


def test_only_right_tokens_can_be_found():
    """Blocks filled by drafts cannot be found before the request has output the same tokens."""
    model, counter = draft_model(k=7)
    first = request("a", [1, 2, 3], 4)
    model.draft([first])
    first.output_token_ids += [5, 40]
    model.draft([first])
    model.forget(first)
    model.draft([request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9], 10)])
    assert counter.steps[-7]["b"][0] == 4


def test_no_block_leaks():
    model, _ = draft_model(num_blocks=6)
    ends = request("a", [*range(1, 10)], 10)
    assert model.draft([ends])
    model.check_integrity()
    assert model.kv_cache.pool.num_held == 3
    assert model.draft([request("b", [*range(30, 44)], 44)]) == {}, "the blocks are taken"
    model.check_integrity()
    model.observe(Batch([], [], preempted=("a",)), StepOutput())
    assert model.kv_cache.pool.num_held == 0
    assert model.draft([request("b", [*range(30, 44)], 44)])
    assert model.draft([ends]) == {}
    model.forget(request("b"))
    model.forget(ends)
    model.check_integrity()
    assert model.kv_cache.pool.num_held == 0


def test_one_that_grows_out_of_the_blocks_gives_them_up():
    model, _ = draft_model(num_blocks=3)
    one = request("a", [1, 2, 3, 4, 5], 6)
    assert model.draft([one])
    one.output_token_ids += [7, 8, 9, 10, 11, 12]
    assert model.draft([one]) == {}
    assert model.kv_cache.pool.num_held == 0


def test_tokens_and_positions_that_it_does_not_have_are_not_drafted_for():
    model, counter = draft_model(max_model_len=10)
    assert model.draft([request("a", [1, 64], 2), request("b", [*range(10)], 11)]) == {}
    one = request("c", [1, 2], 3)
    assert model.draft([one]) == {"c": [4, 5, 6]}
    one.output_token_ids += [4, 5, 6, 7, 8]
    assert model.draft([one]) == {"c": [9, 10]}, "ten positions, of which the last is the target's"
    one.output_token_ids.append(64)
    assert model.draft([one]) == {}
    assert model.kv_cache.pool.num_held == 0
    assert not any(name in step for step in counter.steps for name in "ab")


def test_one_that_cannot_be_sampled_does_not_stop_the_others():
    model, counter = draft_model()
    counter.broken = {"a"}
    assert model.draft([request("a", [1], 2), request("b", [10], 11)]) == {"b": [12, 13, 14]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("models")
    with own_cache(path / "cache"):
        yield path


@pytest.fixture(scope="module")
def pair(folder) -> tuple[LoadedEngine, DraftModel]:
    """The same weights in 8 and in 32 bits: many drafts of the model are accepted, not all."""
    target = write_tiny_gguf(folder / "target.gguf", vocab=320, tensor_type="Q8_0")
    draft = write_tiny_gguf(folder / "draft.gguf", vocab=320, tensor_type="F32")
    loaded = LoadedEngine(
        target, EngineConfig(num_kv_blocks=100, max_num_batched_tokens=64, threads=2)
    )
    checkpoint = open_draft_model(str(draft), loaded.checkpoint, "none")
    drafting = LoadedEngine(checkpoint, draft_config(loaded.config, checkpoint)).engine
    return loaded, make_draft_model(drafting, loaded.engine, 3)


def answers(loaded: LoadedEngine, drafter: Any, **params: Any) -> tuple[list[list[int]], float]:
    """What eight requests say together, and the share of drafts that were right."""
    engine = loaded.engine
    drafted = 0
    accepted = 0
    engine.drafter = drafter
    params = {"max_tokens": 40, "ignore_eos": True, **params}
    requests = [
        Request(f"{i}", [10 + i, 20, 30 + i], SamplingParams(seed=i, **params)) for i in range(8)
    ]
    for one in requests:
        engine.add_request(one)
    while engine.has_work:
        result = engine.step()
        for share in result.batch.decodes:
            drafted += share.num_drafts
            accepted += len(result.output.token_ids[share.request_id]) - 1
    engine.drafter = None
    assert {one.finish_reason for one in requests} == {FinishReason.LENGTH}
    return [one.output_token_ids for one in requests], accepted / max(1, drafted)


class Greedy(DraftModel):
    """The same model, always drafting its most likely token."""

    def __init__(self, like: DraftModel) -> None:
        self.__dict__.update(like.__dict__)
        execute = like._execute
        self._execute = lambda batch: execute(
            Batch(
                *(
                    [replace(one, sampling_params=SamplingParams(temperature=0.0)) for one in half]
                    for half in (batch.decodes, batch.prefills)
                )
            )
        )


def test_the_requests_own_random_numbers_make_a_draft_agree(
    pair,
):
    loaded, model = pair
    plain, _ = answers(loaded, None, temperature=1.0)
    shared, accepted = answers(loaded, model, temperature=1.0)
    greedy, accepted_greedily = answers(loaded, Greedy(model), temperature=1.0)
    assert plain == shared == greedy
    assert accepted > 2 * accepted_greedily
    assert accepted > 0.3
    model.check_integrity()
    assert model.kv_cache.pool.num_held == 0


def test_penalties_and_filters_hold_for_drafts_too(pair):
    loaded, model = pair
    params = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5, "logit_bias": {7: 3.0}}
    plain, _ = answers(loaded, None, **params)
    drafted, accepted = answers(loaded, model, **params)
    assert plain == drafted
    assert accepted > 0.3


def test_the_option_loads_it_and_the_chooser_asks_it(folder, pair):
    loaded, _ = pair
    plain, _ = answers(loaded, None, temperature=0.7)
    config = {
        "method": "draft_model",
        "model": str(folder / "draft.gguf"),
        "num_speculative_tokens": 3,
    }
    speculating = LoadedEngine(
        loaded.checkpoint.path,
        EngineConfig(speculative_config=config, num_kv_blocks=100, threads=2),
    )
    drafter = speculating.engine.drafter
    assert isinstance(drafter, Speculator)
    drafted, accepted = answers(speculating, drafter, temperature=0.7)
    assert plain == drafted
    assert accepted > 0.1
    assert drafter.draft_model is not None
    assert drafter.draft_model.model.kv_cache.pool.num_held == 0
    assert drafter.draft_model.num_failures == 0


def test_another_vocabulary_is_refused_by_its_first_token_that_differs(folder, pair, monkeypatch):
    loaded, _ = pair
    other = write_tiny_gguf(folder / "other.gguf", vocab=320, pre="gpt-2")
    open_draft_model(
        str(other), loaded.checkpoint, "none"
    )  # how texts are cut does not matter: ids are what is drafted
    longer = write_tiny_gguf(folder / "longer.gguf", vocab=336)
    open_draft_model(str(longer), loaded.checkpoint, "none")
    tokens, types, merges = tiny_vocabulary(320)
    control = [CONTROL if i == 310 else kind for i, kind in enumerate(types)]
    renamed = [f"<|other_{i}|>" if i in (305, 311) else token for i, token in enumerate(tokens)]
    for name, made, difference in (
        (
            "renamed",
            (renamed, types, merges),
            r"token 305 is '<\|unused_\d+\|>' in one and '<\|other_305\|>' in",
        ),
        (
            "control",
            (tokens, control, merges),
            r"token 310, '<\|unused_\d+\|>', is text and a control token",
        ),
    ):
        monkeypatch.setattr("tiny_gguf.tiny_vocabulary", lambda size, made=made: made)
        swapped = write_tiny_gguf(folder / f"{name}.gguf", vocab=320)
        with pytest.raises(
            InvalidRequestError, match=f"{name}.gguf cannot draft for target.gguf.*: {difference}"
        ):
            LoadedEngine(
                loaded.checkpoint.path,
                EngineConfig(
                    speculative_config={"model": str(swapped), "num_speculative_tokens": 2}
                ),
            )
