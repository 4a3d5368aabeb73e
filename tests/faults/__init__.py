"""Named faults, each with the test of the first tier that must turn red; ``run.py`` plants them."""
