"""``python -m effasr.cli``: the command ``effasr``."""

import sys

from effasr.cli.main import main

sys.exit(main())
