"""Inverse Hessian-vector products: solvers for (H + damping I) x = b."""
