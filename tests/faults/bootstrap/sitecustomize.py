"""Python imports this at its start where its folder is on PYTHONPATH: a spawned rank, a torchrun
process or a forking server has the fault of the environment before it imports the product.
"""

import os
import sys

if os.environ.get("MINDSPEED_RL_FAULT"):
    _TESTS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if _TESTS not in sys.path:
        sys.path.append(_TESTS)
    from faults.planting import plant_from_environment

    plant_from_environment()
