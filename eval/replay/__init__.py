"""Recorded agent sessions sent to real servers: closed loop, exact tokens, times from the client's side."""
