from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tokenizer.tiny_tokenizer import byte_level

from twinphase.server.jobs import _markers
from twinphase.server.reasoning import ReasoningSplitter
from twinphase.tokenizer.think_tags import ThinkTags, opens_thinking, think_tags

TAGS = ThinkTags("<think>", "</think>")
PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "</thi", "nk>", "<", "\n", " ", "a"]),
    max_size=12,
)


def split(pieces: list[str], opened: bool, tags: ThinkTags = TAGS) -> tuple[str, str]:
    splitter = ReasoningSplitter(tags, opened)
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.flush()]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        (" \n<think>why</think>so", False, "why", "so"),
        ("why\n\nnot\n</think>\n\nso\n", True, "why\n\nnot", "so\n"),
        (
            "<think>\nwhy</think>so",
            True,
            "why",
            "so",
        ),  # some models repeat the tag that the prompt ends in
        ("<think>\n\n</think>\n\nso", False, "", "so"),
        ("\n so <think>why</think>", False, "", "\n so <think>why</think>"),
        ("<thin", False, "", "<thin"),
        ("cut off </thi", True, "cut off </thi", ""),
        ("<think>why</think>so</think>", False, "why", "so</think>"),
    ],
)
def test_text_is_divided_at_the_tags(text, opened, reasoning, content):
    assert split([text], opened) == (reasoning, content)


@given(PIECES, st.booleans())
def test_pieces_do_not_matter(pieces, opened):
    text = "".join(pieces)
    assert split(pieces, opened) == split([text], opened) == split(list(text), opened)


def test_reasoning_streams_but_for_the_beginning_of_a_tag():
    splitter = ReasoningSplitter(TAGS, opened=True)
    fed = [splitter.feed(piece) for piece in ("hmm <", "b> \n", "</", "think>", "\nso")]
    assert fed == [("hmm ", ""), ("<b> ", ""), ("", ""), ("", ""), ("", "so")]


def test_a_caller_can_count_the_tokens_of_the_thinking_part():
    splitter = ReasoningSplitter(TAGS, opened=False)
    states = []
    for token in ("<think>", "why", "</think>", "so"):
        splitter.feed(token)
        states.append(splitter.reasoning)
    assert states == [True, True, False, False]


def test_tags_come_from_the_template():
    assert think_tags("{{ '<think>\\n' }}") == TAGS
    assert think_tags("{% if '[THINK]' in content %}") == ThinkTags("[THINK]", "[/THINK]")
    assert think_tags("{{ message.content }}") is None


HARMONY = "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}why<|end|><|start|>assistant{FINAL}so", "why", "so"),
        (f"{FINAL}so", "", "so"),
        (f"{ANALYSIS}why, cut o", "why, cut o", ""),
        ("<|channel|>commentary", "", "<|channel|>commentary"),
    ],
)
def test_the_channels_of_gpt_oss(text, reasoning, content):
    tags = think_tags(HARMONY)
    assert tags is not None and not opens_thinking("<|start|>assistant", tags)
    for pieces in ([text], list(text)):
        assert split(pieces, False, tags) == (reasoning, content)


def test_control_tokens_inside_a_tag_stay_in_the_text():
    tags = ThinkTags("<|im_start|>analysis", "<|im_end|> so", "<|endoftext|>")
    assert _markers(byte_level(), tags, None) == {0, 1, 2}
    assert _markers(byte_level(), TAGS, None) == frozenset()


def test_only_a_tag_at_its_end_opens_the_thinking():
    assert opens_thinking("<|User|>hi<|Assistant|><think>\n", TAGS)
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n", TAGS)
    assert not opens_thinking(
        "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", TAGS
    )
