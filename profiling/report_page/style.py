"""Looks of the page, in light and in dark, and the little that its script does."""

PARTS = {  # colour of each part of the budget
    "compute": "--blue",
    "communication": "--violet",
    "copies": "--aqua",
    "data_wait": "--orange",
    "host_gap": "--yellow",
    "idle": "--grey",
}

CATEGORIES = {  # colour of each category of kernels
    "matmul": "--blue",
    "attention": "--violet",
    "convolution": "--aqua",
    "elementwise": "--yellow",
    "normalisation": "--magenta",
    "loss": "--orange",
    "lattice": "--green",
    "optimizer": "--red",
    "communication": "--slate",
    "copy": "--brown",
    "other": "--grey",
}

WATERFALL = {  # colour of each share of the peak
    "peak of the GPU": "--grey",
    "achieved, recomputation included": "--violet",
    "achieved, padding included": "--blue",
    "useful": "--aqua",
}

CYCLE = ["--blue", "--aqua", "--yellow", "--violet", "--orange", "--green", "--magenta", "--red"]
"""Colours of ranges, in the order in which they come."""
