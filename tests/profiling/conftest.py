import sys
from pathlib import Path

# Scripts find their own folder when they run; so must tests that import them.
PROFILING = Path(__file__).parents[2] / "profiling"
sys.path.append(str(PROFILING))
