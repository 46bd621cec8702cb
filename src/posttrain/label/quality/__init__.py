"""Quality of answers: agreement, consensus, gold items, drift and behaviour of annotators."""
