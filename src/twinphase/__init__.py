"""twinphase: an LLM inference engine with prefill and decode as first-class phases.

The public names load on first use, so that `import twinphase` costs next to nothing.
docs/python.md says what each group of them is for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinphase.arguments import DEFAULT_MODEL, Options, is_model_name, with_options
    from twinphase.backends.cpu.link import LinkRates, measure_link
    from twinphase.cli import app, command, main
    from twinphase.cluster.config import ClusterConfig
    from twinphase.cluster.launch import make_host
    from twinphase.config import EngineConfig, available_cores, free_memory
    from twinphase.engine.frontends.async_engine import AsyncEngine
    from twinphase.engine.frontends.llm import LLM
    from twinphase.engine.frontends.outputs import RequestOutput
    from twinphase.engine.loading.ceilings import device_of, measure_ceilings, measured_ceilings
    from twinphase.engine.stepped import Stepped, TimedForward, TimedRequest, Workshop
    from twinphase.errors import (
        CacheCapacityError,
        ContextLengthError,
        InvalidRequestError,
        ModelNotFoundError,
        ResultError,
        StorageError,
        TwinphaseError,
        UnsupportedModelError,
    )
    from twinphase.installed import install_command
    from twinphase.models.loader import model_blueprint
    from twinphase.progress import Progress, live
    from twinphase.request import SamplingParams
    from twinphase.server.event_stream import read_events
    from twinphase.server.live.recorder import Recorder
    from twinphase.simulate.calibration import (
        Calibration,
        calibration_file,
        calibration_of,
        read_calibration,
    )
    from twinphase.simulate.capacity import Capacity, LoadShape, capacity_of
    from twinphase.simulate.deployment import (
        Deployment,
        Machine,
        drafted,
        roles_of,
        threads_of_each,
    )
    from twinphase.simulate.errors import (
        Band,
        Trial,
        bands,
        error_sentence,
        level_figure,
        read_trials,
        write_trials,
    )
    from twinphase.simulate.points import MeasuredPoint, calibration_of_points
    from twinphase.simulate.prices import TokenPrices, token_prices
    from twinphase.simulate.recording import SimulationRecorder
    from twinphase.simulate.run import Simulated, run_requests
    from twinphase.simulate.spec import FleetSpec, Front, TraceRequest
    from twinphase.simulate.users import Users, open_load
    from twinphase.terminal import Bar, answers, note
    from twinphase.workload.distributions import (
        Arrivals,
        Closed,
        Lengths,
        Paced,
        Traced,
    )
    from twinphase.workload.lengths import Distribution
    from twinphase.workload.traces import BLOCK_TOKENS, Scaling, TraceLine, read_trace

__all__ = [
    "Arrivals",
    "AsyncEngine",
    "BLOCK_TOKENS",
    "Band",
    "Bar",
    "CacheCapacityError",
    "Calibration",
    "Capacity",
    "Closed",
    "ClusterConfig",
    "ContextLengthError",
    "DEFAULT_MODEL",
    "Deployment",
    "Distribution",
    "EngineConfig",
    "FleetSpec",
    "Front",
    "InvalidRequestError",
    "LLM",
    "Lengths",
    "LinkRates",
    "LoadShape",
    "MeasuredPoint",
    "Machine",
    "ModelNotFoundError",
    "Options",
    "Paced",
    "Progress",
    "Recorder",
    "RequestOutput",
    "ResultError",
    "SamplingParams",
    "Scaling",
    "Simulated",
    "SimulationRecorder",
    "Stepped",
    "StorageError",
    "TimedForward",
    "TimedRequest",
    "TokenPrices",
    "TraceLine",
    "TraceRequest",
    "Traced",
    "Trial",
    "TwinphaseError",
    "UnsupportedModelError",
    "Users",
    "Workshop",
    "__version__",
    "answers",
    "app",
    "available_cores",
    "bands",
    "calibration_file",
    "calibration_of",
    "calibration_of_points",
    "capacity_of",
    "command",
    "device_of",
    "drafted",
    "error_sentence",
    "free_memory",
    "install_command",
    "is_model_name",
    "level_figure",
    "live",
    "main",
    "make_host",
    "measure_ceilings",
    "measure_link",
    "measured_ceilings",
    "model_blueprint",
    "note",
    "open_load",
    "read_calibration",
    "read_events",
    "read_trace",
    "read_trials",
    "roles_of",
    "run_requests",
    "threads_of_each",
    "token_prices",
    "with_options",
    "write_trials",
]

__version__ = "0.1.0"

_HOME = {
    "Arrivals": "twinphase.workload.distributions",
    "AsyncEngine": "twinphase.engine.frontends.async_engine",
    "BLOCK_TOKENS": "twinphase.workload.traces",
    "Band": "twinphase.simulate.errors",
    "Bar": "twinphase.terminal",
    "CacheCapacityError": "twinphase.errors",
    "Calibration": "twinphase.simulate.calibration",
    "Capacity": "twinphase.simulate.capacity",
    "Closed": "twinphase.workload.distributions",
    "ClusterConfig": "twinphase.cluster.config",
    "ContextLengthError": "twinphase.errors",
    "DEFAULT_MODEL": "twinphase.arguments",
    "Deployment": "twinphase.simulate.deployment",
    "Distribution": "twinphase.workload.lengths",
    "EngineConfig": "twinphase.config",
    "FleetSpec": "twinphase.simulate.spec",
    "Front": "twinphase.simulate.spec",
    "InvalidRequestError": "twinphase.errors",
    "LLM": "twinphase.engine.frontends.llm",
    "Lengths": "twinphase.workload.distributions",
    "LinkRates": "twinphase.backends.cpu.link",
    "LoadShape": "twinphase.simulate.capacity",
    "MeasuredPoint": "twinphase.simulate.points",
    "Machine": "twinphase.simulate.deployment",
    "ModelNotFoundError": "twinphase.errors",
    "Options": "twinphase.arguments",
    "Paced": "twinphase.workload.distributions",
    "Progress": "twinphase.progress",
    "Recorder": "twinphase.server.live.recorder",
    "RequestOutput": "twinphase.engine.frontends.outputs",
    "ResultError": "twinphase.errors",
    "SamplingParams": "twinphase.request",
    "Scaling": "twinphase.workload.traces",
    "Simulated": "twinphase.simulate.run",
    "SimulationRecorder": "twinphase.simulate.recording",
    "Stepped": "twinphase.engine.stepped",
    "StorageError": "twinphase.errors",
    "TimedForward": "twinphase.engine.stepped",
    "TimedRequest": "twinphase.engine.stepped",
    "TokenPrices": "twinphase.simulate.prices",
    "TraceLine": "twinphase.workload.traces",
    "TraceRequest": "twinphase.simulate.spec",
    "Traced": "twinphase.workload.distributions",
    "Trial": "twinphase.simulate.errors",
    "TwinphaseError": "twinphase.errors",
    "UnsupportedModelError": "twinphase.errors",
    "Users": "twinphase.simulate.users",
    "Workshop": "twinphase.engine.stepped",
    "answers": "twinphase.terminal",
    "app": "twinphase.cli",
    "available_cores": "twinphase.config",
    "bands": "twinphase.simulate.errors",
    "calibration_file": "twinphase.simulate.calibration",
    "calibration_of": "twinphase.simulate.calibration",
    "calibration_of_points": "twinphase.simulate.points",
    "capacity_of": "twinphase.simulate.capacity",
    "command": "twinphase.cli",
    "device_of": "twinphase.engine.loading.ceilings",
    "drafted": "twinphase.simulate.deployment",
    "error_sentence": "twinphase.simulate.errors",
    "free_memory": "twinphase.config",
    "install_command": "twinphase.installed",
    "is_model_name": "twinphase.arguments",
    "level_figure": "twinphase.simulate.errors",
    "live": "twinphase.progress",
    "main": "twinphase.cli",
    "make_host": "twinphase.cluster.launch",
    "measure_ceilings": "twinphase.engine.loading.ceilings",
    "measure_link": "twinphase.backends.cpu.link",
    "measured_ceilings": "twinphase.engine.loading.ceilings",
    "model_blueprint": "twinphase.models.loader",
    "note": "twinphase.terminal",
    "open_load": "twinphase.simulate.users",
    "read_calibration": "twinphase.simulate.calibration",
    "read_events": "twinphase.server.event_stream",
    "read_trace": "twinphase.workload.traces",
    "read_trials": "twinphase.simulate.errors",
    "roles_of": "twinphase.simulate.deployment",
    "run_requests": "twinphase.simulate.run",
    "threads_of_each": "twinphase.simulate.deployment",
    "token_prices": "twinphase.simulate.prices",
    "with_options": "twinphase.arguments",
    "write_trials": "twinphase.simulate.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'twinphase' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
