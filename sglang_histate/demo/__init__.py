"""A small hybrid model that is generated on this machine, so that anyone can serve one without a download.

``ensure_demo_model()`` returns the folder of a Qwen3.5-style text model (gated delta rule layers and full
attention 3:1) with random but designed weights: its text is harmless gibberish, and every token of it depends
on the whole history through the recurrent state, so a wrong checkpoint shows in the output.
``demo_facts()`` returns its sizes. Nothing here imports sglang.

To compare runs exactly, serve it with ``--dtype float32`` (SGLang turns float32 into float16 otherwise) and
``SGLANG_MAMBA_CONV_DTYPE=float32`` (SGLang rounds the conv window to bfloat16 otherwise).
"""

from sglang_histate.demo.cache import ensure_demo_model
from sglang_histate.demo.facts import DemoFacts, demo_facts

__all__ = ["DemoFacts", "demo_facts", "ensure_demo_model"]
