"""Estimates of the memory of a training, and the choices that make it fit."""
