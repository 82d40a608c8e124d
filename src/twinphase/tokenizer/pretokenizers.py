r"""Rules for splitting text into words before BPE merges, by GGUF's `tokenizer.ggml.pre`.

A name that is not in this table is refused, because a wrong split gives plausible but wrong ids.
The patterns are those of the models' own tokenizers (Oniguruma syntax); the patterns of an entry
apply one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Words split where lower case changes to upper case: endings (contractions), then digits.
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way to split text.

    Attributes:
        patterns: patterns in order; each splits the words so far into matches and gaps.
        ignore_merges: whether a word that is a token stays whole, regardless of merges.
        add_bos: whether texts begin with the BOS token if the file does not say it.
        nfc: whether text is normalized to Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_WORDS % r"\p{N}{1,3}",), ignore_merges=True, add_bos=True)
_DBRX = PreTokenizer(_LLAMA3.patterns)
_QWEN2 = PreTokenizer((_WORDS % r"\p{N}",), nfc=True)
_QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}",
    ),
    nfc=True,
)
_PLAIN = PreTokenizer((_GPT2,))
_GPT4O = PreTokenizer((_CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?", r"\p{N}{1,3}"),))
_TEKKEN = PreTokenizer((_CASED % ("", "", r"\p{N}"),), ignore_merges=True, add_bos=True)
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-"
        r"ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
        r"Ὗ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-"
        r"ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
)
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
    )
)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "exaone4": _PLAIN,
    "olmo": _PLAIN,
    "mpt": _PLAIN,
    "granite-docling": _PLAIN,
    "smollm": _BY_DIGIT,
    "starcoder": _BY_DIGIT,
    "refact": _BY_DIGIT,
    "command-r": _BY_DIGIT,
    "codeshell": _BY_DIGIT,
    "minerva-7b": _BY_DIGIT,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "glm4": _DBRX,
    "chatglm-bpe": _DBRX,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": _TEKKEN,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
}
