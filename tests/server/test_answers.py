import asyncio
from itertools import accumulate
from types import SimpleNamespace

import pytest

from twinphase.server.answers import AnswerDivider, run_job
from twinphase.server.jobs import Reader
from twinphase.server.tools import HERMES
from twinphase.tokenizer.think_tags import ThinkTags


class Stream:
    """Gives numbers, and counts how often it was asked."""

    def __init__(self, given, error=None):
        self.given = iter(given)
        self.error = error
        self.num_asked = self.num_abandoned = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.num_asked += 1
        for item in self.given:
            return item
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration

    def abandon(self):
        self.num_abandoned += 1


def choices_of(*streams):
    return [
        SimpleNamespace(index=i, stream=s, take=lambda u, i=i: (i, u))
        for i, s in enumerate(streams)
    ]


async def let_others_run():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_is_asked_for_more_when_what_it_gave_was_handed_over(count):
    async def main():
        streams = [Stream([1, 2, 3]) for _ in range(count)]
        seen = []
        async for index, item in run_job(choices_of(*streams), lambda choice, update: None):
            await let_others_run()  # the write to the socket
            assert streams[index].num_asked == item
            seen.append((index, item))
        assert sorted(seen) == [(i, k) for i in range(count) for k in (1, 2, 3)]

    asyncio.run(main())


def test_one_answer_that_fails_ends_all():
    async def main():
        streams = [Stream(range(1, 10**9)), Stream([1], ValueError("bad"))]
        with pytest.raises(ValueError, match="bad"):
            async for _ in run_job(choices_of(*streams), lambda choice, update: None):
                pass
        assert all(stream.num_abandoned for stream in streams)
        asked = streams[0].num_asked
        await let_others_run()
        assert streams[0].num_asked == asked and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "pieces, labels",
    [
        (["<think>", "hm", ".", "</think>", "\n", "Hi", " you"], "ttttccc"),
        (["<think>", "hm</", "think>", "H", "i", ""], "tttcce"),
        (["<think>", "hm"], "tt"),
        (
            ["Sure", ". ", "<tool", "_call>", '{"name": "f", "arg', 'uments": {}}']
            + ["\n</tool_call>", "Done"],
            "ccxxxxxc",
        ),
        (["a", "<", "b", "<tool"], "cccc"),
        (["<tool_call>", '{"name": "f", "arguments": {"a": ', "1"], "xxx"),
    ],
)
@pytest.mark.parametrize("cut", [1, 3, 99])
def test_tokens_are_labelled_by_the_part_that_their_text_goes_to(pieces, labels, cut):
    """The text may be cut into updates anywhere, also where a stop string may begin in a token."""
    divider = AnswerDivider(Reader(ThinkTags("<think>", "</think>"), tool_format=HERMES))
    text = "".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    divider.take("", ends, finished=False)
    for start in range(0, len(text), cut):
        divider.take(text[start : start + cut], [], finished=False)
    divider.take("", [], finished=True)
    assert "".join({"call": "x"}.get(label, label[0]) for label in divider.labels) == labels


def test_tokens_that_a_stop_string_cut_off_are_labelled_like_the_text_before():
    divider = AnswerDivider(Reader(ThinkTags("<think>", "</think>")))
    divider.take("<think>a", [7, 8, 9], finished=False)
    divider.take("", [8], finished=True)
    assert divider.labels == ["thought"] * 4
