import numpy as np
from numpy.testing import assert_array_equal

from twinphase.batch import Batch, Phase, ScheduledRequest
from twinphase.engine.inputs import build
from twinphase.request import SamplingParams


def make_share(phase, token_ids, start, block_ids, samples=True):
    return ScheduledRequest("r", phase, token_ids, start, block_ids, samples, SamplingParams())


def test_decodes_come_first_and_every_row_has_its_slot():
    decodes = [make_share(Phase.DECODE, [7], 5, [3, 1]), make_share(Phase.DECODE, [8], 0, [2])]
    prefills = [
        make_share(Phase.PREFILL, [10, 11, 12], 3, [0, 6], samples=False),
        make_share(Phase.PREFILL, [20, 21], 0, [5]),
    ]
    inputs = build(Batch(decodes, prefills), block_size=4)
    assert_array_equal(inputs.token_ids, [7, 8, 10, 11, 12, 20, 21])
    assert_array_equal(inputs.positions, [5, 0, 3, 4, 5, 0, 1])
    assert_array_equal(inputs.slot_mapping, [5, 8, 3, 24, 25, 20, 21])
    assert_array_equal(inputs.query_start, [0, 1, 2, 5, 7])
    assert_array_equal(inputs.block_tables, [[3, 1], [2, 0], [0, 6], [5, 0]])
    assert_array_equal(inputs.logit_rows, [0, 1, 6])
    assert_array_equal(inputs.context_lens, [6, 1, 6, 2])
    assert inputs.num_decodes == 2
    kinds = {
        name: getattr(inputs, name).dtype
        for name in ("token_ids", "positions", "query_start", "block_tables")
    }
    assert set(kinds.values()) == {np.dtype(np.int32)}
    assert inputs.logit_rows.dtype == np.int32
    assert inputs.slot_mapping.dtype == np.int64
