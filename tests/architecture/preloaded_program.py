"""What test_suites.py starts; it notes what it was given, and ends or waits."""

import atexit
import os
import sys
import threading
import time

was_loaded = "effasr.training.trainer" in sys.modules

if __name__ == "__main__":
    if sys.argv[1] == "waits":
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        time.sleep(600)
    atexit.register(sys.stdout.write, "an exit function\n")
    threading.Timer(0.1, sys.stdout.write, ["another thread\n"]).start()
    lines = (
        *(__name__, os.getppid(), os.getpgid(0), sys.argv[1:], os.environ["OF_THIS_ALONE"]),
        *(os.getcwd(), was_loaded),
    )
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stderr.write("to standard error\n")
    sys.exit(3)
