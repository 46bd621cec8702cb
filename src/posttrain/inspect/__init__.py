"""Questions about a workspace: show, status, preview, compare, verify, explain. Reads; changes nothing."""
