"""The measuring stick: calls beside their peers, against what this machine can do today.

``case_of`` makes a case of a named call, ``run_cases`` times it, ``measure_limits`` says what
bounds it, ``record`` keeps the outcome.
"""
