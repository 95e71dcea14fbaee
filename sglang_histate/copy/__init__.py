"""How checkpoints get from the device into records and back: encodings of states."""

from .encoding import Part, TemporalCodec, codec_for

__all__ = ["Part", "TemporalCodec", "codec_for"]
