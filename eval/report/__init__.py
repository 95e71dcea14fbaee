"""Tables and plots of runs of one workload: see `python -m eval.report --help`."""
