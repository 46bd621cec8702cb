"""Draws charts as inline SVG: pure functions, no scripts, nothing loaded, one style sheet for light and dark."""
