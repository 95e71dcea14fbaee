"""CUDA kernels that pack states into records and unpack them, their torch reference, their build and their bench.

Only `sglang_histate.copy.kernels` loads them for a server; it sees this folder as `sglang_histate.copy._kernels`.
"""
