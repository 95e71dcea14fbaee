"""HiState, stock HiCache and no cache side by side: what a rewritten context costs in each.

``python -m eval.internal_hits --help``
"""
