import numpy as np
import pytest

from twinphase.constraint import StructuredOutputsParams
from twinphase.errors import InvalidRequestError
from twinphase.request import SamplingParams
from twinphase.sampling.sampler import ConstraintError
from twinphase.sampling.structured import GrammarCompiler
from twinphase.sampling.thinking import ThinkingTags, make_constraint

# One-token tags, "<r>" of three tokens, and a token in which the end of that tag goes on.
TOKENS = [
    b"<end>",
    b"<turn>",
    b"<think>",
    b"</think>",
    b"<",
    b"/",
    b"r",
    b">",
    b">\n",
    b"a",
    b"b",
    b"\n",
]
END, TURN, THINK, UNTHINK, LESS, SLASH, R, MORE, MORE_LINE, A, B, LINE = range(len(TOKENS))
ALL = set(range(len(TOKENS)))
WORDS = ThinkingTags((THINK,), (UNTHINK,))
SPELLED = ThinkingTags((LESS, R, MORE), (LESS, SLASH, R, MORE))
OPEN = [TURN, A, LINE, THINK, LINE]


@pytest.fixture(
    scope="module",
    params=[[END, TURN], [END, TURN, THINK, UNTHINK]],
    ids=["tags are text", "tags are not"],
)
def compiler(request):
    return GrammarCompiler(TOKENS, request.param, [END], len(TOKENS))


def make(compiler, prompt, tags=WORDS, choice=None, budget=None):
    answer = None if choice is None else StructuredOutputsParams(choice=[choice])
    params = SamplingParams(structured_outputs=answer, thinking_token_budget=budget)
    return make_constraint(params, prompt, compiler, tags)


def allowed(constraint, output):
    restricted = constraint.restrict(np.zeros(len(TOKENS), np.float32), output)
    return set(np.flatnonzero(np.isfinite(restricted)).tolist())


def test_nothing_asked_is_no_constraint(compiler):
    assert make(compiler, OPEN) is None


def test_an_answer_obeys_after_thinking(compiler):
    constraint = make(compiler, OPEN, choice="ab")
    assert allowed(constraint, []) == allowed(constraint, [B, THINK, LINE]) == ALL - {END}
    assert allowed(constraint, [B, UNTHINK]) == {A}
    assert allowed(constraint, [B, UNTHINK, A]) == {B}
    assert allowed(constraint, [B, UNTHINK, A, B]) == {END}
    with pytest.raises(ConstraintError):
        allowed(constraint, [B, UNTHINK, B])


@pytest.mark.parametrize(
    "prompt",
    [[TURN, A], [THINK, A, TURN, B], [TURN, THINK, LINE, UNTHINK, LINE], [TURN, A, UNTHINK], []],
)
def test_an_answer_obeys_at_once_where_thinking_is_not_open(compiler, prompt):
    constraint = make(compiler, prompt, choice="ab", budget=3)
    assert allowed(constraint, []) == {A}


def test_the_prompt_may_have_begun_the_thoughts(compiler):
    assert allowed(make(compiler, [*OPEN, A, B], choice="ab"), []) == ALL - {END}
    assert allowed(
        make(compiler, [TURN, LESS, R, MORE_LINE, A], SPELLED, choice="ab"), []
    ) == ALL - {END}


def test_a_spelled_tag_ends_thinking_however_it_is_cut(compiler):
    for end in ([LESS, SLASH, R, MORE], [LESS, SLASH, R, MORE_LINE]):
        constraint = make(compiler, [TURN, LESS, R, MORE], SPELLED, choice="ab")
        assert allowed(constraint, [A, *end[:-1]]) == ALL - {END}
        assert allowed(constraint, [A, *end]) == {A}


@pytest.mark.parametrize("tags", [WORDS, SPELLED])
def test_a_spent_budget_forces_the_end_tag(compiler, tags):
    for budget in (0, 3):
        constraint = make(compiler, [TURN, *tags.start], tags, choice="ab", budget=budget)
        output = [B] * budget
        assert not budget or allowed(constraint, output[:-1]) == ALL - {END}
        for token in tags.end:
            assert allowed(constraint, output) == {token}
            output.append(token)
        assert allowed(constraint, output) == {A}


def test_a_budget_goes_on_with_an_end_tag_that_has_begun(compiler):
    constraint = make(compiler, [TURN, *SPELLED.start], SPELLED, budget=3)
    assert allowed(constraint, [B, LESS, SLASH]) == {R}
    assert allowed(constraint, [B, B, SLASH]) == {LESS}


@pytest.mark.parametrize("tags", [WORDS, SPELLED])
def test_a_budget_counts_from_a_start_tag_in_the_output(compiler, tags):
    constraint = make(compiler, [TURN, A], tags, budget=2)
    assert allowed(constraint, []) == allowed(constraint, [LINE, *tags.start, A]) == ALL
    assert allowed(constraint, [LINE, *tags.start, A, B]) == {tags.end[0]}
    assert allowed(constraint, [*tags.start, A, B, *tags.end, A, A, A]) == ALL
    assert allowed(constraint, [A, *tags.start, A, B, A]) == ALL


def test_a_constraint_is_a_function_of_the_output(compiler):
    rng = np.random.default_rng(0)
    whole = [B, LESS, SLASH, R, MORE_LINE, A, B]
    outputs = [whole[: rng.integers(len(whole) + 1)] for _ in range(30)] + [
        [B, B, B],
        [B, LESS, SLASH, R, MORE, A],
    ]
    one = make(compiler, [TURN, *SPELLED.start], SPELLED, choice="ab", budget=6)
    for output in outputs:
        assert allowed(one, output) == allowed(
            make(compiler, [TURN, *SPELLED.start], SPELLED, choice="ab", budget=6), output
        )


def test_a_budget_needs_a_model_that_thinks(compiler):
    with pytest.raises(InvalidRequestError, match="does not think"):
        make(compiler, [TURN], None, budget=1)
    assert allowed(make(compiler, OPEN, None, choice="ab"), []) == {A}
