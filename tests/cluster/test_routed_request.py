"""A request in the router: the updates of several workers become those of one engine."""

from twinphase.cluster.routed_request import RoutedRequest
from twinphase.engine.process.messages import Add, RequestUpdate
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord
from twinphase.request import SamplingParams


def test_cached_tokens_of_a_continued_request_never_decrease():
    record = RequestRecord.arrived("a", 0.0)
    record.tokenized(100, 0.0)
    request = RoutedRequest.of(Add(record, list(range(100)), SamplingParams(max_tokens=4)))
    assert request.take(RequestUpdate("a", [], 100, 96)).num_cached == 96
    # The first worker died; the second one has cached nothing.
    ended = record.copy()
    ended.end(FinishReason.LENGTH)
    update = request.take(RequestUpdate("a", [7], 100, 0, ended=ended))
    assert (update.num_cached, update.ended.counts.num_cached_tokens) == (96, 96)
