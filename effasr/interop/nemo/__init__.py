"""NeMo's ``.nemo`` files."""
