"""An engine's answers to a few prompts at once, and its number of accepted drafts."""

from __future__ import annotations

from twinphase.engine.loading.loading import LoadedEngine
from twinphase.request import Request, SamplingParams

PROMPTS = [[(7 * i + j) % 250 + 10 for i in range(20 + 13 * j)] for j in range(6)] + [
    [17] * 40,
    [17] * 41,
]


def answers(loaded: LoadedEngine) -> tuple[list[tuple[list[int], str]], int, int]:
    """Tokens and log probabilities per prompt; numbers of drafted and accepted tokens."""
    engine = loaded.engine
    logprobs = {}
    requests = []
    drafted = 0
    accepted = 0
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=number % 3 / 2, seed=number, max_tokens=40, logprobs=2, ignore_eos=True
        )
        requests.append(Request(str(number), prompt, params))
        engine.add_request(requests[-1])
    while engine.has_work:
        step = engine.step()
        drafted += sum(share.num_drafts for share in step.batch.decodes)
        accepted += sum(
            len(step.output.token_ids[share.request_id]) - 1 for share in step.batch.decodes
        )
        for name, entries in step.output.logprobs.items():
            logprobs.setdefault(name, []).extend(entries)
    engine.scheduler.check_integrity()
    return [(r.output_token_ids, repr(logprobs[r.request_id])) for r in requests], drafted, accepted
