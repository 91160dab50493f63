"""The parts of `gpu_suite`. Needs the standard library alone: each part is a process of its own."""
