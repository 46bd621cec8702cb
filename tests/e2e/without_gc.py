"""Imported first by the fork server: collections of garbage would take a third of the time of its imports."""

import gc

gc.disable()
