"""Imported first by the fork server: collections of garbage would take a sixth of the time of its imports."""

import gc

gc.disable()
