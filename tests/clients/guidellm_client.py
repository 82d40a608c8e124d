"""GuideLLM: a small load of chats, two at a time, all of them answered."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from served import KEY, MODEL, URL, works

COUNT = 6
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder, "data.json")
    report = Path(folder, "report.json")
    data.write_text(
        json.dumps(
            [
                {"prompt": f"Say {number} in words.", "output_tokens_count": 8}
                for number in range(COUNT)
            ]
        )
    )
    command = [
        Path(sys.executable).with_name("guidellm"),
        "run",
        "--backend",
        f"kind=openai_http,target={URL},model={MODEL},api_key={KEY}",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        f"kind=max_requests,count={COUNT}",
        "--data",
        f"kind=json_file,path={data}",
        "--output",
        f"kind=json,path={report}",
        "--disable-console",
    ]
    subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True, stderr=subprocess.DEVNULL
    )
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert totals["successful"] == COUNT and not totals["errored"], totals
    works(f"{COUNT} chats answered, two at a time")
