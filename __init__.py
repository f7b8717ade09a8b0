"""Meshwright: a declarative graph compiler for parallelization plans."""
