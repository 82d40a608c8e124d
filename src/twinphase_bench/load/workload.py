"""The requests of a load: synthetic prompts of given lengths, optionally with shared prefixes.

`traces.py` reads workloads from files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinphase import InvalidRequestError, Lengths
from twinphase_bench.targets.target import Prompt

WORDS = tuple(
    """
    able about above across after again against air all almost along already also always among
    and animal another answer any apple area around arrive ask autumn away baby back bad bag
    ball bank bar base basket be bear beat beautiful because become bed before begin behind
    believe below bench best better between big bird black blue board boat body bone book border
    both bottom box boy branch bread break bridge bright bring broad brother brown build burn
    business busy butter buy by call camp can cap capital captain car care carry case cat catch
    cause center certain chair chance change charge cheap check child choose church circle city
    class clean clear climb clock close clothes cloud coast coat cold color come common company
    cook cool copper copy corn corner correct cost cotton count country course cover cow cross
    crowd cry current cut dance dark daughter day dead deal deep degree depend desert design
    desk detail different dinner direct distance divide doctor dog door double down draw dream
    dress drink drive drop dry during dust each ear early earth east easy eat edge effect egg
    eight either electric eleven else empty end engine enough enter equal even evening event
    ever every exact example except eye face fact fair fall family famous far farm fast father
    fear feed feel few field fight figure fill film find fine finger finish fire first fish fit
    five flat floor flow flower fly follow food foot for force forest form forward four free
    fresh friend from front fruit full game garden gas gate gather gentle get girl give glad
    glass go gold good grand grass gray great green ground group grow guess guide hair half hall
    hand happen happy hard hat have head hear heart heat heavy help here high hill history hold
    hole home hope horse hot hotel hour house how huge human hundred
    """.split()  # noqa: SIM905  a list of quoted words would be a page long
)
# Each prompt begins with this number of unique words.
NONCE_WORDS = 8


@dataclass(frozen=True)
class Sizing:
    """The rules by which prompts for one target get the requested lengths."""

    tokens_per_word: float = 1.0  # Tokens per word of our word list, by the target's own count.
    overhead: float = 0.0  # Additional tokens of every prompt: begin of text, chat template.
    vocab_size: int | None = (
        # If given, prompts are random token ids of exact length, and the fields above are not used.
        None
    )
    reserved: int = 256  # Lower ids are usually control tokens, and are not used.
    counted: bool = True  # False if the target does not count tokens, so that lengths are in words.
    # Encodes a text, for a target of token ids that has the model's tokenizer.
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False)

    def num_words(self, num_tokens: float) -> int:
        """The number of words for `num_tokens` tokens minus the overhead; at least one."""
        return max(1, round(num_tokens / self.tokens_per_word))


class TextMaker:
    """Random texts, determined by seed and number; the first words of all numbers differ."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = list(WORDS)
        random.Random(f"first/{seed}").shuffle(self._first)

    def words(self, count: int, number: int) -> str:
        """Text number `number`.

        Its first eight words spell the number in a shuffled list of words, lowest digit first: no
        two numbers share all eight, and the very first word differs up to the length of the list.
        """
        rest = number
        nonce = []
        for _ in range(NONCE_WORDS):
            nonce.append(self._first[rest % len(WORDS)])
            rest //= len(WORDS)
        return " ".join([*nonce, *self.block(count - NONCE_WORDS, f"text/{number}")][:count])

    def block(self, count: int, name: str) -> list[str]:
        """The words of a named block; equal names have equal words."""
        return random.Random(f"{name}/{self._seed}").choices(WORDS, k=max(0, count))


class PromptMaker:
    """Prompts with about the requested number of tokens, or exactly with token ids."""

    def __init__(self, sizing: Sizing, seed: int = 0) -> None:
        self.sizing = sizing
        self._seed = seed
        self._text = TextMaker(seed)
        self._number = 0

    def take(self, num_tokens: int) -> Prompt:
        """The next prompt, which shares no prefix with any other."""
        self._number += 1
        if self.sizing.vocab_size is None:
            words = self.sizing.num_words(num_tokens - self.sizing.overhead)
            return Prompt(self._text.words(words, self._number), num_tokens=num_tokens)
        ids = self._ids(num_tokens, f"ids/{self._number}")
        usable = self.sizing.vocab_size - self._first_id
        ids[0] = (
            self._first_id + (self._number * 7919 + self._seed) % usable
        )  # The step is a prime, so that no number repeats soon.
        return Prompt("", tuple(ids), num_tokens)

    def take_shared(self, num_tokens: int, blocks: Sequence[int], block_tokens: float) -> Prompt:
        """A prompt made of blocks: prompts with the same first k blocks share these."""
        if self.sizing.vocab_size is not None:
            size = max(1, round(block_tokens))
            ids = [i for block in blocks for i in self._ids(size, f"block/{block}")]
            ids += self._ids(num_tokens - len(ids), f"tail/{blocks[-1:]}")
            return Prompt("", tuple(ids[:num_tokens]), num_tokens)
        size = self.sizing.num_words(block_tokens)
        count = self.sizing.num_words(num_tokens - self.sizing.overhead)
        words = [word for block in blocks for word in self._text.block(size, f"block/{block}")]
        words += self._text.block(count - len(words), f"tail/{blocks[-1:]}")
        return Prompt(" ".join(words[:count]), num_tokens=num_tokens)

    @property
    def _first_id(self) -> int:
        vocab = self.sizing.vocab_size or 0
        return self.sizing.reserved if vocab > 2 * self.sizing.reserved else 3

    def _ids(self, count: int, name: str) -> list[int]:
        draw = random.Random(f"{name}/{self._seed}")
        return draw.choices(range(self._first_id, self.sizing.vocab_size or 0), k=max(0, count))


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load."""

    prompt: Prompt
    max_tokens: int
    timestamp: float | None = None  # In a trace, seconds after the first request.

    @property
    def num_tokens(self) -> int:
        return self.prompt.num_tokens + self.max_tokens


@dataclass(frozen=True)
class Workload:
    """The requests for a target."""

    requests: tuple[LoadRequest, ...]  # Measured requests, in the order of sending.
    # Requests sent first, with their own prompts, which are not measured.
    warm_up: tuple[LoadRequest, ...] = ()
    description: str = ""  # A line for the report.
    conditions: dict[str, str] = field(
        default_factory=dict
    )  # Scale of lengths and times, file, seed.
    notes: tuple[str, ...] = ()  # Facts that a reader needs to judge the load.

    def require_fit(self, context_length: int | None) -> None:
        """Check lengths against a target's context.

        Raises:
            InvalidRequestError: some requests do not fit.
        """
        longest = max((request.num_tokens for request in self.requests), default=0)
        if context_length is not None and longest > context_length:
            number = sum(request.num_tokens > context_length for request in self.requests)
            fix = "Give a shorter --random-input-len or --random-output-len."
            if "--scale-lengths" in self.conditions:
                present = float(self.conditions["--scale-lengths"])
                fix = (
                    f"Give --scale-lengths {0.98 * present * context_length / longest:.3g}, or "
                    "less."
                )
            raise InvalidRequestError(
                f"{number} of {len(self.requests)} requests are longer than the context of "
                f"{context_length} tokens (the longest has {longest}).",
                fix,
            )


def make_workload(
    lengths: Lengths, num_prompts: int, sizing: Sizing, *, seed: int = 0, num_warm_up: int = 3
) -> Workload:
    """Requests with unique prompts; `sizing` is the target's, `seed` that of lengths and texts."""
    generator = random.Random(f"lengths/{seed}")
    maker = PromptMaker(sizing, seed)

    def requests(number: int) -> tuple[LoadRequest, ...]:
        drawn = (lengths.draw(generator) for _ in range(number))
        return tuple(LoadRequest(maker.take(prompt), output) for prompt, output in drawn)

    counted = "" if sizing.counted else "; the target does not count tokens: lengths are in words"
    what = (
        "random token ids"
        if sizing.vocab_size is not None
        else f"{sizing.tokens_per_word:.3f} tokens per word"
    )
    conditions = {"seed": str(seed), "prompts": what, "warm-up requests": str(num_warm_up)}
    description = f"{num_prompts} requests, {lengths}{counted}"
    return Workload(requests(num_prompts), requests(num_warm_up), description, conditions)
