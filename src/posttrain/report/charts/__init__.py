"""Builds charts as options of Apache ECharts: pure functions from numbers to plain data, drawn by static/charts.js."""
