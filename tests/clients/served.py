"""Where the servers are and what they serve, and a line for each check that passed."""

import sys

URL, MODEL, EMBED_URL, EMBED_MODEL = sys.argv[1:5]
KEY = "client-key"  # one that the servers know
QUESTION = "What is the capital of France? Answer in one word."
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def works(what: str) -> None:
    print(f"  {what}", flush=True)
