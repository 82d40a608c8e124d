"""Loads an encoder of any kind from a checkpoint onto a backend."""

from __future__ import annotations

from twinphase.backends.encoder_protocol import EncoderBackend
from twinphase.blueprint import Blueprint
from twinphase.models.bert import Bert, BertShape, read_bert_shape
from twinphase.models.bidirectional import BidirectionalDecoder, read_bidirectional
from twinphase.weights.checkpoint import Checkpoint


def read_encoder(checkpoint: Checkpoint) -> BertShape | Blueprint:
    """The shape of an encoder; raises as `read_bert_shape` and `read_bidirectional`."""
    bert = checkpoint.architecture == "bert"
    return read_bert_shape(checkpoint) if bert else read_bidirectional(checkpoint)


def load_encoder(
    checkpoint: Checkpoint, shape: BertShape | Blueprint, backend: EncoderBackend
) -> Bert | BidirectionalDecoder:
    """Load every tensor; `shape` is from `read_encoder`."""
    if isinstance(shape, BertShape):
        return Bert(checkpoint, shape, backend)
    return BidirectionalDecoder(checkpoint, shape, backend)
