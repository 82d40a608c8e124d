"""A Ray Serve replica: `twinphase serve`, configured like an application of `ray.serve.llm`.

`deploy.py` builds applications from replicas.
"""

from __future__ import annotations

from typing import Any

import msgspec

from twinphase.engine.frontends.checks import engine_config
from twinphase.engine.process.host import Host, ProcessHost
from twinphase.errors import EngineUnavailableError
from twinphase.server.app import make_app
from twinphase.server.config import ServerConfig
from twinphase.server.service import Service


class ModelLoading(msgspec.Struct, forbid_unknown_fields=True):
    """The model, and its name in the API."""

    model_id: str
    model_source: str | None = None


class LLMConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The configuration of one model, with Ray's field names.

    Attributes:
        deployment_config: options of a Serve deployment, such as `num_replicas` or
            `autoscaling_config`.
        engine_kwargs: fields of `EngineConfig`.
        server_kwargs: fields of `ServerConfig`; Ray's `LLMConfig` does not have this field.
    """

    model_loading_config: ModelLoading
    deployment_config: dict[str, Any] = {}
    engine_kwargs: dict[str, Any] = {}
    server_kwargs: dict[str, Any] = {}


class OpenAIServer:
    """A replica's server, behind Serve's proxy.

    Attributes:
        when_ready: the replica counts as started when its engine is ready.
    """

    when_ready = True

    def __init__(self, config: LLMConfig) -> None:
        names = config.model_loading_config
        server = ServerConfig(**{"served_model_name": (names.model_id,), **config.server_kwargs})
        model = names.model_source or names.model_id
        self._service = Service(self._host(model, config, server), model, server)

    def _host(self, model: str, config: LLMConfig, server: ServerConfig) -> Host:
        return ProcessHost(model, engine_config(config.engine_kwargs))

    # Ray defines this name.
    def __serve_build_asgi_app__(self) -> Any:  # noqa: PLW3201
        return make_app(self._service, when_ready=self.when_ready)

    def check_health(self) -> None:
        """Raise if Serve should replace this replica."""
        service = self._service
        if service.failure is not None:
            raise service.failure
        if service.stalled:
            raise EngineUnavailableError("The engine makes no step.", "It is being started again.")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report seconds of waiting work and the share of seats in use, for `by_queue_seconds`."""
        admission = self._service.admission
        return {
            "queue_seconds": admission.queue_seconds,
            "busy": admission.num_requests / admission.num_seats,
        }
