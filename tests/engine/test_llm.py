import io
import re
import signal
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from rich.console import Console

from added import greedy
from provoked import Script
from steps import Steps
from twinphase.backends.reference import ReferenceBackend
from twinphase.batch import Phase
from twinphase.constraint import StructuredOutputsParams
from twinphase.engine.loading.progress import GenerateProgress
from twinphase.errors import CacheCapacityError, ContextLengthError, InvalidRequestError
from twinphase.outcome import MissReason, PrefixMiss
from twinphase.phases.timeline import IntervalKind
from twinphase.phases.work import model_shape
from twinphase.request import SamplingParams
from twinphase.scheduler import chunk

GREEDY = greedy(8)
PROMPT = list(range(40, 70))


@contextmanager
def patched(llm, before):
    """Calls `before` with each batch before it is computed."""
    whole = llm.engine.executor.execute

    def execute(batch):
        before(batch)
        return whole(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", execute)
        yield


def scripted(llm):
    """Steps take 1 ms on the engine's clock, and everything else 1 us."""
    script = Script(llm.engine, lambda batch: 1e-3)

    def clock():
        script.now += 1e-6
        return script.now

    llm.engine.recorder.clock = clock
    return llm


def answer(llm, prompt=PROMPT, params=GREEDY):
    prompts = prompt if isinstance(prompt, str) else [prompt]
    return llm.generate(prompts, params)[0].outputs[0]


def test_greedy_tokens_are_those_of_the_whole_sequence_at_once(llm):
    """Incremental decoding over the paged cache equals full recomputation with argmax."""
    tokens = list(PROMPT)
    for _ in range(4):
        tokens += answer(llm, tokens, greedy(1)).token_ids
    assert answer(llm).token_ids[:4] == tokens[len(PROMPT) :]


def test_outputs_have_vllms_shape(llm):
    (output,) = llm.generate("hello world", greedy(4, logprobs=2))
    (completion,) = output.outputs
    assert output.prompt == "hello world"
    assert output.prompt_token_ids == llm.tokenizer.encode("hello world")
    assert output.finished and output.error is None
    assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == (
        "length",
        None,
        4,
    )
    assert completion.text == llm.tokenizer.decode(completion.token_ids, continuation=True)
    assert len(completion.logprobs) == 4
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token_id].rank == 1  # greedy
        assert len(entry) == 2
        assert entry[token_id].decoded_token == llm.tokenizer.decode(
            [token_id], skip_special_tokens=False
        )
    total = sum(
        entry[t].logprob for t, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    assert total < 0


def test_each_prompt_may_have_its_parameters(llm):
    outputs = llm.generate([PROMPT, PROMPT], [greedy(1), greedy(3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"sampling_params": [GREEDY, GREEDY]}, "1 prompts and 2 sampling parameters"),
        ({"sampling_params": []}, "1 prompts and 0 sampling parameters"),  # not the default
        ({"sampling_params": GREEDY, "priority": [1, 2]}, "1 prompts and 2 priorities"),
        ({"sampling_params": GREEDY, "priority": [1]}, "scheduling_policy is 'fcfs'"),
    ],
)
def test_what_does_not_fit_the_prompts_is_refused(llm, arguments, match):
    with pytest.raises(InvalidRequestError, match=match):
        llm.generate([PROMPT], **arguments)


def test_seedless_draws_differ_and_repeat_with_the_engine(make_llm):
    warm = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)

    def two():
        llm = make_llm(seed=4)
        return [answer(llm, params=warm).token_ids for _ in range(2)]

    first, second = two()
    assert first != second
    assert two() == [first, second]


@pytest.mark.parametrize(
    ("token_id", "params", "num_tokens", "num_in_text", "reason", "stop_reason"),
    [
        (2, {}, 1, 0, "stop", None),  # end of sequence
        (2, {"ignore_eos": True}, 6, 6, "length", None),
        (70, {"stop_token_ids": [70]}, 1, 0, "stop", 70),
        (70, {"stop": ["###"]}, 3, 0, "stop", "###"),
        (70, {"stop": ["#"], "max_tokens": 1}, 1, 0, "stop", "#"),
        (70, {"stop": ["#never"]}, 6, 6, "length", None),  # what was held back is flushed
        (70, {"stop": ["#"], "min_tokens": 4}, 5, 4, "stop", "#"),
        (70, {"max_tokens": None}, 128 - len(PROMPT), 128 - len(PROMPT), "length", None),
    ],
)
def test_ends(llm, token_id, params, num_tokens, num_in_text, reason, stop_reason):
    """Every token is `token_id`, whose text stands for # in stop strings."""
    text = llm.tokenizer.decode([token_id])
    if "stop" in params:
        params = {**params, "stop": [stop.replace("#", text) for stop in params["stop"]]}
    wanted = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 6, "logit_bias": {token_id: 100.0}, **params}
    )
    completion = answer(llm, params=wanted)
    assert (completion.token_ids, completion.text) == ([token_id] * num_tokens, num_in_text * text)
    stop_reason = stop_reason.replace("#", text) if isinstance(stop_reason, str) else stop_reason
    assert (completion.finish_reason, completion.stop_reason) == (reason, stop_reason)


def test_no_end_of_sequence_before_min_tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={2: 100.0}, min_tokens=3)
    completion = answer(llm, params=params)
    assert (len(completion.token_ids), completion.token_ids[-1], completion.finish_reason) == (
        4,
        2,
        "stop",
    )


class TestStream:
    def test_updates_add_up_to_the_result(self, make_llm):
        llm = make_llm(max_num_batched_tokens=16)
        updates = list(llm.stream(PROMPT, GREEDY))
        final = updates[-1].output
        assert [u.num_prefilled for u in updates][:2] == [16, 30]
        assert [u.phase for u in updates[:3]] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
        assert [u.finished for u in updates] == [False] * 8 + [
            True
        ]  # 2 chunks, the second with the first token
        assert (
            sum((u.token_ids for u in updates), [])
            == final.outputs[0].token_ids
            == answer(llm).token_ids
        )
        assert "".join(u.text for u in updates) == final.outputs[0].text
        assert updates[0].num_prompt_tokens == 30

    @pytest.mark.parametrize("taken", [0, 1])
    def test_closing_it_aborts(self, llm, taken):
        stream = llm.stream(PROMPT, GREEDY)
        updates = [next(stream) for _ in range(taken)]
        stream.close()
        assert list(stream) == []
        assert [update.output.outputs[0].finish_reason for update in updates] == ["abort"] * taken
        llm.stream(PROMPT, GREEDY)  # nor is one left that nobody keeps; the fixture looks

    def test_errors_come_before_the_first_update(self, llm):
        with pytest.raises(InvalidRequestError):
            llm.stream([], GREEDY)

    def test_time_adds_up(self, make_llm):
        llm = scripted(make_llm())
        for update in llm.stream("hello world", GREEDY):
            final = update
        metrics = final.output.metrics
        assert sum(metrics.totals().values()) == pytest.approx(metrics.end - metrics.arrival)
        assert metrics.seconds(IntervalKind.TOKENIZE) > 0
        assert (metrics.prefill.tokens, metrics.decode.tokens) == (final.num_prompt_tokens, 7)
        assert len(metrics.token_times) == 8
        assert 0 < metrics.ttft < metrics.end - metrics.arrival
        assert metrics.seconds(IntervalKind.UNATTRIBUTED) < 0.01 * (metrics.end - metrics.arrival)

    def test_compiling_a_grammar_is_not_tokenizing(self, make_llm, monkeypatch):
        llm = scripted(make_llm())
        text = llm._loaded.text
        clock = llm.engine.recorder.clock
        compiled = text.constraint

        def slow(*asked):
            for _ in range(1000):
                clock()
            return compiled(*asked)

        monkeypatch.setattr(text, "constraint", slow)
        params = SamplingParams(
            max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[ab]+")
        )
        metrics = llm.generate("hello", params)[0].metrics
        queued = [interval for interval in metrics.intervals if interval.kind is IntervalKind.QUEUE]
        assert queued[0].reason == "grammar" and queued[0].end - queued[0].start >= 1e-3
        assert metrics.seconds(IntervalKind.TOKENIZE) < 1e-4


class TestChat:
    def test_the_second_turn_reuses_the_first(self, make_llm):
        llm = make_llm(block_size=4)
        params = SamplingParams(temperature=0.0, max_tokens=5)
        messages = [{"role": "user", "content": "hello"}]
        (first,) = llm.chat(messages, params)
        assert first.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert (first.num_cached_tokens, first.prefix_miss) == (
            0,
            PrefixMiss(MissReason.NEVER_SEEN, 0),
        )
        messages += [
            {"role": "assistant", "content": "the world"},
            {"role": "user", "content": "more"},
        ]
        (second,) = llm.chat(messages, params)
        assert second.num_cached_tokens == len(first.prompt_token_ids) // 4 * 4
        assert second.prefix_miss.reason is MissReason.DIVERGED
        (alone,) = make_llm(enable_prefix_caching=False).generate([second.prompt_token_ids], params)
        assert second.outputs[0].token_ids == alone.outputs[0].token_ids
        assert alone.prefix_miss.reason is MissReason.DISABLED

    def test_the_answer_is_reused_too(self, make_llm):
        llm = make_llm(block_size=4)
        (first,) = llm.generate([PROMPT], GREEDY)
        (second,) = llm.generate([[*PROMPT, *first.outputs[0].token_ids, 9, 9]], GREEDY)
        assert (
            second.num_cached_tokens == (len(PROMPT) + 8 - 1) // 4 * 4
        )  # the last sampled token was never computed

    def test_a_stream_of_messages_is_a_conversation_too(self, make_llm):
        llm = make_llm(block_size=4)
        messages = [{"role": "user", "content": "in the world"}]
        params = SamplingParams(temperature=0.0, max_tokens=2)
        for _ in llm.stream(messages, params):
            pass
        updates = list(llm.stream([*messages, {"role": "assistant", "content": "x"}], params))
        assert updates[0].output.num_cached_tokens > 0

    def test_several_conversations(self, llm):
        conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
        assert (
            len(
                llm.chat(
                    conversations, SamplingParams(temperature=0.0, max_tokens=1), priority=[0, 0]
                )
            )
            == 2
        )


class TestMany:
    def test_priorities(self, make_llm):
        llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
        outputs = llm.generate([PROMPT[:5], PROMPT[:6], PROMPT[:7]], GREEDY, priority=[3, 1, 2])
        first = [output.metrics.token_times[0] for output in outputs]
        assert sorted(first) == [first[1], first[2], first[0]]

    @pytest.mark.parametrize("use_tqdm", [True, False])
    def test_a_bar_is_for_terminals(self, llm, capsys, use_tqdm):
        llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=use_tqdm)
        assert capsys.readouterr() == ("", "")

    def test_the_bar_shows_both_phases(self, make_llm, monkeypatch):
        console = Console(file=io.StringIO(), force_terminal=True, width=200)
        monkeypatch.setattr(
            "twinphase.engine.frontends.llm._progress",
            lambda total: GenerateProgress(total, console),
        )
        make_llm().generate([PROMPT, PROMPT, PROMPT], GREEDY)
        shown = console.file.getvalue()
        assert "3/3" in shown
        assert re.search(r"prefill [\d,]+\S* .*decode [\d,]+\S* tok/s", shown)

    def test_a_request_that_fails_fails_alone(self, make_llm):
        llm = make_llm()
        expected = answer(llm, PROMPT[1:]).token_ids

        def fail(batch):
            if any(share.prompt_token_ids == PROMPT for share in batch.scheduled):
                raise RuntimeError("no such luck")

        with patched(llm, fail):
            bad, good = llm.generate([PROMPT, PROMPT[1:]], GREEDY)
        assert (bad.outputs[0].finish_reason, bad.error) == ("error", "RuntimeError: no such luck")
        assert bad.outputs[0].token_ids == [] and bad.finished
        assert (good.outputs[0].finish_reason, good.outputs[0].token_ids) == ("length", expected)
        assert not llm.engine.has_work

    def test_two_front_ends_share_an_engine(self, make_llm):
        """Steps of a stream compute the other front end's request, and vice versa."""
        llm = make_llm(max_num_batched_tokens=16)
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        (output,) = llm.generate([PROMPT[3:]], GREEDY)
        rest = list(stream)
        assert rest[-1].output.outputs[0].token_ids == answer(llm).token_ids
        assert output.outputs[0].token_ids == answer(llm, PROMPT[3:]).token_ids


def test_log_probabilities_of_the_prompt_are_those_of_the_whole_computed_at_once(
    make_llm, tiny_path, monkeypatch
):
    """In chunks, after and beside another request with the same prompt, which shares blocks."""
    monkeypatch.setattr(chunk, "MAX_SCORED_ROWS", 32)
    llm = make_llm()
    prompt = [7 + number * number % 290 for number in range(100)]
    logits = (
        Steps(tiny_path, ReferenceBackend())
        .chunked(np.array(prompt, np.int32), [100])
        .astype(np.float64)
    )
    expected = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))[:-1]
    scored = replace(GREEDY, prompt_logprobs=2)
    most = []
    plain = answer(llm, prompt)
    together = [prompt, prompt[1:], prompt], [scored, GREEDY, scored]
    for prompts, params in (([prompt], scored), together):
        with patched(
            llm, lambda batch: most.append(max(one.num_logits for one in batch.scheduled))
        ):
            outputs = llm.generate(prompts, params)
        for output in outputs[::2]:
            assert output.outputs[0] == plain and output.prompt_logprobs[0] is None
            assert (output.num_cached_tokens, output.prefix_miss) == (
                0,
                PrefixMiss(MissReason.PROMPT_LOGPROBS, 0),
            )
            for row, token_id, entry in zip(
                expected, prompt[1:], output.prompt_logprobs[1:], strict=True
            ):
                assert entry[token_id].logprob == pytest.approx(row[token_id], abs=1e-4)
                assert max(one.logprob for one in entry.values()) == pytest.approx(
                    row.max(), abs=1e-4
                )
                assert (
                    2 <= len(entry) <= 3 and entry[token_id].rank == 1 + (row > row[token_id]).sum()
                )
    assert max(most) == 32
    assert llm.generate([prompt[:1]], scored)[0].prompt_logprobs == [None]
    fresh = make_llm()
    fresh.generate([prompt], scored)
    assert fresh.generate([prompt], GREEDY)[0].num_cached_tokens == 96


def interrupted(llm, step):
    """Ctrl-C arrives while the given step is computed."""
    steps = count(1)
    return patched(
        llm, lambda batch: signal.raise_signal(signal.SIGINT) if next(steps) == step else None
    )


@pytest.mark.parametrize(("step", "num_tokens"), [(1, 0), (2, 1), (4, 3)])
def test_ctrl_c_aborts_and_is_raised(make_llm, step, num_tokens):
    llm = make_llm(max_num_batched_tokens=20, enable_prefix_caching=False)
    whole = answer(llm).token_ids
    with pytest.raises(KeyboardInterrupt), interrupted(llm, step):
        llm.generate([PROMPT, PROMPT], GREEDY)
    assert not llm.engine.has_work
    llm.engine.scheduler.check_integrity()
    updates = []
    with pytest.raises(KeyboardInterrupt), interrupted(llm, step):
        for update in llm.stream(PROMPT, GREEDY):
            updates.append(update)
    completion = updates[-1].output.outputs[0]  # what there is has come before
    assert (completion.finish_reason, completion.token_ids) == ("abort", whole[:num_tokens])
    assert "".join(update.text for update in updates) == completion.text
    assert answer(llm).token_ids == whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_one_call_leaves_other_streams_alone(make_llm):
    llm = make_llm()
    whole = answer(llm).token_ids
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(KeyboardInterrupt), interrupted(llm, 2):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert list(stream)[-1].output.outputs[0].token_ids == whole


def test_ctrl_c_while_a_prompt_is_read_leaves_nothing_behind(llm, monkeypatch):
    encode = llm._loaded.encode
    monkeypatch.setattr(
        llm._loaded,
        "encode",
        lambda prompt: (signal.raise_signal(signal.SIGINT), encode(prompt))[1],
    )
    for call in (llm.generate, llm.stream):
        with pytest.raises(KeyboardInterrupt):
            call("hello", GREEDY)


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ("", InvalidRequestError, "empty"),
        ([], InvalidRequestError, "empty"),
        ([320], InvalidRequestError, "0 to 319"),
        ([1] * 128, ContextLengthError, "has 128 tokens; the context holds 128"),
        ("x" * 100_000, ContextLengthError, "100000"),
        ("\ud800", InvalidRequestError, "Unicode"),
    ],
)
def test_bad_prompts(llm, prompt, error, match):
    with pytest.raises(error, match=match):
        llm.generate([PROMPT, prompt], GREEDY)


def test_a_prompt_larger_than_the_whole_cache(make_llm):
    llm = make_llm(num_kv_blocks=2)
    with pytest.raises(
        CacheCapacityError, match="up to 3 KV cache blocks of 16 tokens; the whole cache has 2"
    ):
        llm.generate([PROMPT[:5], PROMPT], GREEDY)
    assert not llm.engine.has_work


def test_shape_counts_the_tied_head_and_what_only_rows_with_logits_go_through(llm):
    shape = model_shape(llm.checkpoint, llm.blueprint)
    tensors = llm.checkpoint.tensors
    last = f"blk.{llm.blueprint.num_layers - 1}."
    tail = sum(
        tensors[f"{last}{name}.weight"].nbytes
        for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")
    )
    assert shape.head_bytes == 320 * 64 * 4 + tail
    matrices = sum(
        info.nbytes
        for name, info in tensors.items()
        if name.startswith("blk.") and len(info.shape) == 2
    )
    assert shape.linear_bytes == matrices - tail
    assert shape.linear_bytes == shape.linear_parameters * 4


def test_prompts_in_vllms_mappings(llm):
    text = {"prompt": "hello world"}
    ids = {"prompt_token_ids": PROMPT}
    assert llm.generate(text, GREEDY)[0].prompt == "hello world"
    outputs = llm.generate([ids, text, "hello world"], GREEDY)
    assert outputs[0].prompt_token_ids == PROMPT
    assert outputs[1].outputs[0].text == outputs[2].outputs[0].text


def test_a_long_answers_timeline_is_short(llm):
    (output,) = llm.generate([PROMPT], greedy(60))
    timeline = output.metrics
    assert len(timeline.intervals) < 12
    assert (
        timeline.intervals[0].start == timeline.arrival
        and timeline.intervals[-1].end == timeline.end
    )
    assert all(
        a.end == b.start for a, b in zip(timeline.intervals, timeline.intervals[1:], strict=False)
    )


def test_a_prediction_changes_no_answer(make_llm, shared_llm):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, logprobs=1, ignore_eos=True)
    (plain,) = shared_llm.generate("hello world", params)
    llm = make_llm(speculative_config="auto")
    for prediction in (plain.outputs[0].text, ["something else"]):
        (told,) = llm.generate("hello world", params, prediction=prediction)
        assert told.outputs[0].token_ids == plain.outputs[0].token_ids
        assert len(told.metrics.token_times) == 40
    with pytest.raises(InvalidRequestError, match="2 predictions"):
        llm.generate("hello world", params, prediction=["a", "b"])
