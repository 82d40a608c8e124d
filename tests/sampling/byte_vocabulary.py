"""A vocabulary of all bytes, some words and control tokens, and its compiler of grammars."""

from twinphase.sampling.structured import GrammarCompiler

CONTROL = [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>", b"<tool>"]
WORDS = [
    text.encode()
    for text in (
        "the",
        "hello",
        " world",
        '":',
        '", "',
        '{"',
        '"}',
        "\n  ",
        "é",
        "日本",
        "123",
        "tr",
    )
]
TOKENS = [*CONTROL, *(bytes([byte]) for byte in range(256)), *WORDS]
EOS = {0, 2}
SPECIAL = {0, 1, 2, 3}
TOOL = 3
NUM_LOGITS = len(TOKENS) + 11


def make_compiler():
    return GrammarCompiler(TOKENS, SPECIAL, EOS, NUM_LOGITS)
