"""A simulator of one GPU that serves recorded sessions with different prefix caches, driven by the server's own policy.

python -m eval.simulate --workload w125 --systems histate,hicache,infinite --cap 60 --out DIR
"""
