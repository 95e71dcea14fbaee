"""How checkpoints and KV get from one place into another: plans as data, engines that run them, who waits for whom.

Also the encodings of states in records.
"""

from .encoding import Part, TemporalCodec, codec_for
from .engine import CopyEngine, CopyError
from .plan import CopyPlan, PlanError
from .probe import Chosen, choose_engine, host_engine
from .transfer import Move, Space, Transfer

__all__ = [
    "Chosen",
    "CopyEngine",
    "CopyError",
    "CopyPlan",
    "Move",
    "Part",
    "PlanError",
    "Space",
    "TemporalCodec",
    "Transfer",
    "choose_engine",
    "codec_for",
    "host_engine",
]
