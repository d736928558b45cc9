"""Benchmarks: calls and their peers, against the limits of this machine measured in the same run.

``case_of`` makes a case of a named call, ``run_cases`` times it, ``measure_limits`` gives
its bounds, ``record`` stores the result.
"""
