"""The colours of the two phases, wherever both are shown: blue for prefill, orange for decode."""

from __future__ import annotations

# On a light page and on a dark one; after Okabe and Ito (https://jfly.uni-koeln.de/color/).
PAGE_COLOURS = {"prefill": ("#0067b0", "#56b4e9"), "decode": ("#c24a00", "#f08a3c")}
# ANSI codes, as in `ESC[34m`.
TERMINAL_CODES = {"prefill": "34", "decode": "38;5;208"}
