"""lm-eval's `local-completions` (log likelihoods) and `local-chat-completions`, on 50 sentences.

`hf` in items.jsonl is what transformers says of each choice with SmolLM2-135M-Instruct (Q4_1,
dequantized, float32): the sum of the log probabilities of the choice's tokens, as lm-eval's own
`hf` backend computes it. Where its best choice is more than 0.05 nat ahead of the next, the
server's has to be the same.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from served import KEY, MODEL, URL, works

CLEAR = 0.05  # nat
TASK = Path(__file__).with_name("lm_eval_task")
with tempfile.TemporaryDirectory() as home:
    folder = Path(shutil.copytree(TASK, Path(home, "task")))
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": home,
        "OPENAI_API_KEY": KEY,
    }

    def evaluate(
        backend: str, path: str, task: str, *flags: str, **more: object
    ) -> list[dict[str, object]]:
        given = {
            "model": MODEL,
            "base_url": f"{URL}/v1/{path}",
            "auth_token": KEY,
            "num_concurrent": 4,
            **more,
        }
        command = [
            Path(sys.executable).with_name("lm_eval"),
            "run",
            "--model",
            backend,
            "--include_path",
            folder,
            "--model_args",
            ",".join(f"{name}={value}" for name, value in given.items()),
            "--tasks",
            task,
            "--output_path",
            folder / task,
            "--log_samples",
            *flags,
        ]
        run = subprocess.run(
            command, cwd=folder, env=os.environ | offline, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        (samples,) = (folder / task).rglob("samples_*.jsonl")
        return [json.loads(line) for line in samples.read_text().splitlines()]

    remote = {"tokenizer_backend": "remote", "tokenized_requests": True}
    found = evaluate("local-completions", "completions", "likely", "--batch_size", "8", **remote)
    errors = []
    num_clear = 0
    num_same = 0
    for sample in found:
        ours = [float(answer[0][0]) for answer in sample["resps"]]
        theirs = sample["doc"]["hf"]
        errors += [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
        best, second = sorted(theirs, reverse=True)[:2]
        if best - second > CLEAR:
            num_clear += 1
            num_same += ours.index(max(ours)) == theirs.index(best)
    assert len(found) == 50 and sorted(errors)[len(errors) // 2] < CLEAR
    works(
        f"log likelihoods: {num_same} of {num_clear} clear answers as hf's, largest difference "
        f"{max(errors):.3f} nat"
    )
    assert num_same == num_clear
    written = evaluate(
        "local-chat-completions",
        "chat/completions",
        "written",
        "--apply_chat_template",
        eos_string="none",
    )
    assert all(sample["resps"][0][0] for sample in written)
    works(f"chats: {len(written)} answers")
