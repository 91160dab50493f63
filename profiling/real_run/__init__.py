"""The parts of ``profiling/train_on_gpu.py``: a corpus, its steps, and how runs are compared."""
