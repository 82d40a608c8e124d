"""Claim: verifying a draft in one pass yields several tokens per step and the same text."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from twinphase import Stepped
from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import Workbench

PROMPT = 48
DRAFTED = 7
NONE = "no drafts"
RIGHT = f"{DRAFTED} right drafts"
WRONG = f"{DRAFTED} wrong drafts"
RATE = "tokens per second"
STEPS_TAKEN = "decode steps"
OTHER = "other text"


class _Drafts:
    """Drafts a known answer, with every token wrong by one if wanted."""

    num_failures = 0

    def __init__(self, answer: list[int], vocab_size: int, off: int) -> None:
        self._answer = answer
        self._vocab_size = vocab_size
        self._off = off

    def draft(self, requests: Sequence[Any]) -> Mapping[str, Sequence[int]]:
        """The next tokens of each request."""
        return {
            request.request_id: self._next(len(request.output_token_ids)) for request in requests
        }

    def _next(self, known: int) -> list[int]:
        return [
            (token + self._off) % self._vocab_size
            for token in self._answer[known : known + DRAFTED]
        ]

    def observe(self, batch: Any, output: Any) -> None:
        """Do nothing: this drafter does not learn."""

    def forget(self, request: Any) -> None:
        """Do nothing: this drafter keeps no state."""


@Experiment(
    claim="A draft of k tokens, verified in one pass, gives up to k + 1 tokens in one step, and "
    "changes no text.",
    method=f"One answer is decoded without drafts, with {DRAFTED} right ones per step, and with "
    f"{DRAFTED} wrong ones.",
    rules=(
        Rule("tokens/s with right drafts / without", at_least=2, fails_from=64),
        Rule("tokens/s with wrong drafts / without", at_most=0.95, fails_from=64),
        Rule("answers with other tokens", 0, 0, ""),
    ),
    meaning="Drafts pay where they are mostly right, such as when text is repeated or edited, and "
    "cost time elsewhere.",
    figure=Figure("Tokens per second with and without drafts", "drafts", (RATE,)),
    also=(STEPS_TAKEN, OTHER),
    seconds=4,
    sizes=(64, 32),
    sized_in="tokens of the answer",
)
def speculation(bench: Workbench) -> Trial:
    engine = bench.engine(enable_prefix_caching=True)
    prompt = bench.prompt(PROMPT)
    expected = _answer(engine, prompt, bench.size, None)[0]
    vocab_size = bench.workshop.blueprint.vocab_size

    def decode(drafts: _Drafts | None) -> dict[str, float]:
        tokens, seconds, steps = _answer(engine, prompt, bench.size, drafts)
        return {RATE: (len(tokens) - 1) / seconds, STEPS_TAKEN: steps, OTHER: tokens != expected}

    right, wrong = (_Drafts(expected, vocab_size, off) for off in (0, 1))
    ways = ((NONE, None), (RIGHT, right), (WRONG, wrong))
    runs = bench.interleave({name: partial(decode, one) for name, one in ways})
    plain = runs[NONE][RATE]
    taken = {name: median_of(found[STEPS_TAKEN]) for name, found in runs.items()}
    return Trial(
        runs,
        [
            ratios(runs[RIGHT][RATE], plain),
            ratios(runs[WRONG][RATE], plain),
            sum(sum(found[OTHER]) for found in runs.values()),
        ],
        f"Right drafts make {taken[RIGHT]:.0f} steps of {taken[NONE]:.0f}: a step with "
        f"{DRAFTED + 1} rows reads the weights once, as one with a single row does, and takes "
        "longer only by its rows' arithmetic. Each token is drawn as without drafts, so that a "
        "wrong draft costs time and nothing else.",
    )


def _answer(
    engine: Stepped, prompt: list[int], num_tokens: int, drafts: _Drafts | None
) -> tuple[list[int], float, int]:
    """The tokens, the seconds from the first to the last, and the decode steps."""
    engine.engine.drafter = drafts
    ticket = engine.submit(prompt, num_tokens)
    records = engine.run()
    engine.clear()
    return (
        ticket.tokens,
        ticket.times[-1] - ticket.times[0],
        sum(1 for record in records if record.num_decodes),
    )
