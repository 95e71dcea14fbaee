"""Agent sessions in one form, recorded or made, and how they become prompts.

`load` reads every recorded format, `select` takes some of it, `rewriting` and `codex` make sessions, `save` writes
any of them as a trace. `order` fixes the order of requests and `scaling` turns block ids into tokens.
"""
