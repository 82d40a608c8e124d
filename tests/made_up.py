"""A machine that no test runs on, for explanations of made-up timelines."""

from twinphase.backends.base import Units
from twinphase.config import EngineConfig
from twinphase.explain.evidence import Machine
from twinphase.phases.cost import CostModel
from twinphase.phases.hardware import Ceilings
from twinphase.phases.work import ModelShape

KV_BYTES = {"auto": 2 * 2 * (64 + 4 + 128), "int8": 2 * 2 * (64 + 4 + 64 + 4)}  # per token
SHAPE = ModelShape(1000, 500, 600, 300, 2, 4, 2, 64, kv_token_bytes=KV_BYTES["auto"])
PRICES = (2e-3, 1e-4, 5e-4, 1e-4, 1e-8, 1e-6, 1e-5)
CEILINGS = Ceilings("p", 1, "generic", ((1, 1e6), (1 << 30, 1e6)), 1e6, 1e5, None)
UNITS = Units("int8", "int8", "float32")


def made_up_machine(
    *, shape=SHAPE, ceilings=CEILINGS, cores=None, best_isa=None, block_multiple=1, **config
):
    config = EngineConfig(**{"num_kv_blocks": 64, **config})
    return Machine(
        config,
        shape,
        CostModel(PRICES),
        ceilings,
        UNITS,
        cores=cores,
        best_isa=best_isa,
        block_multiple=block_multiple,
        kv_token_bytes=KV_BYTES,
        slo_seconds=config.slo_seconds,
    )
