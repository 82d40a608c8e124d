"""Misuse of the library: an answer or an error with a sentence, never a hang."""

import asyncio
import multiprocessing
import sys
import threading

import pytest

from added import greedy
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.errors import EngineDeadError, InvalidRequestError
from twinphase.explain.explanation import Explanation

GREEDY = greedy(12)
USER = {"role": "user", "content": "hello"}
PROMPTS = [list(range(40, 40 + n)) for n in (30, 7, 17, 25)]


def in_threads(*functions):
    """Results of functions that run at once, one thread each; fails if one does not return."""
    results = [None] * len(functions)
    threads = []

    def run(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    for index in range(len(functions)):
        threads.append(threading.Thread(target=run, args=(index,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    return results


@pytest.fixture
def often_switched():
    """Make threads switch at almost any point."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_threads_share_an_llm(make_llm, request, backend, often_switched):
    llm = make_llm() if backend == "reference" else request.getfixturevalue("cpu_llm")
    alone = [llm.generate([prompt], GREEDY)[0].outputs[0] for prompt in PROMPTS]

    def generate(prompt):
        return lambda: [
            llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0] for _ in range(4)
        ]

    def stream(prompt):
        return lambda: [list(llm.stream(prompt, GREEDY))[-1].output.outputs[0] for _ in range(4)]

    found = in_threads(*map(generate, PROMPTS[:2]), *map(stream, PROMPTS[2:]))
    for answers, expected in zip(found, alone, strict=True):
        assert [(one.token_ids, one.text) for one in answers] == [
            (expected.token_ids, expected.text)
        ] * 4
    assert not llm.engine.has_work and not llm._transcripts
    llm.engine.scheduler.check_integrity()


def test_a_thread_that_waits_gets_its_turn_while_another_goes_on(make_llm):
    """Otherwise a thread that steps in a loop would keep the engine until it is done."""
    llm = make_llm()
    long = greedy(None)
    began = threading.Event()
    order = []

    def first():
        for update in llm.stream([5, 6], long):  # noqa: B007  the last one is returned
            began.set()
            order.append("first")
        return update.finished

    def second():
        assert began.wait(60)
        (output,) = llm.generate([[7, 8]], greedy(2))
        order.append("second")
        return output.finished

    assert in_threads(first, second) == [True, True]
    assert order.index("second") < len(order) - 1


def test_a_stream_dropped_in_the_middle_of_a_step_is_aborted_after_it(make_llm):
    llm = make_llm()
    execute = llm.engine.executor.execute
    streams = [llm.stream(PROMPTS[0], GREEDY)]

    def dropping(batch):
        streams.clear()  # as the garbage collector may
        assert len(batch.scheduled) == len(llm._transcripts), "nothing changes below the step"
        return execute(batch)

    llm.engine.executor.execute = dropping
    (output,) = llm.generate([PROMPTS[1]], GREEDY)
    assert len(output.outputs[0].token_ids) == 12
    assert not llm.engine.has_work and not llm._transcripts


def child_of(function):
    """What a function raises in a forked child, by name and message; None if nothing."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run():
        try:
            function()
            theirs.send(None)
        except BaseException as error:
            theirs.send((type(error).__name__, str(error)))

    process = context.Process(target=run, daemon=True)
    process.start()
    try:
        assert ours.poll(60), "the child hangs"
        found = ours.recv()
        process.join(60)
        assert process.exitcode == 0
        return found
    finally:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
class TestFork:
    def test_an_llm(self, cpu_llm):
        expected = cpu_llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0]
        stream = cpu_llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        for use in (
            lambda: cpu_llm.generate("hello"),
            lambda: cpu_llm.chat([USER]),
            lambda: next(stream),
        ):
            name, message = child_of(use)
            assert name == "EngineDeadError" and "forked child" in message and "spawn" in message
        assert child_of(stream.close) is None, "what a child drops is not its own"
        assert list(stream)[-1].output.outputs[0].token_ids == expected.token_ids

    @pytest.mark.parametrize("start", [AsyncEngine.from_model, AsyncEngine.in_process])
    def test_an_async_engine(self, tiny_path, own_cache, start):
        async def main():
            engine = start(tiny_path, backend="reference")
            try:
                while not engine.is_running:
                    await asyncio.sleep(0.01)
                stream = await engine.submit("hello", GREEDY)

                def use():
                    asyncio.set_event_loop(None)
                    coroutine = engine.submit("hello", GREEDY)
                    try:
                        asyncio.events._set_running_loop(None)
                        asyncio.run(coroutine)
                    finally:
                        stream.abandon()
                        engine.close()

                name, message = child_of(use)
                assert name == EngineDeadError.__name__ and "forked child" in message
                assert (
                    len([update async for update in stream][-1].output.outputs[0].token_ids) == 12
                )
                assert engine.is_running
            finally:
                await asyncio.to_thread(engine.close)

        asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda llm: llm.chat("hi"),
            "chat.. was given a value of type str. Give a list of messages",
        ),
        (lambda llm: llm.chat(USER), "type dict. Give a list of messages"),
        (lambda llm: llm.chat(5), "type int. Give a list of messages"),
        (lambda llm: llm.chat([]), "empty"),
        (lambda llm: llm.chat([[]]), "empty"),
        (lambda llm: llm.chat(["hi"]), "Message 0 is of type str"),
        (lambda llm: llm.chat([USER, "hi"]), "Message 1 is of type str"),
        (lambda llm: llm.chat([[USER], "hi"]), "Message 0 is of type list"),
        (lambda llm: llm.chat([[USER], 5]), "conversation is of type int"),
        (lambda llm: llm.chat([{"content": "hi"}]), "Message 0 has no role"),
        (lambda llm: llm.chat([USER, {"role": "user"}]), "Message 1 has no content"),
        (lambda llm: llm.stream([{"content": "hi"}]), "Message 0 has no role"),
        (lambda llm: llm.stream([USER, 5]), "Message 1 is of type int"),
        (lambda llm: llm.generate(5), "prompt is of type int"),
        (lambda llm: llm.generate([5]), "prompt is of type int"),
        (lambda llm: llm.generate(None), "prompt is of type NoneType"),
        (lambda llm: llm.generate(b"hi"), "prompt is of type bytes"),
        (lambda llm: llm.generate([b"hi"]), "prompt is of type bytes"),
        (lambda llm: llm.generate({}), "Give `prompt` or `prompt_token_ids`"),
        (
            lambda llm: llm.generate({"prompt": "hi", "multi_modal_data": 1}),
            "keys 'prompt', 'multi_modal_data'",
        ),
        (lambda llm: llm.generate([USER]), "messages are for chat"),
        (lambda llm: llm.generate([["hi", "you"]]), "Token id 'hi' in prompt is not an integer"),
        (lambda llm: llm.generate([[True]]), "Token id True"),
        (lambda llm: llm.generate("hi", {"temperature": 0}), "of type dict. Give SamplingParams"),
        (lambda llm: llm.generate("hi", [{"temperature": 0}]), "of type dict. Give SamplingParams"),
        (lambda llm: llm.generate("hi", 0.7), "of type float"),
        (lambda llm: llm.stream("hi", {"temperature": 0}), "of type dict. Give SamplingParams"),
        (lambda llm: llm.generate("hi", priority="high"), "priorities are of type str"),
    ],
)
def test_wrong_types_are_told_at_the_door(llm, call, match):
    with pytest.raises(InvalidRequestError, match=match):
        call(llm)


def test_unknown_options_are_named(make_llm):
    with pytest.raises(
        InvalidRequestError, match="no engine option 'max_num_seq'. Did you mean max_num_seqs?"
    ):
        make_llm(max_num_seq=4)
    with pytest.raises(
        InvalidRequestError, match="no engine option 'rope_theta'. The options are .*backend"
    ):
        make_llm(rope_theta=2)


def test_no_users_id_is_taken_for_a_question(serve):
    """Ids of questions to the engine used to have the same form."""

    async def body(engine):
        first = await engine.submit("hello", GREEDY)
        names = [f"look-{n}" for n in range(3)] + ["0", "1", "2"]
        submits = [engine.submit("hi", GREEDY, request_id=name) for name in names]
        looks = [engine.explain(first) for _ in range(3)]
        *streams, a, b, c = await asyncio.gather(*submits, *looks)
        assert [stream.request_id for stream in streams] == names
        assert all(isinstance(found, Explanation) for found in (a, b, c))
        for stream in (first, *streams):
            assert len([update async for update in stream][-1].output.outputs[0].token_ids) == 12

    serve(body)
