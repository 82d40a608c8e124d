"""The server's configuration: addresses, keys, and every limit that protects it.

The engine's settings are in `twinphase.config`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from twinphase.errors import InvalidRequestError
from twinphase.request import GenerationDefaults, check_tenant
from twinphase.settings import check_settings, setting

TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class ServerConfig(GenerationDefaults):
    """The settings of a server; field names are vLLM's where vLLM has them.

    Raises:
        InvalidRequestError: a field has a value that it does not allow.
    """

    host: str = setting(
        "127.0.0.1", "Address to listen on; 0.0.0.0 listens on every network interface."
    )
    port: int = setting(8000, "Port to listen on; 0 takes any free one.", minimum=0, maximum=65535)
    served_model_name: tuple[str, ...] = setting(
        (), "Name of the model in the API; repeatable.", default_text="the name it is loaded by"
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "Key that clients must send; repeatable. Each key is a tenant, named key1, key2, ... in "
        "this order. Tenants share the engine's time by their weights, but no cached prefixes.",
        option="api-key",
        environment="TWINPHASE_API_KEY",
    )
    named_keys: tuple[str, ...] = setting(
        (),
        "Key of a tenant by name, as NAME=KEY; repeatable, also for several keys of one tenant.",
        option="tenant",
    )
    tenant_weights: tuple[str, ...] = setting(
        (),
        "Weight of a tenant, as NAME=WEIGHT; repeatable. While several tenants have requests, "
        "each gets engine time in proportion to its weight, which is 1 where it is not given.",
        option="tenant-weight",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Name by which clients may call the server, as in the header Host; repeatable. *.NAME "
        "allows all names below NAME, and * any. IP addresses and localhost are always allowed.",
        default_text="any if there are API keys, else none",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origin of browser pages that may call the server (CORS), such as https://page.example; "
        "repeatable. * allows any.",
    )
    ssl_certfile: str | None = setting(
        None,
        "PEM file with the server's certificate and the chain that signs it: the server then "
        "serves HTTPS only. A renewed file is read again.",
        default_text="HTTP",
    )
    ssl_keyfile: str | None = setting(
        None,
        "File with the certificate's key.",
        default_text="the file of the certificate",
    )
    ssl_ca_certs: str | None = setting(
        None,
        "File with the certificates that sign those of clients, for --ssl-cert-reqs.",
        default_text="none",
    )
    ssl_cert_reqs: int = setting(
        0,
        "Whether clients need a certificate of their own: 0, no; 1, one that they show must be "
        "valid; 2, yes.",
        minimum=0,
        maximum=2,
    )
    max_body_bytes: int = setting(
        4 << 20, "Maximum size of a request body, in bytes.", minimum=1, maximum=1 << 30
    )
    max_n: int = setting(16, "Maximum answers per prompt.", minimum=1, maximum=1 << 20)
    max_prompts: int = setting(256, "Maximum prompts per request.", minimum=1, maximum=1 << 20)
    max_queued_requests: int = setting(
        256,
        "Maximum requests of a tenant that wait while others run; more are refused with 429.",
        minimum=1,
        maximum=1 << 20,
    )
    max_queued_tokens: int = setting(
        262_144,
        "Maximum prompt tokens of a tenant's waiting requests; more are refused with 429. A tenant "
        "may always queue one request.",
        minimum=1,
        maximum=1 << 40,
    )
    request_timeout: float = setting(
        600.0, "Seconds from a request's arrival to its last byte.", above=0
    )
    slow_reader_timeout: float = setting(
        30.0,
        "Seconds that a client may leave its answer unread once the buffers are full.",
        above=0,
    )
    body_timeout: float = setting(30.0, "Seconds that a client has to send its request.", above=0)
    stall_timeout: float = setting(
        60.0, "Seconds without a step, while there is work, until the engine is restarted.", above=0
    )
    drain_timeout: float = setting(
        60.0, "Seconds that running requests have to finish after SIGTERM.", above=0
    )
    kept_timelines: int = setting(
        1024,
        "Finished requests whose timelines are kept, for `twinphase explain`.",
        minimum=1,
        maximum=1 << 20,
    )
    kept_responses: int = setting(
        1024,
        "Responses of /v1/responses that are kept in memory, 64 MiB of them at most; 0 for none.",
        minimum=0,
        maximum=1 << 20,
    )
    per_request_spec_decode_metrics: str = setting(
        "none",
        "How much each answer reports of its drafted tokens, under "
        "`metrics.speculative_decoding`: none, summary or detailed.",
        choices=("none", "summary", "detailed"),
    )
    tool_prompt: bool = setting(
        True,
        "Describe tools in a system message if the model's chat template has no place for them.",
    )
    plain_tool_calls: bool = setting(
        True,
        "Take an answer that is one JSON object, bare or in a Markdown fence, for a tool call if "
        "it names a tool of the request and obeys its parameters.",
    )
    log_level: str = setting(
        "info",
        "What is logged on stderr: warning leaves out requests and statistics, debug adds "
        "polled routes such as /health and /metrics.",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "text",
        "Form of the log: text has dated lines, json one object per line with fields of its own "
        "for each request and each generation.",
        choices=("text", "json"),
    )
    log_stats: bool = setting(True, "Log a line of statistics every ten seconds of work.")
    log_requests: bool = setting(
        False, "Log a line for each generation when it is accepted and when it ends."
    )
    page: bool = setting(
        True,
        "Serve the page at / and the events that it draws from (/v1/engine/events).",
    )
    page_others: str = setting(
        "load",
        "What the page shows of other tenants' requests: their load, each without a name, or none, "
        "which leaves their sum.",
        choices=("load", "none"),
    )
    vllm_metrics: bool = setting(False, "Expose the metrics under vLLM's names too.")
    otlp_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector to send traces and metrics to.",
        default_text="none",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.check_override()
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise InvalidRequestError(
                "A file for TLS is given, and no certificate.", "Give --ssl-certfile."
            )
        if bool(self.ssl_cert_reqs) != (self.ssl_ca_certs is not None):
            raise InvalidRequestError(
                "--ssl-ca-certs and --ssl-cert-reqs require each other.", "Give both."
            )
        for key in self.keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise InvalidRequestError(
                    "An API key is empty or not plain ASCII.", "Use letters, digits and - _ ."
                )
        names = sorted(set(self.keys.values()))
        for name in self.weights:
            if name not in names:
                known = (
                    f"Use one of: {', '.join(names)}."
                    if names
                    else "Give keys with --api-key or --tenant."
                )
                raise InvalidRequestError(
                    f"--tenant-weight names {name!r}, which is no tenant here.", known
                )

    @property
    def keys(self) -> dict[str, str]:
        """The tenant of each key.

        Raises:
            InvalidRequestError: a name is missing or not valid, or two tenants have the same key.
        """
        found = {key: f"key{number}" for number, key in enumerate(self.api_keys, start=1)}
        numbered = set(found.values())
        for text in self.named_keys:
            name, _, key = text.partition("=")
            if not TENANT_NAME.fullmatch(name) or not key or name in numbered:
                raise InvalidRequestError(
                    "A --tenant is not of the form NAME=KEY, or has the name of an --api-key.",
                    "Use letters, digits and - _ . for the name; key1, key2, ... are those of "
                    "--api-key.",
                )
            if found.setdefault(key, name) != name:
                raise InvalidRequestError(
                    f"{found[key]} and {name} have the same API key.", "Give each its own."
                )
        return found

    @property
    def weights(self) -> dict[str, float]:
        """The given weights by tenant.

        Raises:
            InvalidRequestError: a weight is not a number from 0.001 to 1,000.
        """
        found = {}
        for text in self.tenant_weights:
            name, _, weight = text.partition("=")
            try:
                found[name] = float(weight)
                check_tenant(name, found[name])
            except (ValueError, InvalidRequestError):
                raise InvalidRequestError(
                    f"--tenant-weight is {text!r}.",
                    "Use NAME=WEIGHT with a weight from 0.001 to 1,000.",
                ) from None
        return found
