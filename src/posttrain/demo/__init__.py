"""The bundled task: generated customer messages, and a workspace in which `posttrain demo` runs the loop."""
