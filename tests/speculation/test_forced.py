"""A token that a grammar forces is drafted; drafting does not change the grammar's state."""

import numpy as np
import pytest

from twinphase.constraint import StructuredOutputsParams
from twinphase.request import Request, SamplingParams
from twinphase.sampling.structured import GrammarCompiler
from twinphase.sampling.thinking import ThinkingConstraint, ThinkingTags
from twinphase.speculation.forced import ForcedProposer

END = 256
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<|end|>"]
COMPILER = GrammarCompiler(TOKENS, {END}, {END}, len(TOKENS))


def compiled(**form):
    return COMPILER.compile(StructuredOutputsParams(**form))


def allowed(constraint, output):
    return np.flatnonzero(
        np.isfinite(constraint.restrict(np.zeros(len(TOKENS), np.float32), output))
    ).tolist()


def forced(constraint, text, limit=99):
    request = Request(
        "a", [1], SamplingParams(), 0.0, output_token_ids=list(text.encode()), constraint=constraint
    )
    drafts = ForcedProposer().propose(request, limit)
    assert all(draft.certain == len(draft.token_ids) for draft in drafts)
    return bytes(drafts[0].token_ids).decode() if drafts else ""


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ({"choice": ["hello world", "hello there"]}, "", "hello "),
        (
            {"choice": ["hello world", "hello there"]},
            "hello w",
            "orld",
        ),  # then only the end is allowed: no draft
        ({"choice": ["hello world", "hello there"]}, "hello world", ""),
        ({"regex": "[0-9]+ apples"}, "", ""),
        ({"regex": "[0-9]+ apples"}, "12 ", "apples"),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                }
            },
            '{"n',
            'ame"',
        ),
    ],
)
def test_what_is_forced(form, text, expected):
    assert forced(compiled(**form), text) == expected
    assert forced(compiled(**form), text, limit=3) == expected[:3]


def test_asking_changes_nothing():
    form = {"choice": ["hello world", "hello there", "goodbye"]}
    asked = compiled(**form)
    output = []
    for byte in b"hello there":
        fresh = compiled(**form)
        drafts = forced(asked, bytes(output).decode())
        assert asked.admits(output, [*drafts.encode(), 1]) == len(drafts)
        assert allowed(asked, output) == allowed(fresh, output)
        output.append(byte)
    assert allowed(asked, output) == [END]
    assert allowed(asked, output[:3]) == [ord("l")]  # and back again


def test_drafts_that_a_grammar_forbids_are_cut():
    constraint = compiled(regex="(cat|dog)+")
    assert constraint.admits([], list(b"catdogcow")) == 7
    assert constraint.admits(list(b"ca"), list(b"xy")) == 0
    assert allowed(constraint, list(b"ca")) == [ord("t")]


def test_the_end_of_thinking_is_forced_when_its_budget_is_spent():
    tags = ThinkingTags(tuple(b"<t>"), tuple(b"</t>"))
    constraint = ThinkingConstraint(
        tags, TOKENS, True, 5, compiled(choice=["yes sir", "no"]), {END}
    )
    assert forced(constraint, "hmm") == ""
    assert forced(constraint, "hmm, w") == "</t>"
    assert forced(constraint, "hmm, w<") == "/t>"
    assert forced(constraint, "hmm, w</t>y") == "es sir"
    assert constraint.admits(list(b"hmm, w</t>y"), list(b"es madam")) == 3
    assert constraint.admits(list(b"hm"), list(b"anything")) == 8
