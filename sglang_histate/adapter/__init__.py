"""The only place that imports sglang: radix cache, capture, fault-in, status, start-up checks.

Patches call `sglang_histate.adapter.hooks` and nothing else.
"""
