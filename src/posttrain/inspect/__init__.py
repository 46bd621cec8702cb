"""Answers questions about a workspace: show, status, preview, compare, verify, explain.

Never changes the champion or the rounds. An answer that takes passes of a model is an artifact: it is computed once.
"""
