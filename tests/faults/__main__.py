"""``python -m faults``, with ``tests`` on the path."""

import sys

from faults.run import main

sys.exit(main())
