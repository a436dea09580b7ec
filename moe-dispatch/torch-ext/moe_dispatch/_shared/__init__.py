# Copied from shared/__init__.py by scripts/sync_shared.py: edit it there.
"""Host and Triton helpers that the kernels share; each kernel ships a copy of those it imports."""
