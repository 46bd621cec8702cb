"""Memory of a training: what a probe measures and a small formula adds, and the choices that make it fit."""
