"""What goes first when a tier is full: the three rankings with the same requests and the same bytes.

``python -m eval.eviction --help``
"""
