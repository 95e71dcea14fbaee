"""``python -m kernels.bench``: what copies cost on this GPU, and which way of copying should be the default."""
