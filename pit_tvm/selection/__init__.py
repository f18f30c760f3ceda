"""Chooses at run time how an operator runs: costs of all candidates, and the minimum.

Pure Python and numpy; PIT, SOSP'23, section 3.3 (Algorithm 1).
"""
