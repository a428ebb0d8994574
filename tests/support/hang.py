"""How long a test waits for what has to come, on any machine: after that it hangs.

The one number is pytest's `faulthandler_timeout`, after which the stacks of all threads are shown. `conftest.py` hands
it to this process and to those that tests start, so `-o faulthandler_timeout=60` shortens every wait.
"""

import os
import time

VARIABLE = "TESTS_HANG_SECONDS"
SECONDS = float(os.environ.get(VARIABLE, "600"))


def pause() -> None:
    """Leave the processor to others for a moment, in a loop that looks for what has to come."""
    time.sleep(0.01)
