"""The loop's compiling of grammars, where what is compiled must be timed or fail."""

import queue
import threading
from types import SimpleNamespace

from added import make_add
from twinphase.constraint import StructuredOutputsParams
from twinphase.engine.process.loop import GRAMMAR_THREADS, EngineLoop
from twinphase.engine.process.messages import End
from twinphase.outcome import FinishReason
from twinphase.request import SamplingParams

PARAMS = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))


def make_loop(constraint):
    text = SimpleNamespace(constraint=constraint)
    return EngineLoop(SimpleNamespace(text=text, engine=None), lambda _: None)


def add(request_id):
    return make_add(request_id, [1], PARAMS)


def test_a_grammar_whose_client_left_in_the_queue_is_not_compiled():
    go_on = threading.Event()
    compiled = queue.SimpleQueue()

    def constraint(params, prompt_token_ids):
        compiled.put(params)
        assert go_on.wait(60)

    loop = make_loop(constraint)
    for number in range(GRAMMAR_THREADS + 5):
        loop.put(add(str(number)))
    for number in range(GRAMMAR_THREADS, GRAMMAR_THREADS + 5):
        loop.put(End(str(number), FinishReason.ABORT))
    go_on.set()
    loop._compilers.shutdown()
    assert compiled.qsize() == GRAMMAR_THREADS


def test_a_panic_of_the_compiler_fails_its_request():
    class Panic(BaseException):
        """As pyo3's."""

    def constraint(params, prompt_token_ids):
        raise Panic("boom")

    loop = make_loop(constraint)
    loop.put(add("a"))
    assert "Panic: boom" in str(loop._inbox.get(timeout=60).error)
    loop._compilers.shutdown()


def test_a_tenants_grammar_does_not_wait_for_all_those_of_another():
    go_on = threading.Event()
    compiled = queue.SimpleQueue()

    def constraint(params, prompt_token_ids):
        compiled.put(prompt_token_ids[0])
        assert go_on.wait(60)

    loop = make_loop(constraint)
    for number in range(GRAMMAR_THREADS + 20):
        message = make_add(str(number), [number], PARAMS)
        message.record.tenant = "a"
        loop.put(message)
    message = make_add("b", [99], PARAMS)
    message.record.tenant = "b"
    loop.put(message)
    go_on.set()
    loop._compilers.shutdown()
    order = [compiled.get() for _ in range(GRAMMAR_THREADS + 21)]
    assert order.index(99) <= 2 * GRAMMAR_THREADS
