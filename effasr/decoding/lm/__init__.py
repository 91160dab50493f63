"""Language models for shallow fusion."""
