"""OpenVINO GenAI behind `/v1/completions`, for `server.py users`.

PEERS_DIR/openvino/bin/python benchmarks/peers/openvino_server.py MODEL_FOLDER --port 8083

Requests join one pipeline with continuous batching and its prefix cache, as they arrive. Replies
are not streamed, and only the fields of a request that `users` sends are read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai as genai
from openvino_adapter import MANY_REQUESTS_TOKENS

CACHE_GIGABYTES = 4


class Pipeline:
    """Steps on a thread of its own while requests are unfinished."""

    def __init__(self, model: str, threads: int, max_seqs: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = MANY_REQUESTS_TOKENS
        scheduler.max_num_seqs = max_seqs
        scheduler.cache_size = CACHE_GIGABYTES
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._ids = itertools.count(1)
        self._waiting: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run_or_exit, daemon=True).start()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request, once it is finished."""
        config = genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        prompt = self._tokenizer.encode(body["prompt"]).input_ids
        done = threading.Event()
        made: list[Any] = []
        with self._changed:
            self._waiting.append((prompt, config, done, made))
            self._changed.notify()
        done.wait()
        usage = {"prompt_tokens": prompt.shape[1], "completion_tokens": len(made)}
        choice = {"index": 0, "text": self._tokenizer.decode(made), "finish_reason": "length"}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def _run_or_exit(self) -> None:
        """A server that cannot go on ends, so that clients do not wait for it."""
        try:
            self._run()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def _run(self) -> None:
        running: list[tuple[Any, threading.Event, list[Any]]] = []
        while True:
            with self._changed:
                while not self._waiting and not running:
                    self._changed.wait()
                arrived = self._waiting
                self._waiting = []
            for prompt, config, done, made in arrived:
                handle = self._pipeline.add_request(next(self._ids), prompt, config)
                running.append((handle, done, made))
            self._pipeline.step()
            for handle, done, made in running:
                status = handle.get_status()
                if status not in (genai.GenerationStatus.RUNNING, genai.GenerationStatus.FINISHED):
                    raise RuntimeError(f"OpenVINO gave a request up: {status}")
                if status == genai.GenerationStatus.FINISHED:
                    made.extend(handle.read_all()[0].generated_ids)
                    done.set()
            running = [one for one in running if not one[1].is_set()]


def handler_of(pipeline: Pipeline) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps(pipeline.complete(body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that arrive at once


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder made by `setup.py`, such as PEERS_DIR/models/ov-int8")
    parser.add_argument("--port", type=int, default=8083)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    args = parser.parse_args()
    pipeline = Pipeline(args.model, args.threads, args.max_num_seqs)
    print(f"http://127.0.0.1:{args.port}", flush=True)
    Server(("127.0.0.1", args.port), handler_of(pipeline)).serve_forever()


if __name__ == "__main__":
    main()
