"""What a log of requests says about checkpoints: how often prompts part inside a turn, and what that costs.

``python -m eval.measure LOG`` is the first question to ask before HiState is used at all. Nothing is served or
evicted here: every tier is unlimited, so that only where checkpoints were taken decides. For budgets there is
``python -m eval.simulate``.
"""
