"""Meshwright beside other ways to train one model on two processes: `python -m meshwright.benchmarks.compare`."""
