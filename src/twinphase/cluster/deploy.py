"""Applications for Ray Serve, configured like `ray.serve.llm`'s: each replica is a whole server.

    from ray import serve
    from twinphase.cluster.deploy import build_openai_app
    serve.run(build_openai_app({"llm_configs": [{"model_loading_config": {"model_id":
    "smollm2"}}]}))

Serve's proxies carry HTTP to the replicas, and its controller starts them, watches them and decides
how many there are, from the seconds of queued work. Not for pools of this project's own server
(`pools.py`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from twinphase.cluster.replica import LLMConfig, OpenAIServer
from twinphase.engine.frontends.checks import engine_config
from twinphase.errors import InvalidRequestError

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext

MAX_QUEUE_SECONDS = 2.0
# The share of the remaining replicas' seats that may be in use after one replica is stopped.
MAX_BUSY_SHARE_AFTER_REMOVAL = 0.5


class ServingArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Argument of `build_openai_app`."""

    llm_configs: list[LLMConfig]


class PDServingArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Argument of `build_pd_openai_app`."""

    prefill_config: LLMConfig
    decode_config: LLMConfig


def build_openai_app(llm_serving_args: Mapping[str, Any]) -> Application:
    """A Serve application with OpenAI's API.

    Args:
        llm_serving_args: `{"llm_configs": [...]}` with one model, as `LLMConfig` describes.

    Raises:
        InvalidRequestError: a field is unknown, or its value is not allowed.
        ImportError: Ray Serve is not installed.
    """
    from ray import serve

    args: ServingArgs = _read(llm_serving_args, ServingArgs)
    if len(args.llm_configs) != 1:
        raise InvalidRequestError(
            f"llm_configs has {len(args.llm_configs)} models.",
            "Build an application for each, with its own route.",
        )
    (config,) = args.llm_configs
    deployment: Any = serve.deployment(serve.ingress()(OpenAIServer), **_options(config))
    application: Application = deployment.bind(config)
    return application


def build_pd_openai_app(pd_serving_args: Mapping[str, Any]) -> Application:
    """A Serve application with OpenAI's API whose replicas either prefill or decode.

    Args:
        pd_serving_args: `{"prefill_config": ..., "decode_config": ...}`, each as `LLMConfig`
            describes.

    Raises:
        InvalidRequestError: a field is unknown, its value is not allowed, or two values contradict
            each other.
        ImportError: Ray Serve is not installed.
    """
    from ray import serve

    from twinphase.cluster.prefill_decode import PDServer, PDWorker

    args: PDServingArgs = _read(pd_serving_args, PDServingArgs)
    configs = args.prefill_config, args.decode_config
    if configs[0].model_loading_config != configs[1].model_loading_config:
        raise InvalidRequestError(
            "prefill_config and decode_config have different models.", "Give both the same."
        )
    for name in ("block_size", "kv_cache_dtype"):
        if len({getattr(engine_config(config.engine_kwargs), name) for config in configs}) > 1:
            raise InvalidRequestError(
                f"prefill_config and decode_config differ in {name}.", "Give both the same."
            )
    if configs[0].server_kwargs:
        raise InvalidRequestError(
            "prefill_config has server_kwargs.", "There is one server: give decode_config's."
        )
    key = secrets.token_hex(32)
    pools = []
    for role, config in zip(("prefill", "decode"), configs, strict=True):
        pool: Any = serve.deployment(
            PDWorker, name=f"{role.capitalize()}Worker", **_options(config)
        )
        pools.append(pool.bind(config, role, key))
    server: Any = serve.deployment(
        serve.ingress()(PDServer), name="PDServer", ray_actor_options={"num_cpus": 0}
    )
    application: Application = server.bind(args.decode_config, key, pools)
    return application


def _options(config: LLMConfig) -> dict[str, Any]:
    """Deployment options: one core per thread, and autoscaling by `by_queue_seconds`."""
    engine = engine_config(config.engine_kwargs)
    options = {"ray_actor_options": {"num_cpus": engine.threads or 1}, **config.deployment_config}
    if isinstance(options.get("autoscaling_config"), dict):
        policy = {"policy_function": f"{__name__}:by_queue_seconds"}
        options["autoscaling_config"] = {"policy": policy, **options["autoscaling_config"]}
    return options


def by_queue_seconds(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the wanted number of replicas; Ray Serve calls this.

    The number grows, at most to twice the present one, while any replica has more than two seconds
    of queued work. It falls by one while nothing is queued and the other replicas have enough free
    seats for the removed replica's requests.
    """
    count = context.current_num_replicas
    metrics = context.aggregated_metrics or {}
    waiting, busy = (_mean(metrics.get(name, {})) for name in ("queue_seconds", "busy"))
    if waiting > MAX_QUEUE_SECONDS:
        wanted = min(2 * count, math.ceil(count * waiting / MAX_QUEUE_SECONDS))
    elif not waiting and count > 1 and busy * count / (count - 1) < MAX_BUSY_SHARE_AFTER_REMOVAL:
        wanted = count - 1
    else:
        wanted = count
    low = context.capacity_adjusted_min_replicas
    high = context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}


def _mean(values: Mapping[Any, float]) -> float:
    return sum(values.values()) / len(values) if values else 0.0


def _read(values: Mapping[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"The configuration cannot be used: {error}.", "See docs/cluster.md."
        ) from None
