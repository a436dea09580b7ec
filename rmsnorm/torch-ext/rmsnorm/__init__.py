"""Root mean square norm with an optional fused residual addition, in Triton."""

from . import layers
from .api import add_rmsnorm, rmsnorm, rmsnorm_residual_fused
from .modules import RMSNorm

__all__ = ["RMSNorm", "add_rmsnorm", "layers", "rmsnorm", "rmsnorm_residual_fused"]
