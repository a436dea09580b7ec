"""Building, checking and publishing the kernels of this repository."""
