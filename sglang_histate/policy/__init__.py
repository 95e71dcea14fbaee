"""Pure decisions: what to capture, what to keep and what goes first.

No torch, no sglang, no I/O, no clock and no randomness in this package: everything a decision needs is an
argument, so that every rank decides alike and the simulator runs the server's own code.
"""
