"""Host and Triton helpers that the kernels share; each kernel ships a copy of those it imports."""
